"""`tandem bench`: send load to a running cluster in an open loop; latencies count from the scheduled arrivals."""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from cli import connection
from cli.load import (
    Arrival,
    Objective,
    Sender,
    clipped,
    open_loop,
    poisson,
    prompt_ids,
    read_trace,
    report,
    scaled,
)
from cli.table import table
from cluster.errors import ConfigError
from cluster.process import ExitStatus
from cluster.settings.worker_settings import flag_of

HELP = "load a cluster in an open loop and measure TTFT, ITL, E2E and goodput"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    load = parser.add_argument_group("load: Poisson arrivals of one length, or a trace's arrivals and lengths")
    load.add_argument("--rate", type=float, metavar="RPS", help="mean arrivals per second (default: 2)")
    load.add_argument(
        "--num-requests", type=int, metavar="N", help="number of requests (default: 100, or all of a trace)"
    )
    load.add_argument("--prompt-tokens", type=int, metavar="N", help="prompt tokens of each request (default: 128)")
    load.add_argument("--output-tokens", type=int, metavar="N", help="output tokens of each request (default: 32)")
    load.add_argument("--trace", type=Path, metavar="FILE", help="Azure LLM inference CSV or Mooncake JSONL")
    load.add_argument(
        "--time-scale", type=float, metavar="X", default=1.0, help="factor for a trace's arrival times (default: 1)"
    )
    load.add_argument(
        "--length-scale", type=float, metavar="X", default=1.0, help="factor for a trace's lengths (default: 1)"
    )
    load.add_argument("--seed", type=int, metavar="N", default=0, help="seed of arrivals and prompts (default: 0)")
    goals = parser.add_argument_group("goodput: the rate of requests within these limits")
    goals.add_argument("--slo-ttft-s", type=float, metavar="X", help="maximum seconds to the first token")
    goals.add_argument(
        "--slo-itl-s", type=float, metavar="X", help="maximum mean seconds between two tokens of a request"
    )
    parser.add_argument(
        "--timeout-s", type=float, metavar="X", default=600.0, help="timeout of one request in seconds (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    arrivals = arrivals_from(arguments)
    figures = asyncio.run(_bench(arguments, arrivals))
    if arguments.json:
        json.dump(figures, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print(report_text(figures))
    return exit_status(figures)


def arrivals_from(arguments: argparse.Namespace) -> list[Arrival]:
    """Return the requests and their times, from the trace or drawn. Raises ConfigError."""
    random = Random(arguments.seed)
    drawn = {
        "--rate": arguments.rate,
        "--prompt-tokens": arguments.prompt_tokens,
        "--output-tokens": arguments.output_tokens,
    }
    others = ("num_requests", "time_scale", "length_scale", "slo_ttft_s", "slo_itl_s", "timeout_s")
    for flag, value in {**drawn, **{flag_of(name): getattr(arguments, name) for name in others}}.items():
        if value is not None and not 0 < value < math.inf:  # not NaN either
            raise ConfigError(f"{flag} must be a positive, finite number, not {value:g}")
    if arguments.trace is None:
        return poisson(
            arguments.rate or 2.0,
            arguments.num_requests or 100,
            arguments.prompt_tokens or 128,
            arguments.output_tokens or 32,
            random,
        )
    unfit = [flag for flag, value in drawn.items() if value is not None]
    if unfit:
        raise ConfigError(f"a trace has its own arrivals and lengths: leave out {', '.join(unfit)}")
    trace = read_trace(arguments.trace, arguments.num_requests, random)
    return scaled(trace, time_scale=arguments.time_scale, length_scale=arguments.length_scale)


def exit_status(figures: Mapping[str, Any]) -> int:
    """Return 0 if the cluster answered at least one request: its report has no latencies otherwise."""
    return 0 if figures["requests"]["ok"] else ExitStatus.CRASHED


def report_text(figures: Mapping[str, Any]) -> str:
    """Return the report; a latency that no request has is `-`."""
    rows = [
        (label, *(_milliseconds(figures[name].get(column)) for column in ("mean", "p50", "p99", "max")))
        for label, name in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))
    ]
    requests, throughput, goodput = figures["requests"], figures["throughput"], figures["goodput"]
    return "\n".join(
        [
            f"{requests['ok']} of {requests['sent']} requests in {figures['duration_s']:.1f} s; "
            f"errors: {requests['errors'] or 'none'}; {figures['clipped']} cut to the model's length",
            f"{throughput['requests_per_s']:.2f} requests/s, {throughput['prompt_tokens_per_s']:.0f} prompt tokens/s, "
            f"{throughput['output_tokens_per_s']:.0f} output tokens/s",
            "",
            table(("ms from scheduled arrival", "mean", "p50", "p99", "max"), rows),
            "",
            f"goodput {goodput['requests_per_s']:.2f} requests/s ({100 * goodput['share']:.1f} %) {_goals(goodput)}",
        ]
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _goals(goodput: Mapping[str, Any]) -> str:
    named = {"TTFT": goodput["slo_ttft_s"], "mean ITL": goodput["slo_itl_s"]}
    goals = ", ".join(f"{name} {limit_s:g} s" for name, limit_s in named.items() if limit_s)
    return f"within {goals}" if goals else "of all answered requests: set limits by --slo-ttft-s and --slo-itl-s"


async def _bench(arguments: argparse.Namespace, arrivals: list[Arrival]) -> dict[str, object]:
    async with connection.open_async_client(arguments) as client:
        model = (await client.models())[0]
        fitting, num_clipped = clipped(arrivals, model.max_model_len)
        prompts = [
            prompt_ids(arrival, number, model.vocab_size, arguments.seed) for number, arrival in enumerate(fitting)
        ]
        records = await open_loop(fitting, Sender(client, model.id, prompts, arguments.timeout_s).send)
    objective = Objective(arguments.slo_ttft_s, arguments.slo_itl_s)
    return {"model": model.id, "clipped": num_clipped, **report(records, objective)}
