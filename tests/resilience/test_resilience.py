"""Tests of faults in real processes: all processes end in time; differing copies are named."""

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.ports import reserved_port
from tests.support import AXES, mesh_of
from xlstm_jax.distributed import (
    LoopGuard,
    NonFiniteError,
    ReplicaError,
    check_replicas,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.resilience import loop_guard, watchdog
from xlstm_jax.distributed.resilience.loop_guard import _failure_of
from xlstm_jax.distributed.resilience.replica_check import check_local_replicas
from xlstm_jax.distributed.resilience.watchdog import EXIT_FAILED, EXIT_HUNG, LOOK_EVERY_S, MAX_TIMEOUT_S

ROOT = Path(__file__).parents[2]
STEP_TIMEOUT_S, FAULT_STEP = 3.0, 5  # of tests/resilience_process.py
START_TIMEOUT_S = 120
FAST_S = 3.0  # promised after an exception or a death: docs/resilience.md

# ---------------------------------------------------------------------------------------------- faults in processes


class Process:
    """A process of ``tests.resilience_process`` with its output lines and end time."""

    def __init__(self, folder, mode, rank, processes, port):
        command = [sys.executable, "-m", "tests.resilience_process", mode, str(rank), str(processes), str(port)]
        self.stderr, self.begun_at = folder / f"{mode}-{rank}.err", time.time()
        with self.stderr.open("w") as errors:
            self.popen = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.lines, self.gone_at = [], None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self.popen.stdout:
            self.lines.extend(line.strip() for line in self.popen.stdout)
        self.popen.wait()
        self.gone_at = time.time()

    def wait_for(self, start):
        """Returns the first line with this start."""
        deadline = time.time() + START_TIMEOUT_S
        while time.time() < deadline and self.popen.poll() is None:
            for line in list(self.lines):
                if line.startswith(start):
                    return line
            time.sleep(0.005)
        raise AssertionError(f"no line {start!r} in {self.lines}: {self.errors()[-3000:]}")

    def line(self, start):
        return next(line for line in self.lines if line.startswith(start))

    def end(self):
        self._reader.join(START_TIMEOUT_S)
        assert self.gone_at, f"still alive: {self.lines}, {self.errors()[-3000:]}"
        return self.popen.returncode

    def errors(self):
        return self.stderr.read_text()


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts the processes of a run; kills remaining processes after the test."""
    started = []

    def start(mode, processes=2):
        port = reserved_port()
        started.extend(Process(tmp_path, mode, rank, processes, port) for rank in range(processes))
        return started

    yield start
    for process in started:
        process.popen.kill()
        process.popen.wait()


def seconds_from(fault, processes):
    return max(process.gone_at for process in processes) - fault


def limit_s(promised_s, fault, processes):
    """Returns the promised seconds, and as many as the same processes have run before the fault.

    A process that starts, compiles and trains five steps does many times the work of one that ends, and both take
    longer on a slow or busy machine.
    """
    return promised_s + fault - min(process.begun_at for process in processes)


def time_of_fault(process):
    return float(process.line("FAULT").split()[1])


def test_stuck_peer_ends_both_processes_with_stacks_of_all_threads(start):
    healthy, stuck = start("stuck")
    # The process whose clock expires first also ends the other's connection; most often both clocks expire.
    codes = {stuck.end(), healthy.end()}
    assert EXIT_HUNG in codes and codes <= {EXIT_HUNG, EXIT_FAILED, -signal.SIGABRT}
    fault, both = time_of_fault(stuck), [healthy, stuck]
    assert seconds_from(fault, both) < limit_s(STEP_TIMEOUT_S + 2, fault, both)
    hung = stuck if stuck.popen.returncode == EXIT_HUNG else healthy
    assert re.search(
        rf"process [01] of 2: .*step [{FAULT_STEP}{FAULT_STEP + 1}] has taken \d+\.\d s, more than its 3 s",
        hung.errors(),
    )
    assert "resilience_process.py" in hung.errors() and "most recent call first" in hung.errors()


def test_watchdog_ends_a_c_call_with_a_held_interpreter_lock(start):
    (process,) = start("stuck in C", processes=1)
    assert process.end() == 1  # exit code of Python's faulthandler
    fault = time_of_fault(process)
    assert STEP_TIMEOUT_S < seconds_from(fault, [process]) < limit_s(STEP_TIMEOUT_S + 2, fault, [process])
    assert "in go_wrong" in process.errors()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode, code", [("stuck, full pipe", EXIT_HUNG), ("stuck in C, full pipe", 1)])
def test_watchdog_ends_a_stuck_process_with_a_full_unread_pipe(start, mode, code):
    (process,) = start(mode, processes=1)
    assert process.end() == code
    # A few extra seconds write the stacks.
    fault = time_of_fault(process)
    assert STEP_TIMEOUT_S < seconds_from(fault, [process]) < limit_s(STEP_TIMEOUT_S + 5, fault, [process])


def test_paused_section_may_exceed_the_step_timeout(start):
    (process,) = start("paused", processes=1)
    assert process.end() == 0, process.errors()[-3000:]
    assert process.line("PAUSED")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "mode, code, text", [("exception", EXIT_FAILED, "the data are gone"), ("sys.exit", 7, "Exit: 7")]
)
def test_exception_in_a_single_process_ends_both_processes_promptly(start, mode, code, text):
    peer, failing = start(mode)
    assert failing.end() == code and text in failing.errors()
    assert peer.end() in (EXIT_FAILED, -signal.SIGABRT), peer.errors()[-3000:]
    fault = time_of_fault(failing)
    assert seconds_from(fault, [peer, failing]) < limit_s(FAST_S, fault, [peer, failing])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_process_ends_the_peer_process(start, victim):
    processes = start("none")
    for process in processes:
        process.wait_for(f"STEP {FAULT_STEP}")
    fault = time.time()
    processes[victim].popen.send_signal(signal.SIGKILL)
    assert processes[victim].end() == -signal.SIGKILL
    assert processes[1 - victim].end() in (EXIT_FAILED, -signal.SIGABRT)
    assert seconds_from(fault, processes) < limit_s(FAST_S, fault, processes)


@pytest.mark.parametrize("told, number, code", [(0, signal.SIGTERM, 0), (1, signal.SIGINT, 130)])
def test_signal_to_a_single_process_stops_both_processes_at_the_same_step(start, told, number, code):
    processes = start("none")
    for process in processes:
        process.wait_for(f"STEP {FAULT_STEP}")
    processes[told].popen.send_signal(number)
    ends = [process.end() for process in processes]
    assert ends == [0 if process is not processes[told] else code for process in processes], processes[told].errors()
    stopped = [process.line("SAVES").split()[1:] for process in processes]
    assert stopped[0] == stopped[1] and stopped[0][0] == stopped[0][1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["none", "distributed"])
def test_sigterm_stops_a_job_of_a_single_process_after_the_step(start, mode):
    (process,) = start(mode, processes=1)
    process.wait_for(f"STEP {FAULT_STEP}")
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0, process.errors()[-3000:]
    assert int(process.line("STOPPED").split()[1]) >= FAULT_STEP


@pytest.mark.slow
def test_sigterm_kills_a_process_without_loop_guard(start):
    (process,) = start("unguarded", processes=1)
    process.wait_for("STEP")
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == -signal.SIGTERM


def test_too_many_nonfinite_steps_end_all_processes_with_the_same_message(start):
    processes = start("nonfinite")
    codes = [process.end() for process in processes]
    assert EXIT_FAILED in codes and set(codes) <= {EXIT_FAILED, -signal.SIGABRT}
    text = "step 8: the loss or a gradient was not finite in 3 steps in a row (4 in all), more than"
    assert any(text in process.errors() and "that of step 5" in process.errors() for process in processes)
    assert not any("STEP 9" in process.lines for process in processes)


def test_check_replicas_raises_in_all_processes_for_a_differing_replica(start):
    processes = start("replicas")
    assert [process.end() for process in processes] == [0, 0], processes[0].errors()[-3000:]
    first, second = (process.line("ERROR") for process in processes)
    assert first == second
    assert "1 of 2 leaves" in first and "'layer/bias', float32[6]" in first and "of process 1. Look" in first


# ------------------------------------------------------------------------------------------------------- the guard


def test_loop_guard_in_a_single_process_propagates_exceptions_and_restores_handlers():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="the data are gone"), LoopGuard():
        assert signal.getsignal(signal.SIGTERM) != before
        raise OSError("the data are gone")
    assert signal.getsignal(signal.SIGTERM) == before
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def interrupted_loop(guard, asks=True, again=False):
    """Sends Ctrl-C in step 3; returns the steps that the loop saves, and the steps that the loop begins."""
    saved, begun = [], []
    for step in range(1, 9):
        begun.append(step)
        for _ in range((step == 3) * (1 + again)):
            signal.raise_signal(signal.SIGINT)
        guard.step_done(step, {"loss": 1.0})
        if asks and guard.should_stop(step):
            saved.append(step)
            break
    return saved, begun


def test_ctrl_c_saves_after_the_step_and_exits_with_a_single_line_and_code_130(capfd):
    with pytest.raises(SystemExit, match=r"^130$"), LoopGuard() as guard:
        saved, begun = interrupted_loop(guard)
    assert saved == [3] and begun == [1, 2, 3]
    assert re.fullmatch(r"\nCtrl-C: this run saves and ends after its step, [^\n]*130[^\n]*\n", capfd.readouterr().err)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("options", [{"asks": False}, {"again": True}], ids=["nobody asks", "twice"])
def test_ctrl_c_interrupts_without_should_stop_calls_or_when_pressed_twice(options):
    with pytest.raises(KeyboardInterrupt, match=r"^$|has not called should_stop"), LoopGuard() as guard:
        interrupted_loop(guard, **options)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_loop_that_asks_may_take_further_steps_after_ctrl_c():
    with pytest.raises((SystemExit, KeyboardInterrupt)) as raised, LoopGuard() as guard:
        for step in range(4):
            guard.step_done(step, {"loss": 1.0})
            if step == 1:
                signal.raise_signal(signal.SIGINT)
            assert guard.should_stop(step) == (step >= 1)
    assert isinstance(raised.value, SystemExit) and raised.value.code == 130


def test_guard_watches_each_step_with_its_limit_and_a_paused_section_without(monkeypatch):
    watched = []

    class Recorded(watchdog.Watchdog):
        def watch(self, activity, timeout_s):
            watched.append((activity, timeout_s))
            super().watch(activity, None)

    monkeypatch.setattr(loop_guard, "Watchdog", Recorded)
    with LoopGuard(step_timeout_s=50, first_step_timeout_s=700) as guard:
        guard.step_done(3, {"loss": 1.0})
        with guard.paused(), pytest.raises(KeyError), guard.paused(90):
            raise KeyError
        guard.step_done(4)
    paused = "the paused section after step 4 began", None
    assert watched == [
        ("the first step", 700),
        ("step 4", 50),
        paused,
        (f"the paused section after {paused[0]} began", 90),
        paused,
        ("step 4", 50),
        ("step 5", 50),
    ]


def test_loop_guard_keeps_an_ignored_sigint_ignored():
    """``LoopGuard`` keeps SIGINT ignored, as in a background run (nohup)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with LoopGuard() as guard:
            saved, begun = interrupted_loop(guard)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert not saved and begun[-1] == 8


def counted(in_a_row, total):
    numbers = {"skipped_in_a_row": in_a_row, "skipped_steps": total}
    return {"loss": jnp.float32(jnp.nan)} | {name: jnp.int32(number) for name, number in numbers.items()}


@pytest.mark.parametrize("limit", [0, 2])
def test_loop_guard_raises_for_too_many_skipped_steps_a_step_later(limit):
    with LoopGuard(max_skipped_in_a_row=limit) as guard:
        for step in range(1, limit + 2):
            guard.step_done(step, counted(step, 7))
        text = rf"step {limit + 1}: .* in {limit + 1} steps in a row \(7 in all\), .*=limit|={limit}; .* of step 0\."
        with pytest.raises(NonFiniteError, match=text):
            guard.step_done(limit + 2, counted(0, 7))
        guard.step_done(limit + 3, counted(limit, 7))  # guard: as many as the limit are not too many


@pytest.mark.parametrize("loss", [np.nan, np.inf, jnp.float32(jnp.nan)], ids=str)
def test_loop_guard_raises_for_a_nonfinite_loss_without_skip_nonfinite(loss):
    with LoopGuard() as guard:
        guard.step_done(1, {"loss": 1.0})
        guard.step_done(2, {"loss": loss, "accuracy": np.nan})
        with pytest.raises(NonFiniteError, match=r"loss of step 2 is (nan|inf), and its update was applied"):
            guard.step_done(3, {"loss": 1.0})


def test_step_done_waits_for_the_previous_step_and_not_for_the_current_step():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, x: jnp.tanh(x @ x), x).sum())
    x = jnp.ones((1000, 1000))
    slow(x).block_until_ready()
    with LoopGuard() as guard:
        loss = slow(x)
        guard.step_done(1, {"loss": loss})
        assert not loss.is_ready()
        guard.step_done(2, {"loss": 0.0})
        assert loss.is_ready()


