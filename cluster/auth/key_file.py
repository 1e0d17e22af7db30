"""The cluster's key file: reading, creating, watching and rotating it. Never logs a secret.

A new file has one line of 64 hex digits, the current secret. Rotation writes lines that begin with a word:

    current 64 hex digits
    next 64 hex digits          accepted, signs nothing yet; or `previous`: accepted, signs nothing any more
    caches GENERATION 64 hex digits
"""

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.auth.keys import SECRET_BYTES, ClusterKeys, Secrets
from cluster.errors import ConfigError
from cluster.settings.config import ClusterSettings

_LOG = logging.getLogger("tandem.keys")
_FORBIDDEN_BITS = 0o037  # group may read: a mounted Kubernetes secret belongs to root and the pod's group
_LOOK_EVERY_S = 1.0
_URGENT_EVERY_S = 0.05  # a stranger that invents ids of secrets does not make a member read its disk for each
_MAX_FILE_BYTES = 4096
_NEXT, _PREVIOUS = "next", "previous"


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A key file's content. `other_word`: next or previous, if there is another secret."""

    secrets: Secrets
    other_word: str = ""


def key_path(settings: ClusterSettings) -> Path:
    """Return the configured file, or the one of this user and cluster name."""
    if settings.cluster_key_file:
        return Path(settings.cluster_key_file)
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return home / "tandem" / f"{settings.cluster_name}.key"


def cluster_keys(settings: ClusterSettings) -> ClusterKeys:
    """Return the keys of this process's cluster; create the file if it is missing. Raises ConfigError."""
    return load_keys(key_path(settings))


def load_keys(path: Path) -> ClusterKeys:
    """Return the keys of this file; create it if it is missing. Members that start together agree on one secret. The
    keys follow the file while it changes.

    Raises ConfigError when the file cannot be read or created, has no valid content, or is readable by other users."""
    try:
        if not path.exists():
            _write(path, secrets.token_hex(SECRET_BYTES) + "\n", place=_link_if_absent)
    except OSError as error:
        raise _unreadable(path, error) from error
    watch = _Watch(path)
    return ClusterKeys(watch.read().secrets, watch.changed)


def read_key_file(path: Path) -> KeyFile:
    """Read a key file. Raises ConfigError as `load_keys` does, also if there is no such file."""
    try:
        if path.stat().st_mode & _FORBIDDEN_BITS:
            raise ConfigError(f"cluster key {path} is readable by other users; run: chmod 600 {path}")
        with path.open("rb") as file:
            return _parsed(file.read(_MAX_FILE_BYTES).decode("ascii"))
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError:
        raise ConfigError(
            f"cluster key {path} must hold {2 * SECRET_BYTES} hex digits; delete it to create a new one"
        ) from None


def rotate(path: Path) -> KeyFile:
    """Take the next of the three steps that replace the secret: accept a new one, sign with it, drop the old one.
    Return the new content. Raises ConfigError."""
    present = read_key_file(path)
    now = present.secrets
    if now.other is None:
        kept = replace(now, other=secrets.token_bytes(SECRET_BYTES), caches=now.cache_secret)
        changed = KeyFile(kept, _NEXT)
    elif present.other_word == _NEXT:
        changed = KeyFile(replace(now, current=now.other, other=now.current), _PREVIOUS)
    else:
        changed = KeyFile(replace(now, other=None))
    _replace(path, changed)
    return changed


def rotate_caches(path: Path) -> KeyFile:
    """Replace the secret behind block hashes: members use the new one after their next start and then no longer find
    earlier blocks. Raises ConfigError.
    """
    present = read_key_file(path)
    fresh = replace(
        present.secrets, caches=secrets.token_bytes(SECRET_BYTES), generation=present.secrets.generation + 1
    )
    changed = replace(present, secrets=fresh)
    _replace(path, changed)
    return changed


class _Watch:
    """Rereads a key file that has changed, at most once per `_LOOK_EVERY_S`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._looked_at_s = time.monotonic()
        self._problem = ""

    def read(self) -> KeyFile:
        self._seen = self._version()
        return read_key_file(self._path)

    def changed(self, is_urgent: bool) -> Secrets | None:
        now_s = time.monotonic()
        if now_s - self._looked_at_s < (_URGENT_EVERY_S if is_urgent else _LOOK_EVERY_S):
            return None
        self._looked_at_s = now_s
        if self._version() == self._seen:
            return None
        try:
            content = self.read()
        except ConfigError as error:
            if error.message != self._problem:
                _LOG.warning("the present keys stay in use: %s", error.message)
            self._problem = error.message
            return None
        self._problem = ""
        _LOG.info("the key file has changed", extra={"generation": content.secrets.generation})
        return content.secrets

    def _version(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _parsed(text: str) -> KeyFile:
    """Raises ValueError."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) == 1 and len(lines[0]) == 1:
        return KeyFile(Secrets(_secret(lines[0][0])))
    words = {line[0]: line[1:] for line in lines}
    if len(words) < len(lines) or not words.keys() <= {"current", _NEXT, _PREVIOUS, "caches"}:
        raise ValueError("an unknown or repeated line")
    if _NEXT in words and _PREVIOUS in words:
        raise ValueError("three secrets")
    other = next((word for word in (_NEXT, _PREVIOUS) if word in words), "")
    generation, caches = words.get("caches", ("1", ""))
    return KeyFile(
        Secrets(
            current=_secret(*words.get("current", ("",))),
            other=_secret(*words[other]) if other else None,
            caches=_secret(caches) if caches else None,
            generation=int(generation),
        ),
        other,
    )


def _secret(*words: str) -> bytes:
    (digits,) = words  # raises ValueError too
    secret = bytes.fromhex(digits)
    if len(secret) != SECRET_BYTES:
        raise ValueError("not a secret")
    return secret


def _text(content: KeyFile) -> str:
    now = content.secrets
    lines = [f"current {now.current.hex()}"]
    if now.other is not None:
        lines.append(f"{content.other_word} {now.other.hex()}")
    if now.caches is not None:
        lines.append(f"caches {now.generation} {now.caches.hex()}")
    return "\n".join(lines) + "\n"


def _replace(path: Path, content: KeyFile) -> None:
    try:
        _write(path, _text(content), place=os.replace)
    except OSError as error:
        raise ConfigError(f"cannot write the cluster key {path}: {error.strerror}") from error


def _write(path: Path, text: str, *, place: Callable[[Path, Path], None]) -> None:
    """Write a draft that only its owner may read, and put it in place: no reader sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        place(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _link_if_absent(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        return  # the other process's secret is used


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot read or create the cluster key {path}: {error.strerror}; choose another --cluster-key-file"
    )
