"""The gRPC server that every Tandem process runs, and the channel to such a server.

Each server includes the health and reflection services; cluster/serving/rpc_errors.py converts every error. Owns the
port and the health status, never the services themselves. Members' calls may come as frames too (frame_server.py).
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.auth.connections import AcceptingConnection
from cluster.errors import ConfigError, MemberRefused
from cluster.observe.health import HealthStatus
from cluster.observe.telemetry import Telemetry
from cluster.serving.frame_server import FrameServer
from cluster.serving.listening import refuse_taken
from cluster.serving.rpc_errors import ErrorInterceptor
from cluster.serving.tls import ClusterTls

# Enough for a packed prompt of a million tokens or for 64 steps of log-probabilities; no valid message is larger.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# Time for the TLS handshake and the HTTP/2 settings; a client that has not completed them by then is disconnected.
_HANDSHAKE_MS = 10_000
_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
# Both ends send pings. A peer that is stopped or cut off does not answer, so its calls are cancelled instead of running
# to their end without a reader.
_KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),  # its default of one minute would override the line above
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_KEEPALIVE_OPTIONS,
    ("grpc.so_reuseport", 0),  # else two processes share a port and each gets half of the calls
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
)
_CHANNEL_OPTIONS = (
    *_KEEPALIVE_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name, this is the timeout of connecting and bounds no pause. A busy machine needs many times the
    # time of an idle one, and a call fails when the first attempt does.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # members reach each other directly; the environment's proxy settings are ignored
)


class GrpcServer:
    """The gRPC server of a process. Use it in this order: construct, add services (`add_..._to_server(servicer,
    server.grpc)`), bind, start, stop.

    The health service reports NOT_SERVING until `set_ready(True)` and again after `set_ready(False)`. Liveness is
    SERVING from the start, except while a problem is set. `status` gives the same answers to other threads.
    """

    def __init__(
        self,
        *,
        service_names: Sequence[str],
        telemetry: Telemetry,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        gate: grpc.aio.ServerInterceptor | None = None,
        credentials: grpc.ServerCredentials | None = None,
        max_calls: int | None = None,
        max_connections: int | None = None,
        max_connection_age_s: float = 0.0,
    ) -> None:
        """`service_names`: full names such as `tandem.v1.Inference`. `interceptors` run inside the one that converts
        errors, so they may raise a TandemError too. `gate` runs outside of all of them and sees a request first, as
        bytes. `credentials`: for TLS; None means plaintext. `max_calls`: the
        maximum number of calls at once; a further call ends with RESOURCE_EXHAUSTED before it is read. None: no limit,
        for a server whose callers are members. `max_connections`: counted before any handshake; a further connection is
        closed. None: as `max_calls`. `max_connection_age_s`: about this old (gRPC varies it by a tenth), a connection
        takes no further call and closes when its last call has ended, so that a client balances its load again. 0: no
        such age."""
        self._interceptors = [*([gate] if gate is not None else []), ErrorInterceptor(telemetry), *interceptors]
        self._frames: FrameServer | None = None  # None: all calls use gRPC
        self._server = grpc.aio.server(
            interceptors=self._interceptors,
            options=[
                *_SERVER_OPTIONS,
                *_message_options(max_message_bytes),
                *_connection_options(max_calls if max_connections is None else max_connections),
                *_age_options(max_connection_age_s),
            ],
            maximum_concurrent_rpcs=max_calls,
        )
        self.grpc = _Services(self._server)
        self._credentials = credentials
        self.status = HealthStatus(service_names)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)

    def serve_frames(
        self,
        accept: Callable[[], AcceptingConnection],
        on_refused: Callable[[MemberRefused, str], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """Serve the calls that members make as frames too, on a port of their own beside that of `bind`. To be called
        before services are added. The arguments are those of FrameServer. With TLS all calls use gRPC."""
        if self._credentials is None:
            self._frames = self.grpc.frames = FrameServer(self._interceptors, accept, on_refused, on_closed)

    @property
    def frame_port(self) -> int:
        """Return the port for frames; 0: there is none."""
        return self._frames.port if self._frames is not None else 0

    def bind(self, host: str, port: int, flag: str = "--port") -> int:
        """Listen on `port`, or on a free port for 0, and return its number. `flag` chooses the port. Raises ConfigError
        if that is impossible."""
        address = join_address(host, port)
        refuse_taken(host, port, flag)
        try:
            if self._credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: the port is in use, or the address is not ours") from error
        if not bound:
            raise ConfigError(f"cannot listen on {address}: the port is in use, or the address is not ours")
        if self._frames is not None:
            self._frames.bind(host)
        return bound

    async def start(self) -> None:
        await self.set_ready(False)
        if self._frames is not None:
            await self._frames.start()
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        """Set the status that the health service reports for the server and each of its services."""
        self.status.is_ready = ready
        await self._publish()

    async def set_problem(self, problem: str) -> None:
        """Set the problem that a restart of the process would solve; the server is then neither alive nor ready. An
        empty string means that there is none."""
        self.status.problem = problem
        await self._publish()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and cancel those that are still in progress after `grace_s`."""
        await self.set_ready(False)
        stopping = [self._server.stop(grace_s)]
        if self._frames is not None:
            stopping.append(self._frames.stop(grace_s))
        await asyncio.gather(*stopping)

    async def _publish(self) -> None:
        for name in self.status.names:
            await self._health.set(name, self.status.status(name))