def test_loop_guard_accepts_the_maximum_step_timeout():
    with LoopGuard(step_timeout_s=MAX_TIMEOUT_S, first_step_timeout_s=MAX_TIMEOUT_S) as guard:
        guard.step_done(1)
        time.sleep(2 * LOOK_EVERY_S)
        assert any(thread.name == "watchdog" for thread in threading.enumerate())  # the watchdog has set the timer


class Loss:
    """A loss as the watchdog reads losses: one shard, whose computation has failed, or that is donated meanwhile."""

    def __init__(self, donated):
        self.is_deleted = lambda: donated == "loss"
        data = SimpleNamespace(
            is_ready=lambda: True, block_until_ready=self.fail, is_deleted=lambda: donated == "shard"
        )
        self.shards = [SimpleNamespace(data=data, device=jax.devices()[0])]

    def fail(self):
        raise RuntimeError("Gloo: connection closed")

    @property
    def addressable_shards(self):
        return self.fail() if self.is_deleted() else self.shards


def test_failure_of_ignores_a_donated_loss_and_reports_a_device_failure():
    assert _failure_of(Loss(donated="loss")) is None and _failure_of(Loss(donated="shard")) is None
    assert _failure_of(Loss(donated=None)) == "device 0 of process 0 failed (Gloo: connection closed)"
    assert _failure_of(jnp.ones(())) is None


