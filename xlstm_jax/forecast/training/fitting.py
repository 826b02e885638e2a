"""Search for the fastest options of a sharded step that fit, by forecast; and the code that applies the result.

  1. the first mesh, three variants: gathered weights kept for the backward pass; gathered again in the backward pass;
     gathered again, and the activations of each block recomputed (remat)
  2. if nothing fits: 2, 4, ... minibatches with the options that took the least memory, until the step fits
  3. each other mesh: with the options of the fastest trial that fits; if nothing fits yet, with the options of 1
     that took the least memory, and then minibatches as in 2
  4. if nothing fits on any mesh: step 3 for every mesh, with the optimizer's state in host memory
  5. another ``min_weight_size``, with the options of the fastest trial that fits

With ``model_axes``, the meshes come from ``model_axes.model_meshes``, and only the best few by estimate are compiled;
``Fit.considered`` lists every mesh, with the reason for its rank.

Each variant in 1 saves memory and usually costs time; the fastest depends on whether compute, memory or links bound
the step. A forecast takes seconds to a minute, so the search varies a single option after the other and does not try
every combination: its result need not be optimal. The three variants of 1 compile in parallel, and so do the meshes of
3 once something fits, because these trials are independent; the number of parallel jobs does not change the trials.
A step within 5 % of the memory at which XLA itself begins to compute values again (``Forecast.has_margin``) is slower
than its forecast may say: trials with that margin come first, and if the best has none, twice the minibatches are
tried. Offload comes last, because its transfers cost time: it is tried only if nothing fits without it. Options that
fail (they do not divide the batch, the compiler refuses the step, the user's code raises) become a row with the reason;
if the very first options fail for another reason than a refusal of the compiler, or all three of 1 fail, the search
raises.
"""

import contextlib
import dataclasses
import inspect
import json
import math
import shlex
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Group, RenderableType
from rich.text import Text

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.policy import DEFAULT_MIN_WEIGHT_SIZE
from xlstm_jax.distributed.data_parallel.wire.collectives import entry_axes
from xlstm_jax.distributed.optimizers.offload import NO_OFFLOAD, Offload
from xlstm_jax.distributed.training.step import StepOptions
from xlstm_jax.forecast.compiling.compile import StepCall
from xlstm_jax.forecast.compiling.compile_process import CompileError, Pending
from xlstm_jax.forecast.compiling.report_cache import ReportCache, chosen_cache
from xlstm_jax.forecast.compiling.side_by_side import room_for_jobs, side_by_side
from xlstm_jax.forecast.forecasting import Forecast, begin_forecast
from xlstm_jax.forecast.hardware.cudnn import traced_for_chip
from xlstm_jax.forecast.hardware.topologies import Topology, parse_topology
from xlstm_jax.forecast.training.model_axes import (
    Considered,
    Estimate,
    estimate,
    links_of_mesh,
    mesh_on,
    model_meshes,
    ranked,
)
from xlstm_jax.forecast.training.workload import one_line_text
from xlstm_jax.formatting import (
    Bar,
    format_axes,
    format_bytes,
    format_mesh,
    notebook_html,
    plain_text,
    rich_table,
    shortened,
)

SHARD_AXIS_PREFIX = "fsdp"
BATCH_AXES = ("dp", SHARD_AXIS_PREFIX)  # prefixes of axes that split the batch
# Below the default threshold: the gain from splitting small leaves depends on the latency of the links.
OTHER_MIN_WEIGHT_SIZE = 2**12
MAX_MINIBATCHES = 64
HOST_GROUPS = (4, 2)  # hosts that share a replica: the first that divides the number of hosts
OPTIONS = ("mesh", "threshold", "gathered weights", "remat", "minibatches", "offload")  # columns
MAX_PROBLEM = 200  # characters of a problem in a table
MESHES_COMPILED = 4  # of the meshes that ``model_axes`` allows
OFFLOADED_STATE = """\
state = create_train_state(
    model, tx, mesh, rng, inputs,
    batch_axes={axes},
    offload=Offload(),
)"""

