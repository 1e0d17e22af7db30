"""The identity of a process in its cluster: its member id, its advertised address and the cluster's key.

The key is 32 random bytes in a file that only its owner may read; it signs tickets and keys hashes. Never logs the key.
"""

import os
import secrets
import socket
from pathlib import Path

from cluster.errors import ConfigError
from cluster.messages import MemberId, Role
from cluster.settings.config import ClusterSettings

KEY_BYTES = 32
_FORBIDDEN_BITS = 0o037  # group may read: a mounted Kubernetes secret belongs to root and the pod's group
_ANY_ADDRESS = ("0.0.0.0", "::", "")


def new_member_id(settings: ClusterSettings, role: Role) -> MemberId:
    """A new incarnation of the configured member id, or of a random one."""
    return MemberId(settings.member_id or f"{role}-{secrets.token_hex(3)}", secrets.token_hex(8))


def advertised_host(settings: ClusterSettings) -> str:
    """The address at which other members reach this process: as configured, else the bound address, else the host's."""
    if settings.advertise_host:
        return settings.advertise_host
    if settings.host not in _ANY_ADDRESS:
        return settings.host
    return socket.gethostbyname(socket.gethostname())


def cluster_key(settings: ClusterSettings) -> bytes:
    """Read the key from the configured file, or from one per user and cluster name. Raises ConfigError."""
    if settings.cluster_key_file:
        return load_cluster_key(Path(settings.cluster_key_file))
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return load_cluster_key(home / "tandem" / f"{settings.cluster_name}.key")


def load_cluster_key(path: Path) -> bytes:
    """Read the key in `path`; create it if the file is missing. Members that start together agree on one key.

    Raises ConfigError when the file cannot be read or created, is not 64 hex digits, or is readable by other users.
    """
    try:
        if not path.exists():
            _make(path)
        if path.stat().st_mode & _FORBIDDEN_BITS:
            raise ConfigError(f"cluster key {path} is readable by other users; run: chmod 600 {path}")
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"cannot read or create the cluster key {path}: {error.strerror}; choose another --cluster-key-file"
        ) from error
    except UnicodeDecodeError:
        raise _malformed(path) from None
    return _parse(text, path)


def _make(path: Path) -> None:
    """Create the file atomically: write a draft, then link it, which fails if another process was first."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return  # the other process's key is used
    finally:
        draft.unlink()


def _parse(text: str, path: Path) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        raise _malformed(path) from None
    if len(key) != KEY_BYTES:
        raise _malformed(path)
    return key


def _malformed(path: Path) -> ConfigError:
    return ConfigError(f"cluster key {path} must hold {2 * KEY_BYTES} hex digits; delete it to create a new one")
