"""Commands: each takes the parsed arguments and returns a ``Report``, which the command line prints.

  run_plan       model, mesh                      --plan_sharding-->  split of each leaf, reasons, bytes per device
  run_forecast   step, topology (or CPU devices)  --forecast------->  memory, traffic and time of a step
  run_lint       step, topology (or CPU devices)  --lint----------->  needless costs of a compiled step
  run_fit        topology, budget                 --fit------------>  options of the step that fit, the fastest first
  run_doctor     this machine                     --examine-------->  versions, devices, extras, self-tests

Every command except ``run_doctor`` begins with the user's factory.
"""

import dataclasses
import itertools
import json
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from xlstm_jax.cli.doctor import examine
from xlstm_jax.cli.factory import AXES, VARIED, Factory, load_factory, settings_of
from xlstm_jax.distributed.device_mesh.meshes import DeviceMeshManager
from xlstm_jax.distributed.optimizers.offload import NO_OFFLOAD, Offload
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.distributed.plan.sharding_plan import ShardingPlan
from xlstm_jax.distributed.processes.devices import simulate_cpu_devices
from xlstm_jax.forecast.compiling.report_cache import FOLDER_VARIABLE, ReportCache, user_cache
from xlstm_jax.forecast.forecasting import Forecast, forecast
from xlstm_jax.forecast.hardware.topologies import Topology, parse_topology
from xlstm_jax.forecast.training.fitting import SHARD_AXIS_PREFIX, Options, Trial, command_of, default_meshes, fit
from xlstm_jax.forecast.training.linting.lint import lint, table
from xlstm_jax.forecast.training.linting.rules import RULES
from xlstm_jax.forecast.training.workload import Workload
from xlstm_jax.formatting import format_bytes, format_mesh, one_line, shortened


class ShowProgress(Protocol):
    """Callback that shows the current activity; a text that ``stays`` becomes a separate line, on a terminal or not."""

    def __call__(self, text: str, *, stays: bool = False) -> None: ...


MAX_REASON = 200  # characters of a reason in an error
MAX_LINE = 100  # characters of a trial's outcome
UNWRAPPED = "no module is wrapped by shard_module_params, so nothing is split; `xlstm-jax plan` shows a wrapper's plan."


class Report(NamedTuple):
    """Result of a command.

    Attributes:
      tables: returns the tables, as ``rich`` renderables and strings.
      json: returns the content of the tables as JSON.
      refusals: bad news, one line each; with any refusal the exit code is 1.
      notes: remarks, one line each.
    """

    tables: Callable[[], Sequence[object]]
    json: Callable[[], str]
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _mesh(args: Namespace, factory: Factory) -> dict[str, int]:
    """Returns the mesh {axis: size} of ``--mesh``, with a size of -1 filled in.

    Without ``--mesh``, the first mesh that ``fit`` would try on the topology. ``factory`` is the user's function of
    ``--factory``: the default mesh depends on whether this function takes the axes to split over.

    Raises:
      ValueError: the product of the sizes differs from the topology's number of devices; neither --mesh nor --topology
        is given; a size is -1 without --topology; or the mesh has no axis to split parameters over.
    """
    mesh: dict[str, int] | None = args.mesh
    if args.topology is not None:
        topology = parse_topology(args.topology)
        mesh = _filled(mesh, topology) if mesh else _meshes_to_try(topology, factory)[0]
    if mesh is None:
        raise ValueError(
            "how many devices? Pass --mesh, as --mesh dp=4,fsdp=64, or --topology, as v5e:16x16 or h100:32x8."
        )
    if -1 in mesh.values():
        raise ValueError(f"--mesh {format_mesh(mesh)}: -1 stands for the rest of a topology; pass --topology too.")
    _check_shard_axes(mesh, factory, dict(args.set))
    return mesh


