"""Ask a cluster for many answers under random bounded schemas and regexes, and judge each of them.

`python -m benchmarks.structured_answers --answers 10000` starts one prefill and one decode worker, so every answer goes
through a hand-off, and prints what benchmarks/results/structured_output.md has. An answer that did not end by `length`
must be valid: by `jsonschema`, or by Python's `re`. Endings by `length` are counted apart.
"""

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter
from typing import Any

import jsonschema

from benchmarks.machine import about
from tandem import AsyncClient, LocalCluster

_AT_ONCE = 32
_MAX_TOKENS = 400
_WORDS = ("red", "green", "blue", "small", "large", "unknown")
_NAMES = ("name", "size", "kind", "tags", "at", "is_open")
_PARTS = (
    "[a-z]{1,8}",
    "[A-Z][a-z]{0,5}",
    "[0-9]{1,4}",
    "(yes|no)",
    "-?[0-9]{1,3}[.][0-9]",
    "[a-f0-9]{4}",
    "#?",
    "(ab|c){1,3}",
)


def random_schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema whose values are all bounded in length."""
    kinds = ["string", "integer", "number", "enum", "boolean", "pattern"] + ["array", "object", "any"] * (depth < 2)
    match "object" if depth == 0 else dice.choice(kinds):
        case "string":
            return {"type": "string", "minLength": dice.randrange(3), "maxLength": dice.randrange(3, 20)}
        case "integer":
            return {"type": "integer", "minimum": -dice.randrange(1000), "maximum": dice.randrange(1000)}
        case "number":
            return {"type": "number", "minimum": -dice.randrange(10), "maximum": dice.randrange(1, 10)}
        case "enum":
            return {"enum": dice.sample(_WORDS, dice.randrange(1, 4))}
        case "boolean":
            return {"type": ["boolean", "null"]}
        case "pattern":
            return {"type": "string", "pattern": f"^{random_regex(dice)}$"}
        case "array":
            return {"type": "array", "items": random_schema(dice, depth + 1), "maxItems": dice.randrange(1, 4)}
        case "any":
            return {"anyOf": [random_schema(dice, depth + 1), random_schema(dice, depth + 1)]}
        case _:
            names = dice.sample(_NAMES, dice.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(dice, depth + 1) for name in names},
                "required": dice.sample(names, dice.randrange(1, len(names) + 1)),
                "additionalProperties": False,
            }


def random_regex(dice: random.Random) -> str:
    return "[-_:/]".join(dice.choices(_PARTS, k=dice.randrange(1, 4)))


def is_valid(text: str, options: dict[str, Any]) -> bool:
    if "regex" in options:
        return re.fullmatch(options["regex"], text) is not None
    try:
        jsonschema.validate(json.loads(text), options["json_schema"])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def judge(client: AsyncClient, number: int, seed: int) -> str:
    """Ask for one answer and return how it ended: valid, length, or invalid with the request."""
    dice = random.Random(seed * 1_000_003 + number)
    options: dict[str, Any] = {"regex": random_regex(dice)} if number % 4 == 3 else {"json_schema": random_schema(dice)}
    result = await client.generate(
        f"# {dice.choice(_WORDS)}\nvalue = ", seed=number, temperature=1.0, max_tokens=_MAX_TOKENS, **options
    ).result()
    if result.choices[0].finish_reason == "length":
        return "length"
    is_handed_over = result.ledger.transport in ("shm", "tcp")
    if not is_valid(result.text, options):
        return f"invalid: {options} gave {result.text!r}"
    return "valid, handed over" if is_handed_over else "valid, ended at its first token"


async def run(num_answers: int, seed: int) -> Counter[str]:
    numbers, ends = iter(range(num_answers)), Counter[str]()

    async def ask(client: AsyncClient) -> None:
        for number in numbers:
            ends[await judge(client, number, seed)] += 1

    with LocalCluster(prefill=1, decode=1) as cluster:
        async with AsyncClient(cluster.grpc, keepalive_timeout_s=60) as client, asyncio.TaskGroup() as tasks:
            for _ in range(_AT_ONCE):
                tasks.create_task(ask(client))
    return ends


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(", ".join(about().values()))
    start_s = time.monotonic()
    ends = asyncio.run(run(arguments.answers, arguments.seed))
    print(f"{arguments.answers} answers, seed {arguments.seed}, in {time.monotonic() - start_s:.0f} s")
    for end, count in ends.most_common():
        print(f"{count:6d} {end}")


if __name__ == "__main__":
    main()
