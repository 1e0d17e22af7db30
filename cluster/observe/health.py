"""The health of a process, and a port that reports it without the event loop.

Readiness: may the process get new work? Liveness: would a restart not help? A draining worker is alive and not ready; a
stuck worker is neither. Health checks on the gRPC port are answered by the event loop, so they time out while it is
blocked. Checks on the health port are answered by a thread that watches the event loop, so a busy loop and a blocked
one are told apart. The health port needs no TLS: its responses contain no data, and orchestrators' checks have no
certificate.

Owns the health status, the port, and the exit of a process whose event loop is blocked. Never decides about work.
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
from cluster.observe.logs import stack_of
from cluster.observe.stalls import StallLimits, StallState, StallTimer
from cluster.process import ExitStatus
from cluster.serving.listening import refuse_taken

LIVENESS = "liveness"
READINESS = "readiness"

_LOG = logging.getLogger("tandem.health")
_LOG_TIMEOUT_S = 1.0
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 4096))


class HealthStatus:
    """The health status of a process. The event loop writes it, any thread may read it. `problem`: why the process is
    not alive; empty if it is.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self.names = ("", READINESS, LIVENESS, *service_names)
        self.is_ready = False
        self.problem = ""

    def status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus | None:
        """Return the status of a service; None if it is unknown."""
        if name not in self.names:
            return None
        return _SERVING if not self.problem and (self.is_ready or name == LIVENESS) else _NOT_SERVING


class LoopWatch:
    """A thread that detects a blocked event loop, logs the loop's stack, and ends the process if it stays blocked."""

    def __init__(
        self,
        limits: StallLimits,
        *,
        end: Callable[[], None] | None = None,
        on_lag: Callable[[float], None] = lambda lag_s: None,
    ) -> None:
        """`end` ends the process; default: exit at once. `on_lag`: called on the loop with the seconds by which its
        timer ran late, at every beat."""
        self._limits = limits
        self._end = end or _end
        self._on_lag = on_lag
        self._stall = StallTimer(limits.poll_s)
        self._beats = 0
        self._stopped = threading.Event()
        self._beat: asyncio.TimerHandle | None = None
        self._loop_thread: int | None = None
        self._thread = threading.Thread(target=self._watch, name="watch the loop", daemon=True)
        self.is_stuck = False

    def start(self) -> None:
        """Call it on the event loop."""
        self._loop_thread = threading.get_ident()
        self._beat_at(asyncio.get_running_loop().time())
        self._thread.start()

    def stop(self) -> None:
        """Call it on the event loop."""
        self._stopped.set()
        if self._beat is not None:
            self._beat.cancel()

    def _beat_at(self, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._beats += 1
        self._on_lag(now_s - due_s)
        next_s = now_s + self._limits.poll_s / 2
        self._beat = loop.call_at(next_s, self._beat_at, next_s)

    def _watch(self) -> None:
        while not self._stopped.wait(self._limits.poll_s):
            stalled_s = self._stall.poll(self._beats, time.monotonic())
            state = self._limits.judge(stalled_s)
            was_stuck, self.is_stuck = self.is_stuck, state is not StallState.RUNNING
            if self.is_stuck and not was_stuck:
                _log(f"the event loop has been blocked for {stalled_s:.1f} s at\n{stack_of(self._loop_thread)}")
            elif was_stuck and not self.is_stuck:
                _log("the event loop runs again")
            if state is StallState.DEAD:
                _log(f"the event loop has been blocked for {stalled_s:.1f} s: the process exits")
                self._end()
                return


class HealthPort:
    """The port for health checks. It is bound when created and answers from `start` to `stop`."""

    def __init__(
        self,
        status: HealthStatus,
        *,
        host: str,
        port: int,
        limits: StallLimits,
        on_lag: Callable[[float], None] = lambda lag_s: None,
    ) -> None:
        """`port` 0: a free port. `limits`: of the event loop. `on_lag`: as in LoopWatch. Raises ConfigError if the port
        cannot be bound."""
        self._status = status
        self._watch = LoopWatch(limits, on_lag=on_lag)
        self._server = grpc.server(ThreadPoolExecutor(1, "health"), options=_OPTIONS)
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check})
        self._server.add_generic_rpc_handlers((handler,))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        refuse_taken(host, port, "--health-port")
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: choose another --health-port") from error

    def start(self) -> None:
        """Call it on the event loop."""
        self._watch.start()
        self._server.start()

    def end_within(self, timeout_s: float) -> None:
        """End the process by force if it has not exited within `timeout_s`."""
        threading.Thread(target=_end_after, args=(timeout_s,), name="end by force", daemon=True).start()

    def stop(self) -> None:
        """Stop answering; does not wait. Call it on the event loop."""
        self._watch.stop()
        self._server.stop(grace=None)

    def _check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._status.status(request.service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=_NOT_SERVING if self._watch.is_stuck else status)


def _log(text: str) -> None:
    """Log on a separate thread, with a timeout: the loop may be blocked by the log's lock or by an unread pipe."""
    logging_thread = threading.Thread(target=_LOG.error, args=(text,), daemon=True)
    logging_thread.start()
    logging_thread.join(_LOG_TIMEOUT_S)


def _end_after(timeout_s: float) -> None:
    threading.Event().wait(timeout_s)
    _end()


def _end() -> None:
    os._exit(ExitStatus.STUCK)