def test_watchdog_ends_the_process_only_for_a_failure_in_two_checks_in_a_row(monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.01)
    ended, looks = [], []

    def find_failure():
        looks.append("look")
        return "device 0 failed" if len(looks) in (3, 5, 7, 8) else None

    def end(self, reason, code):
        ended.append((len(looks), reason, code))
        self._stopped.set()

    monkeypatch.setattr(watchdog.Watchdog, "_end", end)
    dog = watchdog.Watchdog("process 0 of 2", find_failure)
    dog.start()
    dog.watch("step 4", 60)
    dog._thread.join(120)
    dog.stop()
    assert ended == [(8, "device 0 failed, and step 4 did not end", EXIT_FAILED)]


def test_step_done_raises_for_a_loss_donated_before_inspection():
    loss = jnp.float32(1)
    with LoopGuard() as guard:
        guard.step_done(7, {"loss": loss})
        jax.jit(lambda x: x + 1, donate_argnums=0)(loss)
        assert loss.is_deleted()
        with pytest.raises(ValueError, match="the loss of step 7 was donated before it could be looked at"):
            guard.step_done(8, {"loss": 1.0})


def test_error_in_the_loop_comes_before_the_check_of_the_last_loss_which_ends_a_loop_without_error():
    for error, expected in ((KeyError, KeyError), (None, NonFiniteError)):
        with pytest.raises(expected), LoopGuard() as guard:
            guard.step_done(1, {"loss": np.float32(np.inf)})
            if error:
                raise error


