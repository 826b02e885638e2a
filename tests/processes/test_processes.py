"""Tests of real processes over loopback: joining, agreeing on a configuration, and a batch of rows of each process."""

import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import xlstm_jax
from tests.ports import reserved_port
from tests.support import blocks_of, mesh_of
from xlstm_jax.distributed import assert_same_everywhere, initialize_distributed, shard_batch
from xlstm_jax.distributed.processes import initialize
from xlstm_jax.distributed.processes.initialize import _local_address
from xlstm_jax.distributed.processes.same_everywhere import COMPARED_OPTIONS, entries_of, jax_settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "processes.md"
LIMIT_S = 480  # of a run that hangs; the promises about time are asserted one by one
PEER_TIMEOUT_S = 2  # the longest that a process waits for another in tests.process_script


def start(part, rank, count, port, **environment):
    command = [sys.executable, "-m", "tests.process_script", part, str(rank), str(count), str(port), str(time.time())]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(running):
    """Returns the last line of each process, after all processes have succeeded."""
    try:
        done = [process.communicate(timeout=LIMIT_S) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(err[-3000:] for _, err in done)
    return [output.splitlines()[-1] for output, _ in done]


def finished(running):
    return [json.loads(line) for line in ended(running)]


def run(part, count):
    port = reserved_port()
    return finished([start(part, rank, count, port) for rank in range(count)])


@pytest.fixture(scope="module")
def two():
    return run("two", 2)


@pytest.fixture(scope="module")
def four():
    return run("four", 4)


def raised(processes, name, message):
    """Returns the errors of the processes, after checking text and time.

    A start, which is more work than a step, takes longer on a slow or busy machine, too.
    """
    for process in processes:
        assert re.search(message, str(process[name]["result"])), process[name]
        assert process[name]["seconds"] < PEER_TIMEOUT_S + process["start_s"]
    return [process[name]["result"] for process in processes]


# -------------------------------------------------------------------------------------------------------------- joining


def test_single_process_joins_no_job_and_passes_assert_same_everywhere(monkeypatch):
    initialize_distributed()
    initialize_distributed("127.0.0.1:1", 1, 0)
    for name in ("JOB_ID", "NTASKS"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    for name in ("PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "127.0.0.1")
    initialize_distributed()  # a job of one task
    assert_same_everywhere({"seed": 1})
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("h:1",), r"got coordinator_address='h:1', but not num_processes and process_id. Pass all three, or none"),
        ((None, 2, 0), r"got num_processes=2, process_id=0, but not coordinator_address"),
        (("h:1", 2, 2), r"process_id=2 is not one of 0 ... 1 \(num_processes\)"),
        (("h", 2, 0), r"coordinator_address='h' is not host:port, as '10.0.0.1:1234'"),
    ],
    ids=str,
)
def test_initialize_distributed_raises_for_incomplete_or_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        initialize_distributed(*arguments)


def test_initialize_distributed_raises_for_numbers_given_as_strings():
    with pytest.raises(TypeError, match=r"got num_processes='2', process_id='0'; write int\(...\) around it"):
        initialize_distributed("h:1", "2", "0")
    with pytest.raises(TypeError, match="got num_processes=True"):
        initialize_distributed("h:1", True, 0)


@pytest.mark.parametrize("address", [":1234", "10.0.0.1:", "10.0.0.1:port"])
def test_initialize_distributed_raises_for_an_address_without_host_or_port(address):
    with pytest.raises(ValueError, match=f"coordinator_address='{address}' is not host:port"):
        initialize_distributed(address, 2, 0)


