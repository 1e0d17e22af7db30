"""Where a client command finds the cluster: told, from TANDEM_ADDRESS, or the one last started here."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LastCluster:
    """What `tandem up` leaves for other commands while it runs. `grpc` and `http` are its first router's addresses."""

    grpc: str
    http: str
    pid: int
    tls_ca: str = ""  # PEM file with the authorities of its certificates; empty: it does not use TLS
    more_grpc: tuple[str, ...] = ()  # addresses of its other routers

    @property
    def address(self) -> str:
        """Of all its routers, with commas."""
        return ",".join((self.grpc, *self.more_grpc))


def state_file(environment: Mapping[str, str]) -> Path:
    """In the user's run-time folder, which ends with the session; else in the cache."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) if runtime else Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "tandem" / "last-cluster.json"


def remember(cluster: LastCluster, environment: Mapping[str, str] | None = None) -> None:
    path = state_file(os.environ if environment is None else environment)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{cluster.pid}")
    draft.write_text(json.dumps(asdict(cluster)))
    draft.replace(path)


def forget(pid: int, environment: Mapping[str, str] | None = None) -> None:
    """Unless another cluster was started since."""
    environment = os.environ if environment is None else environment
    found = recall(environment)
    if found is not None and found.pid == pid:
        state_file(environment).unlink(missing_ok=True)


def recall(environment: Mapping[str, str]) -> LastCluster | None:
    try:
        values = json.loads(state_file(environment).read_text())
        more_grpc = tuple(values.get("more_grpc", ()))
        return LastCluster(values["grpc"], values["http"], values["pid"], values.get("tls_ca", ""), more_grpc)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_tls_ca(told: str | None, address: str, environment: Mapping[str, str] | None = None) -> str | None:
    """PEM file to judge the router at `address` by; None: it is reached in plaintext."""
    environment = os.environ if environment is None else environment
    if told or environment.get("TANDEM_TLS_CA"):
        return told or environment["TANDEM_TLS_CA"]
    found = recall(environment)
    return found.tls_ca or None if found is not None and found.address == address else None


def find_address(told: str | None, environment: Mapping[str, str] | None = None) -> str:
    """gRPC host:port of a router, or of several with commas. Raises ConfigError."""
    environment = os.environ if environment is None else environment
    address = told or environment.get("TANDEM_ADDRESS")
    if address:
        for one in address.split(","):
            host, separator, port = one.strip().rpartition(":")
            if not (host and separator and port.isdigit()):
                raise ConfigError(f"an address is host:port, not {one!r}")
        return address
    found = recall(environment)
    if found is None or not Path(f"/proc/{found.pid}").exists():
        raise ConfigError("no cluster runs here; start one with `tandem up`, or give --address host:port")
    return found.address
