"""Measure whether a tenant can tell from response times what another tenant has asked.

A real cluster with a prefill and a decode worker, and two recorded keys. In each trial the victim asks a prompt of
random words, then the attacker asks either the same prompt (`asked`) or one that nobody has asked (`new`), in random
order, and measures the time to its second token; so the router's text, placement, both workers' prefix caches and the
hand-off are in it. The area under the ROC curve of the two classes is the probability that a `new` prompt takes longer
than an `asked` one: 0.5 where the times reveal nothing. As a control, the attacker asks its own prompts again, which
shows how well the same measurement finds a shared cache.

    python -m benchmarks.tenant_timing [--trials 1000] [--write]
"""

import argparse
import asyncio
import json
import os
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.machine import about
from benchmarks.tenants import ADMIN_KEY, tenant_key
from tandem.client import AsyncClient
from tandem.local_cluster import LocalCluster

_RESULT = Path(__file__).parent / "results" / "tenant_timing.json"
_NUM_WORDS = 120  # of a prompt: a few hundred tokens
_GOAL, _CONTROL = 0.05, 0.75
_ASKED, _NEW = "asked", "new"

Times = dict[str, list[float]]  # seconds, by class


def roc_area(shorter: Sequence[float], longer: Sequence[float]) -> float:
    """Return the probability that one of `longer` is above one of `shorter`; a tie counts as half."""
    ordered = sorted(shorter)
    below = sum(bisect_left(ordered, each) + bisect_right(ordered, each) for each in longer)
    return below / 2 / len(shorter) / len(longer)


def _prompt(dice: random.Random) -> str:
    return " ".join(f"{dice.choice('abcdefgh')}{dice.randrange(10**6)}" for _ in range(_NUM_WORDS))


async def _ask(client: AsyncClient, prompt: str) -> tuple[float, int]:
    """Return the seconds until the second token, and the prompt tokens that were reported as cached."""
    began_s = time.perf_counter()
    result = await client.generate(prompt, max_tokens=2, temperature=0.0, ignore_eos=True).result()
    return time.perf_counter() - began_s, result.usage.cached_tokens


async def _trials(
    attacker: AsyncClient, before: AsyncClient, num_trials: int, dice: random.Random
) -> tuple[Times, int]:
    """`before`: the client that asks each trial's first prompt. Return the times of the attacker, with `num_trials` of
    each class, and the most prompt tokens that an answer reported as cached."""
    times, most_cached = Times({_ASKED: [], _NEW: []}), 0
    classes = [_ASKED, _NEW] * num_trials
    dice.shuffle(classes)
    for kind in classes:
        prompt, other = _prompt(dice), _prompt(dice)
        await _ask(before, prompt if kind == _ASKED else other)
        taken_s, num_cached = await _ask(attacker, prompt)
        times[kind].append(taken_s)
        most_cached = max(most_cached, num_cached)
    return times, most_cached


async def _measure(address: str, num_trials: int, dice: random.Random) -> dict[str, dict[str, float]]:
    keys = [await tenant_key(address, tenant) for tenant in ("attacker", "victim")]
    async with AsyncClient(address, keys[0]) as attacker, AsyncClient(address, keys[1]) as victim:
        for client in (attacker, victim):
            await _trials(client, client, 5, dice)  # connections and code are warm
        figures = {}
        for name, before, number in (("victim", victim, num_trials), ("control", attacker, max(20, num_trials // 5))):
            times, most_cached = await _trials(attacker, before, number, dice)
            figures[name] = {
                "trials_per_class": number,
                "roc_area": roc_area(times[_ASKED], times[_NEW]),
                "median_asked_ms": 1e3 * median(times[_ASKED]),
                "median_new_ms": 1e3 * median(times[_NEW]),
                "most_cached_tokens": most_cached,
            }
        return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if the area is not within 0.5 +- 0.05, or if the control finds no shared cache."""
    parser = argparse.ArgumentParser(description="What response times reveal about another tenant's prompts.")
    parser.add_argument("--trials", type=int, default=1000, help="of each class")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {_RESULT.name}")
    parsed = parser.parse_args(arguments)
    environment = os.environ | {"TANDEM_ADMIN_KEY": ADMIN_KEY, "TANDEM_KEYS": "redis"}
    with LocalCluster(environment=environment) as cluster:
        figures = asyncio.run(_measure(cluster.grpc, parsed.trials, random.Random(parsed.seed)))
    for name, values in figures.items():
        print(f"{name:8}", "  ".join(f"{key} {value:.4g}" for key, value in values.items()))
    if parsed.write:
        _RESULT.write_text(json.dumps({"about": about(), **figures}, indent=1) + "\n")
    victim, control = figures["victim"], figures["control"]
    return int(
        abs(victim["roc_area"] - 0.5) > _GOAL or victim["most_cached_tokens"] > 0 or control["roc_area"] < _CONTROL
    )


if __name__ == "__main__":
    raise SystemExit(main())
