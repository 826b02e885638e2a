"""``DistributedMetrics``: the collective reductions as methods, for code that is made of NNX modules."""

from flax import nnx

from xlstm_jax.distributed.metrics import reductions


class DistributedMetrics(nnx.Module):
    """Reductions of metric dictionaries over devices, inside ``shard_map`` or ``pmap``; a module without state.

    ``all_gather`` and the ``reduce_*`` methods are the functions of ``reductions`` that end in ``_collective``;
    ``collect_from_devices`` is called outside. Each has a static twin ``*_static`` that needs no instance.

    >>> reduce = jax.pmap(DistributedMetrics().reduce_mean, axis_name="batch")
    >>> DistributedMetrics.collect_from_devices_static(reduce({"loss": jnp.arange(8.0)}))["loss"][0]
    Array(3.5, dtype=float32)
    """

    # A static function is reached through an instance as it is, so that both names are one implementation.
    all_gather = all_gather_static = staticmethod(reductions.all_gather)
    reduce_mean = reduce_mean_static = staticmethod(reductions.reduce_mean_collective)
    reduce_sum = reduce_sum_static = staticmethod(reductions.reduce_sum_collective)
    reduce_max = reduce_max_static = staticmethod(reductions.reduce_max_collective)
    reduce_min = reduce_min_static = staticmethod(reductions.reduce_min_collective)
    reduce_custom = reduce_custom_static = staticmethod(reductions.reduce_custom_collective)
    collect_from_devices = collect_from_devices_static = staticmethod(reductions.collect_from_devices)
