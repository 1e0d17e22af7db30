"""A worker's figures about its links, measured by its reads from other workers."""

import random

import pytest

from cluster.messages import MemberId
from kvtransfer.importer.links import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    MAX_LINKS,
    MIN_READS,
    LinkSpeedFit,
    LinkTable,
    ReadSlowdown,
)

EXPORTER = MemberId("prefill-0", "a")
OTHER = MemberId("prefill-1", "b")
MIB = 1 << 20
SIZES = (64 * 1024, MIB, 16 * MIB, 64 * MIB)


def seconds(num_bytes: int, *, bytes_per_s: float, latency_s: float) -> float:
    return latency_s + num_bytes / bytes_per_s


def read(book: LinkTable, exporter: MemberId, transport: str, bytes_per_s: float, *, times: int = 8) -> None:
    for index in range(times):
        num_bytes = SIZES[index % len(SIZES)]
        taken_s = seconds(num_bytes, bytes_per_s=bytes_per_s, latency_s=1e-4)
        book.record_read(exporter, transport, num_bytes, taken_s, now_s=float(index))


@pytest.mark.parametrize("latency_s", [0.0, 20e-6, 5e-3])
@pytest.mark.parametrize("bytes_per_s", [1e6, 3e9, 400e9])
def test_reads_without_noise_give_the_exact_rate_and_latency(bytes_per_s: float, latency_s: float) -> None:
    fit = LinkSpeedFit()
    for _ in range(3):
        for num_bytes in SIZES:
            fit.add(num_bytes, seconds(num_bytes, bytes_per_s=bytes_per_s, latency_s=latency_s))
    estimate = fit.estimate()
    assert estimate is not None
    assert estimate.bytes_per_s == pytest.approx(bytes_per_s, rel=0.02)
    assert estimate.latency_s == pytest.approx(latency_s, rel=0.02, abs=2e-6)


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_stalled_reads_change_the_estimate_by_a_bounded_amount(seed: int) -> None:
    chance = random.Random(seed)
    fit = LinkSpeedFit()
    for index in range(60):
        num_bytes = chance.choice(SIZES)
        taken_s = seconds(num_bytes, bytes_per_s=2e9, latency_s=1e-3) * chance.uniform(0.9, 1.1)
        fit.add(num_bytes, taken_s * (100.0 if index % 20 == 10 else 1.0))
    estimate = fit.estimate()
    assert estimate is not None
    assert 2e9 / 1.6 < estimate.bytes_per_s < 2e9 * 1.6
    assert estimate.latency_s < 3e-3


def test_the_estimate_follows_a_link_that_became_slower() -> None:
    fit = LinkSpeedFit()
    for _ in range(10):
        for num_bytes in SIZES:
            fit.add(num_bytes, seconds(num_bytes, bytes_per_s=10e9, latency_s=1e-4))
    for _ in range(10):
        for num_bytes in SIZES:
            fit.add(num_bytes, seconds(num_bytes, bytes_per_s=0.1e9, latency_s=1e-4))
    estimate = fit.estimate()
    assert estimate is not None
    assert estimate.bytes_per_s == pytest.approx(0.1e9, rel=0.1)