@pytest.mark.parametrize(
    "error, code",
    [
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(0), 0),
        (SystemExit(3), 3),
        (SystemExit("a text"), 1),
        (OSError(), 13),
    ],
    ids=repr,
)
def test_exit_code_of_a_process_that_an_exception_ends(error, code):
    assert loop_guard._exit_code(error) == code


def test_donated_loss_beside_counters_is_allowed_and_a_donated_counter_is_not():
    first, second = counted(0, 0), counted(0, 0)
    with LoopGuard() as guard:
        guard.step_done(1, first)
        first["loss"].delete()
        guard.step_done(2, second)
        second["skipped_in_a_row"].delete()
        with pytest.raises(ValueError, match="the loss of step 2 was donated"):
            guard.step_done(3, counted(0, 0))


def test_loop_guard_raises_for_calls_outside_of_the_block_and_wrong_arguments():
    guard = LoopGuard(step_timeout_s=None)
    with pytest.raises(ValueError, match="step_done of a LoopGuard outside of its block"):
        guard.step_done(1)
    with guard:
        guard.step_done(1)
        with pytest.raises(ValueError, match=r"no 'loss', their names are \['Loss'\]"):
            guard.step_done(2, {"Loss": 1.0})
        with pytest.raises(ValueError, match="timeout_s=-1"), guard.paused(-1):
            pass
        assert not guard.should_stop(2)
    with pytest.raises(ValueError, match="make one for each loop"), guard:
        pass