BuiltStep = tuple[Any, Sequence[PyTree]]  # a jax.jit function and its abstract arguments


@dataclass(frozen=True)
class Options:
    """Options for building a step.

    Attributes:
      mesh: axes and sizes, outermost first. Parameters are split over axes named fsdp..., the batch over every axis
        except the model's axes.
      min_weight_size: see ``shard_module_params``.
      keep_gathered: whether gathered weights are kept from the forward to the backward pass.
      remat: whether the activations of each block are computed again in the backward pass.
      num_minibatches: see ``make_train_step``.
      offload: see ``create_train_state``.

    >>> Options({"dp": 4, "fsdp_x": 8, "fsdp_y": 8}).shard_axes
    ('fsdp_x', 'fsdp_y')
    """

    mesh: dict[str, int]
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE
    keep_gathered: bool = True
    remat: bool = False
    num_minibatches: int = 1
    offload: Offload = NO_OFFLOAD

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Mesh axes over which parameters are split: the axes whose names begin with "fsdp", outermost first."""
        return tuple(axis for axis in self.mesh if axis.startswith(SHARD_AXIS_PREFIX))

    def __str__(self) -> str:
        gathering = "kept" if self.keep_gathered else "gathered again"
        parts = [format_mesh(self.mesh), f"weights {gathering}", *["remat"] * self.remat]
        parts += [f"{self.num_minibatches} minibatches"] * (self.num_minibatches > 1)
        parts += [f"threshold {self.min_weight_size:,}"] * (self.min_weight_size != DEFAULT_MIN_WEIGHT_SIZE)
        return ", ".join([*parts, *["offload"] * (self.offload != NO_OFFLOAD)])


_WAYS = (Options({}), Options({}, keep_gathered=False), Options({}, keep_gathered=False, remat=True))


@dataclass(frozen=True)
class Trial:
    """A trial of the search: the options of a step, and the forecast of the step or the problem.

    Attributes:
      options: options of the step.
      forecast: forecast of the step; None after a failure.
      fits: whether the step is within the budget.
      problem: reason for a missing forecast, in a line.
      took_s: seconds from the start of the compilation until the trial is listed, with the wait for parallel trials
        listed before; None without a compilation, or for a result from the cache.
    """

    options: Options
    forecast: Forecast | None
    fits: bool
    problem: str = ""
    took_s: float | None = None

    @property
    def seconds(self) -> float:
        """Expected seconds of a step; infinite without a forecast or if unknown."""
        seconds = self.forecast.step_seconds if self.forecast else None
        return math.inf if seconds is None else seconds

    @property
    def tight(self) -> bool:
        """Whether the step fits, but is less than 5 % below the memory at which XLA recomputes values, or above.

        True if ``fits`` is True and ``Forecast.has_margin`` is False; False if the margin is unknown.
        """
        return self.fits and self.forecast is not None and self.forecast.has_margin is False

    @property
    def bytes_per_device(self) -> int | None:
        """Peak memory of a device in bytes; None without a forecast."""
        return self.forecast.total_bytes if self.forecast else None


@dataclass(frozen=True)
class Fit:
    """Result of the search by ``fit``.

    Attributes:
      topology, budget_bytes: as passed to ``fit``, or the default of the budget.
      trials: every trial: first trials that fit with a margin of memory, then trials that fit, then the rest; within
        each group the fastest first.
      considered: with ``model_axes``, every mesh that was estimated, the best first.
      batch_specs: the PartitionSpec of the steps' batch, by mesh as text; None if leaves are split differently.
      layout: the layout of tokens of the steps, as for ``make_train_step``; None if unknown.

    >>> failed = Trial(Options({"fsdp": 4}), None, fits=False, problem="4 devices do not divide 6 rows")
    >>> Fit("v5e:2x2", 2**30, (failed,)).best  # None: nothing fits
    """

    topology: str
    budget_bytes: int
    trials: tuple[Trial, ...]
    considered: tuple[Considered, ...] = ()
    batch_specs: Mapping[str, PartitionSpec | None] = field(default_factory=dict)
    layout: str | None = None

    @property
    def best(self) -> Trial | None:
        """The fastest trial that fits with a margin, or else that fits; None if nothing fits."""
        return next((trial for trial in self.trials if trial.fits), None)

    def __str__(self) -> str:
        return plain_text(self.table())

    @property
    def why_offload(self) -> str:
        """Sentence on the cost of the best trial's offload, and why it is needed; "" without offload or best trial."""
        if self.best is None or not self.best.forecast or self.best.options.offload == NO_OFFLOAD:
            return ""
        host = self.best.forecast.host
        assert host is not None  # else ``fit`` has refused the step
        return (
            f"Nothing fits without offload. With it {format_bytes(host.stored_bytes)} of optimizer state lie in the "
            f"host's memory for each device, and travel there and back in every step: {host.seconds * 1e3:.1f} ms, for "
            f"{host.waited_s * 1e3:.1f} ms of which the step waits."
        )

    def _repr_html_(self) -> str:
        title = f"What each device must hold, of {format_bytes(self.budget_bytes)}; what does not fit in orange"
        bars = [
            Bar(str(trial.options), trial.bytes_per_device or 0, ", ".join(_row(trial)[-3:-1]), not trial.fits)
            for trial in self.trials
            if trial.forecast
        ]
        return notebook_html(self.table(), title, bars)

    def table(self) -> RenderableType:
        """Returns, for ``rich``, a table with a row for each trial; if a trial fits, also the code of the best trial.

        The code applies the options of the best trial in a training. Before the code come the sentences ``why_mesh``
        and ``why_offload``, where not "".
        """
        rows = [_row(trial) for trial in self.trials]
        title = f"What fits into {format_bytes(self.budget_bytes)} on each device of {self.topology}"
        trials = rich_table(title, [*OPTIONS, "bytes per device", "expected", "fits"], rows, right=1)
        if self.best is None:
            return trials
        code = textwrap.indent(self._code(self.best), "    ")
        applied = Text(f"To apply the first, in your training:\n\n{code}\n", overflow="fold")
        notes = [Text(f"{text}\n") for text in (self.why_mesh, self.why_offload) if text]
        return Group(trials, *notes, applied)

    def _code(self, trial: Trial) -> str:
        # The model's axes, from `model_axes`, need not split the batch.
        model_axes = {axis for mesh in self.considered for axis in dict(mesh.mesh) if not axis.startswith(BATCH_AXES)}
        return code_of(trial.options, model_axes, self.batch_specs.get(format_mesh(trial.options.mesh)), self.layout)

    @property
    def why_mesh(self) -> str:
        """Sentence on the meshes that ``fit`` estimated for ``model_axes``, and on the mesh of the best trial.

        The sentence has the number of meshes: estimated, too large, without a step, and compiled. "" if ``model_axes``
        was not given, or if there is no best trial.
        """
        if not self.considered or self.best is None:
            return ""
        compiled = [choice for choice in self.considered if choice.compiled]
        best = next(choice for choice in compiled if dict(choice.mesh) == self.best.options.mesh)
        # The estimate only ranks meshes: a mesh that is reported to fit has been compiled.
        estimates = [choice.estimate for choice in self.considered if choice.estimate]
        too_large = sum(known.total_bytes > self.budget_bytes for known in estimates)
        refused = len(self.considered) - len(estimates)
        return (
            f"Of {len(self.considered)} meshes {too_large} would not fit by their estimates, and {refused} have no "
            f"step; the {len(compiled)} best were tried. {format_mesh(best.mesh)} is the fastest of these that fits: "
            f"{best.estimate}."
        )

    def to_json(self) -> str:
        """Returns the trials (options, bytes, times, problem), and the code that applies the best trial, as JSON.

        The code is null if nothing fits. The full forecast of a trial is not included: see ``Forecast.to_json``.
        """
        rows = []
        for trial in self.trials:
            least, expected, most = (trial.forecast and trial.forecast.step_time) or (None, None, None)
            sizes = {"bytes_per_device": trial.bytes_per_device}
            times = {"step_seconds": expected, "least_step_seconds": least, "most_step_seconds": most}
            outcome = {"fits": trial.fits, "problem": trial.problem}
            rows.append(dataclasses.asdict(trial.options) | sizes | outcome | times)
        data = {"topology": self.topology, "budget_bytes": self.budget_bytes, "trials": rows}
        data |= {"why_offload": self.why_offload, "why_mesh": self.why_mesh}
        data |= {"considered": [str(choice) for choice in self.considered]}
        return json.dumps(data | {"code": self._code(self.best) if self.best else None}, indent=2)


