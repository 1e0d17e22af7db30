"""The requests of a benchmark: arrival times and lengths, drawn or read from a trace. Randomness is an argument.

Traces: Azure LLM inference (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake (JSONL: timestamp in ms,
input_length, output_length, hash_ids, one per 512-token block that covers its block and all before it).
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random

from cluster.errors import ConfigError

_MOONCAKE_BLOCK = 512
_MOONCAKE_GRID_S = 3.0  # its timestamps are rounded down to this
_AZURE_COLUMNS = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A planned request. Requests share a prefix of `prefix_block` tokens per leading prefix id that they have in
    common.
    """

    at_s: float  # from the start of the run
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    prefix_block: int = _MOONCAKE_BLOCK


def poisson(
    rate_rps: float, num_requests: int, prompt_tokens: int, output_tokens: int, random: Random
) -> list[Arrival]:
    """Draw independent arrivals at a mean rate; the first one comes after a drawn gap."""
    at_s, arrivals = 0.0, []
    for _ in range(num_requests):
        at_s += random.expovariate(rate_rps)
        arrivals.append(Arrival(at_s, prompt_tokens, output_tokens))
    return arrivals


def read_trace(path: Path, limit: int | None, random: Random) -> list[Arrival]:
    """Read a trace; its content decides the format. The first arrival is at time 0. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            arrivals = list(_taken(_mooncake(file) if first.startswith("{") else _azure(file), limit))
    except OSError as error:
        raise ConfigError(f"cannot read --trace {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--trace {path} is neither an Azure CSV nor a Mooncake JSONL: {error}") from error
    if not arrivals:
        raise ConfigError(f"--trace {path} contains no request")
    if first.startswith("{"):
        arrivals = _spread(arrivals, random)
    begin_s = arrivals[0].at_s
    return [_moved(arrival, arrival.at_s - begin_s) for arrival in arrivals]


def scaled(arrivals: Sequence[Arrival], *, time_scale: float, length_scale: float) -> list[Arrival]:
    """Multiply times and lengths, the blocks of shared prefixes included. The minimum length is one token."""
    return [
        Arrival(
            at_s=arrival.at_s * time_scale,
            prompt_tokens=max(1, round(arrival.prompt_tokens * length_scale)),
            output_tokens=max(1, round(arrival.output_tokens * length_scale)),
            prefix_ids=arrival.prefix_ids,
            prefix_block=max(1, round(arrival.prefix_block * length_scale)),
        )
        for arrival in arrivals
    ]


def clipped(arrivals: Sequence[Arrival], max_model_len: int) -> tuple[list[Arrival], int]:
    """Cut prompts and outputs to the model's maximum length. Return the arrivals and the number of changed ones."""
    fitting = []
    for arrival in arrivals:
        prompt_tokens = min(arrival.prompt_tokens, max_model_len - 1)
        output_tokens = min(arrival.output_tokens, max_model_len - prompt_tokens)
        fitting.append(Arrival(arrival.at_s, prompt_tokens, output_tokens, arrival.prefix_ids, arrival.prefix_block))
    return fitting, sum(before != after for before, after in zip(arrivals, fitting, strict=True))


def prompt_ids(arrival: Arrival, number: int, vocab_size: int, seed: int) -> list[int]:
    """Return random tokens. Equal prefix ids give equal prefixes. `number` makes the rest of each request unique."""
    ids: list[int] = []
    for prefix_id in arrival.prefix_ids:
        if len(ids) >= arrival.prompt_tokens:
            break
        ids += _random_ids(f"{seed} prefix {prefix_id}", arrival.prefix_block, vocab_size)
    ids += _random_ids(f"{seed} request {number}", max(0, arrival.prompt_tokens - len(ids)), vocab_size)
    return ids[: arrival.prompt_tokens]


def _random_ids(name: str, count: int, vocab_size: int) -> list[int]:
    return Random(name).choices(range(vocab_size), k=count)


def _azure(lines: Iterable[str]) -> Iterator[Arrival]:
    rows = csv.DictReader(lines)
    if not set(rows.fieldnames or ()) >= _AZURE_COLUMNS:
        raise ValueError(f"its columns are {rows.fieldnames}")
    for row in rows:
        yield Arrival(_azure_time_s(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _azure_time_s(text: str) -> float:
    """Convert `2023-11-16 18:15:46.6805900` to seconds. It counts steps of 100 ns: more digits than datetime reads."""
    moment, _, fraction = text.partition(".")
    since = datetime.fromisoformat(moment) - datetime(2023, 1, 1)
    return since.total_seconds() + (float(f"0.{fraction}") if fraction else 0.0)


def _mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    for line in lines:
        row = json.loads(line)
        yield Arrival(
            at_s=row["timestamp"] / 1000,
            prompt_tokens=int(row["input_length"]),
            output_tokens=int(row["output_length"]),
            prefix_ids=tuple(row["hash_ids"]),
        )


def _spread(arrivals: Sequence[Arrival], random: Random) -> list[Arrival]:
    """Move each arrival to a random time within its cell of the grid: a burst every three seconds would be an artefact
    of the rounding."""
    moved = [_moved(arrival, arrival.at_s + random.uniform(0, _MOONCAKE_GRID_S)) for arrival in arrivals]
    return sorted(moved, key=lambda arrival: arrival.at_s)


def _moved(arrival: Arrival, at_s: float) -> Arrival:
    return Arrival(at_s, arrival.prompt_tokens, arrival.output_tokens, arrival.prefix_ids, arrival.prefix_block)


def _taken(arrivals: Iterator[Arrival], limit: int | None) -> Iterator[Arrival]:
    for number, arrival in enumerate(arrivals):
        if limit is not None and number >= limit:
            return
        yield arrival
