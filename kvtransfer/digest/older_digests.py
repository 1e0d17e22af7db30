"""Digests for an importer that knows an older definition only, such as one of the previous version.

Blocks are digested as they are sealed, when nobody knows yet who will read them. So what such an importer is told of
them is digested once more, out of the blocks that its lease pins. Owns nothing.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from cluster.protocol.wire import unpack_ids
from kvtransfer.digest.definitions import DigestDefinition, digest_blocks, split_digests
from kvtransfer.memory import PoolMemory
from tandem.v1 import kv_pb2

_LOG = logging.getLogger(__name__)


class OlderDigests:
    def __init__(self, memory: PoolMemory, at_seal: DigestDefinition, digester: ThreadPoolExecutor) -> None:
        self._memory, self._at_seal, self._digester = memory, at_seal, digester

    async def put_into(self, message: kv_pb2.ExporterMessage, definition: DigestDefinition) -> None:
        """Replaces the digests in a message, taken when its blocks were sealed, by those of the definition."""
        if definition == self._at_seal:
            return
        if message.sealed.digests:
            sealed = message.sealed
            sealed.digests = b"".join(
                await self._again(unpack_ids(sealed.block_ids), split_digests(sealed.digests), definition)
            )
        elif message.finished.tail.digest:
            tail = message.finished.tail
            (tail.digest,) = await self._again([tail.block_id], [tail.digest], definition)

    async def _again(
        self, block_ids: Sequence[int], at_seal: Sequence[bytes], definition: DigestDefinition
    ) -> Sequence[bytes]:
        """Those at seal where a block cannot be read: the importer finds no such digest, and refuses."""
        try:
            return await asyncio.wrap_future(self._digester.submit(self._digest, block_ids, at_seal, definition))
        except RuntimeError as error:  # the device, or a thread that has ended
            _LOG.error("digests for an importer of an earlier version failed: %s", error)
            return at_seal

    def _digest(
        self, block_ids: Sequence[int], at_seal: Sequence[bytes], definition: DigestDefinition
    ) -> tuple[bytes, ...]:
        """On the digester's thread. A block that is no longer what was sealed keeps its digest at seal, which no bytes
        have in another definition: it is caught as if the importer had compared that."""
        digests = digest_blocks(self._memory, block_ids, definition)
        still = digest_blocks(self._memory, block_ids, self._at_seal)
        return tuple(digest if now == then else then for digest, now, then in zip(digests, still, at_seal, strict=True))