def _row(trial: Trial) -> list[str]:
    options = trial.options
    gathering, remat = "kept" if options.keep_gathered else "gathered again", "yes" if options.remat else "no"
    offload = "no" if options.offload == NO_OFFLOAD else "yes"
    cells = [format_mesh(options.mesh), f"{options.min_weight_size:,}", gathering, remat]
    cells += [str(options.num_minibatches), offload]
    if trial.forecast is None:
        return [*cells, "", "", shortened(trial.problem, MAX_PROBLEM)]
    fits = "yes, near the limit" if trial.tight else "yes" if trial.fits else "no"
    step = f"{trial.seconds * 1e3:.1f} ms"
    if times := trial.forecast.step_time:
        step += f" ({times.least * 1e3:.1f} to {times.most * 1e3:.1f})"
    return [*cells, format_bytes(trial.forecast.total_bytes), step, fits]


def fit(
    build_step: Callable[[Options], BuiltStep],
    topology: str,
    budget_bytes: int | None = None,
    *,
    meshes: Sequence[dict[str, int]] | None = None,
    on_trial: Callable[[Options], None] | None = None,
    on_done: Callable[[Trial], None] | None = None,
    jobs: int | None = None,
    cache: bool | ReportCache = True,
    model_axes: Mapping[str, int] | None = None,
) -> Fit:
    """Searches for the options of the fastest step that fits into the memory of a device, by compiling and forecasting.

    No step runs. The result lists every trial; ``Fit.best`` is None if nothing fits.

    >>> fit(lambda options: training().build_step(options.mesh), "v5e:3x3")
    Traceback (most recent call last):
    ValueError: topology='v5e:3x3': there is no such slice of v5e. There are 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16.

    Args:
      build_step: ``build_step(options) -> (step, abstract_args)`` on ``options.mesh``, an abstract mesh, as
        ``Workload.build_step`` does. May raise for unsupported options. ``options.offload`` is for ``Workload(...,
        offload=...)``: if offload is requested and the step keeps nothing on the host, the trial's row reports this.
      topology: as "v5e:16x16" or "h100:32x8".
      budget_bytes: memory budget per device; None: the memory available to a program on this chip.
      meshes: meshes to try, in order. By default an axis for each dim of the torus (GPUs: an axis across hosts and an
        axis within), a flat axis, and hybrid sharding (replicas over the first dim; on GPUs also over groups of
        hosts).
      on_trial: called with the options before each forecast, to show progress.
      on_done: called with each finished trial.
      jobs: maximum number of parallel compilations; None: one for every 2 cores, as memory allows.
      cache: True: read and store compiled programs in the user's folder; False: always compile; a ``ReportCache``: use
        another folder.
      model_axes: in place of ``meshes``: axes of the model, the largest traffic first, with the maximum number of
        devices for each, ``{"tp": 8, "cp": 16, "ep": 8}``. Every mesh in ``options.mesh`` contains each of these axes,
        with size 1 if unused. ``build_step`` is traced for each mesh, in seconds, and compiled for the four best
        meshes by estimate.
    Raises:
      ValueError: the topology is unknown; ``meshes`` and ``model_axes`` are both given; the budget, the number of jobs
        or a limit is not positive; there is no mesh, or no step can be built on any mesh of ``model_axes``; the
        forecast of the very first options fails, chained to the reason, unless the compiler refuses the step; or no
        variant of the first mesh has a forecast.
      ImportError: the compiler for the topology is not installed.
    """
    parsed = parse_topology(topology)
    chip = parsed.chip
    budget = chip.usable_hbm_bytes if budget_bytes is None else budget_bytes
    if not isinstance(budget, int | float) or not budget > 0:
        raise ValueError(
            f"budget_bytes={budget!r}: nothing fits into that. Give the bytes that a device may take, as 14 * 2**30, "
            f"or None for all that {chip.name} has, {chip.usable_hbm_bytes}."
        )
    if meshes is not None and model_axes is not None:
        raise ValueError("meshes and model_axes both say which meshes to try: pass one of them.")
    considered: list[Considered] = []
    batch_specs: dict[str, PartitionSpec | None] = {}
    layouts: list[str | None] = []
    if model_axes is not None:
        considered = _considered(build_step, parsed, model_axes, budget)
        meshes = [dict(choice.mesh) for choice in considered if choice.compiled]
    meshes = default_meshes(parsed) if meshes is None else meshes
    if not meshes:
        raise ValueError(
            "meshes is empty; give at least one, as {'fsdp': 8}, or None for the default meshes of the topology."
        )

    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs}: at least 1 must run at once; None takes as many as this machine has room for.")

    def build(options: Options) -> StepCall:
        with traced_for_chip(chip):
            step, args = build_step(options)
        call = StepCall(step, tuple(args), topology=parsed, cache=report_cache)
        batch_specs[format_mesh(options.mesh)] = batch_spec_of(call)
        layouts.append(layout_of_step(step))
        _check_offload(options, call.traced)  # the trace runs the user's loss, which may raise anything, inside `build`
        return call

    def begin(call: StepCall) -> Pending[Forecast]:
        job = begin_forecast(call)
        if job.key in programs:
            raise ValueError("the same program as one before: build_step, or the model, ignores the varied option")
        programs.add(job.key)
        return job

    # Equal programs for different options are a mistake in `build_step`, and would look like a tie.
    report_cache, programs = chosen_cache(cache), set[str]()  # the cache of every trial; keys of started programs
    limit = room_for_jobs if jobs is None else lambda: jobs
    trials = Search(build, begin, budget, on_trial, on_done, limit).run(meshes)
    return Fit(topology, budget, trials, tuple(considered), batch_specs, next(iter(layouts), None))


