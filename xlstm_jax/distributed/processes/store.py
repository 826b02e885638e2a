"""The key-value store of a job: processes exchange texts through it, and wait until a deadline at most.

  every process   posts its text
  process 0       waits for all texts, and posts its answer
  every process   reads the answer

It is the store of JAX's coordination service, which ``jax.distributed.initialize`` starts. A collective
(``multihost_utils.process_allgather``) would wait for ever for a process that does not come, needs the same number of
devices in every process, and starts the devices. JAX has no public name for the store, nor for the number of this
process before devices are started: both are ``private_names.job``.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence

import jax

from xlstm_jax.private_names import job

PEER_TIMEOUT_S = 600.0  # the default limit of a step; the slowest process may take so much longer to read its shards
GRACE_S = 1.0  # for the answer, which process 0 may post only at the deadline


class KeyValueStore:
    """A folder of the store for one exchange among ``processes``; ``me`` is the number of this process.

    Exchanges of one ``kind`` among the same processes are numbered, since a key can be set only once. Each process
    keeps its count in the store, not in Python: the count must end with the job, as the store does.
    """

    def __init__(self, kind: str, me: int, processes: Sequence[int]) -> None:
        self.me, self.processes = me, processes
        self._client = job.client
        self._folder = f"xlstm_jax/{kind}/{digest(str(list(processes)))}"
        self._number = self._client.key_value_increment(f"{self._folder}/count/{me}", 1)

    def post(self, name: str, text: str) -> None:
        self._client.key_value_set(f"{self._folder}/{self._number}/{name}", text)

    def read(self, name: str, deadline: float) -> str | None:
        """Waits for the text; None after the deadline."""
        # At least 1 ms, so that a text that is there is read also after the deadline.
        wait_ms = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            return self._client.blocking_key_value_get(f"{self._folder}/{self._number}/{name}", wait_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def missing(self) -> list[int]:
        """The processes that have not posted a text; if all have, process 0, which has not answered."""
        found = self._client.key_value_dir_get(f"{self._folder}/{self._number}/texts/")
        return sorted(set(self.processes) - {int(key.rsplit("/", 1)[1]) for key, _ in found}) or [self.processes[0]]

    def delete_previous(self) -> None:
        self._client.key_value_delete(f"{self._folder}/{self._number - 1}/")


def exchange_in(store: KeyValueStore, text: str, what: str, timeout_s: float) -> list[str]:
    """The texts of all processes of ``store``, in order. All call it, with the same ``what``, as "restore step 3".

    Raises:
      TimeoutError: processes did not come in time; says which.
      ValueError: processes do different things; says which of them does what.
    """
    deadline = time.monotonic() + timeout_s
    store.post(f"texts/{store.me}", json.dumps([what, text]))
    # One process judges for all: if each waited for all texts, a text that comes at the deadline would be there for
    # some and missing for others, and processes would part ways.
    if store.me == store.processes[0]:
        _answer(store, deadline)
    # Process 0 may have waited up to the deadline itself before it answers.
    answer = json.loads(store.read("answer", deadline + GRACE_S) or "{}")
    if "posted" not in answer:
        missing = answer.get("missing") or store.missing()
        raise TimeoutError(
            f"{named(missing)} did not come to {what} within {timeout_s:g} s, for which {named([store.me])} waits. See "
            f"the log of process {missing[0]}: it may have died, hang, be slow, or run other code. Then start the job "
            "again; where it is only slow, wait longer."
        )
    whats, texts = zip(*answer["posted"], strict=True)
    if len(set(whats)) > 1:
        groups = by_text(whats, store.processes)
        different = ", but ".join(f"{what} on {named(group)}" for what, group in groups.items())
        raise ValueError(f"processes do different things at once: {different}. Let all do the same in order.")
    return list(texts)


def _answer(store: KeyValueStore, deadline: float) -> None:
    """Posts the texts of all processes; or, if some did not come, their numbers."""
    posted = [store.read(f"texts/{process}", deadline) for process in store.processes]
    missing = [process for process, text in zip(store.processes, posted, strict=True) if text is None]
    if missing:
        store.post("answer", json.dumps({"missing": missing}))
        return
    # All processes have posted here, so they have read the previous answer. The current one is still to be read.
    store.delete_previous()
    store.post("answer", json.dumps({"posted": [json.loads(text) for text in posted if text]}))


def by_text(texts: Sequence[str], processes: Sequence[int]) -> dict[str, list[int]]:
    """The processes grouped by the text that they sent."""
    groups = defaultdict(list)
    for process, text in zip(processes, texts, strict=True):
        groups[text].append(process)
    return groups


def named(processes: Sequence[int]) -> str:
    """As "process 3", or "processes 0, 1"."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, sorted(processes)))}"


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]
