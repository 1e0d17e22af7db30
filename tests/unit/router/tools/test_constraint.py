"""Answers drawn at random under the grammars of tool calls: what the parsers read from each of them is valid."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer

from cluster.errors import InvalidGrammar
from cluster.grammar.engine import GrammarEngine
from cluster.messages import Grammar, GrammarKind
from router.requests import ChatOptions, ChatPrompt, GenerateRequest
from router.text.detokenizer import Vocabulary
from router.text.tokenization import _marker_token_ids
from router.tools.call_forms import CallableTool
from router.tools.constraint import MAX_CALLS, ToolUse, constrained
from router.tools.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from router.tools.source import Arguments, CallBegun, Content, Piece, Reasoning
from tests.unit.router.text.small_tokenizers import byte_level

_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "unit": {"enum": ["°C", "°F"], "type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "at": {"$ref": "#/$defs/Place"},
        "note": {"type": ["string", "null"], "maxLength": 3},
        "tags": {
            "anyOf": [{"type": "string", "maxLength": 4}, {"type": "array", "maxItems": 2, "items": {"type": "string"}}]
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
_SEND: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"enum": [1, 2]}},
    "required": ["to"],
    "additionalProperties": False,
}
_TOOLS = (CallableTool("get_weather", _SCHEMA, is_strict=True), CallableTool("send", _SEND), CallableTool("stop", {}))
THINK, BRACKET_THINK = ("<think>", "</think>"), ("[THINK]", "[/THINK]")
_VALIDATORS = {tool.name: jsonschema.Draft202012Validator(tool.schema) for tool in _TOOLS}


class Tokens:
    """A tokenizer in which every marker is a token, or none is, and its grammar engine."""

    def __init__(self, markers: list[str]) -> None:
        self.tokenizer = byte_level()
        self.tokenizer.add_special_tokens([*markers, "<|eos|>"])
        (self.end,) = self.tokenizer.encode("<|eos|>").ids
        self.size = self.tokenizer.get_vocab_size()
        library = LLTokenizer(self.tokenizer.to_str(), n_vocab=self.size, eos_token=[self.end])
        self.engine = GrammarEngine(library, self.size, frozenset({self.end}))
        vocabulary = Vocabulary(self.tokenizer, markers)
        self.names = [vocabulary.token_bytes(token_id) for token_id in range(self.size)]


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def tokens(request: pytest.FixtureRequest) -> Tokens:
    markers = {marker for each in TOOL_FORMATS.values() for marker in each.markers}
    markers |= {marker for each in REASONING_FORMATS.values() for marker in each.markers}
    return Tokens(sorted(markers) if request.param else [])


@dataclass(frozen=True)
class Model:
    """Draws answers at random under a grammar."""

    tokens: Tokens
    answers: AnswerFormat
    arguments: Mapping[str, object] = field(default_factory=dict)  # of the chat template

    def grammar(self, use: ToolUse | None, prompt_end: str = "", grammar: Grammar | None = None) -> Grammar | None:
        request = GenerateRequest(ChatPrompt((), ChatOptions(arguments=self.arguments)), grammar=grammar)
        ids = _marker_token_ids(self.tokens.tokenizer, self.answers.markers)
        return constrained(request, use, self.answers, token_ids=ids, prompt_end=prompt_end).grammar

    def admits(self, grammar: Grammar | None, text: str, *, whole: bool = False) -> bool:
        assert grammar is not None
        token_ids = self._token_ids(text) + ([self.tokens.end] if whole else [])
        return self.tokens.engine.matcher(grammar).advance(token_ids) == len(token_ids)

    def answer(self, grammar: Grammar | None, begins: str, seed: int) -> str:
        """Return a text that begins with this one, which the grammar must admit, and continues at random to its end."""
        assert grammar is not None
        matcher, draw = self.tokens.engine.matcher(grammar), random.Random(seed)
        token_ids = self._token_ids(begins)
        accepted = matcher.advance(token_ids)
        assert accepted == len(token_ids), self.tokens.tokenizer.decode(token_ids[:accepted])
        while not matcher.is_over:
            assert len(token_ids) < 3000
            bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
            token_ids.append(int(draw.choice(np.flatnonzero(bits))))
            assert matcher.advance(token_ids[-1:]) == 1
        return b"".join(self.tokens.names[token_id] for token_id in token_ids[:-1]).decode()

    def pieces(self, text: str, use: ToolUse | None, prompt_end: str = "") -> list[Piece]:
        parser = self.answers.parser(use.schemas if use is not None else None, prompt_end)
        return [*parser.push(text), *parser.end()]

    def _token_ids(self, text: str) -> list[int]:
        return list(self.tokens.tokenizer.encode(text, add_special_tokens=False).ids)


def _valid_calls(pieces: list[Piece]) -> list[str]:
    """Return the names of the calls, whose arguments are valid."""
    calls = [piece for piece in pieces if isinstance(piece, CallBegun)]
    for begun in calls:
        texts = [piece.text for piece in pieces if isinstance(piece, Arguments) and piece.index == begun.index]
        _VALIDATORS[begun.name].validate(json.loads("".join(texts)))
    return [begun.name for begun in calls]


def _content(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def _reasoning(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_required_calls_are_always_read_and_always_valid(name: str, tokens: Tokens) -> None:
    model = Model(tokens, AnswerFormat.named(name, ""))
    one = ToolUse(_TOOLS, must_call=True, is_parallel=False)
    named = ToolUse(_TOOLS[:1], must_call=True, is_named=True)
    for use, most, seeds in (ToolUse(_TOOLS, must_call=True), MAX_CALLS, 3), (one, 1, 1), (named, 1, 1):
        grammar = model.grammar(use)
        for seed in range(seeds):
            text = model.answer(grammar, "<|channel|>commentary to=" if name == "openai" else "", seed)
            pieces = model.pieces(text, use)
            assert 1 <= len(_valid_calls(pieces)) <= most, text
            assert not _content(pieces).strip(), text


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"llama3_json"}))
def test_calls_of_strict_tools_after_a_text_are_valid(name: str, tokens: Tokens) -> None:
    model = Model(tokens, AnswerFormat.named(name, ""))
    use = ToolUse(_TOOLS)
    grammar = model.grammar(use)
    form = TOOL_FORMATS[name].form
    if form is None:
        text, call = "<|channel|>final<|message|>I look.", "<|channel|>commentary to=functions."
    else:
        text, call = "I look <b>.", f"I look <b>.{form.trigger}"
    assert model.admits(grammar, text, whole=True)
    assert not model.admits(grammar, f"{call}nothing")
    for seed in range(2):
        pieces = model.pieces(model.answer(grammar, call, seed), use)
        assert _valid_calls(pieces)
        assert _content(pieces).strip() in ("I look <b>.", "")


def test_without_a_strict_tool_or_a_form_that_shows_calls_nothing_is_constrained(tokens: Tokens) -> None:
    assert Model(tokens, AnswerFormat.named("hermes", "qwen3")).grammar(ToolUse(_TOOLS[1:])) is None
    assert Model(tokens, AnswerFormat.named("llama3_json", "")).grammar(ToolUse(_TOOLS)) is None


@pytest.mark.parametrize(("reasoning", "opening", "closing"), [("qwen3", *THINK), ("mistral", *BRACKET_THINK)])
def test_reasoning_before_a_constrained_answer_is_free(
    reasoning: str, opening: str, closing: str, tokens: Tokens
) -> None:
    model = Model(tokens, AnswerFormat.named("hermes", reasoning))
    use, free = ToolUse(_TOOLS, must_call=True), "The {city}?\n"
    for prompt_end, begins in (("", f"{opening}\n{free}{closing}"), (f"{opening}\n", f"{free}{closing}\n\n")):
        pieces = model.pieces(model.answer(model.grammar(use, prompt_end), begins, 0), use, prompt_end)
        assert _reasoning(pieces).strip() == free.strip() and _valid_calls(pieces) and not _content(pieces).strip()
    assert model.admits(model.grammar(use), "<tool_call>\n{"), "a model may begin without reasoning"
    assert not model.admits(model.grammar(use, f"{opening}\n"), "<tool_call>\n{", whole=True)
    assert not model.admits(model.grammar(use, f"{opening}\n\n{closing}\n\n"), opening), "the prompt has closed it"
    unthinking = Model(tokens, model.answers, {"enable_thinking": False})
    assert not unthinking.admits(unthinking.grammar(use), opening), "the request asks for none"


_ANSWERS = [
    (Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": [1, {"a": 2}]})), ["1", '{"a": 2}'], ["3"]),
    (Grammar(GrammarKind.REGEX, "a/[bc]\\/+"), ["a/b/", "a/c//"], ["a/b"]),
    (Grammar(GrammarKind.CHOICE, json.dumps(['re"d', "blue\n"])), ['re"d', "blue\n"], ["red"]),
    (Grammar(GrammarKind.GRAMMAR, 'start: "<" b\nb: "x"'), ["<x"], ["<y"]),
]


@pytest.mark.parametrize(("grammar", "matching", "others"), _ANSWERS, ids=[each[0].kind for each in _ANSWERS])
def test_an_answer_after_reasoning_or_beside_calls_matches_the_grammar(
    grammar: Grammar, matching: list[str], others: list[str], tokens: Tokens
) -> None:
    thinking, harmony = (
        Model(tokens, AnswerFormat.named("hermes", "qwen3")),
        Model(tokens, AnswerFormat.named("openai", "openai_gptoss")),
    )
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    channels = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>"
    for texts, admitted in (matching, True), (others, False):
        for text in texts:
            behind = thinking.grammar(None, "<think>", grammar)
            assert thinking.admits(behind, f"Hm</think>\n\n{text}", whole=True) is admitted
            assert harmony.admits(harmony.grammar(None, "", grammar), channels + text, whole=True) is admitted
            beside = thinking.grammar(ToolUse(_TOOLS[1:]), "", grammar)
            assert thinking.admits(beside, text, whole=True) is admitted
            assert thinking.admits(beside, call, whole=True)


@pytest.mark.parametrize(
    ("name", "tool", "words"),
    [
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern of a strict tool"),
        ("glm45", {"properties": {}, "minProperties": 1}, "minProperties of a strict tool"),
        ("glm45", {"properties": {"a": {"type": "string", "enum": [1]}}}, "none that this model's format"),
        ("glm45", {"properties": {}, "required": ["a"]}, "'a' is required"),
        ("qwen3_coder", {"properties": {"<": {}}}, "an argument '<'"),
        ("hermes", {"x-guidance": {}}, "x-guidance"),
    ],
)
def test_a_schema_that_a_form_cannot_enforce_is_refused_by_name(name: str, tool: dict[str, Any], words: str) -> None:
    model = Model(Tokens([]), AnswerFormat.named(name, ""))
    use = ToolUse((CallableTool("f", {"type": "object", **tool}, is_strict=True),), must_call=True)
    with pytest.raises(InvalidGrammar, match=words) as refused:
        model.grammar(use)
    assert refused.value.param == "tools"


def test_names_that_a_form_cannot_write_and_gbnf_beside_reasoning_are_refused() -> None:
    model = Model(Tokens([]), AnswerFormat.named("deepseek_v3", "deepseek_r1"))
    with pytest.raises(InvalidGrammar, match="'a b'"):
        model.grammar(ToolUse((CallableTool("a b", {}),), must_call=True))
    with pytest.raises(InvalidGrammar, match="in Lark"):
        model.grammar(None, "", Grammar(GrammarKind.GRAMMAR, 'root ::= "x"'))


_NODE: dict[str, Any] = {
    "$id": "https://example.org/node",
    "type": "object",
    "properties": {
        "word": {"type": "string", "enum": [f"v{number:04}" for number in range(2500)] + ["v", "a\nb", "<b>", ""]},
        "child": {"$ref": "#"},
        "count": {"$ref": "#/$defs/Count"},
        "least": {"$ref": "#/properties/count"},
    },
    "required": ["word"],
    "additionalProperties": False,
    "$defs": {"Count": {"type": "integer", "minimum": 0, "maximum": 9}},
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "hermes"])
def test_a_tool_whose_schema_refers_to_itself_and_has_many_words_can_be_called(name: str, tokens: Tokens) -> None:
    """In formats with tags per argument, the schema of an argument is a document of its own, and a rule of the library
    has at most 2,000 alternatives.
    """
    model = Model(tokens, AnswerFormat.named(name, ""))
    use = ToolUse((CallableTool("f", _NODE),), must_call=True, is_named=True)
    grammar = model.grammar(use)
    for seed in range(4):
        pieces = model.pieces(model.answer(grammar, "", seed), use)
        jsonschema.validate(json.loads("".join(piece.text for piece in pieces if isinstance(piece, Arguments))), _NODE)


def test_arguments_between_tags_follow_references_and_words_of_every_kind() -> None:
    model = Model(Tokens([]), AnswerFormat.named("qwen3_coder", ""))
    grammar = model.grammar(ToolUse((CallableTool("f", _NODE),), must_call=True, is_named=True))

    def admits(**values: str) -> bool:
        written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return model.admits(grammar, f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>", whole=True)

    assert all(admits(word=word) for word in ("v0000", "v2499", "v", "a\nb", "<b>", ""))
    assert not any(admits(word=word) for word in ("v2500", "v00", "a", "v\n"))
    assert admits(word="v", child='{"word": "v0007", "child": {"word": "v"}}', count="3", least="9")
    assert not admits(word="v", child='{"count": 3}')
    assert not admits(word="v", count="30")
    assert not admits(word="v", least="30")
