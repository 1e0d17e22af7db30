"""A port that cannot be bound is refused in one line, which names the setting that must change."""

import socket
from collections.abc import Callable

import pytest

from cluster.accounts.keys import Gate
from cluster.errors import ConfigError
from cluster.observe.health import HealthPort, HealthStatus
from cluster.observe.stalls import StallLimits
from cluster.observe.telemetry import MetricsPort, Telemetry
from cluster.serving.listening import refusal
from cluster.serving.serving import GrpcServer
from router.http.server import HttpServer

_ELSEWHERE = "192.0.2.1"  # RFC 5737: no machine has it
_LIMITS = StallLimits(60.0, 60.0)


def _bind_grpc(host: str, port: int) -> None:
    GrpcServer(service_names=(), telemetry=Telemetry()).bind(host, port, "--grpc-port")


_BINDS: dict[str, Callable[[str, int], object]] = {
    "--port": lambda host, port: HttpServer(host=host, port=port),
    "--grpc-port": _bind_grpc,
    "--health-port": lambda host, port: HealthPort(HealthStatus([]), host=host, port=port, limits=_LIMITS),
    "--metrics-port": lambda host, port: MetricsPort(Telemetry(), Gate(), host=host, port=port),
}


@pytest.mark.parametrize("flag", _BINDS)
async def test_a_port_in_use_names_its_flag(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            _BINDS[flag]("127.0.0.1", port)
    assert refused.value.message == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another {flag}, or 0 for a free port"
    )


@pytest.mark.parametrize("is_first_shared", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_port_is_free_only_for_sockets_that_share_it_with_one_that_does(
    is_first_shared: bool, is_shared: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=is_first_shared) as first:
        found = refusal("127.0.0.1", first.getsockname()[1], is_shared=is_shared)
    assert (found is None) == (is_first_shared and is_shared)


@pytest.mark.parametrize("flag", _BINDS)
@pytest.mark.parametrize("host", [_ELSEWHERE, "nowhere.invalid"])
async def test_an_address_that_is_not_ours_names_the_host_and_no_port(flag: str, host: str) -> None:
    """Another port would not help."""
    with pytest.raises(ConfigError) as refused:
        _BINDS[flag](host, 0)
    assert refused.value.message.startswith(f"cannot listen on --host {host}: ")
    assert "port" not in refused.value.message
