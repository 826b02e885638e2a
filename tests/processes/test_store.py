"""Exchange of texts between the processes of a job: threads stand for processes, and share a store in memory.

``test_processes.py`` starts real processes, whose store is JAX's.
"""

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from xlstm_jax.distributed.checkpoint import checksums
from xlstm_jax.distributed.processes import collective_errors, same_everywhere, store
from xlstm_jax.distributed.processes.collective_errors import (
    MAX_CAUSE_CHARS,
    allgather_text,
    cause_of,
    interruption,
    raise_on_all,
)
from xlstm_jax.distributed.processes.same_everywhere import LINES_SHOWN, compare
from xlstm_jax.distributed.processes.store import KeyValueStore, exchange_in

ENOUGH_S = 20.0  # for a process that comes
SOON_S = 0.05  # for a process that does not come


class Store:
    """Store with the methods of JAX's: a key is set once, a wait has a limit, and a name with a last slash is a folder.

    Like JAX's it does not wait for a negative time, not even for a text that is there.
    """

    def __init__(self):
        self.texts, self.counts, self.changed = {}, Counter(), threading.Condition()

    def key_value_increment(self, key, by):
        with self.changed:
            self.counts[key] += by
            return self.counts[key]

    def key_value_set(self, key, text):
        with self.changed:
            if key in self.texts:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.texts[key] = text
            self.changed.notify_all()

    def blocking_key_value_get(self, key, wait_ms):
        with self.changed:
            if wait_ms <= 0 or not self.changed.wait_for(lambda: key in self.texts, wait_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.texts[key]

    def key_value_dir_get(self, folder):
        with self.changed:
            return [(key, text) for key, text in self.texts.items() if key.startswith(folder)]

    def key_value_delete(self, folder):
        with self.changed:
            self.texts = {key: text for key, text in self.texts.items() if not key.startswith(folder)}


class Job:
    """Job of several threads, each with its own index."""

    def __init__(self):
        self.client, self._of_thread = Store(), threading.local()

    @property
    def process_id(self):
        return self._of_thread.index

    @property
    def num_processes(self):
        return self._of_thread.count

    def run(self, work, processes, count):
        """Calls ``work(index)`` as each of ``processes`` at once; returns the results or errors, in order."""

        def as_process(index):
            self._of_thread.index, self._of_thread.count = index, count
            try:
                return work(index)
            except (Exception, KeyboardInterrupt) as error:
                return error

        with ThreadPoolExecutor(len(processes)) as threads:
            return list(threads.map(as_process, processes))


@pytest.fixture
def job(monkeypatch):
    running = Job()
    for module in (store, collective_errors, same_everywhere):
        monkeypatch.setattr(module, "job", running)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(store, "GRACE_S", 1.0)
    return running


class WaitsAfterPosting(KeyValueStore):
    """Store of an exchange that calls ``then`` after this process has posted its text, before it waits for others."""

    def __init__(self, me, processes, then):
        super().__init__("test", me, processes)
        self._then = then

    def post(self, name, text):
        super().post(name, text)
        if name.startswith("texts/"):
            self._then()


def exchanged(job, processes, coming=None, timeout_s=ENOUGH_S):
    """Returns what each process gets that posts "text of <index>"; only the processes ``coming`` come.

    None of these waits before all of them have posted: within a short ``timeout_s`` a thread may not even start.
    """
    coming = processes if coming is None else coming
    all_have_posted = threading.Barrier(len(coming))

    def work(me):
        of_exchange = WaitsAfterPosting(me, processes, then=lambda: all_have_posted.wait(ENOUGH_S))
        return exchange_in(of_exchange, f"text of {me}", "count", timeout_s)

    return job.run(work, coming, len(processes))


def texts(errors, kind):
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    return [str(error) for error in errors]


# ------------------------------------------------------------------------------------------------- exchange of texts


def test_every_process_gets_the_texts_of_all_in_the_order_of_the_processes(job):
    for _ in range(2):
        assert exchanged(job, [1, 3, 4]) == [["text of 1", "text of 3", "text of 4"]] * 3


def test_exchanges_of_different_processes_at_the_same_time_are_separate(job):
    def work(me):
        processes = [0, 1] if me < 2 else [2, 3]
        return exchange_in(KeyValueStore("test", me, processes), f"text of {me}", "count", ENOUGH_S)

    first, second = ["text of 0", "text of 1"], ["text of 2", "text of 3"]
    assert job.run(work, range(4), 4) == [first, first, second, second]


def test_store_holds_the_texts_of_the_last_exchange_alone(job):
    """Texts that stay in the store for each step of a training would fill the memory of the coordinator."""
    for _ in range(3):
        exchanged(job, [0, 1, 2])
    assert sorted(key.rpartition("/")[2] for key in job.client.texts) == ["0", "1", "2", "answer"]


@pytest.mark.parametrize("absent, told", [([2], "process 2"), ([1, 2], "processes 1, 2"), ([0], "process 0")], ids=str)
def test_processes_that_wait_in_vain_name_the_absent_ones(job, monkeypatch, absent, told):
    monkeypatch.setattr(store, "GRACE_S", SOON_S)
    coming = [process for process in range(3) if process not in absent]
    for me, text in zip(coming, texts(exchanged(job, range(3), coming, timeout_s=SOON_S), TimeoutError), strict=True):
        assert text.startswith(f"{told} did not come to count within 0.05 s, for which process {me} waits. See the log")
        assert f"See the log of process {absent[0]}:" in text


def test_late_process_raises_the_error_of_the_processes_that_waited(job):
    """The first process decides: the late one has posted its text, but must not go on alone."""
    exchanged(job, range(3), [0, 1], timeout_s=SOON_S)
    (text,) = texts(exchanged(job, range(3), [2]), TimeoutError)
    assert text.startswith("process 2 did not come to count within")


def test_process_waits_longer_for_the_first_process_which_answers_at_its_own_deadline(job, monkeypatch):
    monkeypatch.setattr(store, "GRACE_S", ENOUGH_S)
    process_1_waits = threading.Event()

    def work(me):
        if me == 1:
            waiting = WaitsAfterPosting(1, range(2), then=process_1_waits.set)
            return exchange_in(waiting, "text of 1", "count", SOON_S)
        assert process_1_waits.wait(ENOUGH_S)
        time.sleep(2 * SOON_S)  # process 0 comes after the deadline of process 1
        return exchange_in(KeyValueStore("test", 0, range(2)), "text of 0", "count", ENOUGH_S)

    assert job.run(work, range(2), 2) == [["text of 0", "text of 1"]] * 2


def test_process_without_an_answer_names_the_first_process_if_all_texts_are_there(job, monkeypatch):
    monkeypatch.setattr(store, "GRACE_S", SOON_S)
    KeyValueStore("test", 0, range(2)).post("texts/0", '["count", ""]')  # and ends before it answers
    (text,) = texts(exchanged(job, range(2), [1], timeout_s=SOON_S), TimeoutError)
    assert text.startswith("process 0 did not come to count")


def test_processes_that_do_different_things_all_raise_and_name_both(job):
    def work(me):
        action = "save step 3" if me == 1 else "restore step 2"
        return exchange_in(KeyValueStore("test", me, range(3)), "", action, ENOUGH_S)

    told = (
        "processes do different things at once: restore step 2 on processes 0, 2, but save step 3 on process 1. "
        "Let all do the same in order."
    )
    assert texts(job.run(work, range(3), 3), ValueError) == [told] * 3


def test_text_that_is_there_is_read_after_the_deadline_and_other_errors_of_the_store_are_raised(job, monkeypatch):
    read = KeyValueStore("test", 0, [0])
    read.post("here", "a text")
    past = time.monotonic() - 10
    assert (read.read("here", past), read.read("not here", past)) == ("a text", None)

    def gone(key, wait_ms):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the coordinator is gone")

    monkeypatch.setattr(job.client, "blocking_key_value_get", gone)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the coordinator is gone"):
        read.read("here", past)


# --------------------------------------------------------------------------------------------------------- comparison


def compared(job, entries, processes=range(4)):
    return job.run(lambda me: compare(entries(me), "plan", me, processes, ENOUGH_S), processes, len(processes))


def test_comparison_of_equal_entries_raises_nothing(job):
    assert compared(job, lambda me: {"seed": "17", "lr": "0.1"}) == [None] * 4


def test_comparison_tells_every_process_the_entries_that_differ_of_the_largest_group_first(job):
    def entries(me):
        own = {0: {"lr": "0.2"}, 1: {"lr": "0.1"}, 2: {}, 3: {"lr": "0.1"}}[me]
        return {"seed": "18" if me == 2 else "17", "layers": "2"} | own

    told = (
        "the plan differs between processes:\n"
        "  'seed' is 17 on processes 0, 1, 3, but 18 on process 2\n"
        "  'lr' is 0.1 on processes 1, 3, but 0.2 on process 0, but absent on process 2"
    )
    assert texts(compared(job, entries), ValueError) == [told] * 4


@pytest.mark.parametrize("more", [0, 2])
def test_comparison_lists_a_limited_number_of_entries_and_counts_the_rest(job, more):
    errors = compared(job, lambda me: {f"entry {i:02}": str(me) for i in range(LINES_SHOWN + more)}, range(2))
    head, *lines = texts(errors, ValueError)[0].splitlines()
    assert head == "the plan differs between processes:"
    shown = [f"  'entry {i:02}' is 0 on process 0, but 1 on process 1" for i in range(LINES_SHOWN)]
    assert lines == shown + [f"  and {more} more"] * (more > 0)


# ------------------------------------------------------------------------------------------- checksums of a checkpoint


def test_process_0_adds_the_checksums_of_all_processes_modulo_2_to_the_32(job, monkeypatch):
    monkeypatch.setattr(checksums, "job", job)
    monkeypatch.setattr(jax, "process_count", lambda: 3)

    def work(me):
        sums = checksums.SavedSums({}, ENOUGH_S, "a folder")
        return sums._of_all({"w": [me, 2**32 - 1]}, sums._store)

    for _ in range(2):
        of_all, *own = job.run(work, range(3), 3)
        assert of_all == {"w": [0 + 1 + 2, 2**32 - 3]}
        assert own == [{"w": [1, 2**32 - 1]}, {"w": [2, 2**32 - 1]}]
    assert len(job.client.texts) == 2  # those of the last save


def test_process_0_names_the_process_whose_checksums_do_not_come(job, monkeypatch):
    monkeypatch.setattr(checksums, "job", job)
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def work(me):
        sums = checksums.SavedSums({}, SOON_S, "a folder")
        return sums._of_all({}, sums._store)

    assert texts(job.run(work, [0], 2), TimeoutError) == ["the checksums of process 1 did not come within 0.05 s."]


# --------------------------------------------------------------------------------------------------- collective errors


def together(job, work, failure=(ValueError, TypeError, KeyError)):
    return job.run(lambda me: raise_on_all(lambda: work(me), failure, "read", ENOUGH_S), range(3), 3)


def failing(**errors):
    """Returns work that raises the error of the process ``p<index>``, and returns the index in the others."""

    def work(me):
        if error := errors.get(f"p{me}"):
            raise error
        return me

    return work


def test_without_a_failure_every_process_gets_its_own_result(job):
    assert together(job, failing()) == [0, 1, 2]


def test_failure_of_a_process_is_raised_in_all_with_its_type_and_name(job):
    errors = together(job, failing(p1=TypeError("no text")))
    assert texts(errors, TypeError) == ["process 1: no text"] * 3
    assert isinstance(errors[1].__cause__, TypeError) and errors[0].__cause__ is None


def test_failure_of_another_type_becomes_the_first_type_with_the_name_of_its_own(job):
    lost = OSError("the disk is gone")
    assert texts(together(job, failing(p2=lost)), ValueError) == ["process 2: OSError: the disk is gone"] * 3


def test_equal_failures_of_all_processes_are_told_once(job):
    errors = together(job, failing(**{f"p{me}": TypeError("no text") for me in range(3)}))
    assert texts(errors, TypeError) == ["no text"] * 3


def test_of_failures_of_different_types_all_processes_raise_the_last_of_the_list(job):
    errors = together(job, failing(p0=TypeError("no text"), p2=ValueError("no step")))
    assert texts(errors, TypeError) == ["process 0: no text; process 2: no step"] * 3


def test_processes_that_have_not_joined_cannot_exchange_texts_and_one_alone_need_not(job, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    assert allgather_text("a text", "read") == ["a text"]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="have not joined; call initialize_distributed at the start"):
        allgather_text("a text", "read")


def test_interruption_behind_an_error_goes_on_in_its_place(job):
    def work(me):
        try:
            raise KeyboardInterrupt("stop")
        except KeyboardInterrupt:
            raise OSError("a library turned it into an error") from None

    found = job.run(lambda me: raise_on_all(lambda: work(me), ValueError, "read", ENOUGH_S), [0], 1)
    assert [str(error) for error in found] == ["stop"] and isinstance(found[0], KeyboardInterrupt)


def test_cause_of_an_error_is_the_end_of_its_chain_on_a_single_line_of_limited_length():
    def error(text, cause=None):
        made = OSError(text)
        made.__cause__ = cause
        return made

    assert cause_of(error("read", error("open", error("no\n  such file")))) == "OSError: no such file"
    assert cause_of(error("")) == "OSError: without a message"
    assert (
        cause_of(error("a [source locations='x.cc'] b")) == cause_of(error("a [tensorstore_spec='x']")) == "OSError: a"
    )
    longest = "x" * (MAX_CAUSE_CHARS - len("OSError: "))
    assert cause_of(error(longest)) == f"OSError: {longest}"
    assert cause_of(error(longest + "y")) == f"OSError: {longest}..."


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interruption_is_found_behind_causes_contexts_groups_and_in_texts(kind):
    original, quoted = kind("stop"), OSError(f"comparison failed:\n{kind.__name__}: ")

    def behind(**links):
        error = OSError("outer")
        for name, value in links.items():
            setattr(error, name, value)
        return error

    for error in (behind(__cause__=original), behind(__context__=original), BaseExceptionGroup("two", [original])):
        assert interruption(behind(__cause__=error), None) is original
    assert type(interruption(behind(__cause__=quoted), None)) is kind
    assert interruption(behind(__context__=original), original) is None  # was being handled before
    assert interruption(behind(__cause__=asyncio.CancelledError()), None) is None  # because another task has failed
    assert interruption(behind(__cause__=OSError(f"not at the start of a line: {kind.__name__}")), None) is None
