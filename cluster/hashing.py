"""Names for runs of tokens: the hash of a prompt, and the chain of its blocks' hashes.

Keyed (BLAKE2b, RFC 7693), so that nobody without the cluster's key can aim at a collision; salted, so that two tenants
never share a block. 16 bytes each. Router and workers must agree, so it is here once. Standard library only, pure.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence

HASH_BYTES = 16
_PROMPT = b"tandem.prompt"  # BLAKE2b's personalization (at most 16 bytes): no prompt's hash is ever a block's
_BLOCK = b"tandem.block"
_SALT_BYTES = hashlib.blake2b.SALT_SIZE


def hash_prompt(key: bytes, token_ids: Sequence[int], salt: bytes = b"") -> bytes:
    """Of a whole prompt. `key`: the cluster's, at most 64 bytes. Raises ValueError for an id that is no uint32."""
    return _digest(key, _PROMPT, salt, b"", token_ids)


def hash_blocks(key: bytes, token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> Iterator[bytes]:
    """Of each full block, in order; a block's hash covers it and all before it. A partial last block has none."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    parent = b""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(key, parent, token_ids[start : start + block_size], salt)
        yield parent


def hash_block(key: bytes, parent: bytes, token_ids: Sequence[int], salt: bytes = b"") -> bytes:
    """Of one block after the block whose hash is `parent` (empty for the first)."""
    return _digest(key, _BLOCK, salt, parent, token_ids)


def _digest(key: bytes, person: bytes, salt: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The parent's length goes in first: no parent and ids can be read as another parent and other ids."""
    if len(salt) > _SALT_BYTES:
        salt = hashlib.blake2b(salt, digest_size=_SALT_BYTES).digest()
    state = hashlib.blake2b(bytes([len(parent)]), digest_size=HASH_BYTES, key=key, person=person, salt=salt)
    state.update(parent)
    try:
        state.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    except struct.error as error:
        raise ValueError(f"token ids must fit 32 bits without sign: {error}") from None
    return state.digest()
