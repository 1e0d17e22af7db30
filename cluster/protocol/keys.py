"""The cluster's key: 32 random bytes in a file that only its owner reads. It signs tickets and keys hashes.

Owns the file's form and how it comes to be. Never logs the key.
"""

import os
import secrets
from pathlib import Path

from cluster.errors import ConfigError

KEY_BYTES = 32
_FORBIDDEN_BITS = 0o037  # group may read: a mounted Kubernetes secret belongs to root and the pod's group


def load_cluster_key(path: Path) -> bytes:
    """The key in `path`, made there first where nothing is. Members that start together agree on one.

    Raises ConfigError when it cannot be read or made, is not 64 hex digits, or is open to other users.
    """
    try:
        if not path.exists():
            _make(path)
        if path.stat().st_mode & _FORBIDDEN_BITS:
            raise ConfigError(f"cluster key {path} is open to other users; run: chmod 600 {path}")
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"cannot read or make the cluster key {path}: {error.strerror}; give another --cluster-key-file"
        ) from error
    except UnicodeDecodeError:
        raise _malformed(path) from None
    return _parse(text, path)


def _make(path: Path) -> None:
    """Complete or not there: written aside, then linked, which fails where another process was first."""
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
            return  # theirs is the key
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
    return ConfigError(f"cluster key {path} must hold {2 * KEY_BYTES} hex digits; remove it to have a new one made")
