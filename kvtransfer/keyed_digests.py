"""Keyed digests: tags of blocks that only a holder of the cluster's secret can make or move to another block.

Linear sums with public coefficients find damage and no forgery (kvtransfer/digests.py). A keyed definition has two
keys, derived from one secret of the cluster. The first is the seed of secret coefficients: with them the digest is a
keyed universal hash. The second makes the tag that travels in the place of the digest:

    BLAKE2b(key, exporter with its incarnation, ticket, place of the block, whether it is unverified, digest), 16 bytes

A tag is valid for one place of one ticket. It reveals nothing about sums or coefficients, because keyed BLAKE2b is a
pseudorandom function and no input repeats: linear equations of the coefficients cannot be collected. The construction
is that of Wegman and Carter, "New hash functions and their use in authentication and set equality" (1981), with a
pseudorandom function of the hash instead of a one-time pad added to it: a repeated input would reveal only that two
digests are equal.

Bound: an attacker replaces the bytes of a block, its tag, or both. If the digest of the new bytes differs from that of
the right ones, the right tag is a guess: 2^-128. The digests of different bytes, chosen without the seed, are equal
with a chance of at most (n + 1) * 2^-112 for n folds, and 2^-128 for BLAKE2b. The argument is in kvtransfer/digests.py:
sums are exact integers, so no difference is special, such as one that is divisible by a power of two. A block of up to
256 MiB has at most two folds. So each attempt succeeds with a chance below 2^-110, if HKDF-SHA256, SHAKE256 and keyed
BLAKE2b are pseudorandom. A failed attempt reveals only that it failed: the chance for q attempts is below q * 2^-110.

A definition's name has the id of its secret: the two sides of a hand-off agree on the secret as they agree on the
definition, also while the secret is replaced.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from cluster.auth.keys import ClusterKeys, Purpose, hkdf
from cluster.messages import MemberId
from kvtransfer.digests import DIGEST_BYTES, PUBLIC, VerifyMode

KEYED_SUMS = "keyed-sums"  # the first part of a keyed definition's name
TAIL = -1  # the place of a ticket's last, partly filled block

_PERSON = b"tandem kv tags"
_BLOCK = struct.Struct("<q?")


@dataclass(frozen=True, slots=True)
class DigestDefinition:
    """The definition of the tags that both sides of a hand-off compare. Without a tag key a tag is the digest
    itself."""

    name: str
    seed: bytes = field(default=PUBLIC, repr=False)  # of the coefficients
    tag_key: bytes = field(default=b"", repr=False)

    @property
    def is_keyed(self) -> bool:
        return bool(self.tag_key)


class BlockTags:
    """Converts the digests of one ticket's blocks to the tags that its exporter announces."""

    def __init__(self, definition: DigestDefinition, exporter: MemberId, ticket_id: bytes) -> None:
        self.definition = definition
        self._begun: hashlib.blake2b | None = None
        if definition.is_keyed:
            self._begun = hashlib.blake2b(digest_size=DIGEST_BYTES, key=definition.tag_key, person=_PERSON)
            for part in (str(exporter).encode(), ticket_id):
                self._begun.update(struct.pack("<I", len(part)) + part)

    def tag(self, place: int, digest: bytes, *, is_unverified: bool) -> bytes:
        """Return the tag of the block at this place, or TAIL. An empty digest, of a block that is not verified, stays
        empty."""
        if self._begun is None or not digest:
            return digest
        one = self._begun.copy()
        one.update(_BLOCK.pack(place, is_unverified) + digest)
        return one.digest()


def exported_definition(mode: VerifyMode, name: str, keys: ClusterKeys) -> DigestDefinition:
    """Return the definition of a ticket that is issued now: keyed by the present secret, or the one of this name."""
    return _keyed(keys)[0] if mode is VerifyMode.KEYED else DigestDefinition(name)


def accepted_definitions(mode: VerifyMode, names: Sequence[str], keys: ClusterKeys) -> dict[str, DigestDefinition]:
    """Return the definitions that an importer can verify, by name: `names` and those under each valid secret. An
    importer with `keyed` accepts only the latter, so that no attacker on the path can weaken the verification."""
    public = () if mode is VerifyMode.KEYED else tuple(DigestDefinition(name) for name in names)
    return {definition.name: definition for definition in (*public, *_keyed(keys))}


def _keyed(keys: ClusterKeys) -> tuple[DigestDefinition, ...]:
    """Return a definition for each valid secret, the present one first."""
    return tuple(_under(identifier, key) for identifier, key in keys.derived(Purpose.KV_DIGESTS).items())


@lru_cache(8)
def _under(identifier: bytes, key: bytes) -> DigestDefinition:
    return DigestDefinition(f"{KEYED_SUMS} {identifier.hex()}", hkdf(key, b"coefficients"), hkdf(key, b"tags"))
