"""What is said on a TCP connection between an importer and an exporter: fixed binary fields, nothing else."""

import struct

from kvtransfer.transports.base import TransportError

TOKEN_BYTES = 16

# magic, ticket id, attempt, number of the read, token, number of blocks; then the block ids, 4 bytes each.
ANNOUNCEMENT = struct.Struct(f"<4s16sII{TOKEN_BYTES}sI")
# magic, ticket id, attempt, number of the read, refused or not, number of bytes; then the bytes.
ANSWER = struct.Struct("<4s16sII?Q")
MAGIC = b"TKV1"
_ENDPOINT = struct.Struct(f"<{TOKEN_BYTES}sH")  # token, port; then the host's name


def pack_endpoint(token: bytes, host: str, port: int) -> bytes:
    return _ENDPOINT.pack(token, port) + host.encode()


def parse_endpoint(endpoint: bytes) -> tuple[tuple[str, int], bytes]:
    """Address and token. Raises TransportError."""
    try:
        token, port = _ENDPOINT.unpack_from(endpoint)
        return (endpoint[_ENDPOINT.size :].decode(), port), token
    except (struct.error, UnicodeDecodeError) as error:
        raise TransportError("not an endpoint of this transport") from error
