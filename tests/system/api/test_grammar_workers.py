"""Requests with grammars go only to workers that apply grammars as the router that checked them."""

import asyncio
from dataclasses import replace

import pytest

from cluster.errors import InvalidGrammar, NoGrammarWorker
from cluster.messages import Grammar, GrammarKind
from router.requests import GenerateRequest
from tests.system.rigs.members.router_harness import RouterUnderTest, answer_to, ask, expected_tokens, router_under_test

_REGEX = Grammar(GrammarKind.REGEX, "[a-z]+")


def _with_grammar(grammar: Grammar = _REGEX) -> GenerateRequest:
    return replace(ask(), grammar=grammar, grammar_field="guided_regex")


async def _add_pair(router: RouterUnderTest, number: int, grammar_engine: str) -> None:
    for worker in (await router.add_prefill(f"p{number}"), await router.add_decode(f"d{number}")):
        worker.grammar_engine = grammar_engine
    router.register()
    await router.connected()


async def test_only_workers_with_the_routers_grammar_engine_serve_grammars() -> None:
    async with router_under_test() as router:
        for number, engine in enumerate(("", router.grammars.engine_id, "llguidance 0.1 of another tokenizer")):
            await _add_pair(router, number, engine)
        for _ in range(4):
            answer = await answer_to(router, _with_grammar())
            assert answer.token_ids[0] == expected_tokens(router, ask())
            assert {name.partition("@")[0] for name in answer.summary.ledger.members} == {"p1", "d1"}
        free = await asyncio.gather(*(answer_to(router, ask()) for _ in range(6)))
        assert {name.partition("@")[0] for each in free for name in each.summary.ledger.members} > {"p1", "d1"}


async def test_without_such_a_worker_a_request_with_a_grammar_is_refused_at_once() -> None:
    async with router_under_test() as router:
        await _add_pair(router, 0, "")
        with pytest.raises(NoGrammarWorker, match="llguidance"):
            await answer_to(router, _with_grammar())
        assert (await answer_to(router, ask())).token_ids[0] == expected_tokens(router, ask())


async def test_an_invalid_grammar_is_refused_with_the_clients_field_before_any_worker_is_asked() -> None:
    async with router_under_test() as router:
        with pytest.raises(InvalidGrammar, match=r"guided_regex: .*unclosed") as error:
            await answer_to(router, _with_grammar(Grammar(GrammarKind.REGEX, "(")))
        assert error.value.param == "guided_regex"