def test_loop_guard_raises_outside_of_the_main_thread():
    found = []

    def enter():
        try:
            with LoopGuard():
                pass
        except ValueError as error:
            found.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert re.search("outside of the main thread", found[0])


# ---------------------------------------------------------------------------------------------------------- replicas


def with_one_bad_copy(values, spec, device, spoil):
    """Returns a global array with a wrong copy on one device."""
    sharding = NamedSharding(mesh_of(2, 4), spec)
    good = jax.device_put(jnp.asarray(values), sharding)
    shards = [
        jax.device_put(spoil(shard.data) if shard.device.id == device else shard.data, shard.device)
        for shard in good.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(good.shape, sharding, shards)


def first_entry(value):
    """Spoils the first entry."""
    return lambda data: data.at[(0,) * data.ndim].set(value)


BAD = {
    "one entry": (np.arange(8.0), P(), first_entry(9.0)),
    "the sign of zero": (np.zeros(8), P(), first_entry(-0.0)),
    "bfloat16": (jnp.ones(8, jnp.bfloat16), P(), first_entry(1.0078125)),
    "bool": (np.ones((8, 2), bool), P(), first_entry(False)),
    "int8": (np.ones((8, 2), np.int8), P(), first_entry(2)),
    "exchanged rows": (np.arange(8.0), P(), lambda data: data[::-1]),
    "a slice that two devices hold": (np.arange(16.0).reshape(4, 4), P(None, "fsdp"), first_entry(99.0)),
    "a scalar": (np.float32(1), P(), lambda data: data + 1),
    "a key": (jax.random.key(0), P(), lambda key: jax.random.fold_in(key, 1)),
}


@pytest.mark.parametrize("values, spec, spoil", BAD.values(), ids=BAD)
def test_check_replicas_raises_for_a_differing_copy_with_leaf_and_device(values, spec, spoil):
    good = with_one_bad_copy(values, spec, None, spoil)
    bad = with_one_bad_copy(values, spec, 6, spoil)
    tree = {"fine": good, "layer": {"bias": Sharded(bad, (None,) * bad.ndim)}}
    with pytest.raises(
        ReplicaError, match=r"1 of 2 leaves .*'layer/bias', .* device (2 of process 0 and another on device )?6 of pro"
    ) as raised:
        check_replicas(tree)
    assert [device.id for device in raised.value.devices] == [6]  # the smallest group, not the others
    check_replicas({"fine": good})  # guard: correct copies pass


@pytest.mark.parametrize("counters", [{}, {"skipped_in_a_row": 0, "skipped_steps": 0}], ids=["loss", "skips"])
def test_loop_guard_raises_if_local_devices_hold_different_losses(counters):
    bad = with_one_bad_copy(np.float32(0.5), P(), 6, lambda loss: jnp.nextafter(loss, 1))
    text = (
        r"'the loss of step 2', float32\[\], is one thing on device 0 of .* and another on device 6 of process 0\. Look"
    )
    with LoopGuard() as guard:
        guard.step_done(1, {"loss": with_one_bad_copy(np.float32(0.5), P(), None, None)} | counters)  # guard: equal
        guard.step_done(2, {"loss": bad} | counters)
        with pytest.raises(ReplicaError, match=text) as raised:
            guard.step_done(3, {"loss": 1.0} | counters)
    assert [device.id for device in raised.value.devices] == [6] and raised.value.processes == [0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32], ids=lambda dtype: dtype.__name__)
