"""The parts of an overview: samples, quantiles and events are right and bounded."""

import pytest

from cluster.registry.scale_target import ScaleTarget
from router.overview.history import (
    MAX_EVENTS,
    MAX_SAMPLES,
    REPEAT_S,
    ClusterView,
    EventKind,
    EventLog,
    History,
    SeenMember,
    Totals,
    quantile_s,
)

BOUNDS_S = (0.1, 1.0)
READY = SeenMember("decode", "ready", True)


def totals(at_s: float, num_ended: int = 0, ttft: tuple[int, ...] = (0, 0, 0)) -> Totals:
    latencies = {"ttft": ttft, "itl": (0, 0, 0), "e2e": (0, 0, 0)}
    return Totals(at_s, num_ended, 0, 7 * num_ended, 3 * num_ended, 1, latencies)


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [((0, 0, 0), 0.5, None), ((4, 0, 0), 0.5, 0.05), ((2, 2, 0), 0.75, 0.55), ((0, 0, 3), 0.99, 1.0)],
)
def test_a_quantile_is_interpolated_within_its_range(
    counts: tuple[int, ...], share: float, value: float | None
) -> None:
    assert quantile_s(BOUNDS_S, counts, share) == (None if value is None else pytest.approx(value))


def test_a_sample_is_the_difference_of_two_readings_and_is_given_once() -> None:
    history = History(BOUNDS_S)
    history.add(totals(10.0))
    assert history.newest == 0 and not list(history.since(0))
    history.add(totals(12.0, 5, ttft=(4, 1, 0)))
    (sample,) = history.since(0)
    assert (sample.period_s, sample.num_ended, sample.num_prompt_tokens, sample.num_tokens) == (2.0, 5, 35, 15)
    assert sample.ttft_s is not None and list(sample.ttft_s) == pytest.approx([0.0625, 0.955])
    assert sample.itl_s is None
    assert list(history.since(history.newest)) == []


def test_latencies_are_those_of_the_time_that_is_kept() -> None:
    history = History(BOUNDS_S)
    for second in range(MAX_SAMPLES + 11):
        history.add(totals(2.0 * second, second, ttft=(second, 0, 0)))
    assert len(list(history.since(0))) == MAX_SAMPLES
    assert history.latencies()["ttft"] == (MAX_SAMPLES, 0, 0)
    assert history.newest == MAX_SAMPLES + 10


def texts(log: EventLog, number: int = 0) -> list[tuple[EventKind, str]]:
    return [(event.kind, event.text) for event in log.since(number)]


def test_members_that_come_change_and_leave_are_events() -> None:
    log = EventLog()
    log.observe(ClusterView({"d0@a": READY}), 1.0)
    assert texts(log) == []  # they were there
    log.observe(ClusterView({"d0@a": READY, "d1@b": SeenMember("decode", "starting", False)}), 2.0)
    log.observe(ClusterView({"d0@a": SeenMember("both", "ready", True), "d1@b": READY}), 3.0)
    log.observe(
        ClusterView({"d0@a": SeenMember("both", "draining", True), "d1@b": SeenMember("decode", "ready", False)}), 4.0
    )
    log.observe(ClusterView({}), 5.0)
    assert texts(log) == [
        (EventKind.MEMBER, "d1 joined as decode, starting"),
        (EventKind.MEMBER, "d0 has the role both instead of decode"),
        (EventKind.MEMBER, "d1 is ready"),
        (EventKind.MEMBER, "d0 is draining"),
        (EventKind.FAULT, "d1 does not answer"),
        (EventKind.MEMBER, "d0 left"),
        (EventKind.FAULT, "d1 was lost: its registration ended without a drain"),
    ]
    assert [event.at_s for event in log.since(log.newest - 1)] == [5.0]


def test_a_target_a_breaker_and_a_silent_registry_are_events() -> None:
    log, pair = EventLog(), ("p0@a", "d0@b")
    target = ScaleTarget(prefill=1, decode=2, version=2, follower="up", reached=1)
    log.observe(ClusterView(), 1.0)
    log.observe(ClusterView(target=target, breakers={pair: "open"}, registry_age_s=6.0), 2.0)
    log.observe(ClusterView(target=ScaleTarget(1, 2, 0, 2, "up", 2), breakers={pair: "half_open"}), 3.0)
    log.observe(ClusterView(target=ScaleTarget(1, 2, 0, 2, "up", 2)), 4.0)
    assert texts(log) == [
        (EventKind.SCALE, "target: 1 prefill, 2 decode"),
        (EventKind.FAULT, "p0 to d0: hand-offs fail; the pair is not used for a while"),
        (EventKind.FAULT, "the registry does not answer; the last known membership holds"),
        (EventKind.SCALE, "target reached: 1 prefill, 2 decode"),
        (EventKind.MEMBER, "the registry answers again"),
        (EventKind.MEMBER, "p0 to d0: hand-offs work again, or a worker left"),
    ]


def test_a_fault_that_goes_on_is_one_event_per_period_and_events_are_bounded() -> None:
    log = EventLog()
    log.observe(ClusterView(faults={"old": 3}), 0.0)
    log.observe(ClusterView(faults={"old": 3, "retry": 1}), 1.0)
    for tenth in range(1, int(REPEAT_S * 10) + 1):
        log.observe(ClusterView(faults={"old": 3, "retry": 1 + tenth}), 1.0 + tenth / 10)
    assert texts(log) == [(EventKind.FAULT, "retry"), (EventKind.FAULT, "retry (50 times)")]
    for number in range(MAX_EVENTS + 5):
        log.observe(ClusterView(members={f"d{number}@a": READY}), 100.0)
    assert len(texts(log)) == MAX_EVENTS
