"""Key-value store of a job: processes exchange texts, and wait at most until a deadline.

  every process   posts its text
  process 0       waits for the texts, and posts an answer
  every process   reads the answer

The store belongs to JAX's coordination service, which ``jax.distributed.initialize`` starts. A collective instead
(``multihost_utils.process_allgather``) would wait forever for a missing process, need equal device counts in every
process, and start the devices. JAX has no public name for the store, nor for the process index before devices are
started: both are in ``private_names.job``.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence

import jax

from xlstm_jax.private_names import job

PEER_TIMEOUT_S = 600.0  # the default limit of a step; the slowest process may need this long to read its shards
GRACE_S = 1.0  # extra wait for the answer, which process 0 may post only at the deadline


class KeyValueStore:
    """Folder of the job's key-value store for one exchange of texts; ``me`` is the index of this process.

    Exchanges of one ``kind`` among the same processes are numbered, since a key can be set only once. The count of each
    process is in the store instead of in Python: the count must end with the job, as the store does.
    """

    def __init__(self, kind: str, me: int, processes: Sequence[int]) -> None:
        self.me, self.processes = me, processes
        self._client = job.client
        self._folder = f"xlstm_jax/{kind}/{digest(str(list(processes)))}"
        self._number = self._client.key_value_increment(f"{self._folder}/count/{me}", 1)

    def post(self, name: str, text: str) -> None:
        self._client.key_value_set(f"{self._folder}/{self._number}/{name}", text)

    def read(self, name: str, deadline: float) -> str | None:
        """Waits until a process has posted a text under ``name`` in the exchange of this store, and returns the text.

        ``name`` is a key in the folder of the exchange. None if there is no text at ``deadline``, a time of
        ``time.monotonic()``. A text that exists is returned even after the deadline.
        """
        # Wait at least 1 ms, so that an existing text is read even after the deadline.
        wait_ms = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            return self._client.blocking_key_value_get(f"{self._folder}/{self._number}/{name}", wait_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def missing(self) -> list[int]:
        """Returns the indices of the processes to wait for in this exchange of texts, in ascending order.

        These are the processes that have not posted their text. If every text is posted, the result is the first of
        ``processes``, which collects the texts and has not yet posted the collection.
        """
        entries = self._client.key_value_dir_get(f"{self._folder}/{self._number}/texts/")
        return sorted(set(self.processes) - {int(key.rsplit("/", 1)[1]) for key, _ in entries}) or [self.processes[0]]

    def delete_previous(self) -> None:
        self._client.key_value_delete(f"{self._folder}/{self._number - 1}/")


def exchange_in(store: KeyValueStore, text: str, action: str, timeout_s: float) -> list[str]:
    """Posts this process's ``text``, and returns the texts of all ``store.processes``, in order.

    ``store`` is the folder of one exchange in the job's key-value store. Every process of ``store.processes`` must call
    this function. ``action`` names the purpose for errors, as "restore step 3", and must be the same in every process.

    Raises:
      TimeoutError: processes are missing after ``timeout_s`` seconds; names the processes.
      ValueError: processes pass different ``action``; names the processes of each.
    """
    deadline = time.monotonic() + timeout_s
    store.post(f"texts/{store.me}", json.dumps([action, text]))
    # Process 0 decides for every process: if each waited by itself, a text that arrives at the deadline could be found
    # by some and missed by others, which would then disagree.
    if store.me == store.processes[0]:
        _answer(store, deadline)
    # Process 0 may answer only at the deadline.
    answer = json.loads(store.read("answer", deadline + GRACE_S) or "{}")
    if "posted" not in answer:
        missing = answer.get("missing") or store.missing()
        raise TimeoutError(
            f"{named(missing)} did not come to {action} within {timeout_s:g} s, for which {named([store.me])} waits. "
            f"See the log of process {missing[0]}: it may have died, hang, be slow, or run other code. Restart the "
            "job, or wait longer if the process is only slow."
        )
    actions, texts = zip(*answer["posted"], strict=True)
    if len(set(actions)) > 1:
        groups = by_text(actions, store.processes)
        different = ", but ".join(f"{action} on {named(group)}" for action, group in groups.items())
        raise ValueError(f"processes do different things at once: {different}. Let all do the same in order.")
    return list(texts)


def _answer(store: KeyValueStore, deadline: float) -> None:
    """Posts the answer to an exchange, in the first process: the texts of all processes, or the missing processes.

    Waits for the text of each process until ``deadline``. The answer is JSON: {"posted": [action, text] of each
    process, in order}, or {"missing": indices} if texts are missing.
    """
    posted = [store.read(f"texts/{process}", deadline) for process in store.processes]
    missing = [process for process, text in zip(store.processes, posted, strict=True) if text is None]
    if missing:
        store.post("answer", json.dumps({"missing": missing}))
        return
    # Every process has posted here, so the previous answer has been read everywhere. The current one has not.
    store.delete_previous()
    store.post("answer", json.dumps({"posted": [json.loads(text) for text in posted if text]}))


def by_text(texts: Sequence[str], processes: Sequence[int]) -> dict[str, list[int]]:
    """Returns a dict from each different text to the indices of the processes that posted the text.

    ``texts[i]`` is the text of ``processes[i]``; texts and indices keep their order.
    """
    groups = defaultdict(list)
    for process, text in zip(processes, texts, strict=True):
        groups[text].append(process)
    return groups


def named(processes: Sequence[int]) -> str:
    """Formats process indices as "process 3", or "processes 0, 1", in ascending order."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, sorted(processes)))}"


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]
