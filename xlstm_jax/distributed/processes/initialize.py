"""Joining the processes of a job.

  initialize_distributed()                    under SLURM, Open MPI, Kubernetes, on TPU pods: joins; alone: does nothing
  initialize_distributed(address, n, id)      anywhere else

Every wait is bounded: a job with a missing or lost process should end soon, so that the scheduler restarts the job. A
process that gives up sends the reason to the rest of the job, and ends it (``exit.py``).
"""

import contextlib
import ipaddress
import math
import os
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from xlstm_jax.distributed.processes.exit import leave_with_others
from xlstm_jax.formatting import named_values
from xlstm_jax.private_names import ClusterEnv, job

INITIALIZATION_TIMEOUT_S = 60
HEARTBEAT_TIMEOUT_S = 600  # the default limit of a step: a process that pauses for less is not dead
SHUTDOWN_TIMEOUT_S = 30
RETRY_S = 0.2  # between attempts to reach the coordinator


class Membership(NamedTuple):
    """Identity of this process in a job: its number, the number of processes, and the address of process 0.

    ``bind`` is the listening address of process 0; None for every interface.
    """

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None
    bind: str | None


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    initialization_timeout_s: int = INITIALIZATION_TIMEOUT_S,
    heartbeat_timeout_s: int = HEARTBEAT_TIMEOUT_S,
    shutdown_timeout_s: int = SHUTDOWN_TIMEOUT_S,
) -> None:
    """Joins the processes of a job, so that JAX sees the devices of every process. Call before any use of a device.

    Without arguments JAX detects the cluster manager of the program: SLURM, Open MPI, Kubernetes, TPU pods. If there
    is no cluster, or only a single process, nothing happens, so the same program also runs alone. A second call with
    the same arguments does nothing.

    Args:
      coordinator_address: "host:port" of process 0, as seen from the rest of the job. Process 0 listens on this address
        only; set JAX_COORDINATOR_BIND_ADDRESS if its local address differs. If JAX detects the address, process 0
        listens on the local address to which the host name resolves. If the name resolves only to loopback or to no
        address of this host, process 0 listens on every interface.
      num_processes, process_id: the number of processes, and the index of this process, from 0.
      local_device_ids: indices, on this host, of the accelerators that this process uses. Default: every accelerator;
        under SLURM and Open MPI one accelerator, whose index is the local index of the process. There start one process
        per accelerator, or pass the list.
      initialization_timeout_s: seconds to wait until every process has joined. If the coordinator is missing, this
        process raises a ``TimeoutError``. If the coordinator is found but a third process is missing, JAX's runtime
        aborts this process (SIGABRT, "RegisterTask ... Deadline Exceeded").
      heartbeat_timeout_s: if a process has sent no heartbeat for this number of seconds (its host is gone, or the
        process was stopped), JAX's runtime aborts the rest of the job (SIGABRT). With a ``LoopGuard`` pass at least its
        ``step_timeout_s``, because a process may pause for this time. The job ends sooner if a process is killed in a
        collective or leaves by an error: the other processes notice at once.
      shutdown_timeout_s: seconds that an exiting process waits for the rest of the job to exit.
    Raises:
      ValueError: the first three arguments are given only in part, or contradict each other.
      TypeError: ``num_processes`` or ``process_id`` is not an int.
      TimeoutError: nothing listens at the coordinator's address.
      RuntimeError: this process has joined with other arguments, or JAX has already started its devices.

    >>> initialize_distributed()  # a single process joins nothing
    >>> jax.process_count()
    1
    """
    member = _given_membership(coordinator_address, num_processes, process_id, local_device_ids)
    member = member or _detected_membership(local_device_ids, initialization_timeout_s)
    if member is None or _has_joined(member) or member.num_processes == 1:
        return
    deadline = time.monotonic() + initialization_timeout_s
    # JAX's wait for the coordinator ends in an abort of the process; this wait ends in an error with a cure.
    if member.process_id != 0:
        _wait_for_coordinator(member, deadline, initialization_timeout_s)
    jax.distributed.initialize(
        member.coordinator_address,
        member.num_processes,
        member.process_id,
        local_device_ids=member.local_device_ids,
        cluster_detection_method="deactivate",  # done above; detection would override these arguments
        coordinator_bind_address=member.bind,
        initialization_timeout=max(1, math.ceil(deadline - time.monotonic())),
        heartbeat_timeout_seconds=heartbeat_timeout_s,
        shutdown_timeout_seconds=shutdown_timeout_s,
    )
    # Immediately after joining: from here on an error in one process would leave the others waiting in a collective.
    leave_with_others()


