"""Observation of a step: runs the step with an optimizer that records its calls (``recording``).

The record has the gradients passed to the optimizer, before any moment or clipping, and the updates that the optimizer
returned: ``update`` compares these and the state after the step with one device.

A step with a custom optimizer leaves no record. The results of this optimizer are compared instead: first moments
(``mu``, ``trace``), if any, then updates, and the optimizer's state.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import true_value
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key
from xlstm_jax.distributed.optimizers.sharded_optimizer import owner_of_state, trainable
from xlstm_jax.distributed.optimizers.transforms import call_update
from xlstm_jax.distributed.training.arguments import collections_of
from xlstm_jax.distributed.training.state import State
from xlstm_jax.distributed.training.step_check.recording import Recorded, recorded_state
from xlstm_jax.formatting import listed

_FIRST_MOMENTS = {"mu", "trace"}  # field names in optax


class ReportedLoss(NamedTuple):
    """The loss returned by a step, and the eps of its dtype."""

    value: float
    eps: float


class SeenStep(NamedTuple):
    """Observation of one run of a step: a value per leaf to compare, and the states before and after.

    Attributes:
      value_kind: the kind of values in ``observed_values``: "gradients", "first moments" or "updates".
      observed_values: the observed value of each leaf, by path.
      of_gradients: computes the same kind of values from gradients.
      loss, collections: as returned by the step.
      before, after: the states passed to the step, and returned by it.
      rounding: for updates, which are observed as differences of parameters: the norm of the rounding error of each
        leaf, by path; empty for gradients and first moments.
      updates: the number of optimizer calls in the step.
      next_observation: a further ``SeenStep`` of the same run, to compare if these values are correct.
      run_second_step: runs the step once more, from the returned state.
      state_of_gradients: for a step with a custom optimizer: computes the optimizer's state from gradients.
    """

    value_kind: str
    observed_values: dict[str, jax.Array]
    of_gradients: Callable[[PyTree], dict[str, jax.Array]]
    loss: ReportedLoss | None
    collections: PyTree
    before: Any
    after: Any
    rounding: Mapping[str, float] = MappingProxyType({})
    updates: int = 1
    next_observation: Any = None
    run_second_step: Callable[[], Any] | None = None
    state_of_gradients: Callable[[PyTree], dict[str, Any]] | None = None


def observe(step: Callable[..., Any], state: Any, step_args: PyTree, grads: PyTree, mesh: Mesh) -> SeenStep:
    """Runs ``step`` and returns a ``SeenStep``: gradients and loss of the step, training states before and after.

    The step runs with a recording optimizer: the record, in ``opt_state``, has the gradients of the last call. If the
    step raises an error with this optimizer, or leaves no recorded call, the step runs again with the state's
    optimizer, and the ``SeenStep`` has first moments or updates instead of gradients. If the step has altered the
    record, the gradients are unknown: the ``SeenStep`` then has ``grads``, and ``check_update`` reports the altered
    record.

    Args:
      step, state, step_args: the call is ``step(state, *step_args)``, on copies.
      grads: a tree like the gradients, on a single device: the correct gradients, or any values, which then stand for
        unknown gradients.
      mesh: the mesh of the state.
    """
    before = recorded_state(state, mesh)
    try:
        # Preferred: record the gradients passed to the optimizer, before any moment or clipping.
        after, loss = _run(step, before, step_args)
    except Exception:  # a custom optimizer, or custom specs of the state, may raise anything
        return _of_own_optimizer(step, state, step_args, grads)
    if isinstance(after.opt_state, Recorded) and not after.opt_state.record.is_intact():
        # The record was changed, so gradients are unknown; `check_update` reports this.
        return SeenStep("gradients", _by_path(grads), _by_path, loss, collections_of(after), before, after)
    if not isinstance(after.opt_state, Recorded) or not (calls := int(after.opt_state.record.calls)):
        return _of_own_optimizer(step, state, step_args, grads)
    observed_values = _by_path(_as_seen(after.opt_state.record.grads))
    again = lambda: _run(step, after, step_args)[0]  # noqa: E731
    collections = collections_of(after)
    return SeenStep(
        "gradients", observed_values, _by_path, loss, collections, before, after, updates=calls, run_second_step=again
    )


def _of_own_optimizer(step: Callable[..., Any], state: Any, step_args: PyTree, grads: PyTree) -> SeenStep:
    """Runs a step that bypasses the state's optimizer, and observes first moments or, without moments, updates.

    First moments are set to 0 before the run. A ``SeenStep`` of first moments has the ``SeenStep`` of updates as
    ``next_observation``. Both contain functions that compute reference values with the state's optimizer, on the device
    of ``grads``. ``grads`` is any tree on a single device; its values are not read.
    """

    # Start first moments from zeros, so that they come from this step alone.
    def fresh_leaf(path: str, leaf: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, leaf) if _FIRST_MOMENTS & set(path.split("/")) else leaf

    fresh = state.replace(opt_state=trees.map_leaves_with_path(fresh_leaf, state.opt_state))
    after, loss = _run(step, fresh, step_args)
    before, one_device = trainable(fresh.params), jax.tree.leaves(grads)[0].sharding
    # The same optimizer, for one device and the correct gradients.
    params, opt_state = jax.device_put((before, _as_seen(fresh.opt_state)), one_device)

    def updated(grads: PyTree) -> tuple[PyTree, PyTree]:
        return call_update(state.tx, grads, opt_state, params)

    collections, old = collections_of(after), _by_path(before)
    moved = _by_path(jax.tree.map(jnp.subtract, trainable(after.params), before))
    rounding = {path: float(jnp.finfo(leaf.dtype).eps * jnp.linalg.norm(leaf.ravel())) for path, leaf in old.items()}
    updates = SeenStep(
        "updates",
        moved,
        lambda grads: _by_path(updated(grads)[0]),
        loss,
        collections,
        fresh,
        after,
        rounding,
        state_of_gradients=lambda grads: _by_path(_as_seen(updated(grads)[1])),
    )
    moments = _first_moments(_as_seen(after.opt_state), params)
    # If every moment is still 0, the step did not use this state: compare updates instead.
    if any(np.any(np.asarray(leaf)) for leaf in moments.values()):
        of_moments = lambda grads: _first_moments(updated(grads)[1], params)  # noqa: E731
        return updates._replace(
            value_kind="first moments",
            observed_values=moments,
            of_gradients=of_moments,
            rounding=MappingProxyType({}),
            next_observation=updates,
        )
    return updates


def _run(step: Callable[..., Any], state: State, step_args: PyTree) -> tuple[State, ReportedLoss | None]:
    """Runs the step on copies of its arguments, and returns the new state and the loss.

    The loss is "loss" of the metrics, or a scalar in place of metrics; None without such a value.
    """
    after, metrics, *_ = step(
        *jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, (state, *step_args))
    )
    # A user's step may return the loss in place of metrics.
    if not isinstance(metrics, dict):
        metrics = {"loss": metrics} if np.shape(metrics) == () else {}
    if "loss" not in metrics:
        return after, None
    dtype = jnp.result_type(metrics["loss"])
    return after, ReportedLoss(
        float(metrics["loss"]), float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0
    )


def _as_seen(opt_state: PyTree) -> PyTree:
    return trees.map_leaves(true_value, opt_state)


def _by_path(tree: PyTree) -> dict[str, jax.Array]:
    return dict(trees.leaves_with_path(tree))


def _first_moments(opt_state: PyTree, params: PyTree) -> dict[str, jax.Array]:
    """Returns the first moments (``mu`` or ``trace`` of optax) in an optimizer state, by path of the parameter."""
    # optax stores moments in trees like the parameters: the end of a path identifies the parameter.
    paths = {path: path for path in _by_path(params)}
    moments = {path: leaf for path, leaf in _by_path(opt_state).items() if _FIRST_MOMENTS & set(path.split("/"))}
    return {str(owner_of_state(path, paths)): leaf for path, leaf in moments.items()}


def drifting(collections: PyTree) -> Iterator[str]:
    """Yields one finding if a leaf of ``collections`` has a shard whose copies differ between devices.

    ``collections`` are those of the state after the step.
    """
    if differ := [path for path, leaf in trees.sharded_leaves(collections) if copies_differ(leaf.value)]:
        yield (
            f"the collections {listed(differ)} are not the same on all devices that should hold the same: each device "
            "made them of its own examples. Statistics of the whole batch: nn.BatchNorm(..., axis_name=...), with all "
            "axes of the batch."
        )


def copies_differ(value: jax.Array) -> bool:
    """Returns whether copies of a shard differ: devices that should hold the same part of ``value`` hold other numbers.

    Reads the shards of this process on the host. False if no two devices share a shard.
    """
    # Shards with the same index are copies of each other.
    seen: dict[str, np.ndarray] = {}
    for shard in value.addressable_shards:
        data = np.asarray(jax.random.key_data(shard.data) if is_prng_key(value) else shard.data)
        if not np.array_equal(data, seen.setdefault(str(shard.index), data)):
            return True
    return False


def differ_along(value: jax.Array) -> tuple[str, ...]:
    """Returns the mesh axes along which copies of a shard of ``value`` differ between devices, in mesh order.

    () if copies are equal, or if ``value`` is on no mesh.
    """
    mesh = getattr(value.sharding, "mesh", None)
    if mesh is None or not copies_differ(value):
        return ()
    data = {shard.device: (str(shard.index), np.asarray(shard.data)) for shard in value.addressable_shards}
    along = []
    for dim, axis in enumerate(mesh.axis_names):
        # Lines of devices that differ in this axis alone.
        lines = np.moveaxis(mesh.devices, dim, -1).reshape(-1, mesh.devices.shape[dim])
        pairs = [(data[line[0]], data[other]) for line in lines for other in line[1:]]
        if any(a[0] == b[0] and not np.array_equal(a[1], b[1]) for a, b in pairs):
            along.append(axis)
    return tuple(along)
