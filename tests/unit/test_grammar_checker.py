"""The router's check of grammars: a hostile one is refused within its bounds, and costs no other request anything."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.errors import InvalidGrammar, UnsupportedField
from cluster.grammar.engine import grammar_engine_id
from cluster.messages import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from router.grammars.checker import GrammarChecker

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
# A multiple of a large prime among numbers of 30 digits takes seconds of CPU time.
HOSTILE = {"type": "integer", "multipleOf": 1_000_003, "maximum": 10**30}


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(DEMO, grammar_engine_id(DEMO))
    yield checker
    await checker.close()


async def test_grammars_of_every_kind_are_accepted_or_refused_with_the_cause(checker: GrammarChecker) -> None:
    for kind, good, bad, cause in (
        (GrammarKind.JSON_SCHEMA, '{"type": "object"}', '{"type": "banana"}', "banana"),
        (GrammarKind.REGEX, "[a-z]+", "(", "regex"),
        (GrammarKind.CHOICE, '["yes", "no"]', "[]", "at least one"),
        (GrammarKind.GRAMMAR, 'start: "a"+', "start: missing", "missing"),
    ):
        await checker.check(Grammar(kind, good))
        for _ in range(2):  # compiled, then remembered
            with pytest.raises(InvalidGrammar, match=cause):
                await checker.check(Grammar(kind, bad))


async def test_a_hostile_schema_is_refused_while_others_are_checked(checker: GrammarChecker) -> None:
    await checker.check(schema({"type": "object"}))
    hostile = [asyncio.create_task(checker.check(schema(HOSTILE | {"maximum": 10**30 + n}))) for n in range(2)]
    await asyncio.sleep(0)
    await checker.check(schema({"type": "array", "maxItems": 3}))
    for refused in await asyncio.gather(*hostile, return_exceptions=True):
        assert isinstance(refused, InvalidGrammar) and "compiling it takes longer than" in refused.message
    await checker.check(schema({"type": "array", "maxItems": 4}))


async def test_a_grammar_that_needs_too_much_memory_is_refused() -> None:
    checker = GrammarChecker(DEMO, grammar_engine_id(DEMO), memory_bytes=4 << 20)
    try:
        with pytest.raises(InvalidGrammar, match="needs more than 4 MiB"):
            await checker.check(schema({"enum": [f"value {n}" for n in range(6_000)]}))
        await checker.check(schema({"enum": ["value"]}))
    finally:
        await checker.close()


async def test_a_grammar_is_compiled_once_for_all_that_ask_for_it(checker: GrammarChecker) -> None:
    await asyncio.gather(*(checker.check(schema({"maxItems": 2})) for _ in range(50)))
    assert checker._process is not None
    assert next(checker._process._numbers) == 2


async def test_a_dead_process_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(schema({"type": "object"}))
    first = checker._process
    assert first is not None
    os.kill(first._process.pid, signal.SIGKILL)
    await asyncio.wait([first._reader])
    await checker.check(schema({"type": "array"}))
    assert checker._process is not first


async def test_a_grammar_beyond_the_bounds_of_its_text_is_not_compiled(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidGrammar, match=f"at most {MAX_GRAMMAR_BYTES}"):
        await checker.check(Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1)))
    assert checker._process is None


async def test_a_router_without_the_library_refuses_plainly() -> None:
    with pytest.raises(UnsupportedField, match="llguidance is not installed"):
        await GrammarChecker(DEMO, "").check(Grammar(GrammarKind.REGEX, "a"))


async def test_the_process_ends_with_its_checker(checker: GrammarChecker) -> None:
    await checker.check(schema({"type": "object"}))
    assert checker._process is not None
    pid = checker._process._process.pid
    await checker.close()
    assert not Path(f"/proc/{pid}").exists()
