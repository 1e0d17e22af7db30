"""The metrics and log lines that a process publishes."""

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from cluster.observe.logs import configure_logs
from cluster.observe.metrics import EVERY_PROCESS, METRICS, ROUTER, WORKER, Kind
from cluster.observe.telemetry import Telemetry


def test_prometheus_reads_the_counted_values() -> None:
    telemetry = Telemetry()
    telemetry.count("tandem_decode_tokens_total", 5)
    telemetry.count("tandem_decode_tokens_total")
    telemetry.gauge("tandem_members", 3, role="decode", state="ready")
    telemetry.observe("tandem_ttft_seconds", 0.2)
    text = telemetry.render().decode()
    assert "tandem_decode_tokens_total 6.0" in text
    assert 'tandem_members{role="decode",state="ready"} 3.0' in text
    assert 'tandem_ttft_seconds_bucket{le="0.25"} 1.0' in text
    assert telemetry.value("tandem_decode_tokens_total") == 6
    assert telemetry.value("tandem_ttft_seconds") == 1


def test_a_gauge_of_members_has_series_of_the_present_ones_only() -> None:
    telemetry = Telemetry()
    for number in range(1000):  # members that come and go do not use up the bound of label sets
        telemetry.gauge_all("tandem_worker_slowdown_ratio", {(f"d{number}", "decode"): 1.0, ("d", "decode"): number})
    text = telemetry.render().decode()
    assert re.findall(r'^tandem_worker_slowdown_ratio\{leg="decode",worker="(\w+)"\} (\S+)', text, re.MULTILINE) == [
        ("d", "999.0"),
        ("d999", "1.0"),
    ]
    telemetry.gauge_all("tandem_worker_slowdown_ratio", {})
    assert "decode" not in telemetry.render().decode()


def test_a_process_with_another_role_publishes_that_role_only() -> None:
    telemetry = Telemetry()
    for role in ("prefill", "decode"):
        telemetry.describe(role=role, member="w", model="m")
    assert re.findall(r'^tandem_build_info\{.*role="(\w+)".*\} (\S+)', telemetry.render().decode(), re.MULTILINE) == [
        ("decode", "1.0")
    ]


def test_two_workers_in_one_process_have_separate_counts() -> None:
    first, second = Telemetry(), Telemetry()
    first.count("tandem_decode_tokens_total")
    assert (first.value("tandem_decode_tokens_total"), second.value("tandem_decode_tokens_total")) == (1, 0)


def test_a_process_publishes_only_metrics_that_were_counted_in_it() -> None:
    telemetry = Telemetry()
    assert telemetry.render() == b""
    telemetry.count("tandem_decode_tokens_total", 0)
    assert b"tandem_decode_tokens_total 0.0" in telemetry.render()
    assert b"tandem_requests" not in telemetry.render()


def test_a_router_and_a_worker_publish_their_metrics_before_the_first_use() -> None:
    for telemetry, own, others in (
        (Telemetry.of_router(), ROUTER, WORKER),
        (Telemetry.of_worker(), WORKER, ROUTER),
    ):
        text = telemetry.render().decode()
        names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
        assert names == set(own) | set(EVERY_PROCESS)
        assert not names & set(others)
    assert "tandem_preemptions_total 0.0" in Telemetry.of_worker().render().decode()


def test_an_undeclared_metric_or_label_is_an_error() -> None:
    telemetry = Telemetry()
    with pytest.raises(KeyError):
        telemetry.count("tandem_made_up_total")
    with pytest.raises(KeyError):
        telemetry.count("tandem_members")  # a gauge is no counter
    with pytest.raises(ValueError, match="state"):
        telemetry.gauge("tandem_members", 1, role="decode", colour="red")
    with pytest.raises(ValueError, match="state"):
        telemetry.gauge("tandem_members", 1)


def test_the_values_of_labels_are_bounded() -> None:
    telemetry = Telemetry()
    for index in range(1000):
        telemetry.count("tandem_requests_total", outcome=f"outcome {index}")
    assert telemetry.render().count(b"tandem_requests_total{") == 201
    assert telemetry.value("tandem_requests_total", outcome="other") == 800


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, metric in METRICS.items():
        assert name.startswith(("tandem_", "vllm:"))
        assert name.endswith("_total") == (metric.kind is Kind.COUNTER), name
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM), name
        assert list(metric.buckets) == sorted(set(metric.buckets)), name


def test_a_gauge_can_be_set_and_moved() -> None:
    telemetry = Telemetry()
    telemetry.gauge("tandem_quarantined_blocks", 3)
    telemetry.shift("tandem_quarantined_blocks", -1)
    assert telemetry.value("tandem_quarantined_blocks") == 2


@pytest.fixture
def log_lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.StringIO()
    yield stream
    root.handlers, root.level = handlers, level


def test_a_log_line_contains_the_request_id_and_the_numbers(log_lines: io.StringIO) -> None:
    configure_logs("info", "text", log_lines)
    logging.getLogger("tandem.router").info("admitted", extra={"request_id": "r1", "prompt_tokens": 12, "wait_s": 0.25})
    logging.getLogger("tandem.router").debug("not shown")
    assert (
        log_lines.getvalue().split(" ", 1)[1]
        == "INFO tandem.router request_id=r1 admitted prompt_tokens=12 wait_s=0.25\n"
    )


def test_attributes_that_a_library_adds_to_log_records_are_not_logged(log_lines: io.StringIO) -> None:
    configure_logs("info", "text", log_lines)
    logging.getLogger("tandem.router").info("admitted", extra={"_marked_by": "a library"})
    assert log_lines.getvalue().endswith("INFO tandem.router admitted\n")


def test_a_clients_text_cannot_start_a_new_log_line(log_lines: io.StringIO) -> None:
    configure_logs("info", "text", log_lines)
    logging.getLogger("tandem.router").info("prompt\nof", extra={"request_id": 'x\n2026 ERROR "all is lost'})
    assert len(log_lines.getvalue().splitlines()) == 1
    assert r'request_id="x\n2026 ERROR \"all is lost"' in log_lines.getvalue()


def test_logs_can_be_json(log_lines: io.StringIO) -> None:
    configure_logs("warning", "json", log_lines)
    logging.getLogger("tandem.worker").warning("full", extra={"request_id": "r2", "free_blocks": 0})
    line = json.loads(log_lines.getvalue())
    assert {key: line[key] for key in ("level", "component", "message", "request_id", "free_blocks")} == {
        "level": "WARNING",
        "component": "tandem.worker",
        "message": "full",
        "request_id": "r2",
        "free_blocks": 0,
    }


def test_observations_that_are_added_together_are_those_that_are_added_one_by_one() -> None:
    values = (0.0, 0.0005, 0.0006, 0.2, 0.2, 7.0, 1e6)
    one_by_one, together = Telemetry(), Telemetry()
    for value in values:
        one_by_one.observe("tandem_phase_seconds", value, phase="decode")
    together.observe_all("tandem_phase_seconds", values, phase="decode")
    together.observe_all("tandem_phase_seconds", (), phase="prefill")
    assert together.render() == one_by_one.render()


def test_a_series_is_the_same_however_its_labels_are_ordered() -> None:
    telemetry = Telemetry()
    for _ in range(2):
        telemetry.gauge("tandem_members", 3, role="decode", state="ready")
        telemetry.gauge("tandem_members", 4, state="ready", role="decode")
    assert telemetry.render().count(b"tandem_members{") == 1
    assert telemetry.value("tandem_members", role="decode", state="ready") == 4
