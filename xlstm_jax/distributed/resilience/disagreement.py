"""Error of ``check_replicas`` and of a replayed step: reports devices that disagree.

  message    summary: first leaf; second leaf; ... Cure.

``LoopGuard`` sends the report of an error that leaves its block to every process, and also names a failed device by
``named_devices``.
"""

from collections.abc import Mapping, Sequence

from xlstm_jax.distributed.processes.devices import Device

NAMED_AT_MOST = 5


class DisagreementError(RuntimeError):
    """Error: devices hold or compute different bits where they must be equal.

    Args:
      found: summary of the disagreement, the first part of the message.
      devices: the devices in question.
      leaves: a text for each leaf with different bits, by path.
      cure: advice to the user, in sentences.
    Attributes:
      devices: the devices in question, sorted by id.
      processes: the sorted indices of the devices' processes.
      leaves: the paths of the leaves with different bits.

    >>> error = DisagreementError("two values", jax.devices()[:1], {"kernel": "'kernel', [4]"}, "Restore a checkpoint.")
    >>> error.processes, str(error)
    ([0], "two values: 'kernel', [4]. Restore a checkpoint.")
    """

    def __init__(self, found: str, devices: Sequence[Device], leaves: Mapping[str, str], cure: str) -> None:
        super().__init__(f"{found}: {_first_few([*leaves.values()])}. {cure}")
        self.devices = sorted(set(devices), key=lambda device: device.id)
        self.processes = sorted({device.process_index for device in devices})
        self.leaves = list(leaves)


def named_devices(devices: Sequence[Device]) -> str:
    """Returns the ids of the devices as text, in the given order, with processes: "3 of process 0, 5 of process 1"."""
    return ", ".join(f"{device.id} of process {device.process_index}" for device in devices)


def _first_few(texts: Sequence[str]) -> str:
    """Returns the first ``NAMED_AT_MOST`` texts, joined by "; ", with "; ..." at the end if further texts follow."""
    return "; ".join(texts[:NAMED_AT_MOST]) + ("; ..." if len(texts) > NAMED_AT_MOST else "")
