"""What each thing that watches a router costs, measured alone: `make bench-router BENCH_ARGS=--observed`.

The difference between a watched router and another one is smaller than the noise of a busy machine. So each part is
measured alone, in CPU time: a scrape and a poll of the page at a real router that has just served a load and is idle
now, and in loops the calls that record metrics and traces. How often a request calls them is read from the router's own
metrics. Besides, loads with and without metrics take turns on one process.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.router.figures import ALL_IN_TOKENS, Interval, interval
from benchmarks.router.parties import Router
from benchmarks.router.watchers import PAGE_S, SCRAPE_S, Page, receiver, scrape
from cluster.observe.spans import SpanExport
from cluster.observe.telemetry import Telemetry
from router.request.account import COUNTED_TOGETHER, PhaseName, RequestAccount
from router.request.span_sender import SpanSender
from router.request.traces import Traces
from router.requests import GenerateRequest, TokenPrompt

_CALLS = 2000  # of a loop that is timed once
_TIMES = 15
_SAMPLE_RATIO = 0.01
_PHASES = tuple(PhaseName)
_ITL = "tandem_inter_token_seconds"
_MANY_AT_ONCE = (_ITL, "tandem_prompt_tokens", "tandem_cached_prompt_tokens", "tandem_generated_tokens")


@dataclass(frozen=True, slots=True)
class Cost:
    what: str
    cpu_us: Interval
    times: str  # how often
    share: float  # of the CPU, or of a step's time


@dataclass(frozen=True, slots=True)
class Served:
    """One load on a router, and what it cost."""

    num_requests: int
    cpu_s: float


async def costs_of_router(router: Router, load: Callable[[], Awaitable[Served]], rounds: int) -> list[Cost]:
    """`load` sends requests and returns once all have ended. Shares are those of a router that uses one whole core."""
    request_us, calls, scrapes_us = list[float](), list[float](), list[float]()
    polls_us, others_us = list[float](), list[float]()
    page, other = Page(router), Page(router)
    await page.poll()
    await other.poll()
    for _ in range(rounds):
        before = _num_calls(await scrape(router))
        served = await load()
        request_us.append(1e6 * served.cpu_s / served.num_requests)
        calls.append((_num_calls(await scrape(router)) - before) / served.num_requests)
        scrapes_us.append(await _cpu_us(router, lambda: scrape(router)))
        polls_us.append(await _cpu_us(router, page.poll))
        others_us.append(await _cpu_us(router, other.poll))
    per_request = median(request_us)
    call_us, itl_us, traces_us = _call_us(), _itl_us(), await _traces_us()
    return [
        Cost("a request with its answer, metrics included", interval(request_us), "-", 1.0),
        Cost("a scrape", interval(scrapes_us), f"every {SCRAPE_S:g} s", interval(scrapes_us)[0] / SCRAPE_S / 1e6),
        Cost("a poll of the page", interval(polls_us), f"every {PAGE_S:g} s", interval(polls_us)[0] / PAGE_S / 1e6),
        Cost(
            "a poll of another page", interval(others_us), f"every {PAGE_S:g} s", interval(others_us)[0] / PAGE_S / 1e6
        ),
        Cost("a metric", call_us, f"{median(calls):.1f} a request", median(calls) * call_us[0] / per_request),
        Cost("the times between tokens", itl_us, f"each request of {ALL_IN_TOKENS} tokens", itl_us[0] / per_request),
        Cost(f"traces, {_SAMPLE_RATIO:.0%} sampled", traces_us, "each request", traces_us[0] / per_request),
    ]


async def share_of(what: str, router: Router, load: Callable[[], Awaitable[Served]], num_pairs: int) -> Interval:
    """Return how much more CPU requests take with "metrics" or "proofs" than without, as a share, from loads in turns
    on one switchable router."""
    more = []
    for number in range(num_pairs):
        request_s = {}
        for state in ("on", "off") if number % 2 else ("off", "on"):
            await router.switch(what, state)
            served = await load()
            request_s[state] = served.cpu_s / served.num_requests
        more.append(request_s["on"] / request_s["off"] - 1)
    await router.switch(what, "on")
    return interval(more)


def table(costs: list[Cost]) -> list[str]:
    lines = ["| what | CPU, us | how often | share |", "|---|---|---|---|"]
    for cost in costs:
        mid, low, high = cost.cpu_us
        lines.append(f"| {cost.what} | {mid:.1f} ({low:.1f} to {high:.1f}) | {cost.times} | {cost.share:.2%} |")
    return lines


async def _cpu_us(router: Router, work: Callable[[], Awaitable[object]]) -> float:
    before_s = router.cpu_s()
    await work()
    return 1e6 * (router.cpu_s() - before_s)


def _num_calls(scraped: str) -> float:
    """Return how often metrics were recorded: observations of histograms, and what counters of single events count."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(scraped)
        for sample in family.samples
        if sample.name.startswith("tandem_")
        and (sample.name.endswith("_count") or family.type == "counter")
        and not sample.name.startswith(_MANY_AT_ONCE)
    )


def _itl_us() -> Interval:
    """Return the CPU of the observations of a request's times between tokens."""
    telemetry, values = Telemetry.of_router(), [0.02 + 0.0001 * number for number in range(COUNTED_TOGETHER)]
    num_times = ALL_IN_TOKENS / COUNTED_TOGETHER
    low_to_high = _loop_us(lambda: telemetry.observe_all(_ITL, values))
    mid, low, high = (num_times * each for each in low_to_high)
    return mid, low, high


def _call_us() -> Interval:
    """Return the CPU of an observation of a histogram with a label, the dearest of the frequent calls."""
    telemetry = Telemetry.of_router()
    return _loop_us(lambda: telemetry.observe("tandem_phase_seconds", 0.3, phase="decode"))


async def _traces_us() -> Interval:
    """Return the CPU of the traces of a request that ended well, the thread that sends them and the receiver
    included."""
    async with receiver() as endpoint:
        traces = Traces(
            SpanSender(SpanExport(endpoint, service="tandem-router", member="r"), model="demo_model"),
            sample_ratio=_SAMPLE_RATIO,
            slow_s=60.0,
        )
        request = GenerateRequest(TokenPrompt((1, 2, 3)))
        account = RequestAccount(Telemetry.of_router(), 0.0)
        for number, phase in enumerate(_PHASES):
            account.enter(phase, 0.1 * number)
        ended = account.explanation("r", 1.0, "ok")

        def trace() -> None:
            account.trace = traces.begin("")
            str(account.trace.root)
            traces.end(request, account, ended, 1.0)

        found = await asyncio.to_thread(_loop_us, trace, clock=time.process_time)
        await traces.close()
        return found


def _loop_us(
    call: Callable[[], object], calls: int = _CALLS, clock: Callable[[], float] = time.thread_time
) -> Interval:
    taken_us = []
    for _ in range(_TIMES):
        began_s = clock()
        for _ in range(calls):
            call()
        taken_us.append(1e6 * (clock() - began_s) / calls)
    return interval(taken_us)