def _considered(
    build_step: Callable[[Options], BuiltStep], topology: Topology, model_axes: Mapping[str, int], budget: float
) -> list[Considered]:
    """Estimates a step on every mesh that ``model_axes`` allows; returns a ``Considered`` for each mesh, best first.

    A ``Considered`` has the mesh, its estimate, and whether ``fit`` shall compile the mesh: the few best are marked.
    Here each step is only built and traced, with remat and weights gathered again. If ``build_step`` raises on a mesh,
    the reason takes the place of the estimate.

    Args:
      build_step: makes the step and its abstract arguments for some options, as for ``fit``.
      topology: the devices.
      model_axes: maximum number of devices for each axis of the model, {axis: number}.
      budget: bytes that a step may take on a device.
    Raises:
      ValueError: no step can be built on any mesh.
    """
    estimates: list[tuple[dict[str, int], Estimate | str]] = []
    for mesh in model_meshes(topology, model_axes):
        try:
            with traced_for_chip(topology.chip):
                step, args = build_step(Options(mesh, keep_gathered=False, remat=True))
            call = StepCall(step, tuple(args), topology=topology)
            _ = call.traced  # runs the user's loss; the trace is cached
        except Exception as error:  # the user's code may raise anything
            estimates.append((mesh, one_line_text(error)))
        else:
            estimates.append((mesh, estimate(call, links_of_mesh(topology, mesh))))
    considered = ranked(estimates, budget, MESHES_COMPILED)
    if not any(choice.compiled for choice in considered):
        raise ValueError(f"no step can be built on any mesh that model_axes allows; the first, {considered[0]}")
    return considered


