"""The search for options that fit: what it tries, in which order, and that its best is the fastest of what fits.

The order is tested on steps whose bytes and seconds are a formula of their options: a search compiles a dozen steps,
of ten seconds each, and what it should do next is known only where the figures are. One search is done with real ones.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType

from tests.forecast.test_forecast import Block, loss_fn, rendered
from xlstm_jax.distributed import Offload, shard_module_params
from xlstm_jax.distributed.data_parallel.policy import DEFAULT_MIN_WEIGHT_SIZE
from xlstm_jax.distributed.optimizers.offload import NO_OFFLOAD
from xlstm_jax.forecast import Range
from xlstm_jax.forecast.compiling import side_by_side as several
from xlstm_jax.forecast.compiling.compile_process import CompileError
from xlstm_jax.forecast.compiling.side_by_side import CHILD_BYTES, room_for_jobs, side_by_side
from xlstm_jax.forecast.cost.host import HostTraffic
from xlstm_jax.forecast.hardware.chips import CHIPS
from xlstm_jax.forecast.hardware.topologies import Topology, parse_topology
from xlstm_jax.forecast.training import Workload, fitting
from xlstm_jax.forecast.training.fitting import (
    MAX_MINIBATCHES,
    MAX_PROBLEM,
    OTHER_MIN_WEIGHT_SIZE,
    Fit,
    Options,
    Search,
    Trial,
    code_of,
    default_meshes,
    fit,
)
from xlstm_jax.program_names import INTER_HOST_AXES

BUDGET = 45 * 2**20


class Model(nn.Module):
    """Scanned blocks that are built as the options say; what is kept is chosen by a remat policy."""

    shard_axes: tuple[str, ...]
    min_weight_size: int
    keep_gathered: bool
    remat: bool

    @nn.compact
    def __call__(self, x):
        block = shard_module_params(Block, self.shard_axes, self.min_weight_size)
        if self.remat or not self.keep_gathered:
            policy = None if self.remat else jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            block = nn.remat(block, prevent_cse=False, policy=policy)
        layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return layers(name="blocks")(x)[0]


def build_step(options, rows=8):
    model = Model(options.shard_axes, options.min_weight_size, options.keep_gathered, options.remat)
    x = jax.ShapeDtypeStruct((rows, 8192, 256), jnp.float32)
    return Workload(model, optax.sgd(1e-3), x, loss_fn).build_step(options.mesh, options.num_minibatches)


def torus(*shape):
    return Topology("of any shape", CHIPS["v5p"], shape)


@pytest.mark.parametrize(
    "shape, want",
    [
        ((1, 1), [{"fsdp": 1}]),
        ((1, 8), [{"fsdp": 8}]),
        ((4, 8), [{"fsdp_x": 4, "fsdp_y": 8}, {"fsdp": 32}, {"dp": 4, "fsdp_y": 8}]),
        (
            (4, 4, 8),
            [{"fsdp_x": 4, "fsdp_y": 4, "fsdp_z": 8}, {"fsdp": 128}, {"dp": 4, "fsdp_y": 4, "fsdp_z": 8}],
        ),
    ],
    ids=str,
)
def test_default_meshes_of_a_torus_are_staged_flat_and_hybrid(shape, want):
    assert default_meshes(torus(*shape)) == want
    assert Options(want[-1]).shard_axes == tuple(axis for axis in want[-1] if axis != "dp")


@pytest.mark.parametrize(
    "topology, want",
    [
        ("h100:1x8", [{"fsdp": 8}]),
        ("h100:4x1", [{"fsdp": 4}]),
        ("b200:2x8", [{"fsdp_host": 2, "fsdp_device": 8}, {"fsdp": 16}, {"dp": 2, "fsdp_device": 8}]),
        (
            "h100:8x8",
            [
                {"fsdp_host": 8, "fsdp_device": 8},
                {"fsdp": 64},
                {"dp": 8, "fsdp_device": 8},
                {"dp": 2, "fsdp_host": 4, "fsdp_device": 8},
            ],
        ),
        ("v5e:2x4", default_meshes(torus(2, 4))),
    ],
    ids=str,
)
def test_default_meshes_of_a_topology_put_gpu_hosts_on_the_first_axis(topology, want):
    """Of GPUs: the axis across hosts is one of those that are gathered first."""
    found = default_meshes(parse_topology(topology))
    assert found == want and [list(mesh) for mesh in found] == [list(mesh) for mesh in want]
    assert {axis for mesh in found for axis in mesh if axis.endswith("host")} <= set(INTER_HOST_AXES)


# ---------------------------------------------------------------------------------------------------------- the search

STAGED, FLAT, HYBRID = default_meshes(torus(4, 8))
KEPT, AGAIN, REMAT = Options(STAGED), Options(STAGED, keep_gathered=False), Options(STAGED, 2**18, False, True)


class Arguments(NamedTuple):
    argument_bytes: int


NO_ARGUMENTS = Arguments(0)


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the search reads of a forecast."""

    total_bytes: int
    step_seconds: float
    memory: Arguments = NO_ARGUMENTS
    host: HostTraffic | None = None
    has_margin: bool | None = None

    @property
    def step_time(self):
        return Range(self.step_seconds / 2, self.step_seconds, 1.25 * self.step_seconds)


