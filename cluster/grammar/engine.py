"""Grammars compiled by llguidance for the tokens of one model, and the state of a grammar after some tokens.

A state is a function of the grammar and the tokens: every member with the same `grammar_engine_id` derives the same
masks from them, so a state never travels. The library is imported where an engine is loaded, and nowhere else.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ConfigError, InvalidGrammar
from cluster.grammar.tokenizer_files import read_tokenizer, read_vocabulary, tokenizer_digest
from cluster.messages import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

WORD_BITS = 32  # of a mask
# At most one space, or a new line with its indentation: a model that likes white space cannot fill an answer with it.
JSON_OPTIONS = {"whitespace_pattern": r"(?: ?|\n[ \t]{0,32})", "lenient": False, "coerce_one_of": False}
_ERROR_CHARACTERS = 300


def grammar_engine_id(folder: Path) -> str:
    """Return an id that is equal for two members if they compute the same masks: the library's version, and a digest of
    tokenizer, vocabulary and end-of-sequence tokens. Empty if this member cannot apply grammars: the library is not
    installed, or the model in `folder` has no tokenizer or no end-of-sequence token. Raises ConfigError."""
    digest = tokenizer_digest(folder)
    vocab_size, eos_token_ids = read_vocabulary(folder)
    try:
        installed = version("llguidance")
    except PackageNotFoundError:
        return ""
    if not digest or not eos_token_ids:
        return ""
    named = json.dumps([digest, vocab_size, sorted(eos_token_ids)])
    return f"llguidance {installed} {hashlib.sha256(named.encode()).hexdigest()[:32]}"


class GrammarEngine:
    """Compiles grammars for one model's tokens. Any thread may call it."""

    def __init__(self, tokenizer: "LLTokenizer", vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size

    @staticmethod
    def load(folder: Path) -> "GrammarEngine":
        """Load the tokens of the model in a folder, which takes a second for 128k tokens. Raises ConfigError."""
        from llguidance import LLTokenizer

        vocab_size, eos_token_ids = read_vocabulary(folder)
        tokenizer = read_tokenizer(folder)
        if tokenizer is None or not eos_token_ids:
            raise ConfigError(f"{folder}: a grammar needs a tokenizer.json and an end-of-sequence token")
        try:
            tokens = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{folder}: llguidance cannot read the tokenizer: {error}") from error
        return GrammarEngine(tokens, vocab_size, eos_token_ids)

    @property
    def num_words(self) -> int:
        """The number of 32-bit words of a mask."""
        return -(-self.vocab_size // WORD_BITS)

    @property
    def _mask_bytes(self) -> int:
        return self.num_words * WORD_BITS // 8

    def matcher(self, grammar: Grammar) -> "Matcher":
        """Compile a grammar and return its state before the first token. Nothing bounds the time and memory that this
        takes but the grammar itself. Raises InvalidGrammar.
        """
        from llguidance import LLMatcher, LLParserLimits

        try:
            source = _source(grammar)
        except (ValueError, RecursionError) as error:
            raise InvalidGrammar(_shortened(str(error))) from error
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidGrammar(_shortened(matcher.get_error()))
        return Matcher(matcher, self._eos_token_ids, self._mask_bytes)

    def write_masks(self, rows: Sequence[tuple["Matcher", int]], address: int, num_rows: int) -> None:
        """Write the masks of these states into the given rows of an int32 array `[num_rows, num_words]` at `address`.
        Bit i of a row, from the lowest bit of its first word on, says whether token i may follow. No state may be over.
        The GIL is released."""
        if not rows:
            return
        raw = [(matcher.raw, row) for matcher, row in rows]
        self._executor.unsafe_compute_mask_ptr(raw, address, self._mask_bytes, num_rows)

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor(num_threads=1)


class Matcher:
    """The state of one grammar after some tokens. One thread at a time may use it."""

    def __init__(self, raw: "LLMatcher", eos_token_ids: frozenset[int], mask_bytes: int) -> None:
        self.raw = raw
        self._mask_bytes = mask_bytes
        self._eos_token_ids = eos_token_ids
        self.num_tokens = 0
        self.is_over = False  # ended by an end-of-sequence token, which `raw` has not consumed

    @property
    def error(self) -> str:
        """Why the state has no mask: a limit of the library was exceeded. Empty if it has one."""
        return _shortened(self.raw.get_error()) if self.raw.is_error() else ""

    @property
    def is_accepting(self) -> bool:
        """Return whether the tokens so far are a whole answer."""
        return self.raw.is_accepting()

    def copy(self) -> "Matcher":
        copied = Matcher(self.raw.deep_copy(), self._eos_token_ids, self._mask_bytes)
        copied.num_tokens, copied.is_over = self.num_tokens, self.is_over
        return copied

    def advance(self, token_ids: Sequence[int]) -> int:
        """Append tokens up to the first one that the grammar rejects, and return how many were appended. A whole answer
        may be followed by an end-of-sequence token, and by nothing after it."""
        accepted = 0
        for token_id in token_ids:
            if self.is_over or not self._append(token_id):
                break
            accepted += 1
        self.num_tokens += accepted
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """Remove the last tokens."""
        if not num_tokens:
            return
        self.num_tokens -= num_tokens
        consumed = num_tokens - self.is_over
        self.is_over = False
        if consumed:
            self.raw.rollback(consumed)

    def mask(self) -> bytes:
        """Return the mask of the next token: one bit per token, the lowest bit of each byte first. The state must not
        be over."""
        return self.raw.compute_bitmask()[: self._mask_bytes]  # the library's own ends with a spare word

    def _append(self, token_id: int) -> bool:
        if token_id in self._eos_token_ids:
            self.is_over = self.raw.is_accepting()
            return self.is_over
        return self.raw.try_consume_tokens([token_id]) == 1


def _source(grammar: Grammar) -> str:
    """Return the grammar in the library's own form. Raises ValueError and RecursionError."""
    from llguidance import LLMatcher, grammar_from

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(_schema(grammar.text), overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            return grammar_from("choice", _choices(grammar.text))
        case GrammarKind.GRAMMAR:
            return grammar_from("grammar", grammar.text)


def _schema(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("the schema must be an object")
    if "x-guidance" in schema:
        raise ValueError("x-guidance would change how the schema is read: leave it out")
    return text


def _choices(text: str) -> str:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("the choices must be a list of at least one string")
    return text


def _shortened(message: str) -> str:
    lines = message.replace("<non-verbose/>", "").split("\n")
    return " ".join(line.strip() for line in lines if line.strip())[:_ERROR_CHARACTERS]