def _filled(mesh: dict[str, int], topology: Topology) -> dict[str, int]:
    """Returns the mesh {axis: size} with a size of -1 replaced by the remaining number of the topology's devices.

    Raises:
      ValueError: no such size exists, or, without -1, the product of the sizes differs from the number of devices; with
        a cure.
    """
    fixed_sizes = {axis: size for axis, size in mesh.items() if size != -1}
    devices, known = topology.num_devices, math.prod(fixed_sizes.values())
    filled = {axis: devices // known if size == -1 else size for axis, size in mesh.items()}
    if math.prod(filled.values()) == devices:
        return filled
    # An axis can be -1 if the product of the other sizes divides the number of devices. The error suggests the
    # innermost such axis, which usually splits parameters.
    free = [
        axis for axis in fixed_sizes if len(fixed_sizes) == len(mesh) and devices % (known // fixed_sizes[axis]) == 0
    ]
    sizes = ", ".join(str(size) for size in range(1, devices + 1) if devices % size == 0)
    product = f"{'*'.join(fixed_sizes)} = " if len(fixed_sizes) > 1 else f"{next(iter(fixed_sizes))}="
    cure = f"{product}{known} does not divide {devices}; {sizes} do. Choose one of these"
    if free:
        cure = f"Write -1 for the size of one axis, as {format_mesh(mesh | {free[-1]: -1})}"
    multiple = "a multiple of " if -1 in mesh.values() else ""
    raise ValueError(
        f"--mesh {format_mesh(mesh)} takes {multiple}{known} devices, but {topology.name} has {devices}. "
        f"{cure}, or take another topology."
    )


def _check_shard_axes(mesh: dict[str, int], factory: Factory, chosen: dict[str, Any]) -> None:
    """Raises a ``ValueError`` if no axis of the mesh splits parameters: if no name begins with "fsdp".

    Such a mesh may be a typing error. No error if ``chosen``, the arguments of ``--set`` by name, has the axes to split
    over, or if the user's factory does not take these axes.
    """
    name = factory.axes_name
    if name is None or name in chosen or Options(mesh).shard_axes:
        return
    last = list(mesh)[-1]
    renamed = {SHARD_AXIS_PREFIX if axis == last else axis: size for axis, size in mesh.items()}
    raise ValueError(
        f"--mesh {format_mesh(mesh)}: no axis begins with {SHARD_AXIS_PREFIX}, so {factory.name} would "
        f"split nothing. Name the axes to split over {SHARD_AXIS_PREFIX}..., as {format_mesh(renamed)}"
        f', or pass --set "{name}=(\'{last}\',)", or --set "{name}=()" for a replicated run.'
    )


def _meshes_to_try(topology: Topology, factory: Factory) -> list[dict[str, int]]:
    """Returns the meshes to try for a topology, each {axis: size}, the best guess first.

    If the user's factory takes the axes to split over, these are the default meshes of ``fit``; else a single mesh of a
    single axis "fsdp".
    """
    # A factory without this argument has fixed axis names, most likely "fsdp".
    return default_meshes(topology) if factory.axes_name else [{SHARD_AXIS_PREFIX: topology.num_devices}]


def _note_ignored_options(factory: Factory, varied: Sequence[str], say: ShowProgress) -> None:
    """Shows a line on the options in ``varied`` that the factory does not take, before anything is compiled.

    ``varied`` are keys of ``VARIED``, descriptions such as "remat". Nothing is shown if the factory takes every option.
    """
    if ignored := [option for option in factory.fixed_options if option in varied]:
        say(
            f"{factory.name} has no argument for {', '.join(ignored)}: these keep the factory's values. A factory with "
            "**sharding, which it passes to shard_modules, takes all of them but remat, an option of its model.",
            stays=True,
        )


def _workload(args: Namespace, factory: Factory, mesh: dict[str, int]) -> Workload:
    """Returns the workload (model, optimizer, batch and loss) that the user's factory makes for a mesh.

    Options without ``--set`` keep the factory's defaults. With ``--offload`` the optimizer state is in host memory;
    else the choice of the workload remains.
    """
    return factory.workload(mesh, dict(args.set), Offload() if args.offload else NO_OFFLOAD)


def _plan(workload: Workload, mesh: dict[str, int]) -> ShardingPlan:
    options: dict[str, Any] = {
        "tx": workload.tx,
        "offload": workload.offload,
        **workload.freezing,
        **workload.init_kwargs,
    }
    with workload.explaining_init():
        return plan_sharding(workload.model, mesh, *workload.init_inputs, **options)


def _forecast(args: Namespace, say: ShowProgress) -> tuple[Forecast, ShardingPlan, list[str]]:
    """Builds and compiles the step of the arguments; returns (forecast, plan of the parameters, notes on the cache).

    Without ``--topology`` compiles for simulated CPU devices, as many as the mesh has, and returns no notes; else for
    absent devices. ``say`` shows the progress.
    """
    factory = load_factory(args.factory)
    mesh, cache = _mesh(args, factory), _cache(args)
    if args.topology and not args.mesh:
        _note_ignored_options(factory, list(VARIED)[:1], say)
    say("building the step")
    # For a topology the mesh is abstract, since its devices are absent. CPU devices are simulated before the user's
    # code runs, because that code may start JAX's devices.
    devices: Mapping[str, int] | Mesh = mesh
    if not args.topology:
        size = math.prod(mesh.values())
        simulate_cpu_devices(size)
        devices = DeviceMeshManager.create_device_mesh(mesh, devices=jax.devices()[:size])
    workload = _workload(args, factory, mesh)
    step, abstract = workload.build_step(devices, args.minibatches)
    say(f"compiling for {args.topology or 'simulated CPU devices'}, mesh {format_mesh(mesh)}")
    compiled = forecast(
        step,
        *abstract,
        topology=args.topology,
        tokens=workload.tokens,
        compiler_options=args.compiler_options,
        cache=cache or False,
    )
    return compiled, _plan(workload, mesh), _kept(cache) if args.topology else []


def _cache(args: Namespace) -> ReportCache | None:
    return None if args.no_cache else user_cache()


def _kept(cache: ReportCache | None) -> list[str]:
    """Returns at most one note: compiled programs came from the cache, are stored there, or could not be stored.

    The note names the folder, or the reason why storing failed. [] without a cache, or if the cache was not asked.
    """
    if cache is None or not cache.hits + cache.misses:
        return []
    if cache.problem:
        return [f"the compiled program could not be stored: {cache.problem}. Set {FOLDER_VARIABLE} to another folder."]
    of = f"{cache.hits} of {cache.hits + cache.misses} programs" if cache.hits + cache.misses > 1 else "the program"
    if cache.hits:
        return [f"{of} had been compiled before and came from {cache.folder}; --no-cache compiles anew."]
    return [f"compiled programs are stored in {cache.folder}; --no-cache stores nothing."]


# ------------------------------------------------------------------------------------------------------- the commands


def run_plan(args: Namespace, say: ShowProgress) -> Report:
    """Runs ``xlstm-jax plan``: reports the plan, the reason of one leaf (``--explain``), or differences (``--diff``).

    An exceeded limit, or a difference from the stored plan, is a refusal: the command ends with code 1.
    """
    factory = load_factory(args.factory)
    mesh = _mesh(args, factory)
    say("tracing the model")
    plan = _plan(_workload(args, factory, mesh), mesh)
    refusals: tuple[str, ...] = ()
    # 1.0 allows everything: the check needs a number even without the option.
    fraction = 1.0 if args.max_replicated_fraction is None else args.max_replicated_fraction
    try:
        plan.check(max_replicated_fraction=fraction, max_bytes_per_device=args.max_bytes_per_device)
    except ValueError as error:
        refusals = (str(error),)
    if args.explain:
        sentence = plan.explain(args.explain)
        return Report(lambda: [sentence], lambda: json.dumps({"path": args.explain, "sentence": sentence}), refusals)
    if not args.diff:
        return Report(lambda: [plan.table()], plan.to_json, refusals)
    changes = _read_plan(args.diff).diff(plan)
    refusals += (f"{len(changes)} difference{'s' * (len(changes) > 1)} from {args.diff}.",) if changes else ()
    return Report(
        lambda: [*changes] or [f"No difference from {args.diff}."],
        lambda: json.dumps([difference._asdict() for difference in changes], indent=1),
        refusals,
    )


def _read_plan(path: str) -> ShardingPlan:
    cure = f"Write it with `xlstm-jax plan ... --json > {path}`"
    try:
        return ShardingPlan.from_json(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--diff {path}: {error.strerror}. {cure}.") from error
    except ValueError as error:
        why = shortened(one_line(error).rstrip("."), MAX_REASON)
        raise ValueError(f"--diff {path} is not what `xlstm-jax plan --json` writes: {why}. {cure}.") from error


def run_forecast(args: Namespace, say: ShowProgress) -> Report:
    """Runs ``xlstm-jax forecast``: reports memory, traffic and time of the step.

    With ``--out`` also draws a picture. A step that does not fit into the memory of the devices is a refusal: the
    command ends with code 1.
    """
    compiled, plan, notes = _forecast(args, say)
    if args.out:
        say("drawing")
        compiled.plot(args.out)
    notes += [UNWRAPPED] if plan.assumed else []
    refusals: tuple[str, ...] = ()
    if compiled.fits is False:
        needs, has = (format_bytes(size or 0) for size in (compiled.total_bytes, compiled.available_bytes))
        cure = "`xlstm-jax fit` searches for options that fit."
        refusals = (f"{needs} per device do not fit into the {has} of {compiled.topology}. {cure}",)
    return Report(lambda: [compiled.table()], compiled.to_json, refusals, tuple(notes))


def run_lint(args: Namespace, say: ShowProgress) -> Report:
    """Runs ``xlstm-jax lint``: reports needless costs of the compiled step.

    Checks the rules of ``--rules``, or every rule. Any finding is a refusal, also a model in which no module is
    wrapped: the command ends with code 1.

    Raises:
      ValueError: ``--rules`` names an unknown rule.
    """
    # Checked before the compilation, which takes minutes.
    rules = args.rules or list(RULES)
    if unknown := [name for name in rules if name not in RULES]:
        raise ValueError(f"--rules: there is no rule {unknown[0]!r}; there are {', '.join(RULES)}.")
    compiled, plan, notes = _forecast(args, say)
    say("reading the compiled step")
    # keep_gathered on the command line is deliberate, so the rule about kept weights does not apply.
    keep_gathered = bool(dict(args.set).get("keep_gathered"))
    findings = lint(compiled, plan, num_minibatches=args.minibatches, keep_gathered=keep_gathered)
    findings = [finding for finding in findings if finding.rule in rules]
    refusals = [f"{len(findings)} finding{'s' * (len(findings) > 1)}."] if findings else []
    refusals += [UNWRAPPED] if plan.assumed else []
    return Report(
        lambda: [table(findings)] if findings else ["No findings."],
        lambda: json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1),
        tuple(refusals),
        tuple(notes),
    )


def run_fit(args: Namespace, say: ShowProgress) -> Report:
    """Runs ``xlstm-jax fit``: reports the options with which the step fits, the fastest first.

    Also reports the command that repeats the best forecast. A search in which nothing fits is a refusal: the command
    ends with code 1.
    """
    factory, chosen = load_factory(args.factory), dict(args.set)
    meshes = [_mesh(args, factory)] if args.mesh else _meshes_to_try(parse_topology(args.topology), factory)
    _note_ignored_options(factory, list(VARIED), say)

    def build_step(options: Options) -> Any:
        workload = factory.workload(options.mesh, chosen, options.offload, settings_of(options))
        return workload.build_step(options.mesh, options.num_minibatches)

    cache, done = _cache(args), itertools.count(1)

    def ends(trial: Trial) -> None:
        took = "from the cache" if trial.took_s is None else f"compiled in {trial.took_s:.0f} s"
        outcome = f"{format_bytes(trial.bytes_per_device or 0)}, {took}" if trial.forecast else trial.problem
        say(f"trial {next(done)}: {trial.options}: {shortened(outcome, MAX_LINE)}", stays=True)

    fitted = fit(
        build_step,
        args.topology,
        args.budget,
        meshes=None if args.model_axes and not args.mesh else meshes,
        model_axes=args.model_axes,
        on_trial=lambda options: say(f"compiling {options}"),
        on_done=ends,
        jobs=args.jobs,
        cache=cache or False,
    )
    if fitted.best is None:
        nothing = f"nothing fits into {format_bytes(fitted.budget_bytes)} per device of {fitted.topology}: take more "
        refusals = (f"{nothing}chips, larger ones, or a smaller batch per device.",)
        return Report(lambda: [fitted.table()], fitted.to_json, refusals, tuple(_kept(cache)))
    # The command that repeats the best forecast, with --set for the arguments that the factory declares. The axes are
    # left out, because the command contains --mesh.
    varied = {name: value for name, value in settings_of(fitted.best.options).items() if name not in AXES}
    command = command_of(fitted.best.options, args.factory, args.topology, factory.arguments(varied, chosen))
    repeat = f"and to see all of it:\n\n{indent(command, '    ')}\n"
    return Report(lambda: [fitted.table(), repeat], fitted.to_json, (), tuple(_kept(cache)))


def run_doctor(args: Namespace, say: ShowProgress) -> Report:
    """Runs ``xlstm-jax doctor``: reports versions, devices, extras and self-tests of this machine.

    A failed self-test is a refusal: the command ends with code 1. A missing extra is not.
    """
    del args
    diagnosis = examine(say)
    failed = [check.name for check in diagnosis.checks if not check.ok]
    return Report(diagnosis.tables, diagnosis.to_json, (f"failed: {', '.join(failed)}.",) if failed else ())


COMMANDS: dict[str, Callable[[Namespace, ShowProgress], Report]] = {
    "plan": run_plan,
    "forecast": run_forecast,
    "fit": run_fit,
    "lint": run_lint,
    "doctor": run_doctor,
}
