"""The port at which Prometheus reads a process's metrics: seen through real sockets."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPResponse

import pytest

from cluster.accounts.keys import Gate
from cluster.errors import ConfigError
from cluster.observe.telemetry import CONTENT_TYPE, MetricsPort, Telemetry
from cluster.service_times import StepWork
from engine.scheduling.commands import Inspected
from engine.steps.step_loop import StepTime
from worker.watch import WorkerMetrics

_HOST = "127.0.0.1"
_DEADLINE_S = 30.0


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


@pytest.fixture
def port(telemetry: Telemetry) -> Iterator[MetricsPort]:
    port = MetricsPort(telemetry, Gate(), host=_HOST, port=0)
    port.start()
    yield port
    port.stop()


def get(port: MetricsPort, path: str = "/metrics", **headers: str) -> tuple[HTTPResponse, str]:
    with closing(HTTPConnection(_HOST, port.port, timeout=_DEADLINE_S)) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response, response.read().decode()


def test_a_scrape_shows_the_counters_and_the_process(port: MetricsPort, telemetry: Telemetry) -> None:
    telemetry.count("tandem_decode_tokens_total", 3)
    response, text = get(port)
    assert (response.status, response.getheader("Content-Type")) == (200, CONTENT_TYPE)
    assert "tandem_decode_tokens_total 3.0" in text
    assert "process_cpu_seconds_total" in text and "process_resident_memory_bytes" in text


@pytest.mark.parametrize("keys", [{"metrics_key": "m"}, {"metrics_key": "m", "api_key": "k", "admin_key": "a"}])
def test_with_a_key_for_metrics_every_scrape_needs_one(telemetry: Telemetry, keys: dict[str, str]) -> None:
    port = MetricsPort(telemetry, Gate(**keys), host=_HOST, port=0)  # type: ignore[arg-type]
    port.start()
    try:
        answers = {key: get(port, **({"Authorization": f"Bearer {key}"} if key else {})) for key in ("", "x", "m", "k")}
        statuses = {key: response.status for key, (response, _) in answers.items()}
        assert statuses == {"": 401, "x": 401, "m": 200, "k": 403 if "api_key" in keys else 401}
        assert all("tandem_" not in text for key, (_, text) in answers.items() if key != "m")
    finally:
        port.stop()


def test_nothing_but_metrics_is_served(port: MetricsPort) -> None:
    response, text = get(port, "/ui")
    assert response.status == 404 and "tandem_" not in text


def test_strangers_that_hold_connections_keep_no_scrape_out_and_are_few(port: MetricsPort) -> None:
    with ExitStack() as silent:
        held = [silent.enter_context(socket.create_connection((_HOST, port.port), _DEADLINE_S)) for _ in range(16)]
        response, _ = get(port)
        assert response.status == 200
        assert held[0].recv(1) == b"", "the oldest gives its place"
        held[1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert held[1].recv(8) == b"HTTP/1.0"


def test_a_taken_port_is_reported_with_the_flag(port: MetricsPort) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {_HOST}:{port.port}.*--metrics-port"):
        MetricsPort(Telemetry(), Gate(), host=_HOST, port=port.port)


def inspected(**figures: float) -> Inspected:
    blocks = {"free": 5, "cached": 1, "held": 3, "leased": 1, "quarantined": 0}
    return Inspected(0, blocks, {"running": 2, "waiting": 1, "frozen": 0, **figures}, violation="")


def test_a_worker_publishes_its_blocks_sequences_and_growing_counts(telemetry: Telemetry) -> None:
    metrics = WorkerMetrics(telemetry, vllm_model_name="m")
    metrics.publish(inspected(tokens_computed=10, preemptions=1))
    metrics.publish(inspected(tokens_computed=25, preemptions=1))
    assert telemetry.value("tandem_kv_blocks", state="held") == 3
    assert telemetry.value("tandem_kv_cache_usage_ratio") == pytest.approx(0.4)
    assert telemetry.value("tandem_sequences", state="running") == 2
    assert telemetry.value("tandem_computed_tokens_total") == 25
    assert telemetry.value("tandem_preemptions_total") == 1
    assert telemetry.value("vllm:num_requests_running", model_name="m") == 2
    assert telemetry.value("vllm:num_requests_waiting", model_name="m") == 1
    assert telemetry.value("vllm:kv_cache_usage_perc", model_name="m") == pytest.approx(0.4)


def test_vllms_metric_names_are_published_only_if_configured(telemetry: Telemetry) -> None:
    WorkerMetrics(telemetry).publish(inspected())
    assert b"vllm:" not in telemetry.render()


@pytest.mark.parametrize(
    ("work", "kind"), [(StepWork(num_new=8), "prefill"), (StepWork(batch=2), "decode"), (StepWork(8, 36.0, 2), "mixed")]
)
def test_steps_are_distinguished_by_their_work(telemetry: Telemetry, work: StepWork, kind: str) -> None:
    WorkerMetrics(telemetry).record_step(work, StepTime(0.02, 0.001, 0.018, 0.001))
    assert telemetry.value("tandem_step_seconds", work=kind) == 1