def test_check_local_replicas_ignores_bits_of_nans_split_arrays_and_donated_arrays(dtype):
    mesh = mesh_of(2, 4)
    values = np.arange(8).astype(dtype)
    check_local_replicas("split", jax.device_put(values, NamedSharding(mesh, P(AXES))))
    copies = with_one_bad_copy(values, P(), 6, lambda data: data + 1)
    with pytest.raises(ReplicaError, match="device 6 of process 0"):
        check_local_replicas("loss", copies)
    copies.delete()
    check_local_replicas("loss", copies)
    if jnp.issubdtype(dtype, jnp.floating):
        nan = with_one_bad_copy(values * np.nan, P(), 6, lambda data: -data)
        bits = {np.asarray(shard.data).tobytes() for shard in nan.addressable_shards}
        assert len(bits) == 2  # guard: the NaNs differ in a bit
        check_local_replicas("loss", nan)
        one_nan = with_one_bad_copy(0 * values, P(), 6, lambda data: data.at[3].set(jnp.nan))
        with pytest.raises(ReplicaError, match="device 6 of process 0"):
            check_local_replicas("loss", one_nan)


def test_check_replicas_accepts_unreplicated_leaves_and_equal_copies():
    nan = jnp.array([jnp.nan, 1.0])
    mesh = mesh_of(2, 4)
    split = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P(AXES)))
    check_replicas({"nan": jax.device_put(nan, NamedSharding(mesh, P())), "split": split, "numpy": np.ones(3), "n": 1})
    check_replicas({})


def test_timer_of_the_watchdog_follows_the_limit_and_is_cancelled_at_the_end(monkeypatch):
    calls = []

    class Timer:
        @staticmethod
        def dump_traceback_later(seconds, **options):
            calls.append((seconds, options))

        @staticmethod
        def cancel_dump_traceback_later():
            calls.append("cancelled")

    monkeypatch.setattr(watchdog, "faulthandler", Timer)
    dog = watchdog.Watchdog("process 0", lambda: None)
    dog.watch("step 1", None)
    assert calls == []  # no limit, as before
    dog.watch("step 1", 5.0)
    dog.watch("step 2", 5.0)
    dog.rename("step 3")
    limit = 5 + watchdog.TIMER_GRACE_S
    assert calls == [(limit, {"exit": True, "file": dog._timer_stderr})] and limit > 5
    assert (dog._watched.activity, dog._watched.timeout_s) == ("step 3", 5)
    dog.watch("saving", None)
    assert calls[1:] == ["cancelled"]
    dog.watch("step 4", 7.0)
    dog._stopped.set()
    dog._restart_timer()
    assert calls[2:] == [(limit + 2, calls[0][1]), "cancelled"]


def test_watchdog_ends_the_process_at_its_limit_and_not_before(monkeypatch):
    now, ends, timers, waits = [100.0], [], [], []
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    dog = watchdog.Watchdog("process 0", lambda: None)
    monkeypatch.setattr(dog, "_restart_timer", lambda: timers.append(now[0]))

    def wait(seconds):
        waits.append(seconds)
        now[0] += 1
        if now[0] > 104:
            dog._stopped.set()

    monkeypatch.setattr(dog._stopped, "wait", wait)
    monkeypatch.setattr(dog, "_end", lambda reason, code: ends.append((now[0], reason, code)))
    dog._watched = watchdog._Watched("step 3", 100.0, 2.5)
    dog._look()
    assert ends[0] == (103, "step 3 has taken 3.0 s, more than its 2.5 s", EXIT_HUNG) and len(ends) == 2
    assert timers == [100, 101, 102, 103, 104]
    assert waits[:3] == [min(left, LOOK_EVERY_S) for left in (2.5, 1.5, 0.5)]
