"""The benchmark's arithmetic, and its driver under a simulated clock."""

import asyncio
import json
import math
import random
import selectors
import statistics
from argparse import ArgumentParser
from collections.abc import AsyncGenerator, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest

from cli.load import (
    Arrival,
    Objective,
    Record,
    RequestFailed,
    clipped,
    open_loop,
    percentile,
    poisson,
    prompt_ids,
    read_trace,
    report,
    scaled,
    summary,
)
from cli.verbs.generation import bench
from cluster.errors import ConfigError
from cluster.process import ExitStatus

Value = TypeVar("Value")
SERVICE_S = 0.1
LOAD = 0.7


def record(scheduled_s: float, *token_times_s: float, error: str = "") -> Record:
    ended_s = token_times_s[-1] if token_times_s else scheduled_s
    return Record(scheduled_s, tuple(token_times_s), ended_s, prompt_tokens=10, error=error)


def served_in_turn(arrivals: list[Arrival], service_s: float) -> list[float]:
    """Return the times at which arrivals leave a server that serves them one by one in constant time (Lindley's
    recursion).
    """
    free_s, ends = 0.0, []
    for arrival in arrivals:
        free_s = max(free_s, arrival.at_s) + service_s
        ends.append(free_s)
    return ends


def md1_waits_at_most(time_s: float, load: float, service_s: float) -> float:
    """Return the share of customers of an M/D/1 queue that wait at most this long (Crommelin, 1932)."""
    rate = load / service_s
    total = 0.0
    for k in range(int(time_s / service_s) + 1):
        x = rate * (time_s - k * service_s)
        total += (-x) ** k / math.factorial(k) * math.exp(x)
    return (1 - load) * total


def test_a_fixed_time_server_at_70_percent_load_shows_the_latencies_of_theory() -> None:
    arrivals = poisson(LOAD / SERVICE_S, 200_000, 1, 1, random.Random(1))
    ends = served_in_turn(arrivals, SERVICE_S)
    figures = summary([end - arrival.at_s for end, arrival in zip(ends, arrivals, strict=True)])
    mean_s = SERVICE_S * (1 + LOAD / (2 * (1 - LOAD)))
    low, high = 0.0, 20 * SERVICE_S
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if md1_waits_at_most(middle, LOAD, SERVICE_S) < 0.99 else (low, middle)
    assert figures["mean"] == pytest.approx(mean_s, rel=0.05)
    assert figures["p99"] == pytest.approx(low + SERVICE_S, rel=0.05)