def test_initialize_distributed_raises_for_a_coordinator_address_without_a_cluster(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234")
    with pytest.raises(ValueError, match=r"JAX_COORDINATOR_ADDRESS='10.0.0.1:1234' is set, but JAX finds no cluster"):
        initialize_distributed()


def test_repeated_initialization_accepts_equal_arguments_and_raises_for_others(two):
    for rank, process in enumerate(two):
        assert [process[name]["result"] for name in ("join", "join again", "join without arguments")] == [None] * 3
        assert f"this is process {rank} of 2 at 127.0.0.1:" in process["join as another"]["result"]
        assert f"cannot become process {1 - rank} of 2" in process["join as another"]["result"]


def check_listens_on_loopback_only(listening):
    assert not [one for one in listening if not re.fullmatch(r"(0{16}FFFF0000)?0100007F:[0-9A-F]{4}", one)]
    assert listening  # guard: a port was seen


def test_coordinator_listens_on_the_loopback_address_only(two):
    check_listens_on_loopback_only(two[0]["listening"])


def as_srun(rank, port):
    """Returns the environment that ``srun --ntasks=2`` makes."""
    return {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2"} | {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "JAX_COORDINATOR_PORT": str(port),
    }


def test_initialization_under_slurm_needs_no_arguments_and_listens_on_loopback_only():
    port = reserved_port()
    printed = finished([start("slurm", rank, 2, port, **as_srun(rank, port)) for rank in range(2)])
    assert [process["joined"] for process in printed] == [[0, 2, 2], [1, 2, 2]]
    check_listens_on_loopback_only(printed[0]["listening"])


@pytest.mark.parametrize(
    "resolved, bind",
    [
        (["127.0.0.1"], "127.0.0.1:7"),  # a host with a single address, the address of its name
        (["127.0.1.1"], None),  # Debian's /etc/hosts for the host's name: others find another address
        (["192.0.2.1"], None),  # of another host
        (["127.0.1.1", "0.0.0.0"], "0.0.0.0:7"),  # stands for an address of this host
        ([], None),
    ],
    ids=str,
)
def test_coordinator_binds_to_the_address_resolved_from_the_coordinator_name(monkeypatch, resolved, bind):
    def lookup(*_, **__):
        if not resolved:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in resolved]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    name = resolved[0] if resolved == ["127.0.0.1"] else "node7"
    assert _local_address(f"{name}:7") == bind


@pytest.mark.parametrize(
    "name, bind", [("[::1]", "[::1]:7"), ("localhost", "127.0.0.1:7"), ("127.0.0.1", "127.0.0.1:7")]
)
def test_coordinator_binds_to_given_addresses_of_both_families_and_to_localhost(monkeypatch, name, bind):
    class Probe(contextlib.AbstractContextManager):
        """Socket of a host that has every address."""

        def __init__(self, family, kind):
            assert family == (socket.AF_INET6 if "::" in name else socket.AF_INET)

        def __exit__(self, *_):
            pass

        def bind(self, address):
            pass

    if name == "localhost":
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
        )
    monkeypatch.setattr(socket, "socket", Probe)
    assert _local_address(f"{name}:7") == bind


