"""What a worker learns from its reads of others."""

import random

import pytest

from cluster.messages import MemberId
from kvtransfer.importer.pairs import FIRST_BACKOFF_S, MAX_BACKOFF_S, MAX_PAIRS, PairBook
from kvtransfer.importer.read_fit import MIN_READS, ReadFit

EXPORTER = MemberId("prefill-0", "a")
OTHER = MemberId("prefill-1", "b")
MIB = 1 << 20
SIZES = (64 * 1024, MIB, 16 * MIB, 64 * MIB)


def seconds(num_bytes: int, *, bytes_per_s: float, latency_s: float) -> float:
    return latency_s + num_bytes / bytes_per_s


def read(book: PairBook, exporter: MemberId, transport: str, bytes_per_s: float, *, times: int = 8) -> None:
    for index in range(times):
        num_bytes = SIZES[index % len(SIZES)]
        taken_s = seconds(num_bytes, bytes_per_s=bytes_per_s, latency_s=1e-4)
        book.read_completed(exporter, transport, num_bytes, taken_s, now_s=float(index))


@pytest.mark.parametrize("latency_s", [0.0, 20e-6, 5e-3])
@pytest.mark.parametrize("bytes_per_s", [1e6, 3e9, 400e9])
def test_clean_reads_give_the_line_they_lie_on(bytes_per_s: float, latency_s: float) -> None:
    fit = ReadFit()
    for _ in range(3):
        for num_bytes in SIZES:
            fit.add(num_bytes, seconds(num_bytes, bytes_per_s=bytes_per_s, latency_s=latency_s))
    estimate = fit.estimate()
    assert estimate is not None
    assert estimate.bytes_per_s == pytest.approx(bytes_per_s, rel=0.02)
    assert estimate.latency_s == pytest.approx(latency_s, rel=0.02, abs=2e-6)


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_stalled_reads_move_it_by_a_bounded_amount(seed: int) -> None:
    chance = random.Random(seed)
    fit = ReadFit()
    for index in range(60):
        num_bytes = chance.choice(SIZES)
        taken_s = seconds(num_bytes, bytes_per_s=2e9, latency_s=1e-3) * chance.uniform(0.9, 1.1)
        fit.add(num_bytes, taken_s * (100.0 if index % 20 == 10 else 1.0))
    estimate = fit.estimate()
    assert estimate is not None
    assert 2e9 / 1.6 < estimate.bytes_per_s < 2e9 * 1.6
    assert estimate.latency_s < 3e-3


def test_a_link_that_became_slower_is_followed() -> None:
    fit = ReadFit()
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
    fit = ReadFit()
    for taken_s in (0.010, 0.011, 0.009, 0.010):
        fit.add(MIB, taken_s)
    estimate = fit.estimate()
    assert estimate is not None
    assert estimate.latency_s == 0.0
    assert estimate.bytes_per_s == pytest.approx(MIB / 0.010, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_reads_were_the_figures_are_finite_and_not_negative(seed: int) -> None:
    chance = random.Random(seed)
    fit = ReadFit()
    for _ in range(200):
        fit.add(int(10 ** chance.uniform(0, 11)), 10 ** chance.uniform(-9, 3))
        estimate = fit.estimate()
        if estimate is not None:
            assert 0 < estimate.bytes_per_s < float("inf")
            assert 0 <= estimate.latency_s < float("inf")


def test_too_few_reads_say_nothing() -> None:
    fit = ReadFit()
    for _ in range(MIN_READS - 1):
        fit.add(MIB, 0.001)
    fit.add(0, 0.001)
    assert fit.estimate() is None


def test_figures_are_in_the_order_in_which_handoffs_try() -> None:
    book = PairBook(["shm", "tcp"])
    read(book, OTHER, "tcp", 9e9)
    read(book, EXPORTER, "tcp", 9e9)
    read(book, EXPORTER, "shm", 1e9)
    assert [(figure.exporter, figure.transport) for figure in book.figures()] == [
        (EXPORTER, "shm"),
        (EXPORTER, "tcp"),
        (OTHER, "tcp"),
    ]
    best = book.best(EXPORTER)
    assert best is not None and best.transport == "shm"
    book.open_failed(EXPORTER, "shm", now_s=10.0)
    fallback = book.best(EXPORTER)
    assert fallback is not None and fallback.transport == "tcp"
    assert book.best(MemberId("prefill-2", "c")) is None


def test_a_failure_keeps_away_for_longer_each_time_and_a_read_forgives() -> None:
    book = PairBook(["shm", "tcp"])
    now_s = 100.0
    waits: list[float] = []
    for _ in range(12):
        assert book.usable(EXPORTER, "shm", now_s)
        book.open_failed(EXPORTER, "shm", now_s)
        assert not book.usable(EXPORTER, "shm", now_s)
        assert book.usable(EXPORTER, "tcp", now_s)
        assert book.usable(OTHER, "shm", now_s)
        waited_s = FIRST_BACKOFF_S
        while not book.usable(EXPORTER, "shm", now_s + waited_s):
            waited_s *= 2
        waits.append(min(waited_s, MAX_BACKOFF_S))
        now_s += MAX_BACKOFF_S
    assert waits[:4] == [FIRST_BACKOFF_S * factor for factor in (1, 2, 4, 8)]
    assert waits[-1] == MAX_BACKOFF_S
    book.read_completed(EXPORTER, "shm", MIB, 0.001, now_s)
    assert book.usable(EXPORTER, "shm", now_s)
    book.open_failed(EXPORTER, "shm", now_s)
    assert book.usable(EXPORTER, "shm", now_s + FIRST_BACKOFF_S)


def test_an_exporter_that_started_again_is_another_one() -> None:
    book = PairBook(["shm", "tcp"])
    read(book, EXPORTER, "shm", 1e9)
    book.open_failed(EXPORTER, "tcp", now_s=0.0)
    successor = MemberId(EXPORTER.id, "later")
    read(book, successor, "shm", 2e9)
    assert [figure.exporter for figure in book.figures()] == [successor]
    assert book.usable(successor, "tcp", 0.0)


def test_the_longest_unused_pairs_are_forgotten() -> None:
    book = PairBook(["shm"])
    for index in range(MAX_PAIRS + 10):
        read(book, MemberId(f"prefill-{index:04}", "a"), "shm", 1e9, times=MIN_READS)
    kept = [figure.exporter.id for figure in book.figures()]
    assert kept == [f"prefill-{index:04}" for index in range(10, MAX_PAIRS + 10)]
