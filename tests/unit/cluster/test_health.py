"""A process's health responses while its event loop is busy, dead, draining or stuck: seen through real gRPC."""

import asyncio
import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.observe.health import LIVENESS, READINESS, HealthPort, HealthStatus, LoopWatch
from cluster.observe.logs import stack_of
from cluster.observe.stalls import StallLimits

_DEADLINE_S = 30.0
_SERVING = health_pb2.HealthCheckResponse.SERVING
_LIMITS = StallLimits(timeout_s=0.2, exit_s=0.2)
_PATIENT = StallLimits(timeout_s=60.0, exit_s=60.0)


class Looped:
    """A health port whose event loop runs on a separate thread, and stops when a test calls `block_loop`."""

    def __init__(self, limits: StallLimits) -> None:
        self.status = HealthStatus(["tandem.internal.v1.Worker"])
        self.port = HealthPort(self.status, host="127.0.0.1", port=0, limits=limits)
        self.go_on, self.stands = threading.Event(), threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._thread.start()
        self._call(self.port.start)

    def says(self, service: str) -> bool:
        with grpc.insecure_channel(f"127.0.0.1:{self.port.port}") as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_DEADLINE_S)
        return bool(answer.status == _SERVING)

    def block_loop(self) -> None:
        """Block the event loop with synchronous work."""
        self._loop.call_soon_threadsafe(self._stand)
        assert self.stands.wait(_DEADLINE_S)

    def _stand(self) -> None:
        self.stands.set()
        assert self.go_on.wait(_DEADLINE_S)

    def close(self) -> None:
        self.go_on.set()
        self._call(self.port.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_DEADLINE_S)
        self._loop.close()

    def _call(self, method: "object") -> None:
        async def call() -> None:
            assert callable(method)
            method()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(_DEADLINE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


@pytest.fixture
def looped() -> Iterator[Looped]:
    looped = Looped(_PATIENT)
    yield looped
    looped.close()


def test_a_busy_process_answers_health_checks_at_once(looped: Looped) -> None:
    looped.status.is_ready = True
    looped.block_loop()

    assert {name: looped.says(name) for name in ("", READINESS, LIVENESS, "tandem.internal.v1.Worker")} == {
        "": True,
        READINESS: True,
        LIVENESS: True,
        "tandem.internal.v1.Worker": True,
    }


def test_a_starting_or_draining_process_is_alive_and_not_ready(looped: Looped) -> None:
    assert (looped.says(LIVENESS), looped.says(READINESS), looped.says("")) == (True, False, False)


def test_a_process_with_a_problem_is_neither_alive_nor_ready(looped: Looped) -> None:
    looped.status.is_ready, looped.status.problem = True, "step 7 has run for more than 60 s"
    assert (looped.says(LIVENESS), looped.says(READINESS), looped.says("")) == (False, False, False)
    looped.status.problem = ""
    assert (looped.says(LIVENESS), looped.says(READINESS)) == (True, True)


def test_an_unknown_service_is_not_found(looped: Looped) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        looped.says("tandem.v1.Nobody")
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_blocked_event_loop_is_logged_and_ends_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The test runs the watch alone, because the end of the watch would end the test's process."""
    stands, go_on, ended, watches = threading.Event(), threading.Event(), threading.Event(), []

    async def main() -> None:
        watch = LoopWatch(_LIMITS, end=ended.set)
        watches.append(watch)
        watch.start()
        await asyncio.sleep(0)
        stands.set()
        go_on.wait(_DEADLINE_S)
        watch.stop()

    loop_thread = threading.Thread(target=lambda: asyncio.run(main()))
    loop_thread.start()
    assert stands.wait(_DEADLINE_S)
    assert ended.wait(_DEADLINE_S)
    assert watches[0].is_stuck
    go_on.set()
    loop_thread.join(_DEADLINE_S)
    assert "go_on.wait(_DEADLINE_S)" in caplog.text, "where it stands is in the log"


def test_stack_of_returns_the_stack_of_a_live_thread_and_no_text_for_an_ended_one() -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join(_DEADLINE_S)
    assert "test_stack_of_returns" in stack_of(threading.get_ident())
    assert stack_of(ended.ident) == ""
    assert stack_of(None) == ""
