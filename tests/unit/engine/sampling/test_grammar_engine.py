"""Grammars over the demo model's tokens: the tokens that may follow, whole answers, and states that are a function of
the tokens.
"""

import json
import random
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from cluster.errors import InvalidGrammar
from cluster.grammar.engine import GrammarEngine, Matcher, grammar_engine_id
from cluster.messages import Grammar, GrammarKind
from router.text.tokenization import Tokenization

DEMO = Path(__file__).parents[4] / "examples" / "demo_model"
EOS = 0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "at": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": -1, "maximum": 1}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{2,6}@[a-z]{1,5}\.(com|org)"
CHOICES = ["yes", "no", 'a "quoted"\nline', "é"]
LARK = 'start: "<" word ("," word)* ">"\nword: /[a-z]{1,4}/\n'
GBNF = 'root ::= "(" [0-9]+ ")"\n'


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


GRAMMARS = {
    "schema": schema(PERSON),
    "regex": Grammar(GrammarKind.REGEX, REGEX),
    "choice": Grammar(GrammarKind.CHOICE, json.dumps(CHOICES)),
    "lark": Grammar(GrammarKind.GRAMMAR, LARK),
    "gbnf": Grammar(GrammarKind.GRAMMAR, GBNF),
}
IS_WHOLE: dict[str, Callable[[str], object]] = {
    "schema": lambda text: jsonschema.validate(json.loads(text), PERSON) is None,
    "regex": lambda text: re.fullmatch(REGEX, text),
    "choice": lambda text: text in CHOICES,
    "lark": lambda text: re.fullmatch(r"<[a-z]{1,4}(,[a-z]{1,4})*>", text),
    "gbnf": lambda text: re.fullmatch(r"\([0-9]+\)", text),
}


@cache
def demo() -> GrammarEngine:
    return GrammarEngine.load(DEMO)


@cache
def tokenization() -> Tokenization:
    return Tokenization.load(str(DEMO))


def allowed(matcher: Matcher) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")).tolist()


def random_answer(grammar: Grammar, seed: int, most: int = 400) -> list[int]:
    """Draw tokens that the grammar allows up to the end of sequence, which is not among those returned. After `most`
    tokens the end is taken as soon as it is allowed."""
    draw, matcher, tokens = random.Random(seed), demo().matcher(grammar), list[int]()
    while True:
        choices = allowed(matcher)
        token = EOS if EOS in choices and (len(choices) == 1 or len(tokens) > most) else draw.choice(choices)
        assert matcher.advance([token]) == 1
        if token == EOS:
            return tokens
        tokens.append(token)


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_whole_answer_matches_its_grammar(name: str) -> None:
    for seed in range(40):
        text = tokenization().decode(random_answer(GRAMMARS[name], seed))
        assert IS_WHOLE[name](text), text


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_state_is_a_function_of_the_tokens(name: str) -> None:
    tokens, grown = random_answer(GRAMMARS[name], 1), demo().matcher(GRAMMARS[name])
    for place, token in enumerate(tokens):
        replayed = demo().matcher(GRAMMARS[name])
        assert replayed.advance(tokens[:place]) == place == grown.num_tokens
        assert replayed.mask() == grown.mask()
        grown.advance([token])


def test_rollback_returns_to_the_earlier_state() -> None:
    tokens, matcher = random_answer(GRAMMARS["schema"], 2), demo().matcher(GRAMMARS["schema"])
    masks = []
    for token in [*tokens, EOS]:
        masks.append(matcher.mask())
        matcher.advance([token])
    for mask in reversed(masks):
        matcher.rollback(1)
        assert matcher.mask() == mask
    assert matcher.num_tokens == 0


def test_a_copy_moves_alone() -> None:
    matcher = demo().matcher(GRAMMARS["regex"])
    first, copied = matcher.mask(), matcher.copy()
    copied.advance(random_answer(GRAMMARS["regex"], 3)[:1])
    assert (matcher.num_tokens, copied.num_tokens) == (0, 1)
    assert matcher.mask() == first != copied.mask()


@pytest.mark.parametrize("name", GRAMMARS)
def test_tokens_may_follow_if_and_only_if_the_mask_says_so(name: str) -> None:
    for place, tokens in ((0, []), (2, random_answer(GRAMMARS[name], 4)[:2])):
        matcher = demo().matcher(GRAMMARS[name])
        assert matcher.advance(tokens) == min(place, len(tokens))
        following = [token for token in range(demo().vocab_size) if matcher.copy().advance([token])]
        assert following == allowed(matcher)


