"""The error for a port that cannot be bound: which setting must change, and a check that needs no server."""

import errno
import socket

from cluster.errors import ConfigError


def refuse_taken(host: str, port: int, flag: str) -> None:
    """Raise ConfigError if the port cannot be bound. gRPC would detect this too, but would also log an internal
    error, and does not say why. `flag` chooses the port."""
    if error := refusal(host, port):
        raise cannot_listen(error, host, port, flag) from error


def refusal(host: str, port: int, *, is_shared: bool = False) -> OSError | None:
    """Return why the port cannot be bound, or None if it can. `is_shared`: other sockets that share it may have it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def cannot_listen(error: OSError, host: str, port: int, flag: str) -> ConfigError:
    """Return the error for a port that `flag` chooses."""
    if is_of_host(error):
        return ConfigError(
            f"cannot listen on --host {host}: {reason(error)}; give an address of this machine, or 127.0.0.1"
        )
    shown = f"[{host}]" if ":" in host else host
    return ConfigError(f"cannot listen on {shown}:{port}: {reason(error)}; choose another {flag}, or 0 for a free port")


def is_of_host(error: OSError) -> bool:
    """Return whether no other port of the host would help: its name has no address, or the address is not ours."""
    return isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL


def reason(error: OSError) -> str:
    return error.strerror or str(error)
