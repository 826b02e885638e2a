"""How a program joins the other processes of its job.

  initialize_distributed()                    under SLURM, Open MPI, Kubernetes, on TPU pods: joins; alone: does nothing
  initialize_distributed(address, n, id)      anywhere else

All waits are bounded: a job whose processes do not find each other, or lose one, should end soon, so that the scheduler
starts it again. A process that gives up ends the others, with its reason (``leaving.py``).
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

from xlstm_jax.distributed.processes.leaving import leave_with_others
from xlstm_jax.private_names import ClusterEnv, job
from xlstm_jax.wording import named_values

INITIALIZATION_TIMEOUT_S = 60
HEARTBEAT_TIMEOUT_S = 600  # the default limit of a step: a process that pauses for a shorter time is not dead
SHUTDOWN_TIMEOUT_S = 30
RETRY_S = 0.2  # between attempts to reach the coordinator


class Membership(NamedTuple):
    """Which process of a job this is, of how many, and where process 0 listens.

    ``bind`` is the address that process 0 listens on; None: on all interfaces.
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
    """Joins the processes of one job, so that JAX sees the devices of all. Call it before the first use of a device.

    Without arguments JAX looks for the cluster that started the program: SLURM, Open MPI, Kubernetes, TPU pods. If it
    finds no cluster, or a single process, nothing happens, so the same program runs alone. A second call with the same
    arguments does nothing.

    Args:
      coordinator_address: "host:port" of process 0, as the other processes reach it. Process 0 listens on this address
        only; set JAX_COORDINATOR_BIND_ADDRESS if its own address is another. It also listens only on an address that
        JAX found, unless this is a name that stands for no address of its host but loopback: then it listens on all.
      num_processes, process_id: how many processes there are, and the number of this process, from 0.
      local_device_ids: the accelerators of this host that this process uses. By default all of them, or, under SLURM
        and Open MPI, the one with the number of the process on its host: start one process for each, or pass the list.
      initialization_timeout_s: how long to wait for the others. A process that finds no coordinator raises. JAX's
        runtime ends a process that found the coordinator but waits for a third process (SIGABRT, "RegisterTask ...
        Deadline Exceeded").
      heartbeat_timeout_s: after this long without a sign of life from a process (its host is gone, or it was stopped)
        JAX's runtime ends all others (SIGABRT). A pause that a ``LoopGuard`` allows must be shorter: pass at least its
        ``step_timeout_s``. The others notice at once if a process is killed in a collective or leaves by an error;
        if it goes otherwise they wait for it so long, unless another limit comes first.
      shutdown_timeout_s: how long a process that exits waits for the others to exit.
    Raises:
      ValueError: one or two of the first three arguments are given, or they do not fit each other.
      TimeoutError: nothing listens at the coordinator's address.
      RuntimeError: already joined as something else, or JAX has already started its devices.

    >>> initialize_distributed()  # a single process joins nothing
    >>> jax.process_count()
    1
    """
    member = _given_membership(coordinator_address, num_processes, process_id, local_device_ids)
    member = member or _detected_membership(local_device_ids, initialization_timeout_s)
    if member is None or _has_joined(member) or member.num_processes == 1:
        return
    deadline = time.monotonic() + initialization_timeout_s
    # JAX's own wait for the coordinator ends in an abort of the process; this wait ends in an error with a cure.
    if member.process_id != 0:
        _wait_for_coordinator(member, deadline, initialization_timeout_s)
    jax.distributed.initialize(
        member.coordinator_address,
        member.num_processes,
        member.process_id,
        local_device_ids=member.local_device_ids,
        cluster_detection_method="deactivate",  # done above; it would override what is given here
        coordinator_bind_address=member.bind,
        initialization_timeout=max(1, math.ceil(deadline - time.monotonic())),
        heartbeat_timeout_seconds=heartbeat_timeout_s,
        shutdown_timeout_seconds=shutdown_timeout_s,
    )
    # Right after joining: from here on an error in one process would leave the others waiting in a collective.
    leave_with_others()


def _given_membership(
    address: str | None, num_processes: int | None, process_id: int | None, local_device_ids: Sequence[int] | None
) -> Membership | None:
    """The membership that the arguments describe; None where there are none."""
    given = {"coordinator_address": address, "num_processes": num_processes, "process_id": process_id}
    if all(value is None for value in given.values()):
        return None
    if address is None or num_processes is None or process_id is None:
        passed = {name: value for name, value in given.items() if value is not None}
        missing = " and ".join(name for name in given if name not in passed)
        raise ValueError(
            f"initialize_distributed got {named_values(passed)}, but not {missing}. Pass all three, "
            "or none of them, where SLURM, Open MPI, Kubernetes or a TPU pod starts the processes."
        )
    wrong = {name: value for name, value in list(given.items())[1:] if type(value) is not int}
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
    """The membership that JAX itself detects. (``jax.distributed.initialize()`` cannot be asked without joining.)"""
    variable = os.environ.get("JAX_COORDINATOR_ADDRESS")
    found = ClusterEnv.auto_detect_unset_distributed_params(variable, None, None, local_device_ids, None, timeout_s)
    address, num_processes, process_id, device_ids = found
    if address is not None and num_processes is not None and process_id is not None:
        # JAX by itself listens on all interfaces, where anybody who reaches the port can join the job.
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or (_own_address(address) if process_id == 0 else None)
        return Membership(address, num_processes, process_id, device_ids, bind)
    if variable is not None:
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS={variable!r} is set, but JAX finds no cluster that would say which process this "
            "is. Pass coordinator_address, num_processes and process_id, or unset the variable."
        )
    return None


def _own_address(address: str) -> str | None:
    """The address of this host that the name in "name:port" means; None if it means no address that others reach.

    The others look the name up themselves, and may find another address. So two kinds of answers are no use: an address
    of another host (behind a translation of addresses), and loopback for this host's own name (Debian's /etc/hosts).
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        found = {str(info[4][0]): info[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    for own, family in found.items():
        if own != host and ipaddress.ip_address(own.partition("%")[0]).is_loopback and host != "localhost":
            continue
        # A host can bind only to its own addresses. Any free port (0) will do: only the address is in question.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((own, 0))
            return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"
    return None


def _has_joined(member: Membership) -> bool:
    """Whether this process has joined already; raises ``RuntimeError`` if it has joined as another member."""
    if not jax.distributed.is_initialized():
        return False
    # Not by jax.process_index(), which would start the devices.
    now = job.coordinator_address, job.num_processes, job.process_id
    if now != member[:3]:
        raise RuntimeError(
            f"initialize_distributed: this is process {now[2]} of {now[1]} at {now[0]} already, and cannot become "
            f"process {member.process_id} of {member.num_processes} at {member.coordinator_address}. Call it once."
        )
    return True


def _wait_for_coordinator(member: Membership, deadline: float, timeout_s: float) -> None:
    """Returns as soon as something listens at the coordinator's address."""
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
