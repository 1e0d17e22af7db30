"""The grammars of simulated requests and the code that applies them: workers compute masks with the engine's own code,
on the thread of their step; routers start no process to check grammars that are known to be valid.
"""

import json
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import cache
from pathlib import Path
from typing import Any

from cluster.grammar.engine import grammar_engine_id
from cluster.messages import Grammar, GrammarKind
from engine.grammar.compiled_grammars import CompiledGrammars
from router.requests import ChatPrompt, GenerateRequest
from router.tools.call_forms import CallableTool
from router.tools.constraint import ToolUse, constrained
from router.tools.formats import AnswerFormat
from tests.system.rigs.members.router_harness import DEMO_MODEL

END = 0  # the demo model's end of sequence
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def _forced_call() -> Grammar:
    use = ToolUse((CallableTool("weather", CITY),), must_call=True, is_named=True)
    request = GenerateRequest(ChatPrompt(()))
    made = constrained(request, use, AnswerFormat.named("hermes", ""), token_ids={}, prompt_end="").grammar
    assert made is not None
    return made


GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(CITY)),
    "call": _forced_call(),
    "regex": Grammar(GrammarKind.REGEX, "[a-z]{1,12}-[0-9]{2,4}"),
    "choice": Grammar(GrammarKind.CHOICE, json.dumps(["yes", "no", "perhaps not"])),
}


def compiled_grammars() -> CompiledGrammars:
    """Return the compiled grammars of all workers: a simulated worker has no thread that compiles them."""
    return _compiled_in(os.getpid())


@cache
def _compiled_in(_process_id: int) -> CompiledGrammars:
    """Return the compiled grammars of this process. A forked process compiles its own, because it has none of the
    threads of llguidance's executor.
    """
    grammars = CompiledGrammars(DEMO_MODEL)
    for grammar in GRAMMARS.values():
        grammars.matcher(grammar)
    return grammars


class AtOnce(Executor):
    """Does work when it is submitted. A step computes its masks without another thread."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **keywords: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **keywords))
        except Exception as error:  # noqa: BLE001 -- the caller of `result` raises it, as from a thread
            done.set_exception(error)
        return done


class Checked:
    """The grammar check of a simulated router. It accepts all grammars, because those here are valid."""

    engine_id = grammar_engine_id(Path(DEMO_MODEL))

    async def check(self, grammar: Grammar, source: str) -> None:
        assert grammar in GRAMMARS.values()

    async def close(self) -> None:
        pass
