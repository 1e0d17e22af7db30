"""Finds the cluster for a client command: by --address, TANDEM_ADDRESS, or the cluster last started on this machine."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster.auth.key_file import key_path
from cluster.errors import ConfigError
from cluster.settings.config import ClusterSettings
from cluster.settings.config_sources import setting_outside_flags


@dataclass(frozen=True, slots=True)
class LastCluster:
    """The file that `tandem up` keeps for other commands while it runs. `grpc` and `http` are its first router's
    addresses."""

    grpc: str
    http: str
    pid: int
    tls_ca: str = ""  # PEM file with the authorities of its certificates; empty: it does not use TLS
    more_grpc: tuple[str, ...] = ()  # addresses of its other routers
    admin_key: str = field(default="", repr=False)
    key_file: str = ""  # its cluster key

    @property
    def address(self) -> str:
        """The gRPC addresses of all its routers, comma-separated."""
        return ",".join((self.grpc, *self.more_grpc))


def remember(cluster: LastCluster, environment: Mapping[str, str] | None = None) -> str:
    """Write the file; it is valid until `forget` or the end of the process. Return why it cannot be written, or an
    empty string."""
    folder = _folder(os.environ if environment is None else environment)
    draft = folder / f"draft-{cluster.pid}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("cluster-*.json"):
            if not _lives(path):
                path.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:  # it has a key
            file.write(json.dumps(asdict(cluster)))
        draft.replace(folder / f"cluster-{cluster.pid}.json")
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        return f"cannot write to {folder}: {error.strerror}"
    return ""


def forget(pid: int, environment: Mapping[str, str] | None = None) -> None:
    """Delete the file of this process, and no other."""
    with suppress(OSError):  # a folder that cannot be written
        (_folder(os.environ if environment is None else environment) / f"cluster-{pid}.json").unlink(missing_ok=True)


def running(environment: Mapping[str, str]) -> list[LastCluster]:
    """Return the clusters that run on this machine, the newest first."""
    found = [path for path in _folder(environment).glob("cluster-*.json") if _lives(path)]
    read = [(started_ns, cluster) for path in found if (cluster := _read(path)) and (started_ns := _written_ns(path))]
    return [cluster for _, cluster in sorted(read, key=lambda each: each[0], reverse=True)]


def find_http_address(told: str | None, environment: Mapping[str, str] | None = None) -> str:
    """Return the host:port of a router's HTTP API. Raises ConfigError."""
    environment = os.environ if environment is None else environment
    if address := told or environment.get("TANDEM_HTTP_ADDRESS"):
        _check_address(address)
        return address
    if found := running(environment):
        return found[0].http
    raise ConfigError("no cluster runs on this machine; start one with `tandem up`, or give --http-address host:port")


def find_tls_ca(told: str | None, address: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the PEM file that verifies the router at `address`, gRPC or HTTP; None means plaintext. Raises ConfigError
    if the file of TANDEM_CONFIG cannot be read."""
    environment = os.environ if environment is None else environment
    if named := told or setting_outside_flags("tls_ca", environment):
        return named
    return next(
        (found.tls_ca or None for found in running(environment) if address in (found.address, found.http)), None
    )


def find_admin_key(address: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the admin key of the local cluster with a router at `address`, gRPC or HTTP; empty: there is none."""
    environment = os.environ if environment is None else environment
    for found in running(environment):
        if address in (found.address, found.http, found.grpc, *found.more_grpc):
            return found.admin_key
    return ""


def find_key_file(told: str | None, address: str, environment: Mapping[str, str] | None = None) -> Path:
    """Return the key file of the cluster whose router is at `address`: the given one, else that of a cluster on this
    machine, else that of the default cluster name.
    """
    environment = os.environ if environment is None else environment
    known = (cluster.key_file for cluster in running(environment) if address in cluster.address.split(","))
    named = told or environment.get("TANDEM_CLUSTER_KEY_FILE") or next(known, "")
    return key_path(ClusterSettings(cluster_key_file=named))


def find_address(told: str | None, environment: Mapping[str, str] | None = None) -> str:
    """Return the gRPC host:port of a router, or of several, comma-separated. Raises ConfigError."""
    environment = os.environ if environment is None else environment
    address = told or environment.get("TANDEM_ADDRESS")
    if address:
        for one in address.split(","):
            _check_address(one)
        return address
    found = running(environment)
    if not found:
        raise ConfigError("no cluster runs on this machine; start one with `tandem up`, or give --address host:port")
    return found[0].address


def _check_address(address: str) -> None:
    host, separator, port = address.strip().rpartition(":")
    if not (host and separator and port.isdigit()):
        raise ConfigError(f"an address must be host:port, not {address!r}")


def _folder(environment: Mapping[str, str]) -> Path:
    """Return a folder in XDG_RUNTIME_DIR, which is deleted with the session, else in the user's cache."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    return Path(runtime or environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def _lives(path: Path) -> bool:
    return Path("/proc", path.stem.removeprefix("cluster-")).exists()


def _read(path: Path) -> LastCluster | None:
    """Return None if the file has just been deleted or another version wrote it."""
    try:
        values = json.loads(path.read_text())
        more_grpc = tuple(values.get("more_grpc", ()))
        more = values.get("tls_ca", ""), more_grpc, values.get("admin_key", ""), values.get("key_file", "")
        return LastCluster(values["grpc"], values["http"], values["pid"], *more)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
