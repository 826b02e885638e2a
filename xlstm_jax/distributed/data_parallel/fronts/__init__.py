"""Where boxes meet modules: a front for Flax Linen and one for Flax NNX, and what both do where a module runs."""
