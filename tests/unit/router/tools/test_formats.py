"""Parsers divide an answer the same way whatever parts it comes in.

The texts of the cases are our own. The docstrings of the modules in router/tools/ name the templates, documents and
tests that each format was compared with.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from router.tools.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from router.tools.source import Arguments, CallBegun, Content, Piece, Reasoning
from tests.examples import num_examples

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
_MAYBE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_SEVERAL = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
BOOKING = {
    "type": "object",
    "properties": {
        "room": {"type": "string"},
        "note": _MAYBE,
        "guests": _SEVERAL,
        "late": {"type": "boolean"},
        "floor": {"type": ["integer", "null"]},
        "extras": {"type": "object"},
        "size": {"enum": ["1", "2"]},
    },
}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": WEATHER,
    "get_time": {"type": "object", "properties": {}},
    "book": BOOKING,
}
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
_VALUES = {"room": "12", "note": "None", "guests": '["Ada", "Bo"]', "late": "True", "floor": "null"}
_VALUES |= {"extras": "{'bed': None}", "size": "1"}
_BOOKED = '{"room": "12", "note": null, "guests": ["Ada", "Bo"], "late": true, "floor": null, "extras": {"bed": null},'
_BOOKED += ' "size": "1"}'
_CODER_VALUES = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _VALUES.items())
_GLM_VALUES = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in _VALUES.items())
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
    "hermes arguments are a word": (
        ("hermes", ""),
        '<tool_call>{"name": "f", "arguments": "now"}</tool_call>',
        Answer(calls=[("f", '"now"')]),
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
    "coder values of all types": (
        ("qwen3_coder", ""),
        "<tool_call>\n<function=book>\n" + _CODER_VALUES + "</function>\n</tool_call>",
        Answer(calls=[("book", _BOOKED)]),
    ),
    "coder text that may be null": (
        ("qwen3_coder", ""),
        "<tool_call><function=book><parameter=note>\n7\n</parameter><parameter=guests>\n[Bo]\n</parameter></function>"
        "</tool_call>",
        Answer(calls=[("book", '{"note": "7", "guests": "[Bo]"}')]),
    ),
    "coder without the tag of the call": (
        ("qwen3_coder", ""),
        "Use <function=f> \n" + _CODER.removeprefix("<tool_call>\n") + "\n<function=get_time>\n</function>",
        Answer(
            "Use <function=f>",
            calls=[("get_weather", '{"city": "Par\\nis", "days": 2}'), ("get_time", "{}")],
        ),
    ),
    "coder two functions in one call": (
        ("qwen3_coder", ""),
        "<tool_call><function=get_time></function>\n<function=get_time></function></tool_call>",
        Answer(calls=[("get_time", "{}")] * 2),
    ),
    "coder values without their end tags": (
        ("qwen3_coder", ""),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n<parameter=x>\n<parameter=days>\n3\n"
        "</function>\n</tool_call>",
        Answer(calls=[("get_weather", '{"city": "Oslo\\n<parameter=x>", "days": 3}')]),
    ),
    "glm values of all types": (
        ("glm47", ""),
        "<tool_call>book" + _GLM_VALUES + "</tool_call>",
        Answer(calls=[("book", _BOOKED)]),
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
        Answer(' {"name": "Ada", "age": 36} and more'),
    ),
    "llama calls after text and on lines of their own": (
        ("llama3_json", ""),
        "I look: \n" + _LLAMA.format("get_weather", PARIS) + "\n" + _LLAMA.format("get_time", "{}") + " So {I} wait.",
        Answer("I look:So {I} wait.", calls=[("get_weather", PARIS), ("get_time", "{}")]),
    ),
    "llama tag after text": (
        ("llama3_json", ""),
        "I look. <|python_tag|> " + _LLAMA.format("get_time", "{}"),
        Answer("I look.", calls=[("get_time", "{}")]),
    ),
    "llama code": (("llama3_json", ""), "A <|python_tag|> print(1)", Answer("A <|python_tag|> print(1)")),
    "llama object that holds a call": (
        ("llama3_json", ""),
        '{"steps": [' + _LLAMA.format("get_time", "{}") + "]}",
        Answer('{"steps": [' + _LLAMA.format("get_time", "{}") + "]}"),
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
    "mistral no call": (("mistral", ""), "A [TOOL_CALLS] no tool {x}", Answer("A[TOOL_CALLS]no tool {x}")),
    "mistral list with another object": (
        ("mistral", ""),
        '[TOOL_CALLS] [{"a": 1}, {"name": "f", "arguments": {}, "id": "123456789"}]',
        Answer('{"a": 1}', calls=[("f", "{}")]),
    ),
    "deepseek V3 without a fence": (
        ("deepseek_v3", ""),
        _CALLS + _V3.format("f", PARIS).replace("```json\n", "").replace("\n```", "") + _CALLS_END,
        Answer(calls=[("f", PARIS)]),
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
    "harmony recipient before the channel": (
        ("openai", "openai_gptoss"),
        "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>",
        Answer(calls=[("get_time", "{}")]),
    ),
    "harmony tool of the model's own": (
        ("openai", "openai_gptoss"),
        "<|channel|>analysis to=browser.search code<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>3",
        Answer("3", "{}"),
    ),
    "harmony message without an end": (
        ("openai", "openai_gptoss"),
        _ANALYSIS.removesuffix("<|end|>") + "<|channel|>final<|message|>It is 3.<|return|>",
        Answer("It is 3.", "The city is Paris."),
    ),
    "harmony text": (("openai", "openai_gptoss"), "plain", Answer("plain")),
    "reasoning and answer": (("", "qwen3"), "<think>\nWell.\n</think>\n\nIt is 3.", Answer("It is 3.", "Well.")),
    "no reasoning": (("", "deepseek_r1"), " It is <think>.", Answer(" It is <think>.")),
    "unfinished reasoning": (("", "glm45"), "<think>Well </th", Answer("", "Well </th")),
    "reasoning of Mistral": (("", "mistral"), "[THINK]Well.[/THINK]It is 3.", Answer("It is 3.", "Well.")),
    "reasoning that a call ends": (
        ("qwen3_coder", "qwen3"),
        "<think>\nI write <tool_call> now. \n\n" + _CODER,
        Answer("", "I write <tool_call> now.", calls=[("get_weather", '{"city": "Par\\nis", "days": 2}')]),
    ),
    "reasoning that a call of GLM ends": (
        ("glm45", "glm45"),
        "\n<think>Well, <tool_call>name? \n" + _GLM,
        Answer("", "Well, <tool_call>name?", calls=[("get_weather", PARIS)]),
    ),
    "unfinished reasoning that names the tag": (
        ("qwen3_coder", "qwen3"),
        "<think>Well <tool_call> ",
        Answer("", "Well <tool_call> "),
    ),
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
def test_emitted_text_is_never_revoked(case: str) -> None:
    """The pieces of every prefix of a text, before its end, are a prefix of the pieces of the whole."""
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
_TAGS = ["<function=", "<function=book>", "</function>", "<parameter=note>", "<parameter=room>", "</parameter>"]
_TAGS += ["book", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "null", "to=functions.book"]
_WORDS = st.sampled_from(
    [*_MARKERS, *_TAGS, PARIS, QUOTED, '{"name": "get_time"', "{", "}", "]", "[", "\n", " ", "function", "a", '"']
)


@pytest.mark.parametrize("tool_call_parser", ["", *TOOL_FORMATS])
@settings(max_examples=num_examples(suite=33, search=250))
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
            assert isinstance(json.loads(arguments), str if "a word" in case else dict)


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
