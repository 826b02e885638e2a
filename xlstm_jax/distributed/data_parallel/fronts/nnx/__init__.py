"""The front for Flax NNX: modules that gather their parameters where they run, and models made of them."""