def test_an_answer_ends_only_when_it_is_whole_and_then_must_end() -> None:
    matcher = demo().matcher(schema({"type": "object", "properties": {}, "additionalProperties": False}))
    tokens = tokenization().encode("{}")
    assert matcher.copy().advance([EOS]) == 0 and not matcher.is_accepting
    assert matcher.advance([*tokens, EOS]) == len(tokens) + 1
    assert matcher.advance(tokens) == 0


def test_rejected_tokens_are_not_appended() -> None:
    matcher = demo().matcher(Grammar(GrammarKind.REGEX, "[0-9]{3}"))
    digit, letter = tokenization().encode("7")[0], tokenization().encode("x")[0]
    assert matcher.advance([digit, letter, digit]) == 1 == matcher.num_tokens
    assert matcher.advance([digit, digit]) == 2 and matcher.is_accepting


def test_masks_of_many_states_are_written_into_rows() -> None:
    matchers = [demo().matcher(grammar) for grammar in GRAMMARS.values()]
    rows = np.zeros((len(matchers) + 1, demo().num_words), np.int32)
    demo().write_masks([(matcher, row + 1) for row, matcher in enumerate(matchers)], rows.ctypes.data, len(rows))
    assert not rows[0].any()
    assert [row.tobytes() for row in rows[1:]] == [matcher.mask() for matcher in matchers]


def test_white_space_between_the_parts_of_json_is_bounded() -> None:
    matcher = demo().matcher(schema({"type": "object"}))
    space, newline = tokenization().encode(" ")[0], tokenization().encode("\n")[0]
    matcher.advance(tokenization().encode("{"))
    assert matcher.copy().advance([space] * 100) == 1
    assert matcher.copy().advance([newline] * 100) == 1
    assert matcher.copy().advance([newline, *[space] * 100]) == 33


def test_the_library_reads_the_same_bytes_in_tokens_as_the_detokenizer() -> None:
    engine, known = GrammarEngine.load(DEMO), tokenization()
    anything = engine.matcher(Grammar(GrammarKind.REGEX, "(?s:.)*"))
    for token in set(allowed(anything)) - {EOS}:
        assert engine._tokenizer.decode_bytes([token]) == known.token_bytes(token)


@pytest.mark.parametrize(
    ("grammar", "cause"),
    [
        (Grammar(GrammarKind.REGEX, "(a"), "unclosed group"),
        (Grammar(GrammarKind.REGEX, r"\bword"), "lookarounds"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "EOF|Expecting"),
        (Grammar(GrammarKind.JSON_SCHEMA, "true"), "must be an object"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 100_000), "recursion"),
        (schema({"type": "banana"}), "banana"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "x-guidance"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (schema({"$ref": "https://example.com/schema"}), "not present|retriev"),
        (Grammar(GrammarKind.GRAMMAR, "garbage {{{"), "GBNF"),
        (Grammar(GrammarKind.CHOICE, "[]"), "at least one"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_its_cause(grammar: Grammar, cause: str) -> None:
    with pytest.raises(InvalidGrammar, match=cause):
        demo().matcher(grammar)


def test_members_agree_only_with_equal_tokens(tmp_path: Path) -> None:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(DEMO, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors", "*.svg")))

    def with_entry(name: str, file: str, **changes: object) -> Path:
        path = copied(name) / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return path.parent

    ours = grammar_engine_id(DEMO)
    assert ours.startswith("llguidance ") and grammar_engine_id(copied("same")) == ours
    changed = [
        with_entry("ends", "generation_config.json", eos_token_id=[0, 5]),
        with_entry("wider", "config.json", vocab_size=2048),
        with_entry("other", "tokenizer.json", version="1.0 "),
    ]
    assert len({ours, *map(grammar_engine_id, changed)}) == 4
    (changed[0] / "tokenizer.json").unlink()
    assert grammar_engine_id(changed[0]) == ""


def test_the_digest_of_a_grammar_covers_kind_and_text() -> None:
    one = Grammar(GrammarKind.REGEX, "a")
    assert len({one.digest, Grammar(GrammarKind.REGEX, "b").digest, Grammar(GrammarKind.GRAMMAR, "a").digest}) == 3
    assert one.digest == Grammar(GrammarKind.REGEX, "a").digest and len(one.digest) == 16