@pytest.fixture
def joined(monkeypatch):
    """Returns the list of what a process tells JAX to join; the process does not join."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(initialize, "leave_with_others", lambda: calls.append("tied to the others"))
    return calls


@pytest.mark.parametrize("bind", [None, "0.0.0.0:1"])
def test_process_0_joins_without_waiting_and_is_tied_to_the_others(joined, monkeypatch, bind):
    if bind:
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", bind)
    seconds = iter([100.0, 100.5])
    monkeypatch.setattr(initialize, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    initialize_distributed("127.0.0.1:1", 2, 0, local_device_ids=[3], heartbeat_timeout_s=7, shutdown_timeout_s=8)
    (args, options), tied = joined
    assert args == ("127.0.0.1:1", 2, 0) and tied == "tied to the others"
    assert options == {
        "local_device_ids": [3],
        "cluster_detection_method": "deactivate",
        "coordinator_bind_address": bind or "127.0.0.1:1",
        "initialization_timeout": 60,  # JAX takes whole seconds
        "heartbeat_timeout_seconds": 7,
        "shutdown_timeout_seconds": 8,
    }


def test_other_process_waits_until_the_coordinator_listens(joined, monkeypatch):
    connect, attempts = socket.create_connection, []

    def connect_to_one_that_listens_at_the_second_attempt(*args, **options):
        attempts.append(args)
        if len(attempts) == 2:
            coordinator.listen()
        return connect(*args, **options)

    with socket.socket() as coordinator:
        coordinator.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{coordinator.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=f"process 1 of 2 found nothing that listens at {address} within 0.05 s"):
            initialize_distributed(address, 2, 1, initialization_timeout_s=0.05)
        assert not joined
        monkeypatch.setattr(socket, "create_connection", connect_to_one_that_listens_at_the_second_attempt)
        initialize_distributed(address, 2, 1)
        assert len(attempts) == 2  # guard: the first was in vain
    assert joined[0][0] == (address, 2, 1)


def test_joining_again_does_nothing_with_equal_arguments_and_raises_for_others(joined, monkeypatch):
    now = SimpleNamespace(coordinator_address="127.0.0.1:1", num_processes=3, process_id=1)
    monkeypatch.setattr(initialize, "job", now)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    initialize_distributed("127.0.0.1:1", 3, 1)
    for others in (("127.0.0.1:2", 3, 1), ("127.0.0.1:1", 2, 1), ("127.0.0.1:1", 3, 2)):
        with pytest.raises(RuntimeError, match=r"this is process 1 of 3 at 127.0.0.1:1 already, and cannot become"):
            initialize_distributed(*others)
    assert not joined


@pytest.mark.parametrize(
    "process_id, variable, bind", [(0, "", "127.0.0.1:7"), (1, "", None), (0, "0.0.0.0:7", "0.0.0.0:7")]
)
def test_detected_process_0_listens_at_its_own_address_or_at_the_given_one(
    joined, monkeypatch, process_id, variable, bind
):
    detected = "127.0.0.1:7", 2, process_id, [process_id]
    monkeypatch.setattr(initialize.ClusterEnv, "auto_detect_unset_distributed_params", lambda *_: detected)
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", variable)
    monkeypatch.setattr(initialize, "_wait_for_coordinator", lambda *_: None)
    initialize_distributed()
    args, options = joined[0]
    assert args == detected[:3] and options["local_device_ids"] == [process_id]
    assert options["coordinator_bind_address"] == bind


def test_processes_page_program_runs_as_two_processes(tmp_path):
    (program,) = blocks_of(PAGE)
    (tmp_path / "page.py").write_text(program + "print(jax.process_count(), dict(mesh.shape), metrics['loss'])\n")
    port = reserved_port()
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", tmp_path / "page.py"],
            env={**os.environ, **as_srun(rank, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = ended(running)
    assert first == second and first.startswith("2 {'dp': 4, 'fsdp': 4} ")


@pytest.mark.slow
def test_processes_page_commands_start_two_processes(tmp_path):
    (commands,) = blocks_of(PAGE, "bash")
    commands = commands.replace("29500", str(reserved_port())).replace("python two.py", f"{sys.executable} two.py")
    done = subprocess.run(["bash", "-c", commands], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    lines = sorted(re.findall(r"process \d sees \d+ devices", done.stdout))  # two processes may write into one line
    assert lines == ["process 0 sees 8 devices", "process 1 sees 8 devices"], done.stderr[-3000:]


def test_initialization_without_the_peer_process_fails_within_the_timeout():
    """Process 1 without process 0 raises; process 0 without process 1 is ended by JAX's runtime, within LIMIT_S."""
    alone = [start("join", rank, 2, reserved_port()) for rank in range(2)]
    try:
        (_, aborted), (told, _) = [process.communicate(timeout=LIMIT_S) for process in alone]
    finally:
        for process in alone:
            process.kill()
            process.wait()
    told = json.loads(told.splitlines()[-1])
    join = told["join"]
    assert re.match(
        r"TimeoutError: process 1 of 2 found nothing that listens at 127.0.0.1:\d+ within 3 s", join["result"]
    )
    assert 3 <= join["seconds"] < 3 + told["start_s"]
    assert alone[0].returncode == -6 and "Deadline Exceeded" in aborted


# ------------------------------------------------------------------------------------------------------------- agreeing


