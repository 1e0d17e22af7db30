"""The router's check of grammars: a hostile one is refused within its bounds, and costs no other request anything."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.errors import InvalidGrammar, LimitReached, UnsupportedField
from cluster.grammar.engine import grammar_engine_id
from cluster.messages import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from router.grammars import compile_turns
from router.grammars.checker import GrammarChecker
from router.grammars.compile_turns import COMPILE_LIMIT

DEMO = Path(__file__).parents[4] / "examples" / "demo_model"
# A multiple of a large prime among numbers of 30 digits takes seconds of CPU time.
CLIENT, OTHER = "address 10.0.0.1", "tenant other"
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
        await checker.check(Grammar(kind, good), CLIENT)
        for _ in range(2):  # compiled, then remembered
            with pytest.raises(InvalidGrammar, match=cause):
                await checker.check(Grammar(kind, bad), CLIENT)


async def test_a_hostile_schema_is_refused_while_others_are_checked(checker: GrammarChecker) -> None:
    await checker.check(schema({"type": "object"}), OTHER)
    hostile = [asyncio.create_task(checker.check(schema(HOSTILE | {"maximum": 10**30 + n}), CLIENT)) for n in range(2)]
    await asyncio.sleep(0)
    await checker.check(schema({"type": "array", "maxItems": 3}), OTHER)
    for refused in await asyncio.gather(*hostile, return_exceptions=True):
        assert isinstance(refused, InvalidGrammar) and "compiling it takes longer than" in refused.message
    await checker.check(schema({"type": "array", "maxItems": 4}), CLIENT)


async def test_hostile_schemas_use_up_the_compile_time_of_their_client_alone(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_turns, "_MOST_CPU_S", 0.05)  # less than one of them takes
    known = schema({"type": "object"})
    await checker.check(known, CLIENT)
    hostile = [schema(HOSTILE | {"maximum": 10**30 + n}) for n in range(9)]
    first, *others = await asyncio.gather(*(checker.check(each, CLIENT) for each in hostile), return_exceptions=True)
    assert isinstance(first, InvalidGrammar)
    for refused in others:
        assert isinstance(refused, LimitReached) and refused.param == COMPILE_LIMIT
        assert refused.retry_after_s is not None and refused.retry_after_s > 0
    await checker.check(known, CLIENT)
    await checker.check(schema({"type": "array"}), OTHER)


async def test_a_grammar_that_needs_too_much_memory_is_refused() -> None:
    checker = GrammarChecker(DEMO, grammar_engine_id(DEMO), memory_bytes=4 << 20)
    try:
        with pytest.raises(InvalidGrammar, match="needs more than 4 MiB"):
            await checker.check(schema({"enum": [f"value {n}" for n in range(6_000)]}), CLIENT)
        await checker.check(schema({"enum": ["value"]}), CLIENT)
    finally:
        await checker.close()


async def test_a_grammar_is_compiled_once_for_all_that_ask_for_it(checker: GrammarChecker) -> None:
    await asyncio.gather(*(checker.check(schema({"maxItems": 2}), CLIENT) for _ in range(50)))
    assert checker._process is not None
    assert next(checker._process._numbers) == 2


async def test_a_dead_process_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(schema({"type": "object"}), CLIENT)
    first = checker._process
    assert first is not None
    os.kill(first._process.pid, signal.SIGKILL)
    await asyncio.wait([first._reader])
    await checker.check(schema({"type": "array"}), CLIENT)
    assert checker._process is not first


async def test_a_grammar_beyond_the_bounds_of_its_text_is_not_compiled(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidGrammar, match=f"the maximum is {MAX_GRAMMAR_BYTES}"):
        await checker.check(Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1)), CLIENT)
    for kind in GrammarKind:  # an empty regular expression could be compiled, but no message to a worker has it
        with pytest.raises(InvalidGrammar, match="it is empty"):
            await checker.check(Grammar(kind, ""), CLIENT)
    assert checker._process is None


async def test_a_router_without_the_library_refuses_plainly() -> None:
    with pytest.raises(UnsupportedField, match="llguidance is not installed"):
        await GrammarChecker(DEMO, "").check(Grammar(GrammarKind.REGEX, "a"), CLIENT)


async def test_the_process_ends_with_its_checker(checker: GrammarChecker) -> None:
    await checker.check(schema({"type": "object"}), CLIENT)
    assert checker._process is not None
    pid = checker._process._process.pid
    await checker.close()
    assert not Path(f"/proc/{pid}").exists()
