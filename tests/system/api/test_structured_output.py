"""Answers that must match a grammar, from real clusters: by every field, through hand-offs, kills, moves and drains."""

import asyncio
import json
import re
import signal
from typing import Any

import jsonschema
import openai
import pytest

from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

_DEADLINE_S = 60.0
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"enum": ["old", "new", "big"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "people", "tags"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
_MOST_ATTEMPTS = 10  # at disturbing an answer before it has ended
_PROMPT = "def city():\n    return "
# A multiple of a large prime among numbers of 30 digits takes seconds of CPU time to compile.
_BOUND = "compiling it takes longer than"  # of CPU time, or of time on a busy machine
_HOSTILE = {"type": "integer", "multipleOf": 1_000_003, "maximum": 10**30}


def _client(cluster: LocalCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://{cluster.members['router0'].ready['http']}/v1",
        api_key="-",
        max_retries=0,
        timeout=_DEADLINE_S,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    )


def _question(**extra: Any) -> Any:
    return {"model": "", "prompt": _PROMPT, "max_tokens": 300, "temperature": 1.0, "seed": 3, "extra_body": extra}


def _is_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


_FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": _FORMAT}, _is_schema),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, _is_schema),
    ({"guided_json": SCHEMA}, _is_schema),
    ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, re.compile("[0-9]{3}-[a-z]{2}").fullmatch),
    ({"guided_regex": "(yes|no)!{1,3}"}, re.compile("(yes|no)!{1,3}").fullmatch),
    ({"guided_choice": ["red", "green", "blue\n"]}, ["red", "green", "blue\n"].__contains__),
    ({"structured_outputs": {"grammar": 'start: "<" /[a-c]{1,4}/ ">"'}}, re.compile("<[a-c]{1,4}>").fullmatch),
    ({"guided_grammar": 'root ::= "(" [0-9] ")"\n'}, re.compile(r"\([0-9]\)").fullmatch),
]


async def test_every_field_gives_answers_that_match(cluster: LocalCluster) -> None:
    async with _client(cluster) as client:
        for extra, matches in _FORMS:
            choices = (await client.completions.create(**_question(**extra), n=2)).choices
            assert [choice.finish_reason for choice in choices] == ["stop", "stop"]
            assert all(matches(choice.text) for choice in choices), (extra, [choice.text for choice in choices])
        chat: Any = {"messages": [{"role": "user", "content": "A city, as JSON."}], "response_format": _FORMAT}
        answer = await client.chat.completions.create(model="", max_completion_tokens=300, **chat)
        assert answer.choices[0].finish_reason == "stop" and _is_schema(answer.choices[0].message.content)
    await cluster.until_free()


async def test_refused_grammars_name_their_field_and_cost_no_other_request(cluster: LocalCluster) -> None:
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"json": {"type": "banana"}}}, "structured_outputs", "banana"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": _HOSTILE}}}, "response_format", _BOUND),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "one grammar"),
        ({"structured_outputs": {}}, "structured_outputs", "no constraint"),
    ]
    async with _client(cluster) as client:
        served = asyncio.create_task(client.completions.create(**_question(guided_regex="[a-z]{60}")))
        for extra, field, cause in refused:
            with pytest.raises(openai.BadRequestError) as error:
                await client.completions.create(**_question(**extra))
            assert (error.value.param, error.value.code) == (field, "invalid_grammar")
            assert cause in error.value.message
        for contradiction in ({"min_tokens": 3}, {"ignore_eos": True}):
            with pytest.raises(openai.BadRequestError, match=next(iter(contradiction))):
                await client.completions.create(**_question(guided_regex="[a-z]+", **contradiction))
        assert re.fullmatch("[a-z]{60}", (await served).choices[0].text)
    await cluster.until_free()


async def test_streamed_answers_go_on_after_kills_and_moves_with_the_undisturbed_text(cluster: LocalCluster) -> None:
    async with _client(cluster) as client:
        question = _question(response_format=_FORMAT)
        undisturbed = (await client.completions.create(**question)).choices[0].text
        assert _is_schema(undisturbed)
        for disturb in (_kill_its_decode_worker, _move, _kill_a_prefill_worker):
            for _ in range(_MOST_ATTEMPTS):
                stream = await client.completions.create(**question, stream=True)
                parts = aiter(stream)
                text = "".join([(await anext(parts)).choices[0].text for _ in range(8)])
                is_disturbed = await disturb(cluster)
                text += "".join([part.choices[0].text async for part in parts if part.choices])
                assert text == undisturbed
                await cluster.mend()
                if is_disturbed:
                    break
            else:
                pytest.fail(f"{disturb.__name__} met no sequence")
    await cluster.until_free()


async def _kill_its_decode_worker(cluster: LocalCluster) -> bool:
    """Return False if the sequence had ended before."""
    for name in cluster.workers("decode"):
        if (await cluster.inspect(name)).figures["running"]:
            await _kill(cluster, name)
            return True
    return False


async def _move(cluster: LocalCluster) -> bool:
    """Return False if the sequence had ended before."""
    return any([(await cluster.migrate(source)).num_moved for source in cluster.workers("decode")])


async def _kill_a_prefill_worker(cluster: LocalCluster) -> bool:
    await _kill(cluster, "prefill0")
    return True


async def _kill(cluster: LocalCluster, name: str) -> None:
    cluster.members[name].send_signal(signal.SIGKILL)
    assert await cluster.members[name].exit_code() == -signal.SIGKILL
