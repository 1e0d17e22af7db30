"""Parsers divide an answer the same way whatever parts it comes in.

The cases follow published chat templates (Qwen2.5, Qwen3-Coder, Llama 3.1, Mistral 7B v0.3 and Small 3.2, DeepSeek V3
and V3.1, GLM-4.5, gpt-oss) and what vLLM's tests/tool_parsers/ and tests/reasoning/ try with them.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from router.tools.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from router.tools.pieces import Arguments, CallBegun, Content, Piece, Reasoning

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "get_time": {"type": "object", "properties": {}}}
PARIS = '{"city": "Paris", "days": 2}'
QUOTED = '{"city": "a \\"}{ [\\\\", "list": [1, {"x": "]"}]}'


@dataclass
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def joined(pieces: list[Piece]) -> Answer:
    answer = Answer()
    for piece in pieces:
        match piece:
            case Content(text):
                answer.content += text
            case Reasoning(text):
                answer.reasoning += text
            case CallBegun(index, name):
                assert index == len(answer.calls)
                answer.calls.append((name, ""))
            case Arguments(index, text):
                assert index == len(answer.calls) - 1, "arguments belong to the call that was begun last"
                answer.calls[-1] = (answer.calls[-1][0], answer.calls[-1][1] + text)
    return answer


def parsed(names: tuple[str, str], parts: list[str], prompt_end: str = "") -> Answer:
    parser = AnswerFormat.named(*names).parser(TOOLS, prompt_end)
    return joined([*(piece for part in parts for piece in parser.push(part)), *parser.end()])


_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
_GLM += "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
_CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar\nis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
)
_CODER += "</function>\n</tool_call>"
_HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
_LLAMA = '{{"name": "{}", "parameters": {}}}'
_ANALYSIS = "<|channel|>analysis<|message|>The city is Paris.<|end|>"
_HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + PARIS

CASES: dict[str, tuple[tuple[str, str], str, Answer]] = {
    "hermes call": (("hermes", ""), _HERMES.format("get_weather", PARIS), Answer(calls=[("get_weather", PARIS)])),
    "hermes content and two calls": (
        ("hermes", ""),
        "I look.\n\n" + _HERMES.format("get_weather", QUOTED) + "\n" + _HERMES.format("get_time", "{}"),
        Answer("I look.", calls=[("get_weather", QUOTED), ("get_time", "{}")]),
    ),
    "hermes arguments first": (
        ("hermes", ""),
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        Answer(calls=[("f", '{"a": 1}')]),
    ),
    "hermes without arguments": (("hermes", ""), '<tool_call>{"name": "f"}</tool_call>', Answer(calls=[("f", "{}")])),
    "hermes arguments as text": (
        ("hermes", ""),
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Answer(calls=[("f", '{"a": 1}')]),
    ),
    "hermes no call": (("hermes", ""), "1 < 2, <tool>, and <tool_", Answer("1 < 2, <tool>, and <tool_")),
    "hermes broken call": (
        ("hermes", ""),
        "<tool_call>what {</tool_call> then",
        Answer("<tool_call>what {</tool_call>then"),
    ),
    "hermes unfinished call": (
        ("hermes", ""),
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        Answer(calls=[("f", '{"a": "b')]),
    ),
    "coder call": (
        ("qwen3_coder", ""),
        "Well.\n" + _CODER,
        Answer("Well.", calls=[("get_weather", '{"city": "Par\\nis", "days": 2}')]),
    ),
    "coder without arguments": (
        ("qwen3_coder", ""),
        "<tool_call><function=get_time></function></tool_call>",
        Answer(calls=[("get_time", "{}")]),
    ),
    "glm call": (("glm45", ""), "Well.\n" + _GLM, Answer("Well.", calls=[("get_weather", PARIS)])),
    "glm without arguments": (("glm47", ""), "<tool_call>get_time</tool_call>", Answer(calls=[("get_time", "{}")])),
    "glm twice": (("glm45", ""), _GLM + "\n" + _GLM, Answer(calls=[("get_weather", PARIS)] * 2)),
    "llama call": (("llama3_json", ""), _LLAMA.format("get_weather", PARIS), Answer(calls=[("get_weather", PARIS)])),
    "llama tag and two calls": (
        ("llama3_json", ""),
        "<|python_tag|>" + _LLAMA.format("get_weather", PARIS) + "; " + _LLAMA.format("get_time", "{}"),
        Answer(calls=[("get_weather", PARIS), ("get_time", "{}")]),
    ),
    "llama answer in JSON": (
        ("llama3_json", ""),
        ' {"name": "Ada", "age": 36} and more',
        Answer('{"name": "Ada", "age": 36} and more'),
    ),
    "llama text": (("llama3_json", ""), " It is {warm}.", Answer(" It is {warm}.")),
    "mistral list": (
        ("mistral", ""),
        'Well. [TOOL_CALLS][{"name": "get_weather", "arguments": ' + PARIS + '}, {"name": "f", "arguments": {}}]',
        Answer("Well.", calls=[("get_weather", PARIS), ("f", "{}")]),
    ),
    "mistral named": (
        ("mistral", ""),
        "[TOOL_CALLS]get_weather[ARGS]" + PARIS + "[TOOL_CALLS]get_time{}",
        Answer(calls=[("get_weather", PARIS), ("get_time", "{}")]),
    ),
    "mistral with an id": (
        ("mistral", ""),
        "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]" + QUOTED,
        Answer(calls=[("f", QUOTED)]),
    ),
    "deepseek V3": (
        ("deepseek_v3", ""),
        "Well." + _CALLS + _V3.format("f", PARIS) + "\n" + _V3.format("g", "{}") + _CALLS_END,
        Answer("Well.", calls=[("f", PARIS), ("g", "{}")]),
    ),
    "deepseek V3.1": (
        ("deepseek_v31", ""),
        _CALLS + _V31.format("f", QUOTED) + _V31.format("g", "{}") + _CALLS_END,
        Answer(calls=[("f", QUOTED), ("g", "{}")]),
    ),
    "harmony call": (
        ("openai", "openai_gptoss"),
        _ANALYSIS + _HARMONY_CALL,
        Answer(reasoning="The city is Paris.", calls=[("get_weather", PARIS)]),
    ),
    "harmony final": (
        ("openai", "openai_gptoss"),
        _ANALYSIS + "<|start|>assistant<|channel|>final<|message|>It is <warm>.",
        Answer("It is <warm>.", "The city is Paris."),
    ),
    "harmony preamble and call": (
        ("openai", "openai_gptoss"),
        "<|channel|>commentary<|message|>I look.<|end|>" + _HARMONY_CALL + "<|call|>",
        Answer("I look.", calls=[("get_weather", PARIS)]),
    ),
    "harmony text": (("openai", "openai_gptoss"), "plain", Answer("plain")),
    "reasoning and answer": (("", "qwen3"), "<think>\nWell.\n</think>\n\nIt is 3.", Answer("It is 3.", "Well.")),
    "no reasoning": (("", "deepseek_r1"), " It is <think>.", Answer(" It is <think>.")),
    "unfinished reasoning": (("", "glm45"), "<think>Well </th", Answer("", "Well </th")),
    "reasoning of Mistral": (("", "mistral"), "[THINK]Well.[/THINK]It is 3.", Answer("It is 3.", "Well.")),
    "reasoning and call": (
        ("hermes", "qwen3"),
        "<think>\nWell.\n</think>\n\n" + _HERMES.format("get_weather", PARIS),
        Answer("", "Well.", calls=[("get_weather", PARIS)]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_divided_the_same_at_every_split(case: str) -> None:
    names, text, expected = CASES[case]
    assert parsed(names, [text]) == expected
    assert parsed(names, list(text)) == expected
    for at in range(1, len(text)):
        assert parsed(names, [text[:at], text[at:]]) == expected, f"split at {at}"


@pytest.mark.parametrize("case", CASES)
def test_what_was_emitted_is_never_revoked(case: str) -> None:
    """The pieces of each beginning of a text, without its end, are a beginning of the pieces of the whole."""
    names, text, expected = CASES[case]
    for end in range(len(text)):
        parser = AnswerFormat.named(*names).parser(TOOLS, "")
        early = joined(parser.push(text[:end]))
        assert expected.content.startswith(early.content)
        assert expected.reasoning.startswith(early.reasoning)
        assert [name for name, _ in expected.calls][: len(early.calls)] == [name for name, _ in early.calls]
        assert all(whole.startswith(part) for (_, whole), (_, part) in zip(expected.calls, early.calls, strict=False))


_MARKERS = sorted(
    {marker for tools in TOOL_FORMATS.values() for marker in tools.markers}
    | {marker for reasoning in REASONING_FORMATS.values() for marker in reasoning.markers}
)
_WORDS = st.sampled_from(
    [*_MARKERS, PARIS, QUOTED, '{"name": "get_time"', "}", "]", "[", "\n", " ", "function", "a", '"']
)


@pytest.mark.parametrize("tool_call_parser", ["", *TOOL_FORMATS])
@given(words=st.lists(_WORDS, max_size=12), data=st.data())
def test_any_text_ends_and_is_divided_the_same_at_any_split(
    tool_call_parser: str, words: list[str], data: st.DataObject
) -> None:
    text = "".join(words)
    names = (tool_call_parser, data.draw(st.sampled_from(list(REASONING_FORMATS))))
    whole = parsed(names, [text])
    assert parsed(names, list(text)) == whole
    at = data.draw(st.integers(0, len(text)))
    assert parsed(names, [text[:at], text[at:]]) == whole


@pytest.mark.parametrize("case", [case for case, (_, text, answer) in CASES.items() if answer.calls])
def test_the_arguments_of_a_finished_call_are_json(case: str) -> None:
    _, _, expected = CASES[case]
    for _, arguments in expected.calls:
        if "unfinished" not in case:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("prompt_end", ["<think>\n", "<think>old</think>text<think>"])
def test_reasoning_that_the_prompt_opened_needs_no_tag(prompt_end: str) -> None:
    assert parsed(("", "qwen3"), ["\nWell.</think>3"], prompt_end) == Answer("3", "Well.")
    assert parsed(("", "qwen3"), ["3"], "<think>\n\n</think>\n\n") == Answer("3")


def test_without_tools_no_call_is_looked_for() -> None:
    text = _HERMES.format("f", "{}")
    for reasoning_parser in ("", "qwen3"):
        parser = AnswerFormat.named("hermes", reasoning_parser).parser(None, "")
        assert joined([*parser.push(text), *parser.end()]) == Answer(text)


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser magic is not known; choose one of hermes"):
        AnswerFormat.named("magic", "")
    with pytest.raises(ConfigError, match="--reasoning-parser magic"):
        AnswerFormat.named("", "magic")
