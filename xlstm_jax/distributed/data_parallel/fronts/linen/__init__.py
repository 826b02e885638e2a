"""The front for Flax Linen: modules that gather their parameters where they run."""