class _Services:
    """Takes the services that generated code adds: they are served over gRPC, and as frames where members call."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.frames: FrameServer | None = None

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)
        if self.frames is not None:
            self.frames.add_handlers(handlers)

    def add_registered_method_handlers(
        self, service: str, handlers: dict[str, "grpc.RpcMethodHandler[Any, Any]"]
    ) -> None:
        self._server.add_registered_method_handlers(service, handlers)


def open_channel(
    address: str, tls: ClusterTls | None = None, *, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """Return a channel to host:port, over TLS if the cluster uses it. The certificate there must have the common name
    of members (`--tls-server-name`), or name the host if there is none. The channel connects at the first call and
    reconnects within about two seconds after the server has come back."""
    options: list[tuple[str, object]] = [*_CHANNEL_OPTIONS, *_message_options(max_message_bytes)]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))

    def connect() -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)

    return RenewedChannel(connect, lambda: tls.version)


async def is_serving(channel: grpc.aio.Channel, *, timeout_s: float, service: str = "") -> bool:
    """Ask the health service. Raises grpc.aio.AioRpcError if there is no answer."""
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def join_address(host: str, port: int) -> str:
    """Return host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _message_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


def _connection_options(max_connections: int | None) -> list[tuple[str, int]]:
    return [] if max_connections is None else [("grpc.max_allowed_incoming_connections", max_connections)]


def _age_options(max_connection_age_s: float) -> list[tuple[str, int]]:
    """Set no `max_connection_age_grace_ms`: gRPC's default never cuts calls in progress."""
    return [("grpc.max_connection_age_ms", math.ceil(max_connection_age_s * 1000))] if max_connection_age_s else []


class RenewedChannel(grpc.aio.Channel):
    """A channel whose credentials change, which gRPC's own channels do not support.

    Calls that begin after a change use a new connection. Calls in flight end on the connection where they began, which
    is closed after the last of them.
    """

    def __init__(self, connect: Callable[[], grpc.aio.Channel], version: Callable[[], int]) -> None:
        """`connect` returns a channel with the present credentials, and `version` changes with them."""
        self._connect, self._version = connect, version
        self._opened = _Opened(connect(), version())
        self._former: set[_Opened] = set()  # with calls in flight
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for opened in (self._opened, *self._former):
            await opened.channel.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._present().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._present().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._present().channel.channel_ready()

    def unary_unary(self, method: str, *codec: Any, **more: Any) -> Any:
        return self._calls("unary_unary", method, codec, more)

    def unary_stream(self, method: str, *codec: Any, **more: Any) -> Any:
        return self._calls("unary_stream", method, codec, more)

    def stream_unary(self, method: str, *codec: Any, **more: Any) -> Any:
        return self._calls("stream_unary", method, codec, more)

    def stream_stream(self, method: str, *codec: Any, **more: Any) -> Any:
        return self._calls("stream_stream", method, codec, more)

    def _calls(self, kind: str, method: str, codec: tuple[Any, ...], more: dict[str, Any]) -> Any:
        opened, begin_call = self._opened, getattr(self._opened.channel, kind)(method, *codec, **more)

        def begin(*arguments: Any, **options: Any) -> Any:
            nonlocal opened, begin_call
            now = self._present()
            if now is not opened:
                opened, begin_call = now, getattr(now.channel, kind)(method, *codec, **more)
            call = begin_call(*arguments, **options)
            now.num_calls += 1
            call.add_done_callback(lambda _: self._ended(now))
            return call

        return begin

    def _present(self) -> "_Opened":
        version = self._version()
        if version != self._opened.version:
            former, self._opened = self._opened, _Opened(self._connect(), version)
            self._former.add(former)
            self._close_unused(former)
        return self._opened

    def _ended(self, opened: "_Opened") -> None:
        opened.num_calls -= 1
        self._close_unused(opened)

    def _close_unused(self, opened: "_Opened") -> None:
        if opened in self._former and not opened.num_calls:
            self._former.discard(opened)
            closing = asyncio.create_task(opened.channel.close(), name="close a channel with former credentials")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


class _Opened:
    """A connection, the version of its credentials, and its calls in flight."""

    def __init__(self, channel: grpc.aio.Channel, version: int) -> None:
        self.channel, self.version = channel, version
        self.num_calls = 0
