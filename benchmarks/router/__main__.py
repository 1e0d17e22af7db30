"""What one streamed request and one streamed token cost the router, by path; `make bench-router`.

Real router processes over paced workers (worker.py) with a real Redis. 64 clients ask for 16 tokens and for 208 in
turns; the slope between the two is the cost of a token, the rest that of a request. CPU is that of the router's
process by its own clock, and the load generator's is apart. `--baseline FOLDER` measures the router of another checkout
in turns with this one, and prints ratios. `--observed` measures each thing that watches a router (observation.py),
`--proofs` what the proofs of its calls to workers cost.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks import machine
from benchmarks.router.figures import ALL_IN_TOKENS, Interval, Pair, Round, interval, of_pairs, percentile, ratio
from benchmarks.router.load import Job
from benchmarks.router.observation import Served, costs_of_router, share_of, table
from benchmarks.router.parties import Arm, Parties, Router, parties

_RESULTS = Path(__file__).parents[1] / "results"
_SHORT, _LONG = 16, 208  # tokens of an answer
_SHORT_REQUESTS = 4  # per client and round, so that both rounds take seconds
_CLIENTS = 64
_STEP_S = 0.02
_OURS, _BASELINE = "this", "baseline"
_PROMPTS: dict[str, str | list[int]] = {
    "text": "How does a router stream tokens? " * 4,
    "tokens": list(range(1, 65)),
    "long": [1 + number * 7 % 1000 for number in range(100_000)],
}
_PAIRS = 8  # with and without metrics, for each round
_LONG_REQUESTS = 8  # of one client, one after another
PATHS = ("http text", "http tokens", "https text", "https tokens", "grpc text", "grpc tokens")
LONG_PATHS = ("http tokens", "grpc tokens")  # with prompts of 100,000 token ids too
_CORE_SHARE = 0.5  # of one core, for the delays


@dataclass(slots=True)
class Measured:
    """The measurements of one path and one arm."""

    pairs: list[Pair] = field(default_factory=list)
    long_prompt_ms: list[float] = field(default_factory=list)  # CPU of a request with a prompt of 100,000 tokens
    delay_p50_ms: list[float] = field(default_factory=list)
    delay_p99_ms: list[float] = field(default_factory=list)


class Bench:
    def __init__(self, parties: Parties, extra: dict[str, object]) -> None:
        self._parties = parties
        self._extra = extra

    async def pair(self, path: str, router: Router) -> Pair:
        short = await self.round(path, router, _SHORT, _SHORT_REQUESTS)
        return Pair(short, await self.round(path, router, _LONG, 1))

    async def delays_ms(self, path: str, router: Router, step_s: float) -> list[float]:
        """Return for each token of long answers how long it took from its step to its client."""
        workers = self._parties.workers[router.is_tls]
        workers.set_step(step_s)
        result, _ = await self._parties.load.run(self._job(path, router, _LONG, 1, measures_delay=True), router)
        workers.set_step(_STEP_S)
        return [1e3 * delay_s for delay_s in result.delays_s]

    async def long_prompt_ms(self, path: str, router: Router) -> float:
        """Return the CPU of a request with 100,000 token ids and a short answer."""
        job = self._job(path.partition(" ")[0] + " long", router, 2, _LONG_REQUESTS)
        _, cpu_s = await self._parties.load.run(replace(job, num_clients=1), router)
        return 1e3 * cpu_s / _LONG_REQUESTS

    async def round(self, path: str, router: Router, max_tokens: int, num_requests: int) -> Round:
        """Let each client send `num_requests` requests."""
        result, cpu_s = await self._parties.load.run(self._job(path, router, max_tokens, num_requests), router)
        return Round(result.num_requests, max_tokens, cpu_s, result.cpu_s)

    def _job(
        self, path: str, router: Router, max_tokens: int, num_requests: int, *, measures_delay: bool = False
    ) -> Job:
        protocol, _, prompt = path.partition(" ")
        return Job(
            path=protocol,
            address=router.grpc if protocol == "grpc" else router.http,
            prompt=_PROMPTS[prompt],
            num_clients=_CLIENTS,
            num_requests=num_requests,
            max_tokens=max_tokens,
            steps_file=self._parties.steps_files[router.is_tls],
            measures_delay=measures_delay,
            extra=self._extra,
            ca_file=self._parties.ca_file,
        )


async def _measure(options: argparse.Namespace) -> dict[tuple[str, str], Measured]:
    arms = {_OURS: Arm(Path(__file__).parents[2], options.processes)}
    if options.baseline:
        arms[_BASELINE] = Arm(options.baseline.resolve())
    with_tls = sorted({path.startswith("https") for path in options.paths})
    measured = {(path, arm): Measured() for path in options.paths for arm in arms}
    with tempfile.TemporaryDirectory(prefix="tandem-bench-router-") as folder:
        async with parties(arms, Path(folder), with_tls) as present:
            bench = Bench(present, dict(json.loads(options.extra)))
            await _take_turns(options, present, bench, measured)
            for path in options.paths if options.delays else ():
                for router in present.routers[path.startswith("https")]:
                    await _measure_delays(bench, path, router, measured[path, router.arm], options.rounds)
    return measured


async def _observe(options: argparse.Namespace) -> list[str]:
    """Return a table of what watching a router costs."""
    arm = Arm(Path(__file__).parents[2], module="benchmarks.router.switchable")
    with tempfile.TemporaryDirectory(prefix="tandem-bench-router-") as folder:
        async with parties({_OURS: arm}, Path(folder), [False]) as present:
            [router] = present.routers[False]
            bench = Bench(present, dict(json.loads(options.extra)))

            async def load(num_requests: int = _SHORT_REQUESTS, num_tokens: int = ALL_IN_TOKENS) -> Served:
                served = await bench.round("http text", router, num_tokens, num_requests)
                return Served(served.num_requests, served.cpu_s)

            await load()
            if options.proofs:
                short = partial(load, num_tokens=_SHORT)
                more, low, high = await share_of("proofs", router, short, _PAIRS * options.rounds)
                return [
                    f"A request with its proofs, compared with one without: {more:+.2%} ({low:+.2%} to {high:+.2%})."
                ]
            more, low, high = await share_of("metrics", router, partial(load, 1), _PAIRS * options.rounds)
            return [
                *table(await costs_of_router(router, load, options.rounds)),
                "",
                f"A request with its metrics, compared with one without: {more:+.2%} ({low:+.2%} to {high:+.2%}).",
            ]


async def _take_turns(
    options: argparse.Namespace, present: Parties, bench: Bench, measured: dict[tuple[str, str], Measured]
) -> None:
    for turn in range(-1, options.rounds):  # the first turn warms up
        for path in options.paths:
            routers = present.routers[path.startswith("https")]
            for router in routers if turn % 2 else reversed(routers):
                pair = await bench.pair(path, router)
                long_prompt_ms = await bench.long_prompt_ms(path, router) if path in LONG_PATHS else None
                if turn >= 0:
                    measured[path, router.arm].pairs.append(pair)
                if turn >= 0 and long_prompt_ms is not None:
                    measured[path, router.arm].long_prompt_ms.append(long_prompt_ms)
        print(".", end="", flush=True)
    print()


async def _measure_delays(bench: Bench, path: str, router: Router, measured: Measured, rounds: int) -> None:
    token_us, _, _ = of_pairs(measured.pairs, lambda pair: pair.all_in_us)
    for _ in range(max(2, rounds // 2)):
        delays_ms = await bench.delays_ms(path, router, _CLIENTS * token_us / 1e6 / _CORE_SHARE)
        measured.delay_p50_ms.append(percentile(delays_ms, 0.5))
        measured.delay_p99_ms.append(percentile(delays_ms, 0.99))


def _shown(value: Interval, digits: int = 1) -> str:
    median, low, high = value
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _table(measured: dict[tuple[str, str], Measured]) -> list[str]:
    lines = [
        "| path | us per token | ms per request | all in, us per token | tokens/s per core | ms per prompt of 100,000 |"
        " added ms, p50 / p99 | load generator, us per token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (path, arm), figures in measured.items():
        pairs = figures.pairs
        all_in = of_pairs(pairs, lambda pair: pair.all_in_us)
        delay = "-"
        if figures.delay_p99_ms:
            delay = f"{interval(figures.delay_p50_ms)[0]:.2f} / {interval(figures.delay_p99_ms)[0]:.2f}"
        lines.append(
            f"| {path}{'' if arm == _OURS else ', ' + arm} | {_shown(of_pairs(pairs, lambda pair: pair.token_us))} |"
            f" {_shown(of_pairs(pairs, lambda pair: pair.request_ms), 2)} | {_shown(all_in)} | {1e6 / all_in[0]:,.0f} |"
            f" {_shown(interval(figures.long_prompt_ms)) if figures.long_prompt_ms else '-'} |"
            f" {delay} | {of_pairs(pairs, lambda pair: pair.load_all_in_us)[0]:.1f} |"
        )
    return lines


def _ratios(measured: dict[tuple[str, str], Measured], paths: Sequence[str]) -> list[str]:
    lines = ["| path | this / baseline: token | request | all in |", "|---|---|---|---|"]
    for path in paths:
        ours, theirs = measured[path, _OURS].pairs, measured[path, _BASELINE].pairs
        figures = (lambda p: p.token_us), (lambda p: p.request_ms), (lambda p: p.all_in_us)
        lines.append(f"| {path} | " + " | ".join(_shown(ratio(ours, theirs, each), 2) for each in figures) + " |")
    return lines


def _page(about: dict[str, str], table: list[str]) -> str:
    facts = "; ".join(f"{name} {value}" for name, value in about.items())
    return "\n".join(
        [
            "# CPU of the router",
            "",
            f"`make bench-router` ({facts}). {_CLIENTS} clients, a step every {1e3 * _STEP_S:.0f} ms with one token for"
            f" each, hand-off from a prefill to a decode worker. A token costs the slope between answers of {_SHORT}"
            f" and {_LONG} tokens; all in: with its share of an answer of {ALL_IN_TOKENS} tokens. Medians with"
            " 95 % intervals. Added time: from the worker's step to the client, where the router uses"
            f" {_CORE_SHARE:.0%} of a core; the worker, gRPC and the load generator are in it, all on the same cores.",
            "",
            *table,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="pairs of rounds per path")
    parser.add_argument("--paths", type=lambda text: text.split(","), default=list(PATHS), help="separated by commas")
    parser.add_argument("--baseline", type=Path, help="another checkout, whose router is measured in turns")
    parser.add_argument("--observed", action="store_true", help="measure what watching a router costs")
    parser.add_argument("--proofs", action="store_true", help="measure what proofs of membership cost")
    parser.add_argument("--processes", type=int, default=1, help="router processes on one HTTP port")
    parser.add_argument("--no-delays", dest="delays", action="store_false")
    parser.add_argument("--extra", default="{}", help="more fields of the HTTP requests, as JSON")
    parser.add_argument("--write", action="store_true", help="write the page and the figures into benchmarks/results")
    options = parser.parse_args()
    if options.observed or options.proofs:
        print("\n".join(asyncio.run(_observe(options))))
        return
    measured = asyncio.run(_measure(options))
    about, table = machine.about() | {"load average": f"{os.getloadavg()[2]:.0f}"}, _table(measured)
    print("\n".join(table))
    if options.baseline:
        print("\n".join(["", *_ratios(measured, options.paths)]))
    if options.write:
        page = _RESULTS / "router.md"
        _, heading, notes = page.read_text().partition("\n## ")  # the rest of the page is written by hand
        page.write_text(_page(about, table) + heading + notes)
        rows = [{"path": path, "arm": arm} | asdict(figures) for (path, arm), figures in measured.items()]
        (_RESULTS / "router.json").write_text(json.dumps({"about": about, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
