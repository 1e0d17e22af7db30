"""The servers of a router and their ports."""

from dataclasses import dataclass
from functools import partial

from cluster.observe.health import HealthPort
from cluster.observe.stalls import StallLimits
from cluster.observe.telemetry import MetricsPort, Telemetry
from cluster.serving.serving import GrpcServer
from cluster.serving.tls import ClusterTls
from cluster.settings.config import RouterConfig
from router.accounts import Accounts, KeyInterceptor
from router.http.server import HttpServer

SERVICES = ("tandem.v1.Inference", "tandem.v1.Admin")
_SPARE_CALLS = 4096  # for health checks, operators, idle connections and refusals in progress


@dataclass(frozen=True, slots=True)
class Ports:
    """The servers of a router; their ports are bound before anything is served."""

    http: HttpServer
    grpc: GrpcServer
    health: HealthPort
    metrics: MetricsPort
    host: str  # the name under which others reach them


def bind_ports(
    config: RouterConfig, host: str, telemetry: Telemetry, tls: ClusterTls | None, accounts: Accounts
) -> Ports:
    """Bind the ports. Raises ConfigError."""
    http = HttpServer(host=config.host, port=config.port, tls=tls, shares_port=config.share_port == "on")
    grpc = GrpcServer(
        service_names=SERVICES,
        telemetry=telemetry,
        max_message_bytes=config.max_message_bytes,
        interceptors=[KeyInterceptor(accounts.gate, accounts.audit)],
        credentials=tls.public_credentials() if tls is not None else None,
        max_calls=max_calls(config),
        max_connection_age_s=config.max_connection_age_s,
    )
    limits = StallLimits(config.loop_timeout_s, config.stuck_exit_s)  # of the event loop
    on_lag = partial(telemetry.observe, "tandem_event_loop_lag_seconds")
    health = HealthPort(grpc.status, host=config.host, port=config.health_port, limits=limits, on_lag=on_lag)
    metrics = MetricsPort(telemetry, accounts.gate, host=config.metrics_host, port=config.metrics_port)
    return Ports(http, grpc, health, metrics, host)


def max_calls(config: RouterConfig) -> int:
    """Return the bound on concurrent gRPC calls and on HTTP connections. It is far above the bound on live requests,
    because the router answers every request that it refuses with the reason.
    """
    return 2 * config.max_live_requests + _SPARE_CALLS
