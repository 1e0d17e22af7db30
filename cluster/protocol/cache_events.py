"""Cache events of a worker's prefix cache on the wire: split into messages of bounded size, and parsed."""

from collections.abc import Iterator

from cluster.messages import CacheEvents
from cluster.protocol.hashing import MAX_PREFIX_BLOCKS, split_hashes
from cluster.protocol.received import checked
from tandem.internal.v1 import worker_pb2


def to_wire(events: CacheEvents) -> Iterator[worker_pb2.CacheEvents]:
    """The messages to send, in this order. Messages after the first one carry no events, only the remaining `stored`
    hashes."""
    yield worker_pb2.CacheEvents(
        cleared=events.cleared,
        first_number=events.first_number,
        next_number=events.next_number,
        stored=b"".join(events.stored[:MAX_PREFIX_BLOCKS]),
        removed=b"".join(events.removed),
    )
    for start in range(MAX_PREFIX_BLOCKS, len(events.stored), MAX_PREFIX_BLOCKS):
        yield worker_pb2.CacheEvents(
            first_number=events.next_number,
            next_number=events.next_number,
            stored=b"".join(events.stored[start : start + MAX_PREFIX_BLOCKS]),
        )


def from_wire(message: worker_pb2.CacheEvents) -> CacheEvents:
    """Raises MalformedMessage."""
    checked(message)
    return CacheEvents(
        message.first_number,
        message.next_number,
        split_hashes(message.stored),
        split_hashes(message.removed),
        message.cleared,
    )