STATE_BYTES = {str(STAGED): 300, str(FLAT): 100, str(HYBRID): 900}


def by_formula(options):
    """Returns the figures of a step; its bytes are the sum of three terms:

      state        by the mesh; two thirds are moments, which offload moves to the host, at a cost of 10 seconds
      weights      200, or 100 if they are gathered again
      activations  800, or 200 with remat, divided by the number of minibatches

    For example, on STAGED unless another mesh is named:

                                state   weights   activations   total
      KEPT                        300       200           800    1300
      AGAIN                       300       100           800    1200
      REMAT                       300       100           200     600
      REMAT_IN_4                  300       100            50     450
      FLAT_IN_2, on FLAT          100       100           100     300
    """
    state = STATE_BYTES[str(options.mesh)]
    host = HostTraffic(state * 2 // 3, state, state, 10.0, 8.0) if options.offload == Offload() else None
    state -= host.stored_bytes if host else 0
    weights = 200 if options.keep_gathered else 100
    activations = (200 if options.remat else 800) // options.num_minibatches
    slow = 1.0 + 0.2 * (not options.keep_gathered) + 0.3 * options.remat + 0.1 * options.num_minibatches
    slow *= {str(STAGED): 1.0, str(FLAT): 1.5, str(HYBRID): 0.9}[str(options.mesh)]
    slow += 10.0 if host else 0.0
    return Figures(state + weights + activations, slow, Arguments(state), host)


@dataclasses.dataclass
class Job:
    """A compilation that is done at once, or when ``steps`` have been asked for."""

    result: Callable
    log: list | None = None
    steps: int = 0
    closed: bool = False
    seconds: float | None = None
    key: object = dataclasses.field(default_factory=object)  # of another program

    def start(self):
        if self.log is not None:
            self.log.append(self)

    def is_done(self):
        self.steps -= 1
        return self.steps < 0

    def close(self):
        self.closed = True


def bytes_of(options):
    return by_formula(options).total_bytes


def fit_within(budget, forecast_of=by_formula, build=lambda options: options, meshes=(STAGED, FLAT, HYBRID), at_once=1):
    """Returns the result of a search, and the options that it has tried, in order."""
    search = Search(build, lambda options: Job(partial(forecast_of, options)), budget, limit=lambda: at_once)
    return Fit("v5e:4x8", budget, search.run(meshes)), [trial.options for trial in search.trials]


REMAT_IN_4 = replace(REMAT, num_minibatches=4)
FLAT_IN_2 = replace(REMAT, mesh=FLAT, num_minibatches=2)

ALL_COUNTS = [1, 2, 4, 8, 16, 32, 64]  # of minibatches
assert ALL_COUNTS[-1] == MAX_MINIBATCHES

# Budgets, each the bytes of the largest options that shall fit.
ALL_WAYS = bytes_of(KEPT)  # 1300: kept weights fit on the first mesh
NOT_KEPT = bytes_of(AGAIN)  # 1200: weights must be gathered again
FOUR_MINIBATCHES = bytes_of(REMAT_IN_4)  # 450: with remat, two minibatches of 500 do not fit
FLAT_ONLY = bytes_of(FLAT_IN_2)  # 300: on the first mesh state and weights alone take 400
NOTHING = STATE_BYTES[str(FLAT)]  # 100: the state fits on one mesh, and weights beside it on none


@pytest.mark.parametrize(
    "options, said",
    [
        (Options({"dp": 2, "fsdp": 4}), []),
        (Options({"fsdp_x": 2, "fsdp_y": 4}, 2**12, keep_gathered=False), ["reshard_after_forward=True"]),
        (Options({"fsdp": 8}, keep_gathered=False, remat=True, num_minibatches=4), ["nn.remat", "num_minibatches=4"]),
        (Options({"dp": 8}), []),
        (Options({"dp": 2, "fsdp": 4}, offload=Offload()), ["create_train_state(", "offload=Offload(),"]),
    ],
    ids=str,
)
def test_code_of_options_runs_and_contains_every_option(options, said):
    code = code_of(options)
    names = {"Block": nn.Dense, "loss_fn": lambda params, apply_fn, batch, rng: 0.0}
    names |= {"model": shard_module_params(nn.Dense, "fsdp", 16)(8), "tx": optax.adam(1e-3)}
    names |= {"rng": jax.random.key(0), "inputs": jnp.ones((8, 4))}
    exec(
        f"from functools import partial\nfrom flax import linen as nn\nfrom xlstm_jax.distributed import *\n{code}",
        names,
    )
    assert dict(names["mesh"].shape) == options.mesh and callable(names["step"])
    assert ("wrap" in names) == bool(options.shard_axes) and ("block" in names) == options.remat
    if options.shard_axes:
        given = names["wrap"].keywords
        assert given["min_weight_size"] == options.min_weight_size
        assert given["axis_name"] == (options.shard_axes if len(options.shard_axes) > 1 else options.shard_axes[0])
    assert not [word for word in said if word not in code]
    assert not [line for line in code.splitlines() if len(line) > 60]
    if options.offload != NO_OFFLOAD:
        assert names["state"].opt_state[0].mu["kernel"].sharding.memory_kind == "pinned_host"
    host = HostTraffic(1, 1, 1, 1.0, 1.0)
    fit = Fit("v5e:2x4", 2**30, (Trial(options, Figures(2**20, 1.0, host=host), fits=True),))
    table = rendered(fit.table())
    assert not [line for line in code.splitlines() if line not in table]
    assert json.loads(fit.to_json())["code"] == code


def test_fit_tries_other_meshes_with_the_fastest_options_of_the_first_mesh():
    found, tried = fit_within(ALL_WAYS)
    kept = [replace(KEPT, mesh=mesh) for mesh in (FLAT, HYBRID)]
    assert tried == [KEPT, AGAIN, REMAT, *kept, replace(KEPT, min_weight_size=OTHER_MIN_WEIGHT_SIZE)]
    assert found.best.options == KEPT and found.best.seconds == 1.1
    found, tried = fit_within(NOT_KEPT)
    again = [replace(AGAIN, mesh=mesh) for mesh in (FLAT, HYBRID)]
    assert tried[3:] == [*again, replace(AGAIN, min_weight_size=OTHER_MIN_WEIGHT_SIZE)]
    assert found.best.options == AGAIN


def test_fit_continues_with_a_faster_mesh_as_the_best():
    found, tried = fit_within(bytes_of(replace(KEPT, mesh=HYBRID)))
    assert found.best.options == replace(KEPT, mesh=HYBRID)
    assert tried[-1] == replace(found.best.options, min_weight_size=OTHER_MIN_WEIGHT_SIZE)


def test_fit_adds_minibatches_to_the_smallest_options_until_the_step_fits():
    found, tried = fit_within(FOUR_MINIBATCHES)
    assert tried[:5] == [KEPT, AGAIN, REMAT, replace(REMAT, num_minibatches=2), REMAT_IN_4]
    assert found.best.options == REMAT_IN_4 and found.best.bytes_per_device == FOUR_MINIBATCHES
    other_meshes = [replace(REMAT_IN_4, mesh=mesh) for mesh in (FLAT, HYBRID)]
    assert tried[5:] == [*other_meshes, replace(REMAT_IN_4, min_weight_size=OTHER_MIN_WEIGHT_SIZE)]


def test_fit_tries_other_meshes_after_no_minibatch_count_fits_the_first_mesh():
    found, tried = fit_within(FLAT_ONLY)
    on_first = [KEPT, AGAIN, *(replace(REMAT, num_minibatches=count) for count in ALL_COUNTS)]
    on_flat = [replace(REMAT, mesh=FLAT), FLAT_IN_2]
    # Something fits by now, so the rest is tried once each, with its options.
    rest = [replace(FLAT_IN_2, mesh=HYBRID), replace(FLAT_IN_2, min_weight_size=OTHER_MIN_WEIGHT_SIZE)]
    assert tried == on_first + on_flat + rest
    assert found.best.options.mesh == FLAT and found.best.bytes_per_device == FLAT_ONLY
    without_flat = fit_within(FLAT_ONLY, meshes=(STAGED, HYBRID))[0].trials
    assert {trial.options.offload for trial in without_flat if trial.fits} == {Offload()}  # guard: it is the mesh


def test_fit_without_a_fitting_step_has_tried_every_mesh_minibatch_count_and_offload():
    found, tried = fit_within(NOTHING)
    assert found.best is None and [trial.options for trial in found.trials if trial.fits] == []
    # More minibatches can help only where the state on the device fits: it takes 300, 100 and 900 bytes on STAGED, FLAT
    # and HYBRID, and a third of that with offload.
    for offload, where_state_fits in ((NO_OFFLOAD, [FLAT]), (Offload(), [STAGED, FLAT])):
        for mesh in (STAGED, FLAT, HYBRID):
            state = by_formula(replace(REMAT, mesh=mesh, offload=offload)).memory.argument_bytes
            assert (state <= NOTHING) == (mesh in where_state_fits)
            want = ALL_COUNTS if mesh in where_state_fits else [1]
            counts = {o.num_minibatches for o in tried if (o.mesh, o.offload) == (mesh, offload)}
            assert sorted(counts) == want, f"minibatches of {mesh} with {offload}, whose state takes {state} bytes"
    # Another min_weight_size is tried only of options that fit.
    assert {options.min_weight_size for options in tried} == {DEFAULT_MIN_WEIGHT_SIZE}


def test_fit_tries_offload_last_and_only_if_no_step_fits_without_offload():
    # One mesh, and the budget of four minibatches with offload: its state of 300 bytes does not fit without offload, so
    # no minibatches are tried for it.
    on_host = [replace(REMAT, offload=Offload(), num_minibatches=count) for count in (1, 2, 4)]
    budget = bytes_of(on_host[-1])
    assert budget < STATE_BYTES[str(STAGED)]
    found, tried = fit_within(budget, meshes=(STAGED,))
    assert tried == [KEPT, AGAIN, REMAT, *on_host, replace(on_host[-1], min_weight_size=OTHER_MIN_WEIGHT_SIZE)]
    assert found.best.options == on_host[-1] and found.best.bytes_per_device == budget
    # The 200 bytes are two thirds of the state.
    why = "Nothing fits without offload. With it 200 B of optimizer state lie in the host's memory for each device, and"
    assert found.why_offload.startswith(why)
    assert "10000.0 ms, for 8000.0 ms of which the step waits" in found.why_offload
    assert " ".join(why.split()[:9]) in " ".join(rendered(found.table()).split())
    data = json.loads(found.to_json())
    assert data["why_offload"] == found.why_offload
    first = data["trials"][0]
    assert first["step_seconds"] == 2 * first["least_step_seconds"] == found.best.seconds  # ranked by what is expected
    # On two meshes, minibatches and the other mesh are tried before offload.
    _, tried = fit_within(FLAT_ONLY, meshes=(STAGED, HYBRID))
    on_first = [KEPT, AGAIN, *(replace(REMAT, num_minibatches=count) for count in ALL_COUNTS)]
    before_offload = [*on_first, replace(REMAT, mesh=HYBRID)]
    assert tried[: len(before_offload) + 1] == [*before_offload, replace(REMAT, offload=Offload())]


@pytest.mark.parametrize("budget", [ALL_WAYS, FOUR_MINIBATCHES, FLAT_ONLY])
def test_fit_never_tries_offload_for_a_budget_met_without_offload(budget):
    found, tried = fit_within(budget)
    assert found.best is not None and {options.offload for options in tried} == {NO_OFFLOAD}
    assert found.why_offload == json.loads(found.to_json())["why_offload"] == ""


@pytest.mark.parametrize(
    "error, problem",
    [
        (ValueError("12 rows, which 8 devices do not divide"), "12 rows, which 8 devices do not divide"),
        (CompileError("the compiler's process ended with exit code -9:\nlog"), "ended with exit code -9: log"),
        (TimeoutError("longer than timeout_s=1800"), "longer than timeout_s=1800"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_fit_records_a_compile_error_as_a_trial_and_continues(error, problem):
    def forecast_of(options):
        if options.keep_gathered is False and not options.remat:
            raise error
        return by_formula(options)

    found, tried = fit_within(ALL_WAYS, forecast_of)
    (failed,) = (trial for trial in found.trials if trial.forecast is None)
    assert failed.options == AGAIN and not failed.fits and problem in failed.problem and len(tried) == 6
    assert problem.split()[0] in rendered(found.table()) and problem.split()[0] in str(found)
    assert json.loads(found.to_json())["trials"][-1]["problem"] == failed.problem


@pytest.mark.parametrize(
    "error", [KeyError("x"), RuntimeError("a" * 5000), ValueError(), AssertionError()], ids=lambda e: type(e).__name__
)
def test_fit_records_an_exception_of_build_step_as_a_trial_with_the_source_line(error):
    def build(options):
        if options.mesh == FLAT:
            raise error
        return options

    found, tried = fit_within(ALL_WAYS, build=build)
    (failed,) = (trial for trial in found.trials if trial.forecast is None)
    assert (
        type(error).__name__ in failed.problem
        and "forecast/test_planner.py, line" in failed.problem
        and len(tried) == 6
    )
    assert len(" ".join(rendered(found.table()).split())) < 10 * MAX_PROBLEM


def test_fit_stops_adding_minibatches_at_the_first_impossible_count():
    def forecast_of(options):
        if options.num_minibatches > 2:
            raise ValueError("num_minibatches=4 does not divide the 2 rows of a device")
        return by_formula(options)

    found, tried = fit_within(NOTHING, forecast_of)
    assert found.best is None
    # Minibatches are tried where the state fits: on FLAT, and with offload on STAGED, too.
    counts = [(options.mesh, options.offload == Offload(), options.num_minibatches) for options in tried]
    without_offload = [(STAGED, 1)] * 3 + [(FLAT, 1), (FLAT, 2), (FLAT, 4)] + [(HYBRID, 1)]
    with_offload = [(STAGED, 1), (STAGED, 2), (STAGED, 4), (FLAT, 1), (FLAT, 2), (FLAT, 4), (HYBRID, 1)]
    assert counts == [
        (mesh, offload, count)
        for offload, tries in ((False, without_offload), (True, with_offload))
        for mesh, count in tries
    ]


def test_fit_raises_for_a_failure_at_the_first_options_with_the_cause():
    def broken(options):
        return {}["missing"]

    def refused(options):
        raise CompileError("unsupported")

    first = "no forecast of the first options, fsdp_x=4,fsdp_y=8, weights kept: "
    with pytest.raises(ValueError, match=f"{first}KeyError: 'missing' .*forecast/test_planner.py, line") as raised:
        fit_within(ALL_WAYS, build=broken)
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(ValueError, match=f"{first}.*unsupported"):
        fit_within(ALL_WAYS, refused)


def test_fit_continues_after_the_compiler_refuses_the_first_options():
    def forecast_of(options):
        if options.keep_gathered:
            raise CompileError("the compiler refuses the step for v5e:4x8: UNIMPLEMENTED")
        return by_formula(options)

    found, _ = fit_within(ALL_WAYS, forecast_of)
    (failed,) = (trial for trial in found.trials if trial.forecast is None)
    assert found.best is not None and found.best is not failed and not failed.fits
    assert failed.options == KEPT and "UNIMPLEMENTED" in " ".join(rendered(found.table()).split())


def test_fit_raises_for_a_missing_compiler_package():
    def without_libtpu(options):
        raise ImportError("needs libtpu")

    with pytest.raises(ImportError, match="needs libtpu"):
        fit_within(ALL_WAYS, without_libtpu)


def test_fit_raises_for_an_exception_in_the_loss_with_the_source_file():
    def bad_loss(params, apply_fn, batch, rng):
        raise RuntimeError("in the loss")

    def build(options):
        x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
        return Workload(nn.Dense(8), optax.sgd(1e-3), x, bad_loss).build_step(options.mesh)

    with pytest.raises(
        ValueError, match=r"no forecast of the first .*RuntimeError: in the loss .*forecast/test_planner.py"
    ):
        fit(build, "v5e:2x2", meshes=[{"fsdp": 4}])


# -------------------------------------------------------------------------------------------------------- side by side


def jobs_of(steps, log):
    return [(Job(lambda: None, log, count), number) for number, count in enumerate(steps)]


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_side_by_side_runs_jobs_up_to_the_limit_and_yields_in_order(limit, monkeypatch):
    log, most = [], []
    jobs = jobs_of([90, 30, 10, 50, 20], log)

    def sleep(_):
        most.append(sum(job.steps >= 0 for job in log))

    monkeypatch.setattr(several.time, "sleep", sleep)
    done = [number for _, number in side_by_side(iter([*jobs[:2], (None, "nothing"), *jobs[2:]]), lambda: limit)]
    assert done == [0, 1, "nothing", 2, 3, 4] and log == [job for job, _ in jobs]
    assert max(most) == min(limit, 5)


def test_side_by_side_closes_running_jobs_when_the_caller_stops():
    log = []
    jobs = jobs_of([9, 99, 99], log)

    def made():  # the user's code, from which anything may come
        yield from jobs[:2]
        raise KeyError("the third")

    with pytest.raises(KeyError, match="the third"):
        next(side_by_side(made(), lambda: 9))
    with contextlib.closing(side_by_side(iter(jobs), lambda: 9)) as done:
        assert next(done) == jobs[0]
    assert log == [job for job, _ in jobs[:2] + jobs] and all(job.closed for job in log)


def test_fit_tries_the_same_options_for_any_number_of_parallel_jobs():
    for budget in (ALL_WAYS, FOUR_MINIBATCHES, FLAT_ONLY, NOTHING):
        (alone, tried_alone), (beside, tried_beside) = (fit_within(budget, at_once=count) for count in (1, 8))
        assert tried_alone == tried_beside and len(tried_alone) > 5, f"{budget=}"
        assert alone == beside, f"{budget=}"


def test_room_for_jobs_is_limited_by_cores_and_free_memory(monkeypatch):
    monkeypatch.setattr(several.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    largest = several.resource.getrusage(several.resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    child = max(CHILD_BYTES, largest)
    for free, room in {10**6: 1, 3 * child: 3, 1000 * child: 32, None: 32}.items():
        monkeypatch.setattr(several, "free_bytes", lambda free=free: free)
        assert room_for_jobs() == room


def test_free_bytes_is_the_smaller_of_system_and_cgroup_memory(monkeypatch):
    texts = {"meminfo": "MemTotal: 9 kB\nMemAvailable:     4000 kB\n", "memory.max": "max\n", "memory.current": "7\n"}
    monkeypatch.setattr(several, "_text", lambda path: texts.get(path.name, ""))
    assert several.free_bytes() == 4000 * 1024
    texts |= {"memory.max": "1000000\n", "memory.current": "900000\n", "memory.stat": "anon 1\ninactive_file 5000\n"}
    assert several.free_bytes() == 105_000
    texts.clear()
    assert several.free_bytes() is None


# ---------------------------------------------------------------------------------------------------- with real figures
# Slow: a search over steps that are compiled is in test_needless_offload.py, too.


@pytest.fixture(scope="module")
def tight():
    """A search under a budget that takes minibatches; rows for two of them on each device, not for four."""
    pytest.importorskip("libtpu")
    tried = []
    return fit(build_step, "v5e:2x2", BUDGET, meshes=[{"fsdp": 4}], on_trial=tried.append), tried


@pytest.mark.slow
@pytest.mark.libtpu
def test_fit_best_is_the_fastest_trial_within_the_budget(tight):
    found, _ = tight
    fitting = [trial for trial in found.trials if trial.fits]
    assert fitting and found.best is fitting[0]
    assert not {str(trial.options): trial.bytes_per_device for trial in fitting if trial.bytes_per_device > BUDGET}
    assert found.best.seconds == min(trial.seconds for trial in fitting)
    assert [trial.fits for trial in found.trials] == sorted((trial.fits for trial in found.trials), reverse=True)


@pytest.mark.slow
@pytest.mark.libtpu
def test_fit_tries_kept_regathered_and_remat_weights_before_minibatches(tight):
    found, tried = tight
    ways = [(o.keep_gathered, o.remat, o.num_minibatches) for o in tried]
    assert ways[:3] == [(True, False, 1), (False, False, 1), (False, True, 1)]
    assert ways[3][2] == 2 and tried[-1].min_weight_size == OTHER_MIN_WEIGHT_SIZE
    by_options = {(t.options.keep_gathered, t.options.remat, t.options.num_minibatches): t for t in found.trials}
    saved = [by_options[way].bytes_per_device for way in ways[:3]]
    assert saved[0] > saved[1] > saved[2] > BUDGET  # each saves memory, and none of them fits


@pytest.mark.slow
@pytest.mark.libtpu
def test_fit_table_and_json_contain_all_trials(tight):
    found, tried = tight
    text = rendered(found.table())
    assert "What fits into 45 MiB on each device of v5e:2x2" in text and text.count("fsdp=4") == len(tried)
    data = json.loads(found.to_json())
    assert len(data["trials"]) == len(tried) and data["trials"][0]["fits"] is True


def layer_on_host(options, passes_on=True):
    """One layer with Adam; of the three ways there is one."""
    if not options.keep_gathered:
        raise ValueError("the layer is as it is")
    model, x = shard_module_params(nn.Dense, "fsdp", 64)(16), jax.ShapeDtypeStruct((8, 64), jnp.float32)

    def loss(params, apply_fn, x, rng):
        return jnp.mean(apply_fn({"params": params}, x) ** 2)

    offload = options.offload if passes_on else NO_OFFLOAD
    return Workload(model, optax.adam(1e-3), x, loss, offload=offload).build_step(options.mesh, options.num_minibatches)


def test_fit_raises_for_an_unbuildable_step_and_passes_on_errors_of_the_estimate(monkeypatch):
    def broken(*_):
        raise KeyError("ours")

    with pytest.raises(ValueError, match=r"no step can be built on any mesh .*ZeroDivisionError"):
        fit(lambda _: (jax.jit(lambda x: x / (1 // 0)), (1.0,)), "v5e:2x2", model_axes={"tp": 1})
    monkeypatch.setattr(fitting, "estimate", broken)
    with pytest.raises(KeyError, match="ours"):
        fit(lambda _: (jax.jit(lambda x: x), (1.0,)), "v5e:2x2", model_axes={"tp": 1})


@pytest.mark.parametrize("passes_on", [True, False])
def test_fit_trial_reports_a_build_step_without_offload_passed_on(passes_on, monkeypatch):
    """Steps are built and traced; nothing fits by the figures that they are given."""
    figures = Figures(2**40, 1.0)
    monkeypatch.setattr(fitting, "begin_forecast", lambda *_, **__: Job(lambda: figures))
    found = fit(partial(layer_on_host, passes_on=passes_on), "v5e:2x2", meshes=[{"fsdp": 4}])
    problems = {t.problem for t in found.trials if t.options.offload == Offload() and t.options.num_minibatches == 1}
    assert found.best is None and len(problems) == 1
    said = "nothing of this step lies on the host: pass Workload(..., offload=options.offload) in build_step"
    assert problems.pop().startswith(said) != passes_on


@pytest.mark.libtpu
@pytest.mark.parametrize(
    "types",
    [(AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Auto), (AxisType.Auto,) * 2],
    ids=["explicit", "mixed", "auto"],
)
def test_fit_under_a_set_mesh_of_other_devices_forecasts_the_same_bytes(types):
    def found():
        return fit(_small_step, "v5e:2x2", meshes=[{"fsdp": 4}], jobs=1, cache=False).trials[0].forecast.total_bytes

    without = found()
    with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=types)):
        assert found() == without
    assert without > 0  # guard


def _small_step(options):
    model = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(256)
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    return Workload(
        model, optax.adamw(1e-3), x, lambda params, apply_fn, x, rng: (apply_fn({"params": params}, x) ** 2).mean()
    ).build_step(options.mesh)
