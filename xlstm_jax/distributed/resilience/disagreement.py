"""The report of devices that disagree: what ``check_replicas`` and a replayed step raise.

``LoopGuard`` names a device that has failed by the same function.
"""

from collections.abc import Sequence

from xlstm_jax.distributed.processes.devices import Device

NAMED_AT_MOST = 5


class DisagreementError(RuntimeError):
    """Error: devices hold or compute different bits where they must be equal.

    Attributes:
      devices: the devices in question.
      processes: the indices of their processes.
      leaves: the paths of the leaves that differ.

    >>> DisagreementError("text", jax.devices()[:1], ["params/kernel"]).processes
    [0]
    """

    def __init__(self, text: str, devices: Sequence[Device] = (), leaves: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.devices = sorted(set(devices), key=lambda device: device.id)
        self.processes = sorted({device.process_index for device in devices})
        self.leaves = list(leaves)


def named_devices(devices: Sequence[Device]) -> str:
    """Returns the devices as text, with their processes: "3 of process 0, 5 of process 1"."""
    return ", ".join(f"{device.id} of process {device.process_index}" for device in devices)


def first_few(texts: Sequence[str]) -> str:
    """Returns the first texts, and dots for further ones."""
    return "; ".join(texts[:NAMED_AT_MOST]) + ("; ..." if len(texts) > NAMED_AT_MOST else "")