def test_assert_same_everywhere_returns_promptly_for_equal_values(two):
    for process in two:
        assert process["same"]["result"] is None and process["same again"]["result"] is None
        assert process["same again"]["seconds"] < process["start_s"]


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "seed",
            r"ValueError: the seed and configuration differs .*\n  'seed' is 18 on process 0, but 17 on process 1$",
        ),
        ("array", r"'data' is int64\[1000\] \(0, 1, .*\), sha256 \w+ on process 0, but .*, sha256 \w+ on process 1$"),
        ("absent", r"'dropout' is absent on process 0, but 0.1 on process 1$"),
        ("code", r"'code/model.py' is 'sha256 \w+' on process 0, but 'sha256 \w+' on process 1$"),
        ("jax.config", r"'jax_default_prng_impl' is threefry2x32 on process 0, but rbg on process 1$"),
        ("XLA_FLAGS", r"'XLA_FLAGS --xla_cpu_enable_fast_math' is absent on process 0, but true on process 1$"),
    ],
)
def test_all_processes_raise_for_differing_values_with_paths_and_process_numbers(two, name, message):
    first, second = raised(two, name, message)
    assert first.splitlines()[1:] == second.splitlines()[1:]
    assert first.count("\n") == 1  # guard: only differences are named


@pytest.mark.slow
def test_error_for_differing_values_names_the_process_among_four(four):
    assert len(set(raised(four, "seed", r"'seed' is 17 on processes 0, 1, 3, but 18 on process 2$"))) == 1
    (told,) = set(raised(four, "two differ", r"'seed' is 17 on processes 0, 1, 3, but 18 on process 2\n"))
    assert re.search(r"'lr' is 0.1 on processes 0, 1, 2, but 0.2 on process 3$", told)


def test_processes_raise_for_different_comparisons_at_the_same_time(two):
    raised(
        two, "order", "do different things at once: compare the seed on process 0, but compare the plan on process 1"
    )


def test_comparison_raises_a_timeout_error_naming_the_absent_process(two):
    raised(two, "late", r"^TimeoutError: process 1 did not come to compare the plan within 0.5 s")


# ---------------------------------------------------------------------------------------------------------- restoring


@pytest.fixture(scope="module")
def restoring():
    return run("restores", 2)


@pytest.mark.parametrize(
    "name, message",
    [
        ("extra leaf", r"^ValueError: process 1: step 2 in .* does not fit the abstract state: it has no 'b'"),
        ("no leaf", r"^ValueError: process 1: the state has no leaves"),
        ("text", r"^TypeError: process 1: 'n' is str; a checkpoint holds numbers"),
        ("other step", r"^ValueError: processes do .*: restore step 1 on process 0, but restore step 2 on process 1\."),
        ("other method", r"but look for the newest step on process 1\. Let all do the same in order\.$"),
    ],
)
def test_restore_error_of_a_single_process_is_raised_in_both_processes(restoring, name, message):
    assert [process["fits"]["result"] for process in restoring] == [2, 2]  # guard: the step is readable
    assert len(set(raised(restoring, name, message))) == 1


@pytest.mark.parametrize(
    "name, what",
    [
        ("latest_step without it", "look for the newest step"),
        ("restore without it", "read step 2"),
        ("save without it", "save step 3"),
    ],
)
def test_checkpointer_raises_a_timeout_error_for_a_stuck_process(restoring, name, what):
    message = rf"^TimeoutError: process 1 did not come to {what} within 2 s, for which process [01] waits\. See the log"
    raised(restoring, name, message)
    assert [process["fits again"]["result"] for process in restoring] == [2, 2]


# ------------------------------------------------------------------------------------------------------ compared values


@dataclass
class Config:
    lr: float = 0.1
    layers: list = field(default_factory=lambda: [1, 2])
    act: object = nn.gelu


@jax.tree_util.register_dataclass
@dataclass
class Rows:
    x: object


class Kind(Enum):
    A = 1