class OwnTime(selectors.DefaultSelector):
    """An event loop that advances its time to the next timer instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is not None:
            self.now_s += max(0.0, timeout)
        return events


def in_own_time(main: Coroutine[object, object, Value]) -> Value:
    selector = OwnTime()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


async def against_fixed_time(arrivals: list[Arrival], service_s: float) -> list[Record]:
    server = asyncio.Lock()

    async def send(number: int, arrival: Arrival) -> AsyncGenerator[int, None]:
        async with server:
            await asyncio.sleep(service_s)
            yield 1

    return await open_loop(arrivals, send)


def test_the_driver_measures_a_queue_to_the_microsecond_and_never_delays_an_arrival() -> None:
    arrivals = poisson(LOAD / SERVICE_S, 2_000, 1, 1, random.Random(2))
    records = in_own_time(against_fixed_time(arrivals, SERVICE_S))
    assert [record.scheduled_s for record in records] == [arrival.at_s for arrival in arrivals]
    assert [record.ended_s for record in records] == pytest.approx(served_in_turn(arrivals, SERVICE_S), abs=1e-6)


def test_a_stalled_server_delays_every_request_due_during_the_stall() -> None:
    """A closed loop would have sent one request in these ten seconds, and reported one slow answer."""
    arrivals = [Arrival(float(second), 1, 1) for second in range(10)]

    async def stalled() -> list[Record]:
        open_again = asyncio.Event()
        asyncio.get_running_loop().call_later(10.0, open_again.set)

        async def send(number: int, arrival: Arrival) -> AsyncGenerator[int, None]:
            await open_again.wait()
            yield 1

        return await open_loop(arrivals, send)

    assert [record.ttft_s for record in in_own_time(stalled())] == pytest.approx(list(range(10, 0, -1)), abs=1e-6)


def test_a_failed_request_is_counted_under_its_reason_and_stops_no_other() -> None:
    async def send(number: int, arrival: Arrival) -> AsyncGenerator[int, None]:
        yield 2
        if number == 1:
            raise RequestFailed("overloaded")
        await asyncio.sleep(0.5)
        yield 1

    records = in_own_time(open_loop([Arrival(0.0, 1, 3)] * 3, send))
    figures = report(records, Objective())
    assert figures["requests"] == {"sent": 3, "ok": 2, "failed": 1, "errors": {"overloaded": 1}}
    assert [len(each.token_times_s) for each in records] == [3, 2, 3]


def test_latencies_count_from_the_schedule_and_gaps_between_tokens() -> None:
    one = record(1.0, 1.5, 1.6, 1.9)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.e2e_s == pytest.approx(0.9)
    assert one.inter_token_s == pytest.approx([0.1, 0.3])


def test_goodput_counts_requests_that_meet_both_objectives() -> None:
    records = [
        record(0.0, 0.1, 0.2),  # good
        record(0.0, 0.9, 1.0),  # first token too late
        record(0.0, 0.1, 0.9, 1.0),  # too slow between tokens
        record(0.0, 0.2),  # one token has no gaps
        record(0.0, 0.1, error="unavailable"),
        record(0.0, 0.1, 0.2, 2.0, error=""),  # the last to end: two seconds in all
    ]
    figures = report(records, Objective(ttft_s=0.5, itl_s=0.3))
    assert figures["goodput"] == {"slo_ttft_s": 0.5, "slo_itl_s": 0.3, "requests_per_s": 1.0, "share": 2 / 6}
    assert figures["duration_s"] == 2.0


def test_a_run_in_which_every_request_failed_has_no_latencies_and_fails() -> None:
    figures = report([record(0.0, error="unavailable")], Objective())
    assert figures["ttft_s"] == {}
    lines = bench.report_text({"model": "m", "clipped": 0, **figures}).splitlines()
    assert ["TTFT", "-", "-", "-", "-"] in [line.split() for line in lines]
    assert bench.exit_status(figures) == ExitStatus.CRASHED
    answered = report([record(0.0, 0.5, 1.0), record(0.0, error="unavailable")], Objective())
    assert bench.exit_status(answered) == 0


@pytest.mark.parametrize("count", [2, 3, 10, 101])
def test_percentiles_use_linear_interpolation(count: int) -> None:
    values = [random.Random(count).random() for _ in range(count)]
    expected = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, share / 100) for share in range(1, 100)] == pytest.approx(expected)


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    arrivals = poisson(5.0, 50_000, 1, 1, random.Random(3))
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(arrivals)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.02)
    assert statistics.pstdev(gaps) == pytest.approx(0.2, rel=0.02)


def test_an_azure_trace_is_read_with_its_odd_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 23:59:59.6805900,374,44",
        "2023-11-17 00:00:01,396,109",
    ]
    path.write_bytes("\r\n".join(rows).encode())
    first, second = read_trace(path, None, random.Random(0))
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(1.31941, abs=1e-6)
    assert len(read_trace(path, 1, random.Random(0))) == 1


def test_a_mooncake_trace_is_spread_over_its_grid_and_keeps_its_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 3000 * (number // 50),
            "input_length": 1100,
            "output_length": 5,
            "hash_ids": [0, number, 900 + number],
        }
        for number in range(100)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arrivals = read_trace(path, None, random.Random(0))
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert len(set(times)) == 100
    assert times[-1] > 3.0
    small = scaled(arrivals, time_scale=2.0, length_scale=1 / 16)
    assert (small[0].prompt_tokens, small[0].output_tokens, small[0].prefix_block) == (69, 1, 32)
    assert small[-1].at_s == pytest.approx(2 * times[-1])
    prompts = [prompt_ids(arrival, number, 1000, seed=5) for number, arrival in enumerate(small)]
    assert all(len(prompt) == 69 for prompt in prompts)
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1
    assert len({tuple(prompt[32:64]) for prompt in prompts}) == 100


@pytest.mark.parametrize(
    "content", ["", "a,b\n1,2\n", "{}\n", '{"timestamp": 1', "TIMESTAMP,ContextTokens,GeneratedTokens\n"]
)
def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--trace"):
        read_trace(path, None, random.Random(0))


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv", None, random.Random(0))


def test_lengths_are_cut_to_the_models_maximum() -> None:
    arrivals = [Arrival(0.0, 100, 10), Arrival(0.0, 5000, 10), Arrival(0.0, 1000, 100)]
    fitting, num_clipped = clipped(arrivals, 1024)
    assert [(arrival.prompt_tokens, arrival.output_tokens) for arrival in fitting] == [(100, 10), (1023, 1), (1000, 24)]
    assert num_clipped == 2


def test_the_same_seed_makes_the_same_run() -> None:
    assert arrivals("--rate", "3", "--seed", "7") == arrivals("--rate", "3", "--seed", "7")
    assert arrivals("--rate", "3", "--seed", "7") != arrivals("--rate", "3", "--seed", "8")


@pytest.mark.parametrize(
    "words",
    [
        ("--rate", "0"),
        ("--num-requests", "-1"),
        ("--length-scale", "0"),
        *((flag, value) for flag in ("--rate", "--time-scale", "--slo-ttft-s") for value in ("nan", "inf", "-1", "0")),
        ("--timeout-s", "nan"),
        ("--trace", "x.csv", "--rate", "3"),
    ],
)
def test_impossible_load_settings_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=words[-2]):
        arrivals(*words)


def arrivals(*words: str) -> list[Arrival]:
    parser = ArgumentParser()
    bench.add_arguments(parser)
    return bench.arrivals_from(parser.parse_args(words))
