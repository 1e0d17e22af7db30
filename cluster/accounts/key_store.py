"""Stores the records of API keys: in the cluster's Redis, or in a file. A store holds one signed document. A change
replaces the document only if it is still the one that was read. Redis publishes every change, so every router reads it
at once; a file is checked twice a second. While a store does not answer, routers keep their keys; if a store has lost
its document, or has an older one, a router restores it.
"""

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Protocol

from cluster.accounts.keys import Gate, KeySet, is_signed_now
from cluster.auth.keys import ClusterKeys
from cluster.errors import ConfigError, RegistryUnavailable, TandemError, Unavailable
from cluster.registry.registry import Registry

_LOG = logging.getLogger("tandem.accounts")
_NAMES = ("keys", "keys:changes")  # the document, the channel
_READ = "return {redis.call('GET', KEYS[1]) or ''}"
# ARGV: the document that is replaced (empty: there is none), the new one.
_REPLACE = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return {'0'} end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('PUBLISH', KEYS[2], 'keys')
return {'1'}
"""
_LOOK_S = 0.5  # between two looks at a file: no portable event reports that a file, or a mounted secret, was replaced
_LOOKS = 20  # after this many looks the file is read even if unchanged: the cluster's secret may have been replaced
_ATTEMPTS = 5  # at a change, while others change the keys too
_FORBIDDEN_BITS = 0o037  # group may read: a mounted secret belongs to root and the pod's group


class KeyStore(Protocol):
    async def read(self) -> str:
        """Return the document; empty: there is none. Raises TandemError."""

    async def replace(self, before: str, after: str) -> bool:
        """Replace the document, if it is still `before`. Raises TandemError."""

    def changes(self) -> AsyncGenerator[None, None]:
        """Yield at once, and whenever the document may have changed."""


class RedisKeyStore:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def read(self) -> str:
        (document,) = await self._registry.evaluate(_READ, _NAMES[:1], [])
        return document

    async def replace(self, before: str, after: str) -> bool:
        return await self._registry.evaluate(_REPLACE, _NAMES, [before, after]) == ["1"]

    def changes(self) -> AsyncGenerator[None, None]:
        return self._registry.news(_NAMES[1])


class FileKeyStore:
    """Stores the records in a file. Only one process should change it at a time: the last of two simultaneous changes
    wins.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> str:
        try:
            return self._path.read_text(encoding="ascii")
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise Unavailable(f"cannot read the API keys in {self._path}: {error}") from error

    async def replace(self, before: str, after: str) -> bool:
        if await self.read() != before:
            return False
        draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(after)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise Unavailable(f"cannot write the API keys to {self._path}: {error.strerror}") from error
        return True

    async def changes(self) -> AsyncGenerator[None, None]:
        seen: tuple[int, int] | None = (-1, -1)
        for number in itertools.count():
            try:
                status = self._path.stat()
                found = (status.st_ino, status.st_mtime_ns)
            except OSError:
                found = None
            if found != seen or not number % _LOOKS:
                seen = found
                yield
            await asyncio.sleep(_LOOK_S)


class RecordedKeys:
    """The recorded keys of one router: follows a store, and changes the records for administrators."""

    def __init__(self, store: KeyStore, gate: Gate, keys: ClusterKeys) -> None:
        self._store, self._gate, self._keys = store, gate, keys

    async def follow(self) -> None:
        """Give every change to the gate, until cancelled."""
        async with aclosing(self._store.changes()) as changes:
            async for _ in changes:
                await self.refresh()

    async def refresh(self) -> None:
        """Give the present document to the gate. A store that does not answer changes nothing."""
        with suppress(RegistryUnavailable):  # counted and logged where the registry is followed
            await self.load()

    async def load(self) -> None:
        """Give the present document to the gate, unless it is not signed. Raises RegistryUnavailable."""
        try:
            document = await self._store.read()
            if not self._gate.replace(self._parsed(document)):
                _LOG.warning("the store of API keys had lost changes; this router writes them again")
                await self._restore(document)
            elif document and not is_signed_now(document, self._keys):  # the cluster's secret is being replaced
                await self._restore(document)
        except RegistryUnavailable:
            raise
        except TandemError as error:
            _LOG.error("the present API keys stay in use: %s", error.message)

    async def change(self, changed: Callable[[KeySet], KeySet]) -> None:
        """Store and use the records that `changed` returns for the present ones. Raises what `changed` raises,
        ConfigError for a document that is not signed, and Unavailable or RegistryUnavailable where the store does not
        answer."""
        for _ in range(_ATTEMPTS):
            before = await self._store.read()
            if not self._gate.replace(self._parsed(before)):
                await self._restore(before)
                continue
            after = changed(self._gate.keys)
            if await self._store.replace(before, after.signed(self._keys)):
                self._gate.replace(after)
                return
        raise Unavailable("other operators changed the API keys at the same time; try again")

    async def _restore(self, document: str) -> None:
        """Replace the document in the store by the present records."""
        await self._store.replace(document, self._gate.keys.signed(self._keys))

    def _parsed(self, document: str) -> KeySet:
        return KeySet.parse(document, self._keys) if document else KeySet()


def configured_key(value: str, file: str, flag: str) -> str:
    """Return a key that is given by its text or in a file. Raises ConfigError."""
    if not file:
        return value
    if value:
        raise ConfigError(f"give {flag} or {flag}-file, not both")
    path = Path(file)
    try:
        if path.stat().st_mode & _FORBIDDEN_BITS:
            raise ConfigError(f"{flag}-file {file} is readable by other users; run: chmod 600 {file}")
        key = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"cannot read {flag}-file {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        key = ""
    if not key or not key.isprintable():
        raise ConfigError(f"{flag}-file {file} must hold one line of printable characters")
    return key
