"""What the commands do: from parsed arguments to a ``Report``, which the command line shows.

  plan       model, mesh                      --plan_sharding-->  what is split, why, and what each device keeps
  forecast   step, topology (or CPU devices)  --forecast------->  memory, traffic and time of a step
  lint       the same                         --lint----------->  what in the compiled step costs more than it need
  fit        topology, budget                 --fit------------>  options of the step that fit, the fastest first
  doctor     this machine                     --examine-------->  versions, devices, extras, self-tests

All but ``doctor`` begin with the user's factory. None of them prints.
"""

import dataclasses
import json
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from xlstm_jax.cli import doctor
from xlstm_jax.cli.factory import Factory, load_factory
from xlstm_jax.distributed.device_mesh.meshes import DeviceMeshManager
from xlstm_jax.distributed.forecast.fitting import search as planner
from xlstm_jax.distributed.forecast.forecasting import Forecast, forecast
from xlstm_jax.distributed.forecast.linting.findings import lint, table
from xlstm_jax.distributed.forecast.linting.rules import RULES
from xlstm_jax.distributed.forecast.workload import Workload
from xlstm_jax.distributed.hardware.slices import parse_topology
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.distributed.plan.sharding_plan import ShardingPlan
from xlstm_jax.distributed.processes.simulation import simulate_cpu_devices
from xlstm_jax.distributed.wording import format_bytes, format_mesh

Say = Callable[[str], None]  # shows what is being done now
FLAT_AXIS = "fsdp"
UNWRAPPED = "no module is wrapped by shard_module_params, so nothing is split; `xlstm-jax plan` shows what it would do."


class Report(NamedTuple):
    """What a command found.

    Attributes:
      tables: returns what there is to read, as ``rich`` renderables and strings.
      json: returns the same for programs.
      refusals: bad news, a line for each: the exit code is 1 where there are any.
      notes: what the reader should know, a line for each.
    """

    tables: Callable[[], Sequence[Any]]
    json: Callable[[], str]
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------ the user's training


def _mesh(args: Namespace, factory: Factory) -> dict[str, int]:
    mesh = mesh_sizes(args.mesh, args.topology, factory)
    _check_shard_axes(mesh, factory, dict(args.set))
    return mesh


