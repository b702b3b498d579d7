"""Ports for servers of ours, chosen where no outgoing connection can take them away again.

The system's own choice (port 0) lies in the range from which clients get theirs:
between the choice and the server's start any connection may have it.
"""

from __future__ import annotations

import secrets
import socket

from storage.errors import ConfigError

LOOPBACK = "127.0.0.1"
_RANGE = range(15_000, 22_000)
"""Below the ports that Linux (from 32768) and the IANA (from 49152) give to clients, also 10,000 higher."""
_TRIES = 200


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen there now; a port whose last connections are in TIME_WAIT is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(count: int, host: str = LOOPBACK, *, beside: int = 0) -> list[int]:
    """Different ports that are free now, and so are those that lie ``beside`` ports higher. Raises ConfigError."""
    found: list[int] = []
    for _ in range(_TRIES):
        if len(found) == count:
            return found
        port = _RANGE[secrets.randbelow(len(_RANGE))]
        if port not in found and is_free(port, host) and (not beside or is_free(port + beside, host)):
            found.append(port)
    raise ConfigError(f"no {count} free ports on {host} from {_RANGE.start} to {_RANGE.stop - 1} in {_TRIES} tries")


def free_port(host: str = LOOPBACK) -> int:
    """One of :func:`free_ports`."""
    return free_ports(1, host)[0]
