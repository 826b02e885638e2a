"""What fits, and what of it is fastest: a search over the options of a sharded step, by forecast.

  1. weights kept, weights gathered again, blocks recomputed      each saves memory, and as a rule costs time
  2. 2, 4, ... minibatches                                        as long as nothing fits
  3. other meshes, then another threshold                         one change at a time, to the fastest that fits

The three of the first line are all tried: which is fastest depends on whether compute, memory or links bound the step.
A forecast takes seconds to a minute, so the search walks along each option and does not try all combinations.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


_WAYS = (Options({}), Options({}, keep_gathered=False), Options({}, keep_gathered=False, remat=True))


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
    search = _Search(build_step, topology, budget, on_trial or (lambda options: None))
    search.try_ways(meshes[0])
    search.try_minibatches()
    for change in [{"mesh": mesh} for mesh in meshes[1:]] + [{"min_weight_size": OTHER_MIN_WEIGHT_SIZE}]:
        search.try_beside_the_best(change)
    return Fit(topology, budget, tuple(sorted(search.trials, key=lambda trial: (not trial.fits, trial.seconds))))


@dataclass
class _Search:
    build_step: Callable[[Options], tuple[Any, Sequence[PyTree]]]
    topology: str
    budget: int
    on_trial: Callable[[Options], None]
    trials: list[Trial] = field(default_factory=list)

    def attempt(self, options: Options) -> Trial:
        self.on_trial(options)
        try:
            step, args = self.build_step(options)
            found = forecast(step, *args, topology=self.topology)
            trial = Trial(options, found, found.total_bytes <= self.budget)
        except ValueError as error:  # these options do not divide, say; others may
            trial = Trial(options, None, False, str(error).splitlines()[0])
        self.trials.append(trial)
        return trial

    def try_ways(self, mesh: dict[str, int]) -> None:
        for options in _WAYS:
            self.attempt(dataclasses.replace(options, mesh=mesh))
            first = self.trials[0]
            if first.problem:
                raise ValueError(f"build_step cannot build the first options, {first.options}: {first.problem}")

    def try_minibatches(self) -> None:
        """Twice as many each time, of the way that took least, until one fits or no more can be made of the batch."""
        smallest = min((trial for trial in self.trials if trial.forecast), key=lambda trial: trial.bytes_per_device)
        count = 2
        while not any(trial.fits for trial in self.trials) and count <= MAX_MINIBATCHES:
            if self.attempt(dataclasses.replace(smallest.options, num_minibatches=count)).problem:
                return
            count *= 2

    def try_beside_the_best(self, change: dict[str, Any]) -> None:
        best = min((trial for trial in self.trials if trial.fits), key=lambda trial: trial.seconds, default=None)
        if best is not None:
            self.attempt(dataclasses.replace(best.options, **change))


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
