"""Row of NNX in the registry of module systems; in a separate file, because the text is needed without ``flax.nnx``."""

from xlstm_jax.distributed.data_parallel.modules.other_systems import OtherSystem

NNX_MODULES = OtherSystem("flax.nnx", "nnx_model(lambda rngs: MyModule(..., rngs=rngs))")
