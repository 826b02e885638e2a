"""Ports for the coordinators of jobs that tests start, reserved until the test process ends."""

import socket

_reserved: list[socket.socket] = []  # bound, but not listening: attempts to connect are refused


def reserved_port() -> int:
    """Returns a port of the loopback address at which a coordinator started later can listen, and no other program.

    A port that was free is not enough: until the coordinator listens, another test or an outgoing connection can get
    the same port. So a socket stays bound to it. With SO_REUSEPORT, which gRPC sets for its own socket, too, a second
    socket of this user can listen there; without the option nobody can bind to the port.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    _reserved.append(holder)
    return holder.getsockname()[1]
