"""The text of a grammar in llguidance's variant of Lark, written rule by rule."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import InvalidGrammar
from cluster.grammar.engine import JSON_OPTIONS
from cluster.messages import Grammar, GrammarKind

_ANY_TEXT = "(?s:.*)"
_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)/")


class Lark:
    """Collects rules. Methods return expressions; `source` returns the grammar that begins with an expression."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """`token_ids`: markers that are tokens of their own and that no free text holds, with their ids."""
        self._token_ids = token_ids
        self._marker = re.compile("|".join(re.escape(each) for each in sorted(token_ids, key=len, reverse=True)))
        self._rules: list[str] = []

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, expression: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def is_token(self, marker: str) -> bool:
        return marker in self._token_ids

    def literal(self, text: str) -> str:
        """Return an expression for this text, in which markers are their tokens."""
        parts, at = [], 0
        for found in self._marker.finditer(text) if self._token_ids else ():
            parts += [_quoted(text[at : found.start()]), f"<[{self._token_ids[found[0]]}]>"]
            at = found.end()
        return " ".join(part for part in (*parts, _quoted(text[at:])) if part) or '""'

    def one_of(self, words: Sequence[str], end: str) -> str:
        """Return an expression for one of these texts, followed by the text `end`; empty for none. Most are
        alternatives of one terminal: the library limits those of a rule to 2,000. A text with a character at which
        `end` may begin, a marker, or no character is an alternative of its own.
        """
        plain = [word for word in words if word and end[:1] not in word and not self._marked(word)]
        others = [self.literal(word) for word in words if not word or end[:1] in word or self._marked(word)]
        terminal = [self._terminal(" | ".join(map(_quoted_whole, dict.fromkeys(plain))))] if plain else []
        return " | ".join(terminal + others)

    def _marked(self, word: str) -> bool:
        return bool(self._token_ids) and self._marker.search(word) is not None

    def text(self, without: Sequence[str], patterns: Sequence[str] = (_ANY_TEXT,)) -> str:
        """Return an expression for any text that matches these patterns and contains none of these words."""
        words = [_escaped(word) for word in without if not self.is_token(word)]
        excluded = [f"~/(?s:.*)({'|'.join(words)})(?s:.*)/"] if words else []
        return self._terminal(" & ".join([*(f"/{pattern}/" for pattern in patterns), *excluded]))

    def text_until(self, marker: str, without: Sequence[str] = ()) -> str:
        """Return an expression for any text without these words, up to and including the first such marker."""
        text = self.text((marker, *without))
        return (
            f"{text} {self.literal(marker)}" if self.is_token(marker) else self._terminal(f"{text} {_quoted(marker)}")
        )

    def json(self, schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
        """Return an expression for JSON that the schema admits. `is_lenient`: keywords that cannot be enforced are
        ignored. Raises InvalidGrammar.
        """
        if "x-guidance" in schema:
            raise InvalidGrammar("x-guidance would change how the schema is read: leave it out")
        options = {"x-guidance": JSON_OPTIONS | {"lenient": is_lenient}}
        return self.rule(f"%json {json.dumps(options | dict(schema))}")

    def answer(self, grammar: Grammar) -> str:
        """Return an expression for text that matches a grammar of the request. Raises InvalidGrammar."""
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return self.json(_object(grammar.text))
            case GrammarKind.REGEX:
                return self._terminal(f"/{_SLASH.sub(_with_slash, grammar.text)}/".replace("\n", r"\n"))
            case GrammarKind.CHOICE:
                return self.rule(" | ".join(map(_quoted_whole, json.loads(grammar.text))))
            case GrammarKind.GRAMMAR if "::=" in grammar.text:
                raise InvalidGrammar("GBNF cannot follow reasoning or stand beside tools: write the grammar in Lark")
            case GrammarKind.GRAMMAR:
                return self.rule(f"%lark {{\n{grammar.text}\n}}")

    def _terminal(self, expression: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name


def _object(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(str(error)) from error
    if not isinstance(schema, dict):
        raise InvalidGrammar("the schema must be an object")
    return schema


def _quoted(text: str) -> str:
    return _quoted_whole(text) if text else ""


def _quoted_whole(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _with_slash(found: re.Match[str]) -> str:
    return f"{found[1]}\\/"


def _escaped(word: str) -> str:
    return _SLASH.sub(_with_slash, re.escape(word))
