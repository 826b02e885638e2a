"""Training steps with and without metrics: timing in turn, and counts of collectives; see ``benchmarks.metrics``."""

import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.distributed.metrics import Compose, Max, Min, Sum, WeightedMean, make_log_step
from xlstm_jax.distributed.processes import available_devices

AXIS = "dp"
SIMULATED_DEVICES = 8
WIDTH = 128
ROWS = 32  # per device
LEARNING_RATE = 1e-3
NAIVE_BUDGET = 2  # largest cost of a sync of every metric, in pmeans of a scalar
MIXED = (*[WeightedMean()] * 6, Sum(), Sum(jnp.int32), Max(), Min())

OURS = ("update", "update and sync", "update, sync and compute")

WHOLE, SPLIT = PartitionSpec(), PartitionSpec(AXIS)

# A collective in StableHLO, or in compiled HLO (synchronous or asynchronous).
_KINDS = "all.reduce|all.gather|reduce.scatter|all.to.all|collective.permute|collective.broadcast"
_COLLECTIVE = re.compile(rf"stablehlo\.(?:{_KINDS})\b|\s(?:{_KINDS})(?:-start)?\(")

Values = list[jax.Array]


@dataclass(frozen=True)
class Cost:
    """Collectives in the lowered and in the compiled program, and the microseconds per call in each round."""

    lowered: int
    compiled: int
    rounds: tuple[float, ...]

    @property
    def microseconds(self) -> float:
        return float(np.median(self.rounds))

    def above(self, other: "Cost") -> np.ndarray:
        """Returns the difference to ``other`` in each round."""
        return np.array(self.rounds) - np.array(other.rounds)


@dataclass(frozen=True)
class Measurement:
    """Costs by label: of training steps in ``steps``, of separate reductions in ``alone``."""

    metrics: int
    devices: str
    steps: dict[str, Cost]
    alone: dict[str, Cost]
    has_clu: bool

    def added(self, label: str) -> float:
        """Returns the microseconds that a variant adds to the bare step."""
        return float(np.median(self.steps[label].above(self.steps["bare"])))

    def added_collectives(self, label: str) -> tuple[int, int]:
        """Returns the collectives added in the lowered and in the compiled program.

        The compiled program may combine added collectives with the collectives of the bare step.
        """
        cost, bare = self.steps[label], self.steps["bare"]
        return cost.lowered - bare.lowered, cost.compiled - bare.compiled

    def in_step(self) -> dict[str, np.ndarray]:
        """Returns the microseconds in each round that a reduction adds to a step without the reduction."""
        pairs = {
            "1 pmean": ("1 pmean", "bare"),
            f"{NAIVE_BUDGET} pmeans": (f"{NAIVE_BUDGET} pmeans", "bare"),
            "sync": ("update and sync", "update"),
            "mixed: sync": ("mixed: update and sync", "mixed: update"),
            f"{self.metrics} pmeans": ("pmean of each value", "bare"),
        }
        return {label: self.steps[a].above(self.steps[b]) for label, (a, b) in pairs.items()}

    def in_units_of_the_budget(self, label: str) -> tuple[float, float]:
        """Returns the cost of a reduction relative to the budget, in the step and alone; the aim is at most 1."""
        budget = f"{NAIVE_BUDGET} pmeans"
        here, alone = self.in_step(), np.array(self.alone[label].rounds) / np.array(self.alone[budget].rounds)
        return float(np.median(here[label]) / np.median(here[budget])), float(np.median(alone))


@dataclass(frozen=True)
class Variant:
    """Compiled variant; ``run(calls)`` runs the program ``calls`` times and waits for the last call."""

    lowered: int
    compiled: int
    run: Callable[[int], None]


# ------------------------------------------------------------------------------------------------------------ variants