def _check_offload(options: Options, traced: jax.stages.Traced) -> None:
    """Raises a ``ValueError`` if a step has no arguments in host memory, although its options request offload."""
    spaces = {aval.memory_space for aval in traced.jaxpr.in_avals}
    if options.offload != NO_OFFLOAD and jax.memory.Space.Host not in spaces:
        raise ValueError(
            "nothing of this step lies on the host: pass Workload(..., offload=options.offload) in build_step, and use "
            "an optimizer whose state is split like the parameters"
        )


@dataclass
class Search:
    """Search of ``fit`` for the fastest options with which a step fits.

    Attributes:
      build: makes the step of some options.
      begin: starts the forecast of a step, which compiles in a child process.
      budget_bytes: memory of a device that the step may use.
      on_trial, on_done: called with the options of a trial as it starts, and with the trial when it ends.
      limit: returns how many trials may compile at once.
      trials: the trials so far.
    """

    build: Callable[[Options], StepCall]
    begin: Callable[[StepCall], Pending[Forecast]]
    budget_bytes: int
    on_trial: Callable[[Options], None] | None = None
    on_done: Callable[[Trial], None] | None = None
    limit: Callable[[], int] = room_for_jobs
    trials: list[Trial] = field(default_factory=list)

    def run(self, meshes: Sequence[dict[str, int]]) -> tuple[Trial, ...]:
        """Runs the search on ``meshes`` in order, and returns every trial, in the order of ``Fit.trials``.

        The first mesh is tried with gathered weights kept, with weights gathered again, and with remat. While nothing
        fits, the options of these with the least memory are tried with 2, 4, ... minibatches, then on each other mesh
        in the same way, then with offload on every mesh. Once a trial fits, the best options are tried on the meshes
        that are left, and with another ``min_weight_size``.

        Raises:
          ValueError: every variant of the first mesh fails; or the first does, not by a refusal of the compiler.
        """
        self.attempt(*[dataclasses.replace(way, mesh=meshes[0]) for way in _WAYS])
        compiled = [trial for trial in self.trials if trial.forecast]
        if not compiled:
            raise _no_forecast(self.trials[0].options, self.trials[0].problem)
        # Minibatches and other meshes start from the trial with the least memory, which is most likely to fit.
        smallest = min(compiled, key=lambda trial: trial.bytes_per_device or 0)
        self.try_minibatches(smallest)
        rest = self.try_meshes(smallest.options, meshes[1:])
        if self.best is None:
            # Offload comes last: each byte in host memory is sent to the device and back in a step.
            rest = self.try_meshes(dataclasses.replace(smallest.options, offload=Offload()), meshes)
        if self.best is not None:
            self.attempt(*[dataclasses.replace(self.best.options, mesh=mesh) for mesh in rest])
            self.attempt(dataclasses.replace(self.best.options, min_weight_size=OTHER_MIN_WEIGHT_SIZE))
        return tuple(sorted(self.trials, key=_rank))

    @property
    def best(self) -> Trial | None:
        """The fastest trial so far that fits with a margin of memory, or else that fits; None if nothing fits yet."""
        return min((trial for trial in self.trials if trial.fits), key=_rank, default=None)

    def try_meshes(self, options: Options, meshes: Sequence[dict[str, int]]) -> list[dict[str, int]]:
        """Tries meshes in order with ``options``, each with increasing minibatches, until a trial fits.

        Returns the meshes that were not tried. Tries nothing if a trial has fitted before.
        """
        rest = list(meshes)
        while rest and self.best is None:
            options = dataclasses.replace(options, mesh=rest.pop(0))
            self.try_minibatches(self.attempt(options))
        return rest

    def try_minibatches(self, trial: Trial) -> None:
        """Tries the options of ``trial`` with twice the minibatches, again and again, until a trial fits.

        Ends without a fit if a trial fails, the maximum is reached, or minibatches cannot help: parameters, optimizer
        state and the batch take the same memory for any number of minibatches. If ``trial`` is the best, but near the
        limit of memory, the next number of minibatches is tried. Nothing is tried if another trial fits.
        """
        while (
            (self.best is None or (self.best is trial and trial.tight))
            and trial.forecast
            and trial.forecast.memory.argument_bytes <= self.budget_bytes
        ):
            # Doubled, since each trial is a compilation.
            count = 2 * trial.options.num_minibatches
            if count > MAX_MINIBATCHES:
                return
            trial = self.attempt(dataclasses.replace(trial.options, num_minibatches=count))

    def attempt(self, *several: Options) -> Trial:
        """Forecasts several options in parallel, appends their trials to ``trials`` in order, and returns the last.

        Options that fail get a trial without forecast. Calls ``on_done`` with each trial.

        Raises:
          ValueError: the first trial of the search has no forecast, for another reason than a refusal of the compiler.
        """
        # A generator: the next step is traced while the previous steps compile.
        begun = (self._begun(options) for options in several)
        with contextlib.closing(side_by_side(begun, self.limit)) as done:
            for job, (options, error) in done:
                self.trials.append(self._trial(job, options, error))
                if self.on_done is not None:
                    self.on_done(self.trials[-1])
        return self.trials[-1]

    def _begun(self, options: Options) -> tuple[Pending[Forecast] | None, tuple[Options, Exception | None]]:
        """Builds the step of ``options`` by the user's function, and prepares the compilation, which is not started.

        Returns (pending compilation, (options, None)). If ``build`` (which makes the step) raises any error, or
        ``begin`` (which exports the step) a ``ValueError``, returns (None, (options, error)). Calls ``on_trial``
        before.
        """
        if self.on_trial is not None:
            self.on_trial(options)
        try:
            step = self.build(options)
        except Exception as error:  # the user's code may raise anything
            return None, (options, error)
        try:
            return self.begin(step), (options, None)
        except ValueError as error:  # other exceptions do not depend on the options
            return None, (options, error)

    def _trial(self, job: Pending[Forecast] | None, options: Options, error: Exception | None) -> Trial:
        """Returns the trial of ``options``, after the wait for the compilation: with a forecast, or with the problem.

        Args:
          job: the compilation; None if no step could be built.
          options: options of the trial.
          error: reason why there is no job; else None.
        Raises:
          ValueError: the first trial of the search has a problem, other than that the compiler refuses the step.
        """
        try:
            forecast = job.result() if job is not None else None
        except (ValueError, CompileError, TimeoutError) as raised:  # other exceptions do not depend on the options
            forecast, error = None, raised
        if job is not None and forecast is not None:
            return Trial(options, forecast, forecast.total_bytes <= self.budget_bytes, took_s=job.seconds)
        assert error is not None
        problem = one_line_text(error)
        if not self.trials and not isinstance(error, CompileError):  # the compiler may accept the next options
            raise _no_forecast(options, problem) from error
        return Trial(options, None, False, problem)


