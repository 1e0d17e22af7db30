"""The keys of a cluster, derived from the secrets of its key file. Standard library only, pure.

A secret signs nothing itself: each purpose has a key of its own, derived by HKDF-SHA256 (RFC 5869). Every signature
begins with the id of the secret that it belongs to, and two secrets are valid at once while one replaces the other. The
hashes of blocks have a secret of their own, whose replacement invalidates all caches.
"""

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

SECRET_BYTES = 32
KEY_ID_BYTES = 4
SIGNATURE_BYTES = KEY_ID_BYTES + hashlib.sha256().digest_size
_EXTRACT_SALT = b"tandem keys 1"


class Purpose(StrEnum):
    """The purpose of a derived key. A signature for one purpose is never valid for another."""

    CALLS = "calls between members"
    KV_CONNECTIONS = "connections that move KV"
    KV_DIGESTS = "keyed digests of KV"
    REGISTRATIONS = "registrations"
    TICKETS = "tickets"
    LINK_CHECKS = "link checks"
    ACCEPTANCES = "acceptances"
    KEY_RECORDS = "records of API keys"
    USE_REPORTS = "reports of use"


class CachePurpose(StrEnum):
    """The purpose of a key that is derived from the secret of the caches."""

    BLOCK_HASHES = "block hashes"
    SALTS = "cache salts"


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secrets of a cluster. `other` is valid too; it is the next secret or the previous one.

    `caches`: the secret behind block hashes and cache salts; None: derived from `current`. `generation` counts how
    often it was replaced.
    """

    current: bytes
    other: bytes | None = None
    caches: bytes | None = None
    generation: int = 1

    def __repr__(self) -> str:
        return f"Secrets({key_id(self.current).hex()}, generation={self.generation})"

    @property
    def cache_secret(self) -> bytes:
        return self.caches if self.caches is not None else hkdf(self.current, b"secret of the caches")


class ClusterKeys:
    """Signs with the current secret and accepts the signatures of both."""

    def __init__(self, secrets: Secrets | bytes, reread: Callable[[bool], Secrets | None] | None = None) -> None:
        """`reread(is_urgent)` returns the secrets if they have changed, or None; it decides how often it really looks.
        It is called with True for a signature under an id that is not known."""
        self._secrets = secrets if isinstance(secrets, Secrets) else Secrets(secrets)
        self._reread = reread
        self._by_id = _by_id(self._secrets)
        # The caches of a running process keep the secret with which it started.
        self._cache_secret, self._generation = self._secrets.cache_secret, self._secrets.generation

    def sign(self, purpose: Purpose, message: bytes) -> bytes:
        """Return SIGNATURE_BYTES bytes."""
        self._refresh(is_urgent=False)
        return sign(self._secrets.current, purpose, message)

    @property
    def current_id(self) -> bytes:
        """Return the id of the secret that signs."""
        self._refresh(is_urgent=False)
        return key_id(self._secrets.current)

    def verify(self, purpose: Purpose, message: bytes, signature: bytes) -> bool:
        """Return whether one of the valid secrets made this signature."""
        secret = self.secret_of(signature[:KEY_ID_BYTES])
        return secret is not None and hmac.compare_digest(sign(secret, purpose, message), signature)

    def secret_of(self, identifier: bytes) -> bytes | None:
        """Return the valid secret with this id; None if there is none, also after reading the key file again."""
        self._refresh(is_urgent=False)
        if identifier not in self._by_id:
            self._refresh(is_urgent=True)
        return self._by_id.get(identifier)

    def derived(self, purpose: Purpose) -> dict[bytes, bytes]:
        """Return the key for this purpose of each valid secret, by the secret's id; the current one comes first."""
        self._refresh(is_urgent=False)
        return {identifier: purpose_key(secret, purpose) for identifier, secret in self._by_id.items()}

    def cache_key(self, purpose: CachePurpose) -> bytes:
        """Return a key of 32 bytes. It is the same as long as this object lives, also while secrets are replaced."""
        return hkdf(self._cache_secret, f"{purpose} {self._generation}".encode())

    @property
    def hash_key(self) -> bytes:
        """Return the key of the hashes of blocks and prompts."""
        return self.cache_key(CachePurpose.BLOCK_HASHES)

    def _refresh(self, *, is_urgent: bool) -> None:
        secrets = self._reread(is_urgent) if self._reread is not None else None
        if secrets is not None:
            self._secrets, self._by_id = secrets, _by_id(secrets)


def sign(secret: bytes, purpose: Purpose, message: bytes) -> bytes:
    """Return the id of the secret and an HMAC-SHA256 under the key for this purpose."""
    return key_id(secret) + hmac.digest(purpose_key(secret, purpose), message, "sha256")


@lru_cache(256)
def key_id(secret: bytes) -> bytes:
    """Return the name of a secret in signatures. It reveals nothing about the secret."""
    return hkdf(secret, b"id", KEY_ID_BYTES)


@lru_cache(256)
def purpose_key(secret: bytes, purpose: Purpose) -> bytes:
    return hkdf(secret, f"purpose {purpose}".encode())


def hkdf(secret: bytes, info: bytes, num_bytes: int = 32, *, salt: bytes = _EXTRACT_SALT) -> bytes:
    """HKDF-SHA256 of RFC 5869. `num_bytes`: at most 8,160."""
    pseudorandom = hmac.digest(salt, secret, "sha256")
    output, block = b"", b""
    for number in range(1, -(-num_bytes // 32) + 1):
        block = hmac.digest(pseudorandom, block + info + bytes([number]), "sha256")
        output += block
    return output[:num_bytes]


def _by_id(secrets: Secrets) -> dict[bytes, bytes]:
    return {key_id(secret): secret for secret in (secrets.current, secrets.other) if secret is not None}
