"""The wire form of what came and went in a worker's prefix cache: cut into messages, and read again."""

from collections.abc import Iterator

from cluster.messages import PrefixNews
from cluster.protocol.hashing import HASH_BYTES
from cluster.protocol.received import checked
from tandem.v1 import worker_pb2

_MAX_HASHES = 65_536  # in one message: one MiB


def to_wire(news: PrefixNews) -> Iterator[worker_pb2.PrefixNews]:
    """In messages of a size that can be sent; those after the first are additions without events."""
    first = news.added[:_MAX_HASHES]
    yield worker_pb2.PrefixNews(
        is_snapshot=news.is_snapshot,
        first_number=news.first_number,
        next_number=news.next_number,
        added=b"".join(first),
        evicted=b"".join(news.evicted),
    )
    for start in range(_MAX_HASHES, len(news.added), _MAX_HASHES):
        yield worker_pb2.PrefixNews(
            first_number=news.next_number,
            next_number=news.next_number,
            added=b"".join(news.added[start : start + _MAX_HASHES]),
        )


def from_wire(message: worker_pb2.PrefixNews) -> PrefixNews:
    """Raises MalformedMessage."""
    checked(message)
    return PrefixNews(
        message.first_number,
        message.next_number,
        _split_hashes(message.added),
        _split_hashes(message.evicted),
        message.is_snapshot,
    )


def _split_hashes(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))