def train(weights: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Trains a linear model to reproduce its inputs for a step; returns new weights, and the error [rows, width]."""
    error = inputs @ weights - inputs
    gradient = jax.lax.pmean(inputs.T @ error / len(error), AXIS)
    return weights - LEARNING_RATE * gradient, error


def columns(error: jax.Array, count: int) -> Values:
    """Returns the values that the metrics observe, one column [rows] per metric."""
    return [error[:, i % WIDTH] for i in range(count)]


def pmeans(values: Values) -> Values:
    return [jax.lax.pmean(column.mean(), AXIS) for column in values]


def named(values: Values) -> dict[str, jax.Array]:
    return {f"m{i}": column for i, column in enumerate(values)}


def step_with(observe: Callable[[Any, Values], tuple[Any, Any]], count: int) -> Callable:
    """Returns ``step((weights, state), inputs) -> ((weights, state), outputs)``."""

    def step(carry, inputs):
        weights, error = train(carry[0], inputs)
        state, outputs = observe(carry[1], columns(error, count))
        return (weights, state), outputs

    return step


def our_observers(metric: Compose) -> tuple[Callable, Callable, Callable]:
    """Returns three observers: update; update and sync; update, sync and compute."""

    def update(state, values):
        kinds = [metric.metrics[name] for name in named(values)]
        counted = [v > 0 if kind == Sum(jnp.int32) else v for kind, v in zip(kinds, values, strict=True)]
        return metric.update(state, **named(counted)), ()

    def update_and_sync(state, values):
        state, _ = update(state, values)
        return state, metric.sync(state)

    def update_sync_and_compute(state, values):
        state, synced = update_and_sync(state, values)
        return state, metric.compute(synced)

    return update, update_and_sync, update_sync_and_compute


def clu_collection(count: int) -> Any:
    from clu import metrics as clu_metrics  # optional; called only if clu is installed

    return clu_metrics.Collection.create(**{f"m{i}": clu_metrics.Average.from_output(f"m{i}") for i in range(count)})


def clu_observers(collection: Any) -> tuple[Callable, Callable]:
    """Returns two observers: merge on each device; gather, reduce and merge."""

    def merge(state, values):
        local = jax.tree.map(lambda x: x[0], state)
        local = local.merge(collection.single_from_model_output(**named(values)))
        return jax.tree.map(lambda x: x[None], local), ()

    def gather(state, values):
        state = state.merge(collection.gather_from_model_output(axis_name=AXIS, **named(values)))
        return state, state.compute()

    return merge, gather


def step_variants(mesh: Mesh, count: int, with_clu: bool) -> Iterator[tuple[str, Variant]]:
    inputs = np.random.default_rng(0).normal(size=(mesh.size * ROWS, WIDTH)).astype(np.float32)
    inputs = jax.device_put(inputs, NamedSharding(mesh, SPLIT))

    def variant(observe, state=(), spec=WHOLE, check_vma=True):
        carry = (_placed(jnp.zeros((WIDTH, WIDTH)), mesh, WHOLE), _placed(state, mesh, spec))
        step = step_with(observe, count)
        specs = (WHOLE, spec)
        return _stepping(_on_mesh(step, mesh, (specs, SPLIT), (specs, WHOLE), check_vma), carry, inputs)

    yield "bare", variant(lambda state, values: (state, ()))
    for prefix, metric in (("", means(count)), ("mixed: ", mixed(count))):
        for label, observe in zip(OURS, our_observers(metric), strict=True):
            yield prefix + label, variant(observe, metric.empty(AXIS, mesh), SPLIT)
    yield "1 pmean", variant(lambda state, values: (state, pmeans(values[:1])))
    yield f"{NAIVE_BUDGET} pmeans", variant(lambda state, values: (state, pmeans(values[:NAIVE_BUDGET])))
    yield "pmean of each value", variant(lambda state, values: (state, pmeans(values)))
    if with_clu:
        # The result of all_gather is typed as varying, although it is replicated: check_vma would reject it as output.
        collection = clu_collection(count)
        merge, gather = clu_observers(collection)
        stacked = jax.tree.map(lambda x: jnp.stack([x] * mesh.size), collection.empty())
        yield "clu, merge", variant(merge, stacked, SPLIT, check_vma=False)
        yield "clu, gather and merge", variant(gather, collection.empty(), WHOLE, check_vma=False)


def means(count: int) -> Compose:
    return Compose({f"m{i}": WeightedMean() for i in range(count)})


def mixed(count: int) -> Compose:
    return Compose({f"m{i}": MIXED[i % len(MIXED)] for i in range(count)})


def reductions_alone(mesh: Mesh, count: int) -> Iterator[tuple[str, Variant]]:
    for number in (1, NAIVE_BUDGET, count):
        values = _placed([jnp.arange(mesh.size) + float(i) for i in range(number)], mesh, SPLIT)
        yield (
            f"{number} pmean{'s' * (number > 1)}",
            _calling(_on_mesh(pmeans, mesh, SPLIT, WHOLE, donate=False), values),
        )
    for prefix, metric in (("", means(count)), ("mixed: ", mixed(count))):
        sync = _on_mesh(metric.sync, mesh, SPLIT, WHOLE, donate=False)
        yield f"{prefix}sync", _calling(sync, metric.empty(AXIS, mesh))
        yield f"{prefix}log step", _logging(make_log_step(metric, mesh, AXIS), metric.empty(AXIS, mesh))


# ----------------------------------------------------------------------------------------------------------- measuring


def measure(steps: int = 20, rounds: int = 25, metrics: int = 20, with_clu: bool | None = None) -> Measurement:
    """Runs every variant ``rounds`` times in turn, ``steps`` calls each time.

    Args:
        metrics: the number of metrics; at least one for each kind of ``MIXED``.
        with_clu: whether to include clu; by default if clu is installed.
    Raises:
        ValueError: ``metrics`` is below the number of kinds; or only one device exists, so no reduction is needed.
    """
    if metrics < len(MIXED):
        raise ValueError(f"--metrics {metrics}: the mixed ones are of {len(MIXED)} kinds; take {len(MIXED)} or more.")
    with_clu = importlib.util.find_spec("clu") is not None if with_clu is None else with_clu
    mesh = DeviceMeshManager.create_device_mesh({AXIS: -1}, devices=_several_devices())
    variants = dict(step_variants(mesh, metrics, with_clu)), dict(reductions_alone(mesh, metrics))
    steps_cost, alone_cost = (_timed(some, steps, rounds) for some in variants)
    first = mesh.devices.flat[0]
    return Measurement(metrics, f"{mesh.size} {first.platform} devices", steps_cost, alone_cost, with_clu)


def _several_devices() -> list[jax.Device]:
    """Returns the accelerators if there are several, else CPU devices, simulated if JAX has not started."""
    devices = available_devices(SIMULATED_DEVICES)
    devices = devices if len(devices) > 1 else jax.devices("cpu")
    if len(devices) == 1:
        raise ValueError("there is one device, and nothing to reduce over; call this before JAX has started.")
    return devices


def _timed(variants: dict[str, Variant], calls: int, rounds: int) -> dict[str, Cost]:
    times = {label: [] for label in variants}
    for _ in range(rounds):
        for label, variant in variants.items():
            variant.run(1)  # warms the caches after the preceding variant
            start = time.perf_counter()
            variant.run(calls)
            times[label].append((time.perf_counter() - start) / calls * 1e6)
    return {label: Cost(v.lowered, v.compiled, tuple(times[label])) for label, v in variants.items()}


def count_collectives(text: str) -> int:
    """Counts the collectives in StableHLO or compiled HLO; a collective of several operands counts once."""
    return len(_COLLECTIVE.findall(text))


def _on_mesh(fn: Callable, mesh: Mesh, in_specs: Any, out_specs: Any, check_vma: bool = True, donate: bool = True):
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.jit(mapped, donate_argnums=0 if donate else ())


def _placed(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    return jax.tree.map(lambda x: jax.device_put(jnp.array(x), NamedSharding(mesh, spec)), tree)


def _variant(fn: Any, arguments: tuple, run: Callable[[Any, int], None]) -> Variant:
    lowered = fn.lower(*arguments)
    compiled = lowered.compile()
    counts = count_collectives(lowered.as_text()), count_collectives(compiled.as_text())
    return Variant(*counts, lambda calls: run(compiled, calls))


def _stepping(fn: Any, carry: Any, inputs: jax.Array) -> Variant:
    """Runs steps as in training: each step is dispatched without waiting for the preceding step."""

    def run(compiled, calls):
        nonlocal carry
        for _ in range(calls):
            carry, outputs = compiled(carry, inputs)
        jax.block_until_ready((carry, outputs))

    return _variant(fn, (carry, inputs), run)


def _calling(fn: Any, argument: Any) -> Variant:
    def run(compiled, calls):
        for _ in range(calls):
            jax.block_until_ready(compiled(argument))

    return _variant(fn, (argument,), run)


def _logging(fn: Any, state: Any) -> Variant:
    def run(compiled, calls):
        nonlocal state
        for _ in range(calls):
            values, state = compiled(state)
            jax.block_until_ready((values, state))

    return _variant(fn, (state,), run)