def _rank(trial: Trial) -> tuple[bool, bool, float]:
    return not trial.fits, trial.tight, trial.seconds


def _no_forecast(options: Options, problem: str) -> ValueError:
    return ValueError(f"no forecast of the first options, {options}: {problem}")


def default_meshes(topology: Topology) -> list[dict[str, int]]:
    """Returns the meshes {axis: size} that ``fit`` tries by default, in order; dims of size 1 are left out.

    For a topology of several dims, in this order: an FSDP axis for each dim; a single axis "fsdp" over all devices;
    replicas ("dp") along the first dim, with FSDP axes for the rest; for GPUs also replicas of groups of hosts. For a
    single dim, only the axis "fsdp".

    An axis for each dim comes first: over a flat axis of a large torus, XLA compiles a reduce-scatter to an all-reduce
    of twice the bytes. On GPUs such a mesh lets weights be gathered between hosts first, so that the slower network
    carries the smallest pieces.
    """
    dims = [size for size in topology.dims if size > 1]
    flat = {SHARD_AXIS_PREFIX: math.prod(dims)}
    if len(dims) <= 1:
        return [flat]
    copies = dims[:1]
    if topology.platform == "cuda":
        copies += [dims[0] // group for group in HOST_GROUPS if dims[0] % group == 0 < dims[0] - group][:1]
    wanted: list[dict[str, int]] = [{}, *({"dp": count} for count in copies)]
    staged, *copied = [mesh for sizes in wanted if (mesh := mesh_on(topology, sizes))]
    return [staged, flat, *copied]


def batch_spec_of(call: StepCall) -> PartitionSpec | None:
    """Returns the PartitionSpec that all split leaves of a step's batch share; else None.

    The batch is every argument after the first, the state. Scalars and replicated leaves do not count. None also for a
    batch without split leaves.
    """
    # Scalars and keys are replicated, however the batch is split.
    placed = [leaf.sharding for leaf in jax.tree.leaves(call.args[1:]) if getattr(leaf, "ndim", 0)]
    specs = {s.spec for s in placed if isinstance(s, NamedSharding) and any(map(entry_axes, s.spec))}
    return specs.pop() if len(specs) == 1 else None


def layout_of_step(step: Callable[..., Any]) -> str | None:
    """Returns the layout of tokens, such as "zigzag", of a step made by ``make_train_step``.

    None for a step without a layout, and for any other function.
    """
    options = getattr(inspect.unwrap(step), "__self__", None)
    return options.layout.tokens if isinstance(options, StepOptions) else None


def code_of(
    options: Options,
    model_axes: Collection[str] = (),
    batch_spec: PartitionSpec | None = None,
    layout: str | None = None,
) -> str:
    """Returns the code that applies the options in a training; lines have at most 60 columns for usual axis names.

    Args:
      options: options of the step.
      model_axes: mesh axes that need not split the batch.
      batch_spec: PartitionSpec of the step's batch, if known; written if some axes do not split the batch, or another
        dim than rows is split.
      layout: layout of the step, as for ``make_train_step``.
    """
    axes = tuple(axis for axis in options.mesh if axis not in model_axes)
    lines = [f"    loss_fn, mesh, {axes}, num_minibatches={options.num_minibatches}"]
    if batch_spec is not None and (len(batch_spec) > 1 or set(axes) != set(options.mesh)):
        axes = tuple(axis for entry in batch_spec for axis in entry_axes(entry))
        entries = ", ".join(format_axes(entry_axes(entry)) if entry else "None" for entry in batch_spec)
        lines = [f"    loss_fn, mesh, num_minibatches={options.num_minibatches},", f"    batch_spec=jax.P({entries}),"]
    elif axes != tuple(options.mesh):
        lines = ["    # and those of the model's own axes that split the batch:", *lines]
    if layout is not None:
        lines = [*lines[:-1], f"{lines[-1].removesuffix(',')},", f"    layout={layout!r},"]
    # The code must match the forecast, without an option that nn.remat implies.
    gathered_again = not options.keep_gathered and not options.remat  # nn.remat implies the second gather
    wrapper = [
        "    shard_module_params,",
        f"    axis_name={format_axes(options.shard_axes)},",
        f"    min_weight_size={options.min_weight_size},",
        *(["    reshard_after_forward=True,"] if gathered_again else []),
    ]
    return "\n".join(
        [
            "mesh = DeviceMeshManager.create_device_mesh(",
            f"    {dict(options.mesh)}",
            ")",
            *(["wrap = partial(", *wrapper, ")"] if options.shard_axes else []),
            *(["block = nn.remat(wrap(Block), prevent_cse=False)"] if options.remat else []),
            *(OFFLOADED_STATE.format(axes=axes).splitlines() if options.offload != NO_OFFLOAD else []),
            "step = make_train_step(",
            *lines,
            ")",
        ]
    )


def command_of(options: Options, factory: str, topology: str, settings: Mapping[str, Any]) -> str:
    """Returns the command that repeats the forecast of these options, over several lines.

    Args:
      options: options to forecast.
      factory: value of ``--factory``.
      topology: value of ``--topology``.
      settings: values of the factory's arguments, each passed as ``--set``.
    """
    more = [f"--minibatches {options.num_minibatches}"] if options.num_minibatches > 1 else []
    more += ["--offload"] if options.offload != NO_OFFLOAD else []
    parts = [
        f"xlstm-jax forecast --factory {factory}",
        " ".join([f"--topology {topology} --mesh {format_mesh(options.mesh)}", *more]),
        *(f"--set {shlex.quote(f'{name}={value!r}')}" for name, value in settings.items()),
    ]
    return " \\\n    ".join(parts)
