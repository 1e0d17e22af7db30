"""What a process says of its own health, and a port where that is answered without its event loop.

Two questions. Readiness: may it get new work? Liveness: would a restart help? A worker that drains is alive and not
ready; one that is stuck is neither. The answers on the gRPC port come from the event loop, and say nothing while it is
busy; those on the health port come from a thread that looks at the loop's own beat, so that a busy loop is told from a
dead one. Its answers need no TLS: they hold nothing, and no orchestrator's probe has a certificate.

Owns the state of health, the port, and the end of a process whose loop stands still. Never decides about work.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2

from cluster.errors import ConfigError
from cluster.observe.stacks import stack_of
from cluster.observe.watchdog import StandStill, StuckLimits, Verdict
from cluster.process import ExitStatus

LIVENESS = "liveness"
READINESS = "readiness"

_LOG = logging.getLogger("tandem.health")
_SAY_S = 1.0
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 4096))


class HealthStatus:
    """Set on the event loop; any thread may ask. `problem` is why the process is not alive; empty: it is."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self.names = ("", READINESS, LIVENESS, *service_names)
        self.is_ready = False
        self.problem = ""

    def status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus | None:
        """None: there is no such service here."""
        if name not in self.names:
            return None
        return _SERVING if not self.problem and (self.is_ready or name == LIVENESS) else _NOT_SERVING


class LoopWatch:
    """Whether the event loop still turns. A thread looks; a loop that stands still for longer than it may ends the
    process, with a word on where it stands."""

    def __init__(self, limits: StuckLimits, *, end: Callable[[], None] | None = None) -> None:
        """`end`: what ends the process; None: leaving it at once."""
        self._limits = limits
        self._end = end or _end
        self._still = StandStill(limits.look_s)
        self._beats = 0
        self._stopped = threading.Event()
        self._beat: asyncio.TimerHandle | None = None
        self._loop_thread: int | None = None
        self._thread = threading.Thread(target=self._watch, name="watch the loop", daemon=True)
        self.is_stuck = False

    def start(self) -> None:
        """On the loop."""
        self._loop_thread = threading.get_ident()
        self._take_beat()
        self._thread.start()

    def stop(self) -> None:
        """On the loop."""
        self._stopped.set()
        if self._beat is not None:
            self._beat.cancel()

    def _take_beat(self) -> None:
        self._beats += 1
        self._beat = asyncio.get_running_loop().call_later(self._limits.look_s / 2, self._take_beat)

    def _watch(self) -> None:
        while not self._stopped.wait(self._limits.look_s):
            stood_s = self._still.look(self._beats, time.monotonic())
            verdict = self._limits.judge(stood_s)
            was_stuck, self.is_stuck = self.is_stuck, verdict is not Verdict.WELL
            if self.is_stuck and not was_stuck:
                _say(f"the event loop has stood still for {stood_s:.1f} s at\n{stack_of(self._loop_thread)}")
            elif was_stuck and not self.is_stuck:
                _say("the event loop turns again")
            if verdict is Verdict.HOPELESS:
                _say(f"the event loop has stood still for {stood_s:.1f} s: the process ends")
                self._end()
                return


class HealthPort:
    """Bound when made, answers from `start` to `stop`."""

    def __init__(self, status: HealthStatus, *, host: str, port: int, limits: StuckLimits) -> None:
        """Raises ConfigError when the port cannot be had. `port` 0: a free one. `limits`: of the event loop."""
        self._status = status
        self._watch = LoopWatch(limits)
        self._server = grpc.server(ThreadPoolExecutor(1, "health"), options=_OPTIONS)
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check})
        self._server.add_generic_rpc_handlers((handler,))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: choose another --health-port") from error

    def start(self) -> None:
        """On the loop."""
        self._watch.start()
        self._server.start()

    def end_within(self, timeout_s: float) -> None:
        """The process leaves by itself within this, or is ended."""
        threading.Thread(target=_end_after, args=(timeout_s,), name="end by force", daemon=True).start()

    def stop(self) -> None:
        """On the loop. Nobody answers any more; does not wait."""
        self._watch.stop()
        self._server.stop(grace=None)

    def _check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._status.status(request.service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=_NOT_SERVING if self._watch.is_stuck else status)


def _say(text: str) -> None:
    """Whoever holds the log's lock, or does not read what is written, may be what the loop waits for."""
    saying = threading.Thread(target=_LOG.error, args=(text,), daemon=True)
    saying.start()
    saying.join(_SAY_S)


def _end_after(timeout_s: float) -> None:
    threading.Event().wait(timeout_s)
    _end()


def _end() -> None:
    os._exit(ExitStatus.STUCK)