def test_entries_of_a_configuration_have_the_path_and_text_of_each_leaf():
    value = {
        "config": Config(),
        "options": SimpleNamespace(path=Path("a/b"), kind=Kind.A, none=None),
        "dtype": jnp.bfloat16,
        "spec": P("dp"),
        "empty": {},
        "key": jax.random.key(0),
        "lr": functools.partial(optax.cosine_decay_schedule, 0.1, decay_steps=5),
        "boxed": nn.Partitioned(np.float32(2), ("fsdp",)),
        "shape": jax.ShapeDtypeStruct((2, 3), jnp.float32),
        "bytes": b"abc",
        3: {"b", "a"},
    }
    got = entries_of(value)
    want = {
        "config/lr": "0.1",
        "config/layers/1": "2",
        "options/none": "None",
        "dtype": "jax.numpy.bfloat16",
        "empty": "empty dict",
        "lr/args/0": "0.1",
        "lr/decay_steps": "5",
        "boxed/names/0": "'fsdp'",
        "3/0": "'a'",
    }
    assert want.items() <= got.items()
    assert got["config/act"].endswith(".gelu") and got["key"].startswith("key<fry>[] (0, 0), sha256")
    assert entries_of(value) == got  # independent of memory addresses


@pytest.mark.parametrize(
    "option, value",
    [
        ("jax_enable_x64", True),
        ("jax_default_matmul_precision", "float32"),
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_threefry_partitionable", False),
        ("jax_debug_nans", True),
        ("jax_random_seed_offset", 1),
    ],
)
def test_jax_settings_include_options_with_effect_on_values_or_programs(option, value):
    before, old = jax_settings(), getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        changed = {name: text for name, text in jax_settings().items() if before.get(name) != text}
    finally:
        jax.config.update(option, old)
    assert changed == {option: str(value)} and jax_settings() == before


def test_jax_settings_include_flags_except_process_specific_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_b --xla_dump_to=/tmp/0 --xla_gpu_cuda_data_dir=/cuda --xla_a=2")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_c=true --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    found = {name: text for name, text in jax_settings().items() if " " in name or "NVIDIA" in name}
    assert found == {
        "XLA_FLAGS --xla_a": "2",
        "XLA_FLAGS --xla_b": "true",
        "LIBTPU_INIT_ARGS --xla_tpu_c": "true",
        "NVIDIA_TF32_OVERRIDE": "0",
    }


def test_settings_that_may_differ_between_hosts_are_not_compared():
    different = {"jax_platforms", "jax_compilation_cache_dir", "jax_num_cpu_devices", "jax_log_compiles"}
    assert different <= jax.config.values.keys() and not different & jax_settings().keys()


def test_compared_jax_options_exist_in_the_installed_jax():
    assert len(COMPARED_OPTIONS & jax.config.values.keys()) > len(COMPARED_OPTIONS) - 5  # some are of one release only


@pytest.mark.parametrize(
    "change", [lambda x: x + 1, lambda x: x.astype(np.int64), lambda x: x[::-1], lambda x: x[None], lambda x: x % 99]
)
def test_entries_of_arrays_differ_for_any_change(change):
    x = np.arange(100, dtype=np.int32)
    assert entries_of(change(x)) != entries_of(x) == entries_of(x.copy())
    assert entries_of("long " * 99) != entries_of("long " * 98 + "else ")


def test_entries_are_full_texts_up_to_a_length_and_show_the_first_values_of_an_array():
    assert entries_of("x" * 78) == {".": repr("x" * 78)}  # 80 characters with the quotes
    assert re.fullmatch(r"'x{79}\.\.\. \(81 characters, sha256 \w{16}\)", entries_of("x" * 79)["."])
    six, seven = (entries_of(np.arange(count, dtype=np.int32))["."] for count in (6, 7))
    assert six.startswith("int32[6] (0, 1, 2, 3, 4, 5), sha256 ")
    assert seven.startswith("int32[7] (0, 1, 2, 3, 4, 5, ...), sha256 ")


def test_entries_of_bytes_differ_for_any_change_and_modules_without_a_file_have_their_name():
    assert entries_of(b"abc") == entries_of(bytearray(b"abc")) != entries_of(b"abd")
    assert entries_of({"code": [sys]}) == {"code/0/name": "'sys'"}


def test_entries_of_a_package_have_a_digest_per_file():
    files = entries_of({"code": xlstm_jax})
    assert {"code/distributed/processes/same_everywhere.py", "code/__init__.py"} <= set(files)
    assert len(set(files.values())) > 10


