"""When the streams of a dropped secret end."""

import asyncio

import pytest

from cluster.auth.gate import DROPPED_GRACE_S, OpenStreams
from cluster.auth.keys import ClusterKeys, Secrets, key_id

_OLD, _NEW = b"o" * 32, b"n" * 32


class _Stream:
    has_ended = False

    def end(self, key_id: bytes) -> None:
        self.has_ended = True


class _Cluster:
    """Streams on the old secret, a key file and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.secrets, self.now_s = Secrets(_NEW, _OLD), 100.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now_s)
        self._streams = OpenStreams(ClusterKeys(self.secrets, lambda is_urgent: self.secrets))
        self.stream = _Stream()
        self._streams.add(key_id(_OLD), self.stream)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self._streams._look()

    def close(self) -> None:
        self._streams.close()


async def test_a_secret_that_came_back_and_is_dropped_again_leaves_its_streams_their_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = _Cluster(monkeypatch)
    cluster.secrets = Secrets(_NEW)
    cluster.pass_time(0.0)
    cluster.pass_time(DROPPED_GRACE_S - 1.0)
    cluster.secrets = Secrets(_NEW, _OLD)
    cluster.pass_time(0.5)
    cluster.pass_time(DROPPED_GRACE_S)
    assert not cluster.stream.has_ended

    cluster.secrets = Secrets(_NEW)
    cluster.pass_time(0.0)
    cluster.pass_time(DROPPED_GRACE_S - 1.0)
    assert not cluster.stream.has_ended
    cluster.pass_time(1.0)
    assert cluster.stream.has_ended
    cluster.close()