def mesh_sizes(mesh: dict[str, int] | None, topology: str | None, factory: Factory) -> dict[str, int]:
    """The mesh that was asked for, -1 filled in; by default one that suits the topology and the factory.

    Raises:
      ValueError: the sizes do not multiply to the topology's devices, says both; or there is nothing to go by.
    """
    if topology is None:
        return _own_sizes(mesh)
    place = parse_topology(topology)
    if mesh is None:
        return default_meshes(place.shape, factory)[0]
    known = math.prod(size for size in mesh.values() if size != -1)
    filled = {axis: place.num_devices // known if size == -1 else size for axis, size in mesh.items()}
    if math.prod(filled.values()) != place.num_devices:
        free = "a multiple of " if -1 in mesh.values() else ""
        raise ValueError(
            f"--mesh {format_mesh(mesh)} takes {free}{known} devices, but {topology} has {place.num_devices}. "
            f"{_other_sizes(mesh, place.num_devices)}, or take another topology."
        )
    return filled


def _other_sizes(mesh: dict[str, int], count: int) -> str:
    """The cure for sizes that do not multiply to the number of devices."""
    given = {axis: size for axis, size in mesh.items() if size != -1}
    known = math.prod(given.values())
    free = [axis for axis in reversed(given) if count % (known // given[axis]) == 0]
    if free and len(given) == len(mesh):
        return f"Write -1 for the size of one axis, as {format_mesh(mesh | {free[0]: -1})}"
    sizes = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
    product = f"{'*'.join(given)} = " if len(given) > 1 else f"{next(iter(given))}="
    return f"{product}{known} does not divide {count}; {sizes} do. Choose one of these"


def _check_shard_axes(mesh: dict[str, int], factory: Factory, chosen: dict[str, Any]) -> None:
    """Nothing would be split over axes of which none is named fsdp...; that must be meant, and no slip of the keys."""
    if "shard_axes" not in factory.declared or "shard_axes" in chosen or planner.Options(mesh).shard_axes:
        return
    last = list(mesh)[-1]
    renamed = {FLAT_AXIS if axis == last else axis: size for axis, size in mesh.items()}
    raise ValueError(
        f"--mesh {format_mesh(mesh)}: no axis begins with {planner.SHARD_AXIS_PREFIX}, so {factory.name} would be "
        f"told to split nothing. Name the axes to split over {planner.SHARD_AXIS_PREFIX}..., as {format_mesh(renamed)}"
        f', or pass --set "shard_axes=(\'{last}\',)", or --set "shard_axes=()" for a replicated run.'
    )


def _own_sizes(mesh: dict[str, int] | None) -> dict[str, int]:
    if mesh is None:
        raise ValueError("how many devices? Pass --mesh, as --mesh dp=4,fsdp=64, or --topology, as v5e:16x16.")
    if -1 in mesh.values():
        raise ValueError(f"--mesh {format_mesh(mesh)}: -1 stands for the rest of a topology; pass --topology too.")
    return mesh


def default_meshes(shape: Sequence[int], factory: Factory) -> list[dict[str, int]]:
    """The planner's, where the factory can split over any axes; else one flat axis."""
    if "shard_axes" in factory.declared:
        return planner.default_meshes(shape)
    return [{FLAT_AXIS: math.prod(shape)}]


def _workload(factory: Factory, mesh: dict[str, int], chosen: dict[str, Any]) -> Workload:
    """The user's workload for a mesh, with all options at the defaults of the factory."""
    shard_axes = planner.Options(mesh).shard_axes
    return factory.workload({"shard_axes": shard_axes, "devices": math.prod(mesh.values())}, chosen)


def _plan(workload: Workload, mesh: dict[str, int]) -> ShardingPlan:
    return plan_sharding(workload.model, mesh, *workload.init_inputs, tx=workload.tx)


def _forecast(args: Namespace, say: Say) -> tuple[Forecast, Workload, dict[str, int]]:
    factory = load_factory(args.factory)
    mesh = _mesh(args, factory)
    workload = _workload(factory, mesh, dict(args.set))
    say("building the step")
    step, abstract = workload.build_step(mesh if args.topology else _simulated(mesh), args.minibatches)
    say(f"compiling for {args.topology or 'simulated CPU devices'}, mesh {format_mesh(mesh)}")
    return forecast(step, *abstract, topology=args.topology, tokens=workload.tokens), workload, mesh


def _simulated(mesh: dict[str, int]) -> Mesh:
    """The mesh over simulated CPU devices."""
    count = math.prod(mesh.values())
    simulate_cpu_devices(count)
    return DeviceMeshManager.create_device_mesh(mesh, devices=jax.devices()[:count])


# ------------------------------------------------------------------------------------------------------- the commands


def plan(args: Namespace, say: Say) -> Report:
    """``xlstm-jax plan``"""
    factory = load_factory(args.factory)
    mesh = _mesh(args, factory)
    say("tracing the model")
    found = _plan(_workload(factory, mesh, dict(args.set)), mesh)
    refusals = tuple(_check(found, args.max_replicated_fraction, args.max_bytes_per_device))
    if args.explain:
        said = found.explain(args.explain)
        return Report(lambda: [said], lambda: json.dumps({"path": args.explain, "sentence": said}), refusals)
    if args.diff:
        return _diff(_read_plan(args.diff), found, args.diff, refusals)
    return Report(lambda: [found.table()], found.to_json, refusals)


def _check(plan: ShardingPlan, fraction: float | None, max_bytes: int | None) -> list[str]:
    """What ``plan.check`` refuses, where something is to be checked."""
    try:
        plan.check(max_replicated_fraction=1.0 if fraction is None else fraction, max_bytes_per_device=max_bytes)
    except ValueError as error:
        return [str(error)]
    return []


def _read_plan(path: str) -> ShardingPlan:
    cure = f"Write it with `xlstm-jax plan ... --json > {path}`"
    try:
        return ShardingPlan.from_json(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--diff {path}: {error.strerror}. {cure}.") from error
    except (ValueError, KeyError) as error:
        why = str(error).rstrip(".")
        raise ValueError(f"--diff {path} is not what `xlstm-jax plan --json` writes: {why}. {cure}.") from error


def _diff(before: ShardingPlan, after: ShardingPlan, path: str, refusals: tuple[str, ...]) -> Report:
    found = before.diff(after)
    refusals += (f"{len(found)} difference{'s' * (len(found) > 1)} from {path}.",) if found else ()
    return Report(
        lambda: found or [f"No difference from {path}."],
        lambda: json.dumps([difference._asdict() for difference in found], indent=1),
        refusals,
    )


def show_forecast(args: Namespace, say: Say) -> Report:
    """``xlstm-jax forecast``"""
    found, workload, mesh = _forecast(args, say)
    notes = (UNWRAPPED,) if _plan(workload, mesh).assumed else ()
    if args.out:
        say("drawing")
        found.plot(args.out)
    return Report(lambda: [found.table()], found.to_json, tuple(_does_not_fit(found)), notes)


def _does_not_fit(found: Forecast) -> list[str]:
    if found.fits is not False:
        return []
    needs, has = format_bytes(found.total_bytes), format_bytes(found.available_bytes)
    return [f"{needs} per device do not fit into the {has} of {found.topology}. `xlstm-jax fit` looks for what does."]


def show_lint(args: Namespace, say: Say) -> Report:
    """``xlstm-jax lint``"""
    rules = _rules(args.rules)
    compiled, workload, mesh = _forecast(args, say)
    say("reading the compiled step")
    kept = bool(dict(args.set).get("keep_gathered"))  # said on the command line, so on purpose
    planned = _plan(workload, mesh)
    findings = lint(compiled, planned, num_minibatches=args.minibatches, keep_gathered=kept)
    findings = [finding for finding in findings if finding.rule in rules]
    refusals = (f"{len(findings)} finding{'s' * (len(findings) > 1)}.",) if findings else ()
    refusals += (UNWRAPPED,) if planned.assumed else ()
    return Report(
        lambda: [table(findings)] if findings else ["No findings."],
        lambda: json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1),
        refusals,
    )


def _rules(names: list[str] | None) -> Sequence[str]:
    if unknown := [name for name in names or () if name not in RULES]:
        raise ValueError(f"--rules: there is no rule {unknown[0]!r}; there are {', '.join(RULES)}.")
    return names or list(RULES)


def fit(args: Namespace, say: Say) -> Report:
    """``xlstm-jax fit``"""
    factory = load_factory(args.factory)
    shape = parse_topology(args.topology).shape
    meshes = [_mesh(args, factory)] if args.mesh else default_meshes(shape, factory)
    found = planner.fit(
        StepBuilder(factory, dict(args.set)),
        args.topology,
        args.budget,
        meshes=meshes,
        on_trial=Trials(say),
    )
    nothing = f"nothing fits into {format_bytes(found.budget_bytes)} per device of {found.topology}: take more chips, "
    refusals = () if found.best else (f"{nothing}larger ones, or a smaller batch per device.",)
    return Report(lambda: [found.table()], found.to_json, refusals)


class StepBuilder:
    """``build_step`` of the planner: the factory's step, once for each way in which it can differ."""

    def __init__(self, factory: Factory, chosen: dict[str, Any]) -> None:
        self.factory, self.chosen = factory, chosen
        self.built: set[str] = set()

    def __call__(self, options: planner.Options) -> Any:
        """The step for these options.

        Raises:
          ValueError: the factory does not declare what these options change, so they were tried already.
        """
        given = {name: getattr(options, name) for name in ("shard_axes", "min_weight_size", "remat", "keep_gathered")}
        given["devices"] = math.prod(options.mesh.values())
        arguments = self.factory.arguments(given, self.chosen)
        key = repr((options.mesh, options.num_minibatches, arguments))
        if key in self.built:
            raise ValueError(f"as before: {self.factory.name} has no option for this")
        self.built.add(key)
        workload = self.factory.workload(given, self.chosen)
        return workload.build_step(options.mesh, options.num_minibatches)


class Trials:
    """``on_trial`` of the planner: says which it is, and how many there were."""

    def __init__(self, say: Say) -> None:
        self.say, self.count = say, 0

    def __call__(self, options: planner.Options) -> None:
        self.count += 1
        kept = "kept" if options.keep_gathered else "gathered again"
        remat = ", remat" if options.remat else ""
        minibatches = f", {options.num_minibatches} minibatches" if options.num_minibatches > 1 else ""
        self.say(f"trial {self.count}: {format_mesh(options.mesh)}, weights {kept}{remat}{minibatches}")


def examine(args: Namespace, say: Say) -> Report:
    """``xlstm-jax doctor``"""
    del args
    return diagnosis(doctor.examine(say))


def diagnosis(found: doctor.Diagnosis) -> Report:
    """The report of a diagnosis: a failed check is bad news, an extra that is not installed is none."""
    failed = [check.name for check in found.checks if not check.ok]
    return Report(found.tables, found.to_json, (f"failed: {', '.join(failed)}.",) if failed else ())