def test_assert_same_everywhere_raises_for_objects_without_a_stable_text():
    with pytest.raises(
        TypeError, match=r"'a/0' is <object object at 0x.*: a object has no text that is the same in two"
    ):
        assert_same_everywhere({"a": [object()]})


# -------------------------------------------------------------------------------------------------------------- batches


def test_shard_batch_concatenates_rows_in_the_order_of_processes(two):
    want = [[100 * p + 2 * i, 100 * p + 2 * i + 1] for p in range(2) for i in range(4)]
    for rank, process in enumerate(two):
        assert process["rows"]["all"] == want
        assert process["rows"]["here"] == [want[4 * rank : 4 * rank + 2], want[4 * rank + 2 : 4 * rank + 4]]
        assert process["scalar"] == 7


def test_shard_batch_compares_nothing_between_processes_for_a_known_shape(two):
    for process in two:
        assert process["again"] == [True] * 3 and process["comparisons of the same shape"] == 0


def test_shard_batch_on_alternating_meshes_compares_once_per_mesh(two):
    """Batches on two alternating meshes are compared once per mesh."""
    for process in two:
        rows = process["rows"]["all"]
        assert process["other mesh 0"]["result"] == process["other mesh 1"]["result"] == rows
        assert process["first mesh 0"]["result"] == process["first mesh 1"]["result"] == rows
        assert process["comparisons"] == {"first round": 1, "second round": 0}


def test_shard_batch_gives_padding_rows_weight_zero(two):
    row = [[[100 * p + 2 * i, 100 * p + 2 * i + 1] for i in range(4)] for p in range(2)]
    for process in two:
        assert process["padded"] == [*row[0][:3], row[0][0], *row[1][:3], row[1][0]]
        assert process["weight"] == [1, 1, 1, 0, 1, 1, 1, 0]
        # Process 0 has no rows left, and repeats a row of the last batch.
        assert process["uneven"] == [row[0][0]] * 4 + [*row[1][:3], row[1][0]]
        assert process["uneven weight"] == [0, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "does not divide",
            r"^ValueError: 2 does not divide the 3 rows .* process (0|1), whose .* Hand in 2 or 4 rows",
        ),
        ("different rows", r"batch .* differs .*'rows for each process' is 2 on process 0, but 8 on process 1$"),
        ("different dtype", r"batch .* differs .*'x' is float32 .* on process 0, but int32 .* on process 1$"),
        ("different scalar", r"batch .* differs .*'n' is 0 on process 0, but 1 on process 1$"),
        (
            "shared, but different",
            r"with the same shards over \('fsdp',\) differs .*'x' is .* on process 0, but ",
        ),
    ],
)
def test_shard_batch_raises_in_all_processes_for_mismatched_batches(two, name, message):
    raised(two, name, f"(?s){message}")


def test_new_batch_shape_in_a_single_process_raises_a_timeout_error(two):
    result = two[0]["new shape here alone"]
    assert re.match(
        r"TimeoutError: process 1 did not come to compare the batch of a new shape within 1 s", result["result"]
    )