def test_reads_of_one_size_give_a_rate_and_no_latency() -> None:
    fit = LinkSpeedFit()
    for taken_s in (0.010, 0.011, 0.009, 0.010):
        fit.add(MIB, taken_s)
    estimate = fit.estimate()
    assert estimate is not None
    assert estimate.latency_s == 0.0
    assert estimate.bytes_per_s == pytest.approx(MIB / 0.010, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_figures_are_finite_and_not_negative_for_any_reads(seed: int) -> None:
    chance = random.Random(seed)
    fit = LinkSpeedFit()
    for _ in range(200):
        fit.add(int(10 ** chance.uniform(0, 11)), 10 ** chance.uniform(-9, 3))
        estimate = fit.estimate()
        if estimate is not None:
            assert 0 < estimate.bytes_per_s < float("inf")
            assert 0 <= estimate.latency_s < float("inf")


def test_too_few_reads_give_no_estimate() -> None:
    fit = LinkSpeedFit()
    for _ in range(MIN_READS - 1):
        fit.add(MIB, 0.001)
    fit.add(0, 0.001)
    assert fit.estimate() is None


def test_speeds_are_in_the_order_in_which_hand_offs_use_transports() -> None:
    book = LinkTable(["shm", "tcp"])
    read(book, OTHER, "tcp", 9e9)
    read(book, EXPORTER, "tcp", 9e9)
    read(book, EXPORTER, "shm", 1e9)
    assert [(figure.exporter, figure.transport) for figure in book.speeds()] == [
        (EXPORTER, "shm"),
        (EXPORTER, "tcp"),
        (OTHER, "tcp"),
    ]
    best = book.best(EXPORTER)
    assert best is not None and best.transport == "shm"
    book.record_failure(EXPORTER, "shm", now_s=10.0)
    fallback = book.best(EXPORTER)
    assert fallback is not None and fallback.transport == "tcp"
    assert book.best(MemberId("prefill-2", "c")) is None


def test_each_failure_doubles_the_backoff_and_a_read_resets_it() -> None:
    book = LinkTable(["shm", "tcp"])
    now_s = 100.0
    waits: list[float] = []
    for _ in range(12):
        assert book.is_usable(EXPORTER, "shm", now_s)
        book.record_failure(EXPORTER, "shm", now_s)
        assert not book.is_usable(EXPORTER, "shm", now_s)
        assert book.is_usable(EXPORTER, "tcp", now_s)
        assert book.is_usable(OTHER, "shm", now_s)
        waited_s = FIRST_BACKOFF_S
        while not book.is_usable(EXPORTER, "shm", now_s + waited_s):
            waited_s *= 2
        waits.append(min(waited_s, MAX_BACKOFF_S))
        now_s += MAX_BACKOFF_S
    assert waits[:4] == [FIRST_BACKOFF_S * factor for factor in (1, 2, 4, 8)]
    assert waits[-1] == MAX_BACKOFF_S
    book.record_read(EXPORTER, "shm", MIB, 0.001, now_s)
    assert book.is_usable(EXPORTER, "shm", now_s)
    book.record_failure(EXPORTER, "shm", now_s)
    assert book.is_usable(EXPORTER, "shm", now_s + FIRST_BACKOFF_S)


def test_a_restarted_exporter_has_figures_of_its_own() -> None:
    book = LinkTable(["shm", "tcp"])
    read(book, EXPORTER, "shm", 1e9)
    book.record_failure(EXPORTER, "tcp", now_s=0.0)
    successor = MemberId(EXPORTER.id, "later")
    read(book, successor, "shm", 2e9)
    assert [figure.exporter for figure in book.speeds()] == [successor]
    assert book.is_usable(successor, "tcp", 0.0)


def test_links_unused_for_longest_are_dropped() -> None:
    book = LinkTable(["shm"])
    for index in range(MAX_LINKS + 10):
        read(book, MemberId(f"prefill-{index:04}", "a"), "shm", 1e9, times=MIN_READS)
    kept = [figure.exporter.id for figure in book.speeds()]
    assert kept == [f"prefill-{index:04}" for index in range(10, MAX_LINKS + 10)]


def _hand_off(book: LinkTable, num_bytes: int, fixed_s: float) -> None:
    moving_s = seconds(num_bytes, bytes_per_s=1e9, latency_s=1e-4) if num_bytes else 0.0
    book.record_hand_off(EXPORTER, "shm", num_bytes, fixed_s + moving_s)


def test_the_fixed_part_of_hand_offs_is_the_time_that_does_not_grow_with_their_bytes() -> None:
    book = LinkTable(["shm"])
    read(book, EXPORTER, "shm", 1e9)
    for num_bytes in (0, MIB, 64 * MIB) * 5:
        _hand_off(book, num_bytes, 0.003)
    assert book.hand_off is not None
    assert book.hand_off.fixed_s == pytest.approx(0.003, rel=0.01)
    assert book.hand_off.relative_error < 0.01


def test_a_stalled_hand_off_does_not_change_the_fixed_part_and_a_lasting_change_does() -> None:
    book = LinkTable(["shm"])
    for _ in range(8):
        _hand_off(book, 0, 0.003)
    _hand_off(book, 0, 5.0)
    assert book.hand_off is not None and book.hand_off.fixed_s == 0.003
    for _ in range(31):
        _hand_off(book, 0, 0.030)
    assert book.hand_off.fixed_s == 0.030


def test_a_hand_off_over_an_unmeasured_link_is_not_recorded() -> None:
    book = LinkTable(["shm"])
    _hand_off(book, MIB, 0.003)
    assert book.hand_off is None
    assert book.speeds() == ()


def _timed(slowdown: ReadSlowdown, num_bytes: int, seconds: float, *, times: int = 15) -> float:
    for _ in range(times):
        slowdown.add(num_bytes, seconds)
    return slowdown.times


def test_a_link_that_takes_much_longer_than_at_its_fastest_says_so_until_it_is_fast_again() -> None:
    slowdown = ReadSlowdown()
    assert _timed(slowdown, MIB, 0.002) == 1.0
    assert _timed(slowdown, MIB, 0.230) == pytest.approx(20.0)
    assert _timed(slowdown, MIB, 0.230, times=150) == pytest.approx(20.0), "what lasts does not become usual"
    assert _timed(slowdown, MIB, 0.002) == 1.0


def test_delays_of_a_few_milliseconds_on_a_busy_machine_are_no_slowdown() -> None:
    slowdown = ReadSlowdown()
    _timed(slowdown, MIB, 0.0002)
    assert _timed(slowdown, MIB, 0.008) < 2.0


def test_reads_of_another_size_and_a_few_stalled_ones_are_no_slowdown() -> None:
    slowdown = ReadSlowdown()
    _timed(slowdown, MIB, 0.002)
    assert _timed(slowdown, 64 * MIB, 0.128) == 1.0
    for _ in range(10):
        _timed(slowdown, MIB, 0.002, times=10)
        assert _timed(slowdown, MIB, 5.0, times=5) == 1.0
    assert _timed(slowdown, 0, 5.0) == 1.0


def test_a_worker_reports_the_slowdown_of_each_link() -> None:
    table = LinkTable(["tcp"])
    for seconds_taken in (0.002, 0.230):
        for exporter in (EXPORTER, OTHER):
            for _ in range(15):
                table.record_read(exporter, "tcp", MIB, 0.002 if exporter == OTHER else seconds_taken, now_s=0.0)
    assert [round(speed.slowdown) for speed in table.speeds()] == [20, 1]
