"""``DistributedMetrics``: the collective reductions as methods of an NNX module."""

from flax import nnx

from xlstm_jax.distributed.metrics import reductions


class DistributedMetrics(nnx.Module):
    """Reductions of metric dictionaries over devices, inside ``shard_map`` or ``pmap``; a module without state.

    The methods are ``all_gather`` and the ``reduce_*_collective`` functions of ``reductions``, without the suffix
    ``_collective``. Call ``collect_from_devices`` outside of ``shard_map`` and ``pmap``. Each method has a static
    version, ``*_static``, for calls without an instance.

    >>> reduce = jax.pmap(DistributedMetrics().reduce_mean, axis_name="batch")
    >>> DistributedMetrics.collect_from_devices_static(reduce({"loss": jnp.arange(8.0)}))["loss"][0]
    Array(3.5, dtype=float32)
    """

    # A staticmethod takes no `self`, so the instance method and the static version share one implementation.
    all_gather = all_gather_static = staticmethod(reductions.all_gather)
    reduce_mean = reduce_mean_static = staticmethod(reductions.reduce_mean_collective)
    reduce_sum = reduce_sum_static = staticmethod(reductions.reduce_sum_collective)
    reduce_max = reduce_max_static = staticmethod(reductions.reduce_max_collective)
    reduce_min = reduce_min_static = staticmethod(reductions.reduce_min_collective)
    reduce_custom = reduce_custom_static = staticmethod(reductions.reduce_custom_collective)
    collect_from_devices = collect_from_devices_static = staticmethod(reductions.collect_from_devices)