def test_shard_batch_takes_equal_rows_from_processes_with_the_same_shards(two):
    for process in two:
        assert process["shared"]["all"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert process["shared"]["here"] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_shard_batch_splits_tokens_of_rows_over_devices(two):
    """A device gets its half of the tokens if the axis crosses processes; otherwise each process has its rows."""
    for rank, process in enumerate(two):
        rows = np.arange(8).reshape(2, 4)
        both, of_one = process["tokens of both"], process["tokens of one"]
        assert both["all"] == rows.tolist() and of_one["all"] == [*rows.tolist(), *(100 + rows).tolist()]
        assert both["here"] == [rows[i : i + 1, 2 * rank : 2 * rank + 2].tolist() for i in range(2)]
        assert of_one["here"] == [(100 * rank + rows[:, i : i + 2]).tolist() for i in (0, 2)]


@pytest.mark.slow
def test_shard_batch_in_four_processes_raises_for_unequal_rows_of_the_same_shards(four):
    for process in four:
        assert process["rows"]["all"] == [[0], [1], [10], [11]]
    message = r"(?s)with the same shards over \('dp',\) .*'x' is .* on process 2, but .* on process 3$"
    raised(four[2:], "shared, but different", message)
    assert "Error" not in str([four[rank]["shared, but different"]["result"] for rank in (0, 1)])  # theirs are the same


def test_shard_batch_in_a_single_process_splits_and_pads_rows_over_devices():
    batch = {"x": np.arange(24.0, dtype=np.float32).reshape(8, 3), "y": jnp.arange(8, dtype=jnp.bfloat16), "n": 3}
    got = shard_batch(batch, mesh_of(2, 4), ("dp", "fsdp"))
    for name in batch:
        np.testing.assert_array_equal(got[name], batch[name])
    assert got["x"].sharding.spec == P(("dp", "fsdp")) and got["n"].sharding.is_fully_replicated
    assert got["y"].dtype == jnp.bfloat16
    assert {shard.data.shape for shard in got["x"].addressable_shards} == {(1, 3)}
    padded, weight = shard_batch({"x": batch["x"][:5]}, mesh_of(2, 4), "dp", pad=True)
    assert padded["x"].shape == (6, 3) and weight.tolist() == [1, 1, 1, 1, 1, 0] and weight.dtype == np.float32
    np.testing.assert_array_equal(padded["x"][5], batch["x"][0])
    assert shard_batch({"x": batch["x"]}, mesh_of(2, 4), "dp", pad=True)[1].sum() == 8


def test_shard_batch_pads_with_real_rows_in_turn():
    """Padding repeats real rows in turn, in all dtypes; a process without rows repeats a row of an earlier batch."""
    rows = {"x": jnp.arange(3, dtype=jnp.bfloat16), "tokens": np.arange(6).reshape(3, 2), "is": np.array([True] * 3)}
    batch, weight = shard_batch(rows | {"n": 7}, mesh_of(2, 4), ("dp", "fsdp"), pad=True)
    for name, leaf in rows.items():
        np.testing.assert_array_equal(batch[name], np.asarray(leaf)[[0, 1, 2, 0, 1, 2, 0, 1]])
        assert batch[name].dtype == jax.dtypes.canonicalize_dtype(leaf.dtype)
    assert batch["n"] == 7 and weight.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    none = {name: leaf[:0] for name, leaf in rows.items()}
    batch, weight = shard_batch(none | {"n": 7}, mesh_of(2, 4), ("dp", "fsdp"), pad=8)
    assert batch["tokens"].tolist() == [[0, 1]] * 8 and not weight.any()
    with pytest.raises(ValueError, match=r"process 0 hands in 0 rows, .* had none .*rows\[jax.process_index\(\)"):
        shard_batch(none | {"other": np.zeros((0, 5))}, mesh_of(2, 4), ("dp", "fsdp"), pad=8)


class Tensor:
    """A tensor of another library, with NumPy's dtype and conversion."""

    shape, ndim, dtype = (8,), 1, np.dtype(np.float32)

    def __array__(self, dtype=None, copy=None):
        return np.ones(8, np.float32)


@pytest.mark.parametrize(
    "batch, options, error, message",
    [
        (
            {"x": np.ones((10, 2))},
            {},
            ValueError,
            r"8 does not divide the 10 rows .* process 0, .* Hand in 8 or 16 rows",
        ),
        ({"x": np.ones((3, 2))}, {}, ValueError, r"8 does not divide the 3 rows .* Hand in 8 rows, or pass pad=True"),
        ({"x": np.ones((0, 2))}, {}, ValueError, r"8 does not divide the 0 rows"),
        (
            {"x": np.ones(8), "m": {"y": np.ones(7)}},
            {},
            ValueError,
            r"batch\['x'\] of shape \(8,\) has 8 rows, .*\['m/y'\]",
        ),
        (
            {"x": np.ones(8)},
            {"pad": 12},
            ValueError,
            r"pad=12 rows for 8 rows .*: at least as many, and a multiple of 8",
        ),
        ({"x": np.ones(16)}, {"pad": 8}, ValueError, r"pad=8 rows for 16 rows"),
        ({"n": 3}, {}, ValueError, r"no leaf with rows"),
        (
            {"x": np.ones(8), "y": [1, 2, 3, 4, 5, 6, 7, 8]},
            {},
            TypeError,
            r"batch\['y'\] is a list of 8 Python numbers, .* Pass np\.asarray\(batch\['y'\]\)",
        ),
        ((np.ones(8), [[1.0, 2.0]] * 8), {}, TypeError, r"batch\[1\]\[0\] is a list of 2 Python numbers"),
        (Config(), {}, TypeError, r"^batch is a Config, a dataclass that JAX does not know; .* pass vars\(batch\)"),
        (
            {"c": [Config()]},
            {},
            TypeError,
            r"^batch\['c'\]\[0\] is a Config, a dataclass .*register_dataclass above Con",
        ),
        ({"x": np.ones(8), "id": "abc"}, {}, TypeError, r"batch\['id'\] is 'abc', not an array. Leave it out"),
        ({"x": np.array(["a"] * 8)}, {}, TypeError, r"batch\['x'\] is an array <U1\[8\], not of numbers"),
        (
            {"x": Tensor()},
            {},
            TypeError,
            r"batch\['x'\] is a Tensor of tests, which JAX does not take. Pass np.asarray",
        ),
        (Tensor(), {"pad": True}, TypeError, r"^batch is a Tensor of tests"),
        ({"x": np.ones(8, "f4,i4")}, {}, TypeError, r"batch\['x'\] is an array .*, not of numbers"),
        ({"x": np.ma.masked_less(np.ones(8), 2)}, {}, TypeError, r"batch\['x'\] is a masked array, .*filled\(0\)"),
        ({"x": jax.ShapeDtypeStruct((8,), jnp.float32)}, {}, TypeError, r"batch\['x'\] is a type without values"),
        ({"x": np.ones(8), "n": 2**70}, {}, ValueError, r"batch\['n'\] is \d+, which int32 does not hold"),
        (
            {"k": jax.random.split(jax.random.key(0), 8)},
            {},
            TypeError,
            r"batch\['k'\] has the dtype key<fry>, not of numbers. Pass jax.random.key_data",
        ),
    ],
)
def test_shard_batch_raises_for_rows_of_invalid_shape_or_type(batch, options, error, message):
    with pytest.raises(error, match=message):
        shard_batch(batch, mesh_of(2, 4), ("dp", "fsdp"), **options)


def test_shard_batch_accepts_any_pytree_containers():
    batch = (np.ones(8), [np.zeros((8, 2)), 0.5], {"betas": (0.9, 0.99)}, Rows(np.ones(8)))
    sharded = shard_batch(batch, mesh_of(2, 4), ("dp", "fsdp"))
    assert jax.tree.structure(sharded) == jax.tree.structure(batch)


def test_shard_batch_raises_for_an_unknown_batch_axis():
    with pytest.raises(ValueError, match=r"batch_axes='data': the mesh has no axis 'data'"):
        shard_batch({"x": np.ones(8)}, mesh_of(2, 4), "data")


# --------------------------------------------------------------------------------------------------------------- meshes


def test_first_mesh_axis_crosses_processes_and_info_reports_the_axis(two):
    for process in two:
        assert process["devices"] == [[0, 0], [1, 1]]
        info = {"total_devices": 4, "axes": {"dp": 2, "fsdp": 2}, "processes": 2, "platform": "cpu"}
        assert info.items() <= process["info"].items()
        assert process["info"]["axes_across_processes"] == ["dp"]
        assert process["info of one axis"]["axes_across_processes"] == ["data"]
        assert re.match(r"ValueError: the first 2 of 4 devices leave process 1 with", process["too few"]["result"])


@pytest.mark.slow
def test_create_device_mesh_keeps_axes_within_processes_where_possible(four):
    for process in four:
        assert process["{'dp': 2, 'fsdp': 6}"] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]
        # Devices laid out row by row would send "dp" across processes too: [0, 0, 0, 1], [1, 1, 2, 2], ...
        assert process["{'dp': 3, 'fsdp': 4}"] == [[0, 1, 2, 3]] * 3
