"""Block hashes: the hash of a prompt, and the chain of hashes of its blocks. Standard library only, pure.

Hashes are keyed BLAKE2b (RFC 7693) of 16 bytes, so a collision cannot be constructed without the cluster's key. A chain
begins at a root that covers the tenant's salt, the adapter and the wire dtype of the KV: tenants never share a block,
and KV that was quantised on the wire never counts as computed KV. Routers and workers must compute equal hashes.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence

HASH_BYTES = 16
_LENGTH, _NO_PARENT = bytes([HASH_BYTES]), bytes([0])  # the parent's length, which the parent follows
ID_BYTES = 4
MAX_PREFIX_BLOCKS = 65_536  # whose hashes one message may name: 1 MiB
NATIVE = "native"  # computed on this worker, or moved without quantisation
_PROMPT = b"tandem.prompt"  # BLAKE2b's personalization (at most 16 bytes): a prompt's hash never equals a block's
_BLOCK = b"tandem.block"
_ROOT = b"tandem.root"


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token, block or sequence ids as little-endian uint32, in which form messages and hashes have them. Raises
    ValueError for an id that does not fit."""
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        unfit = next(value for value in ids if not 0 <= value < 1 << 32)
        raise ValueError(f"id {unfit} does not fit 32 bits without sign") from None


def hash_prompt(key: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a whole prompt. `key`: the cluster's key, at most 64 bytes. Raises ValueError for an id that is no
    uint32."""
    state = hashlib.blake2b(_NO_PARENT, digest_size=HASH_BYTES, key=key, person=_PROMPT)
    state.update(pack_ids(token_ids))
    return state.digest()


def hash_root(key: bytes, *, salt: str = "", adapter: str = "", content: str = NATIVE) -> bytes:
    """The parent hash of a prompt's first block. `content`: the wire dtype of its KV."""
    state = hashlib.blake2b(digest_size=HASH_BYTES, key=key, person=_ROOT)
    for field in (salt, adapter, content):
        encoded = field.encode("utf-8", "surrogatepass")
        state.update(struct.pack("<I", len(encoded)) + encoded)
    return state.digest()


class BlockChain:
    """The hashes of one sequence's full blocks, growing with its tokens. Owned by the owner of the sequence."""

    def __init__(self, key: bytes, block_size: int, root: bytes) -> None:
        self.hashes: list[bytes] = []
        self._key = key
        self._block_size = block_size
        self._root = root

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the full blocks that are not hashed yet. `token_ids`: all tokens of the sequence so far."""
        self._append(pack_ids(token_ids[len(self.hashes) * self._block_size :]))

    def extend_packed(self, packed: bytes) -> None:
        """Do what `extend` does, with the ids as `pack_ids` packs them."""
        self._append(packed[ID_BYTES * len(self.hashes) * self._block_size :])

    def parent_of(self, index: int) -> bytes:
        """The parent hash of the block with this index."""
        return self.hashes[index - 1] if index else self._root

    def copy(self) -> "BlockChain":
        """A copy for a sequence that continues separately from here on."""
        copied = BlockChain(self._key, self._block_size, self._root)
        copied.hashes = list(self.hashes)
        return copied

    def _append(self, packed: bytes) -> None:
        self.hashes += _hashes(self._key, packed, self._block_size, self.parent_of(len(self.hashes)))


class NamelessChain(BlockChain):
    """The chain of a worker without prefix caching: no block has a hash, so no block is found or cached."""

    def __init__(self) -> None:
        super().__init__(b"", 1, b"")

    def extend(self, token_ids: Sequence[int]) -> None:
        pass

    def extend_packed(self, packed: bytes) -> None:
        pass

    def parent_of(self, index: int) -> bytes:
        return b""

    def copy(self) -> "BlockChain":
        return NamelessChain()


def split_hashes(packed: bytes) -> tuple[bytes, ...]:
    """Hashes that were packed into one field of a message. Its length is a multiple of 16."""
    return tuple(packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))


NewChain = Callable[[str, str], BlockChain]  # (salt, wire dtype of the KV) -> the empty chain of a new sequence


def keyed_chains(key: bytes, block_size: int) -> NewChain:
    return lambda salt, content: BlockChain(key, block_size, hash_root(key, salt=salt, content=content))


def nameless_chains() -> NewChain:
    return lambda salt, content: NamelessChain()


def _hashes(key: bytes, packed: bytes, block_size: int, parent: bytes) -> list[bytes]:
    """The parent's length comes first, so that no two pairs of parent and ids are hashed as the same bytes."""
    num_bytes, hashes = ID_BYTES * block_size, list[bytes]()
    begun = hashlib.blake2b(digest_size=HASH_BYTES, key=key, person=_BLOCK)  # quicker to copy than to make
    head = bytes([len(parent)]) + parent
    for start in range(0, len(packed) - num_bytes + 1, num_bytes):
        state = begun.copy()
        state.update(head + packed[start : start + num_bytes])
        hashes.append(digest := state.digest())
        head = _LENGTH + digest
    return hashes