def _given_membership(
    address: str | None, num_processes: int | None, process_id: int | None, local_device_ids: Sequence[int] | None
) -> Membership | None:
    """Returns the membership in a job (address, number of processes, index) that a user's arguments describe.

    None if address, number and index are all None. ``local_device_ids`` become part of the result, unchecked. Raises a
    ``ValueError`` if the user gives only some of the first three arguments, or values that do not fit, and a
    ``TypeError`` if a number is not an int.
    """
    arguments = {"coordinator_address": address, "num_processes": num_processes, "process_id": process_id}
    if all(value is None for value in arguments.values()):
        return None
    if address is None or num_processes is None or process_id is None:
        passed = {name: value for name, value in arguments.items() if value is not None}
        missing = " and ".join(name for name in arguments if name not in passed)
        raise ValueError(
            f"initialize_distributed got {named_values(passed)}, but not {missing}. Pass all three, "
            "or none of them, where SLURM, Open MPI, Kubernetes or a TPU pod starts the processes."
        )
    wrong = {name: value for name, value in list(arguments.items())[1:] if type(value) is not int}
    if wrong:
        raise TypeError(f"initialize_distributed got {named_values(wrong)}; write int(...) around it.")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process_id={process_id} is not one of 0 ... {num_processes - 1} (num_processes).")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"coordinator_address={address!r} is not host:port, as '10.0.0.1:1234'.")
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address)
    return Membership(address, num_processes, process_id, local_device_ids, bind)


def _detected_membership(local_device_ids: Sequence[int] | None, timeout_s: int) -> Membership | None:
    """Returns the membership in a job (address, number of processes, index) that JAX detects; None without a cluster.

    JAX detects the job from a cluster manager, such as SLURM. ``local_device_ids`` are the user's indices of
    accelerators (None: detected, too), and ``timeout_s`` limits the detection. Raises a ``ValueError`` if
    JAX_COORDINATOR_ADDRESS is set, but there is no cluster. (``jax.distributed.initialize()`` cannot detect without
    joining.)
    """
    variable = os.environ.get("JAX_COORDINATOR_ADDRESS")
    detected = ClusterEnv.auto_detect_unset_distributed_params(variable, None, None, local_device_ids, None, timeout_s)
    address, num_processes, process_id, device_ids = detected
    if address is not None and num_processes is not None and process_id is not None:
        # By default JAX listens on every interface, where anybody who reaches the port can join the job.
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or (_local_address(address) if process_id == 0 else None)
        return Membership(address, num_processes, process_id, device_ids, bind)
    if variable is not None:
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS={variable!r} is set, but JAX finds no cluster that would say which process this "
            "is. Pass coordinator_address, num_processes and process_id, or unset the variable."
        )
    return None


def _local_address(address: str) -> str | None:
    """Returns "IP:port" at which this host can listen, for ``address`` "name:port"; None if the name gives no such IP.

    Each process resolves the name by itself, and may get another IP. Two kinds of results are useless: an IP of another
    host (behind address translation), and loopback for this host's name (Debian's /etc/hosts).
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        addresses = {str(info[4][0]): info[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    for candidate, family in addresses.items():
        if candidate != host and ipaddress.ip_address(candidate.partition("%")[0]).is_loopback and host != "localhost":
            continue
        # A host can bind only to its local addresses. Any free port (0) will do: only the address is tested.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((candidate, 0))
            return f"[{candidate}]:{port}" if ":" in candidate else f"{candidate}:{port}"
    return None


def _has_joined(member: Membership) -> bool:
    """Returns whether this process has already joined the job as ``member``; False if the process is in no job.

    Raises a ``RuntimeError`` if the process has joined with another address, number of processes or index.
    """
    if not jax.distributed.is_initialized():
        return False
    # Avoid jax.process_index(), which would start the devices.
    now = job.coordinator_address, job.num_processes, job.process_id
    if now != member[:3]:
        raise RuntimeError(
            f"initialize_distributed: this is process {now[2]} of {now[1]} at {now[0]} already, and cannot become "
            f"process {member.process_id} of {member.num_processes} at {member.coordinator_address}. Call it once."
        )
    return True


def _wait_for_coordinator(member: Membership, deadline: float, timeout_s: float) -> None:
    """Blocks until something listens at the coordinator's address, or raises a ``TimeoutError`` after ``deadline``.

    ``deadline`` is a time of ``time.monotonic()``; ``timeout_s``, the full wait, is only for the text of the error.
    """
    host, _, port = member.coordinator_address.rpartition(":")
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(left, RETRY_S)).close()
            return
        except OSError as error:
            if left <= 0:
                raise TimeoutError(
                    f"process {member.process_id} of {member.num_processes} found nothing that listens at "
                    f"{member.coordinator_address} within {timeout_s:g} s ({error}). Process 0 listens there as soon "
                    "as it runs: see its log, and whether this host reaches that address and port."
                ) from error
            time.sleep(min(RETRY_S, left))
