"""What an importer needs to read an exporter's pool: where it is, the keys to it, and where its admission stands.

Fixed fields and the agent's own binary metadata behind them, under a checksum: damaged bytes never reach the library.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nixl.agent import Region

MAGIC = b"NKV1"
TOKEN_BYTES = 16
_CHECKSUM_BYTES = 16
# slot, token; pool: address, blocks, bytes per block, device or -1; admissions: address, slots; bytes of metadata.
_FIELDS = struct.Struct(f"<I{TOKEN_BYTES}sQQQiQII")
_MAX_METADATA_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NixlEndpoint:
    slot: int
    token: bytes
    pool: Region
    admissions: Region
    metadata: bytes

    def pack(self) -> bytes:
        pool, admissions = self.pool, self.admissions
        device = -1 if pool.device is None else pool.device
        fields = _FIELDS.pack(
            self.slot,
            self.token,
            pool.address,
            pool.num_rows,
            pool.row_bytes,
            device,
            admissions.address,
            admissions.num_rows,
            len(self.metadata),
        )
        body = fields + self.metadata
        return MAGIC + _checksum(body) + body

    @classmethod
    def parse(cls, packed: bytes) -> "NixlEndpoint":
        """Raises TransportError."""
        checksum, body = packed[len(MAGIC) : len(MAGIC) + _CHECKSUM_BYTES], packed[len(MAGIC) + _CHECKSUM_BYTES :]
        if not packed.startswith(MAGIC) or not hmac.compare_digest(checksum, _checksum(body)):
            raise TransportError("not an endpoint of this transport")
        if not _FIELDS.size < len(body) <= _FIELDS.size + _MAX_METADATA_BYTES:
            raise TransportError(f"an endpoint of {len(body)} bytes")
        slot, token, address, num_blocks, block_bytes, device, table, num_slots, size = _FIELDS.unpack_from(body)
        metadata = body[_FIELDS.size :]
        if len(metadata) != size or slot >= num_slots or device < -1 or token == bytes(TOKEN_BYTES):
            raise TransportError("an endpoint that contradicts itself")
        pool = Region(address, num_blocks, block_bytes, None if device < 0 else device)
        return cls(slot, token, pool, Region(table, num_slots, TOKEN_BYTES), metadata)


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
