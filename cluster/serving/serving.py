"""A gRPC server as every process of Tandem runs it, and the channel that reaches one.

Health and reflection services stand in each server; every error leaves through cluster/serving/rpc_errors.py. Owns the
port and the health status, never what is served.
"""

import socket
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.errors import ConfigError
from cluster.observe.health import HealthStatus
from cluster.observe.telemetry import Telemetry
from cluster.serving.rpc_errors import ErrorInterceptor
from cluster.serving.tls import ClusterTls

# Packed prompts of a million tokens and 64 steps of log-probabilities fit; nothing that is meant for Tandem is larger.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# From the connection to the end of its TLS handshake and its HTTP/2 settings: a silent client is disconnected then.
_HANDSHAKE_MS = 10_000
_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
# Both ends ask: who is frozen or cut off answers no ping, and what it asked for would run to its end for nobody.
_KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),  # where this is left at its minute, that has no effect
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
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # members reach each other directly, whatever the environment says
)


class GrpcServer:
    """Made, given its services (`add_..._to_server(servicer, server.grpc)`), bound, started, stopped; in that order.

    Not ready until told: health says NOT_SERVING from the start and again from `set_ready(False)`. Alive from the
    start, but for the time of a problem. `status` says the same to other threads.
    """

    def __init__(
        self,
        *,
        service_names: Sequence[str],
        telemetry: Telemetry,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        credentials: grpc.ServerCredentials | None = None,
        max_calls: int | None = None,
    ) -> None:
        """`service_names`: full names, as in `tandem.v1.Inference`. `interceptors` stand inside of the one that turns
        errors into statuses, so they may raise a TandemError too. `credentials`: TLS with these; else plaintext.
        `max_calls`: at once; one more is RESOURCE_EXHAUSTED before it is read. As many connections, counted before any
        handshake; one more is closed. None: its callers are members."""
        self.grpc = grpc.aio.server(
            interceptors=[ErrorInterceptor(telemetry), *interceptors],
            options=[*_SERVER_OPTIONS, *_message_options(max_message_bytes), *_connection_options(max_calls)],
            maximum_concurrent_rpcs=max_calls,
        )
        self._credentials = credentials
        self.status = HealthStatus(service_names)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc)

    def bind(self, host: str, port: int) -> int:
        """The port it listens on: `port`, or a free one for 0. Raises ConfigError when it cannot be had."""
        address = join_address(host, port)
        _refuse_taken(host, port)
        try:
            if self._credentials is None:
                bound = self.grpc.add_insecure_port(address)
            else:
                bound = self.grpc.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: the port is in use, or the address is not ours") from error
        if not bound:
            raise ConfigError(f"cannot listen on {address}: the port is in use, or the address is not ours")
        return bound

    async def start(self) -> None:
        await self.set_ready(False)
        await self.grpc.start()

    async def set_ready(self, ready: bool) -> None:
        """What the health service says, for the server and each of its services."""
        self.status.is_ready = ready
        await self._publish()

    async def set_problem(self, problem: str) -> None:
        """Why a restart of the process would help: then it is neither alive nor ready. Empty: it would not."""
        self.status.problem = problem
        await self._publish()

    async def stop(self, grace_s: float) -> None:
        """Takes no new call; those in progress may go on for so long, then they are cancelled."""
        await self.set_ready(False)
        await self.grpc.stop(grace_s)

    async def _publish(self) -> None:
        for name in self.status.names:
            await self._health.set(name, self.status.status(name))


def open_channel(
    address: str, tls: ClusterTls | None = None, *, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """To host:port, over TLS where the cluster uses it. Connects by itself, and again after a loss, within two seconds
    of the other side's return."""
    options = [*_CHANNEL_OPTIONS, *_message_options(max_message_bytes)]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


async def is_serving(channel: grpc.aio.Channel, *, timeout_s: float, service: str = "") -> bool:
    """Asks the health service. Raises grpc.aio.AioRpcError when nobody answers."""
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def join_address(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refuse_taken(host: str, port: int) -> None:
    """gRPC would find out too, and write a line of its own to stderr that says it in the words of its source."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {join_address(host, port)}: {error.strerror}") from error


def _message_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


def _connection_options(max_connections: int | None) -> list[tuple[str, int]]:
    return [] if max_connections is None else [("grpc.max_allowed_incoming_connections", max_connections)]
