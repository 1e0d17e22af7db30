"""Names for runs of tokens: the hash of a prompt, and the chain of its blocks' hashes.

Keyed (BLAKE2b, RFC 7693), so that nobody without the cluster's key can aim at a collision. A chain begins at a root
that covers the tenant's salt, the adapter, and what the KV travelled as: two tenants never share a block, and KV that
was quantised on its way is never taken for what was computed. 16 bytes each. Router and workers must agree, so it is
here once. Standard library only, pure.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence

HASH_BYTES = 16
NATIVE = "native"  # computed where it is, or moved as it was computed
_PROMPT = b"tandem.prompt"  # BLAKE2b's personalization (at most 16 bytes): no prompt's hash is ever a block's
_BLOCK = b"tandem.block"
_ROOT = b"tandem.root"


def hash_prompt(key: bytes, token_ids: Sequence[int]) -> bytes:
    """Of a whole prompt. `key`: the cluster's, at most 64 bytes. Raises ValueError for an id that is no uint32."""
    return _digest(key, _PROMPT, b"", token_ids)


def hash_root(key: bytes, *, salt: str = "", adapter: str = "", content: str = NATIVE) -> bytes:
    """The parent of a prompt's first block. `content`: the wire dtype that its KV travelled as."""
    state = hashlib.blake2b(digest_size=HASH_BYTES, key=key, person=_ROOT)
    for field in (salt, adapter, content):
        encoded = field.encode("utf-8", "surrogatepass")
        state.update(struct.pack("<I", len(encoded)) + encoded)
    return state.digest()


def hash_blocks(key: bytes, token_ids: Sequence[int], block_size: int, parent: bytes = b"") -> Iterator[bytes]:
    """Of each full block after `parent`, in order; each covers all before it. A partial last block has none."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(key, parent, token_ids[start : start + block_size])
        yield parent


def hash_block(key: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Of one block after the block, or root, whose hash is `parent`."""
    return _digest(key, _BLOCK, parent, token_ids)


class BlockChain:
    """The hashes of one sequence's full blocks. Grows with its tokens; owned by whoever owns the sequence."""

    def __init__(self, key: bytes, block_size: int, root: bytes) -> None:
        self.hashes: list[bytes] = []
        self._key = key
        self._block_size = block_size
        self._root = root

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hashes the full blocks of these tokens, of which the hashed ones are the beginning."""
        first_new = len(self.hashes) * self._block_size
        parent = self.parent_of(len(self.hashes))
        self.hashes += hash_blocks(self._key, token_ids[first_new:], self._block_size, parent)

    def parent_of(self, index: int) -> bytes:
        """What the block of this index continues."""
        return self.hashes[index - 1] if index else self._root

    def copy(self) -> "BlockChain":
        """For a sequence that goes on apart from here."""
        copied = BlockChain(self._key, self._block_size, self._root)
        copied.hashes = list(self.hashes)
        return copied


class NamelessChain(BlockChain):
    """Of a worker that shares no prefixes: no block has a hash, so none is ever found or kept."""

    def __init__(self) -> None:
        super().__init__(b"", 1, b"")

    def extend(self, token_ids: Sequence[int]) -> None:
        pass

    def parent_of(self, index: int) -> bytes:
        return b""

    def copy(self) -> "BlockChain":
        return NamelessChain()


NewChain = Callable[[str, str], BlockChain]  # (salt, what the KV travelled as) -> the chain of a sequence's beginning


def keyed_chains(key: bytes, block_size: int) -> NewChain:
    return lambda salt, content: BlockChain(key, block_size, hash_root(key, salt=salt, content=content))


def nameless_chains() -> NewChain:
    return lambda salt, content: NamelessChain()


def _digest(key: bytes, person: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The parent's length goes in first: no parent and ids can be read as another parent and other ids."""
    state = hashlib.blake2b(bytes([len(parent)]) + parent, digest_size=HASH_BYTES, key=key, person=person)
    try:
        state.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    except struct.error as error:
        raise ValueError(f"token ids must fit 32 bits without sign: {error}") from None
    return state.digest()
