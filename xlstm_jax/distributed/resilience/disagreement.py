"""The report of devices that disagree: what ``check_replicas`` and a replayed step raise.

  what was found: leaf by leaf. What to do.

``LoopGuard`` sends the report of an error that leaves its block to all processes, and names a device that has failed by
the same function.
"""

from collections.abc import Mapping, Sequence

from xlstm_jax.distributed.processes.devices import Device

NAMED_AT_MOST = 5


class DisagreementError(RuntimeError):
    """Error: devices hold or compute different bits where they must be equal.

    Args:
      found: what was found.
      leaves: the paths of the leaves that differ, with a text for each.
      cure: what to do, as sentences.
    Attributes:
      devices: the devices in question.
      processes: the indices of their processes.
      leaves: the paths of the leaves that differ.

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
    """Returns the devices as text, with their processes: "3 of process 0, 5 of process 1"."""
    return ", ".join(f"{device.id} of process {device.process_index}" for device in devices)


def _first_few(texts: Sequence[str]) -> str:
    """Returns the first texts, and dots for further ones."""
    return "; ".join(texts[:NAMED_AT_MOST]) + ("; ..." if len(texts) > NAMED_AT_MOST else "")
