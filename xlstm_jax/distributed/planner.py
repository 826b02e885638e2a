"""What fits, and what of it is fastest: a search over the options of a sharded step, by forecast.

  keep gathered weights  ->  gather them again  ->  remat  ->  2, 4, ... minibatches      until something fits
  then, around the fastest that fits: other meshes, another threshold                     one change at a time

Options come cheapest first: each saves memory at the price of time (wire bytes, recomputation, smaller matrices). Where
one fits, what saves more memory can only be slower and is not compiled. A forecast takes seconds to a minute, so the
search takes one step along each option and does not try all combinations.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.forecast.chips import parse_topology
from xlstm_jax.distributed.forecast.estimate import Forecast, forecast
from xlstm_jax.distributed.forecast.report import rich_table
from xlstm_jax.distributed.partitioning import DEFAULT_MIN_WEIGHT_SIZE
from xlstm_jax.distributed.plan_leaves import format_bytes

SHARD_AXIS_PREFIX = "fsdp"
OTHER_MIN_WEIGHT_SIZE = 2**12
MAX_MINIBATCHES = 64


@dataclass(frozen=True)
class Options:
    """One way to build a step.

    Attributes:
      mesh: axes and sizes, outermost first. Parameters are split over those named fsdp..., the batch over all.
      min_weight_size: see ``shard_module_params``.
      keep_gathered: whether gathered weights are kept from the forward to the backward pass.
      remat: whether the activations of each block are computed again in the backward pass.
      num_minibatches: see ``make_train_step``.
    """

    mesh: dict[str, int]
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE
    keep_gathered: bool = True
    remat: bool = False
    num_minibatches: int = 1

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes that parameters are split over."""
        return tuple(axis for axis in self.mesh if axis.startswith(SHARD_AXIS_PREFIX))


@dataclass(frozen=True)
class Trial:
    """One forecast of the search; ``problem`` says in a line why there is none."""

    options: Options
    forecast: Forecast | None
    fits: bool
    problem: str = ""

    @property
    def seconds(self) -> float:
        """Estimated time of a step; infinite where there is no forecast."""
        return self.forecast.step_seconds if self.forecast else float("inf")

    @property
    def bytes_per_device(self) -> int | None:
        """What a device must hold, at the peak."""
        return self.forecast.total_bytes if self.forecast else None


@dataclass(frozen=True)
class Fit:
    """All that was tried: what fits first, the fastest first."""

    topology: str
    budget_bytes: int
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        """The fastest that fits."""
        return next((trial for trial in self.trials if trial.fits), None)

    def table(self) -> Any:
        """A rich table, one row for each trial."""
        rows = [_row(trial) for trial in self.trials]
        title = f"What fits into {format_bytes(self.budget_bytes)} on each device of {self.topology}"
        columns = ["mesh", "threshold", "gathered weights", "remat", "minibatches", "bytes per device", "step", "fits"]
        return rich_table(title, columns, rows)

    def to_json(self) -> str:
        """The trials with their totals; the forecasts themselves have a ``to_json`` of their own."""
        rows = [
            dataclasses.asdict(trial.options)
            | {"bytes_per_device": trial.bytes_per_device, "fits": trial.fits, "problem": trial.problem}
            | {"step_seconds": trial.forecast and trial.seconds}
            for trial in self.trials
        ]
        return json.dumps({"topology": self.topology, "budget_bytes": self.budget_bytes, "trials": rows}, indent=2)


def _row(trial: Trial) -> list[str]:
    options = trial.options
    mesh = ",".join(f"{axis}={size}" for axis, size in options.mesh.items())
    kept = "kept" if options.keep_gathered else "gathered again"
    cells = [mesh, f"{options.min_weight_size:,}", kept, "yes" if options.remat else "no", str(options.num_minibatches)]
    if trial.forecast is None:
        return [*cells, "", "", trial.problem]
    fits = "yes" if trial.fits else "no"
    return [*cells, format_bytes(trial.bytes_per_device), f"{trial.seconds * 1e3:.1f} ms", fits]


def fit(
    build_step: Callable[[Options], tuple[Any, Sequence[PyTree]]],
    topology: str,
    budget_bytes: int | None = None,
    *,
    meshes: Sequence[dict[str, int]] | None = None,
    on_trial: Callable[[Options], None] | None = None,
) -> Fit:
    """Searches for the fastest step that fits.

    Args:
      build_step: ``build_step(options) -> (step, abstract_args)`` on ``options.mesh``, an abstract mesh; as
        ``Workload.build_step`` makes them. It may raise a ``ValueError`` for options that it does not support.
      topology: as "v5e:16x16".
      budget_bytes: of each device; by default what the compiler lets a program have on that chip.
      meshes: those to try, the first one first. By default one axis for each dim of the torus, one flat axis, and
        hybrid sharding (replicas over the first dim).
      on_trial: called before each forecast, to show progress.
    Raises:
      ValueError: an unknown topology; or ``build_step`` raised at the very first options.
    """
    place = parse_topology(topology)
    budget = budget_bytes or place.chip.usable_hbm_bytes
    meshes = list(meshes or default_meshes(place.shape))
    trials: list[Trial] = []

    def attempt(options: Options) -> Trial:
        if on_trial:
            on_trial(options)
        trials.append(_attempt(build_step, options, topology, budget))
        return trials[-1]

    for options in _ladder(meshes[0]):
        if attempt(options).fits:
            break
        if len(trials) == 1 and trials[0].forecast is None:
            raise ValueError(f"build_step cannot build the first options, {options}: {trials[0].problem}")
    for change in [{"mesh": mesh} for mesh in meshes[1:]] + [{"min_weight_size": OTHER_MIN_WEIGHT_SIZE}]:
        best = min((trial for trial in trials if trial.fits), key=lambda trial: trial.seconds, default=None)
        if best is not None:
            attempt(dataclasses.replace(best.options, **change))
    ranked = sorted(trials, key=lambda trial: (not trial.fits, trial.seconds))
    return Fit(topology, budget, tuple(ranked))


def default_meshes(shape: Sequence[int]) -> list[dict[str, int]]:
    """Meshes worth trying on a torus of this shape; dims of size 1 are left out.

    One axis for each dim comes first: over one flat axis of a large torus, XLA compiles a reduce-scatter to an
    all-reduce of twice the bytes.
    """
    dims = [size for size in shape if size > 1] or [1]
    flat = {SHARD_AXIS_PREFIX: 1}
    for size in dims:
        flat[SHARD_AXIS_PREFIX] *= size
    if len(dims) == 1:
        return [flat]
    staged = {f"{SHARD_AXIS_PREFIX}_{'xyz'[i]}": size for i, size in enumerate(dims)}
    hybrid = {"dp": dims[0]} | {axis: size for axis, size in list(staged.items())[1:]}
    return [staged, flat, hybrid]


def _ladder(mesh: dict[str, int]) -> Iterator[Options]:
    """Options, each saving more memory than the last, at the price of more time."""
    yield Options(mesh)
    yield Options(mesh, keep_gathered=False)
    count = 1
    while count <= MAX_MINIBATCHES:
        yield Options(mesh, keep_gathered=False, remat=True, num_minibatches=count)
        count *= 2


def _attempt(build_step: Callable[..., Any], options: Options, topology: str, budget: int) -> Trial:
    try:
        step, args = build_step(options)
        found = forecast(step, *args, topology=topology)
    except ValueError as error:  # these options do not divide, say; others may
        return Trial(options, None, False, str(error).splitlines()[0])
    return Trial(options, found, found.total_bytes <= budget)
