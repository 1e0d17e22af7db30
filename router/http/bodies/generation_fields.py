"""Groups of fields that both generation endpoints have: structured output, changes of logits, and options
of streams.

Structured output is `response_format` in OpenAI's API, and `structured_outputs` and the older `guided_*` in vLLM's. All
of them become one grammar, which router/grammars/ checks. The pipeline checks the ranges of the fields for logits.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field, WithJsonSchema

from cluster.errors import InvalidGrammar, InvalidRequest
from cluster.messages import Grammar, GrammarKind
from router.http.bodies.openapi import TOKEN_IDS
from router.http.bodies.strict_body import EMPTY, NeutralValues, StrictBody
from router.request.logit_rules import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
)
from router.requests import SamplingParams
from router.text.model_files import PENALTY_RANGES

_MAX_CHOICES = 4096
_ANY_OBJECT = '{"type": "object"}'
Schema = Annotated[dict[str, Any] | str, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})]
Choices = Annotated[list[str], Field(min_length=1, max_length=_MAX_CHOICES)]


class JsonSchemaFormat(StrictBody):
    """A schema and its name."""

    name: str = Field("", description="accepted; changes nothing")
    description: str | None = Field(None, description="accepted; changes nothing")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="JSON schema of the answer; absent: any JSON object"
    )
    strict: bool | None = Field(None, description="accepted; every schema is enforced")


class ResponseFormat(StrictBody):
    """OpenAI's field. vLLM's type `structural_tag` is refused, and so are its fields."""

    asks_for_nothing: ClassVar[NeutralValues] = {"format": (), "structures": (), "triggers": ()}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> Grammar | None:
        """Return the grammar of the answer. Raises InvalidRequest."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            problem = "the type json_schema needs it" if self.json_schema is None else f"the type {self.type} has none"
            raise InvalidRequest(f"response_format.json_schema: {problem}", param="response_format.json_schema")
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        return _json_grammar(_ANY_OBJECT if schema is None else schema)


class StructuredOutputs(StrictBody):
    """The field of vLLM with exactly one of its constraints."""

    asks_for_nothing: ClassVar[NeutralValues] = {
        "disable_fallback": (False, True),  # there is no fallback
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    }

    json_: Schema | None = Field(None, alias="json", description="the answer is JSON that this schema admits")
    regex: str | None = None
    choice: Choices | None = Field(None, description="the answer is one of these texts")
    grammar: str | None = Field(
        None, description="the answer follows this grammar, in llguidance's variant of Lark or in GBNF"
    )
    json_object: Literal[True] | None = Field(None, description="true: the answer is any JSON object")

    def grammars(self) -> list[Grammar]:
        schema = _ANY_OBJECT if self.json_object else None
        return [*_grammars(self.json_, self.regex, self.choice, self.grammar), *_grammars(schema, None, None, None)]


class StructuredOutputFields(StrictBody):
    """The fields of both endpoints."""

    response_format: ResponseFormat | None = Field(
        None, description="format of the answer: text, any JSON object, or JSON that follows a schema"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="exactly one constraint: json, regex, choice, grammar or json_object"
    )
    guided_json: Schema | None = Field(None, description="same as structured_outputs.json")
    guided_regex: str | None = Field(None, description="same as structured_outputs.regex")
    guided_choice: Choices | None = Field(None, description="same as structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="same as structured_outputs.grammar")

    def grammar(self) -> tuple[Grammar | None, str]:
        """Return the grammar and the field that holds it. Raises InvalidGrammar for more than one."""
        if self.model_fields_set.isdisjoint(StructuredOutputFields.model_fields):
            return None, ""
        found: list[tuple[Grammar, str]] = []
        if self.response_format is not None and (grammar := self.response_format.grammar()) is not None:
            found.append((grammar, "response_format"))
        if self.structured_outputs is not None:
            given = self.structured_outputs.grammars()
            if not given:
                raise InvalidGrammar(
                    "structured_outputs has no constraint: set json, regex, choice, grammar or json_object",
                    param="structured_outputs",
                )
            found += [(grammar, "structured_outputs") for grammar in given]
        found += [(grammar, "guided_json") for grammar in _grammars(self.guided_json, None, None, None)]
        found += [(grammar, "guided_regex") for grammar in _grammars(None, self.guided_regex, None, None)]
        found += [(grammar, "guided_choice") for grammar in _grammars(None, None, self.guided_choice, None)]
        found += [(grammar, "guided_grammar") for grammar in _grammars(None, None, None, self.guided_grammar)]
        if len(found) > 1:
            named = " and ".join(field for _, field in found)
            raise InvalidGrammar(f"an answer can follow one grammar; send only one of {named}", param=found[1][1])
        return found[0] if found else (None, "")


def _grammars(
    schema: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[Grammar]:
    return [
        *([_json_grammar(schema)] if schema is not None else []),
        *([Grammar(GrammarKind.REGEX, regex)] if regex is not None else []),
        *([Grammar(GrammarKind.CHOICE, json.dumps(choice))] if choice is not None else []),
        *([Grammar(GrammarKind.GRAMMAR, grammar)] if grammar is not None else []),
    ]


def _json_grammar(schema: dict[str, Any] | str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))


_MAX_LISTED = 4096
_ID_DIGITS = 10  # of 32 bits


def _penalty(name: str) -> dict[str, Any]:
    return dict(zip(("minimum", "maximum"), PENALTY_RANGES[name], strict=True))


class LogitFields(StrictBody):
    presence_penalty: float | None = Field(
        None,
        description="subtracted from the logits of tokens that occur in the output",
        json_schema_extra=_penalty("presence_penalty"),
    )
    frequency_penalty: float | None = Field(
        None,
        description="subtracted from a token's logit for each time that it occurs in the output",
        json_schema_extra=_penalty("frequency_penalty"),
    )
    repetition_penalty: float | None = Field(
        None,
        description="divides positive logits of tokens of the prompt and the output, and multiplies negative ones",
        json_schema_extra=_penalty("repetition_penalty"),
    )
    logit_bias: Annotated[
        dict[str, float],
        WithJsonSchema(
            {
                "type": "object",
                "propertyNames": {"pattern": f"^[0-9]{{1,{_ID_DIGITS}}}$"},
                "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
                "maxProperties": MAX_LOGIT_BIAS,
            }
        ),
    ] = Field({}, description="by token id: number that is added to the token's logit")
    allowed_token_ids: Annotated[
        list[int],
        Field(min_length=1, max_length=_MAX_LISTED),
        FailFast(),
        WithJsonSchema(
            {
                "title": TOKEN_IDS,
                "type": "array",
                "items": {"type": "integer", "minimum": 0},
                "minItems": 1,
                "maxItems": MAX_ALLOWED_TOKEN_IDS,
            }
        ),
    ] = Field(EMPTY, description="the only tokens that may be generated")
    bad_words: Annotated[
        list[str],
        Field(max_length=_MAX_LISTED),
        FailFast(),
        WithJsonSchema(
            {
                "type": "array",
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARACTERS},
                "maxItems": MAX_BAD_WORDS,
            }
        ),
    ] = Field(EMPTY, description="strings that are never generated")

    def sampling_params(self, **others: Any) -> SamplingParams:
        """Return these fields as sampling parameters, beside the others. Raises InvalidRequest."""
        return SamplingParams(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._biases(),
            allowed_token_ids=tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
            **others,
        )

    def _biases(self) -> tuple[tuple[int, float], ...]:
        if not self.logit_bias:
            return ()

        def is_id(key: str) -> bool:
            return key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS

        wrong = next((key for key in self.logit_bias if not is_id(key)), None)
        if wrong is not None:
            raise InvalidRequest(f"logit_bias: {wrong!r:.40} is not a token id", param="logit_bias")
        return tuple(sorted({int(key): bias for key, bias in self.logit_bias.items()}.items()))


class StreamOptions(StrictBody):
    asks_for_nothing: ClassVar[NeutralValues] = {"include_obfuscation": (False,)}

    include_usage: bool = Field(default=False, description="true: a last chunk has the usage and no choices")
    continuous_usage_stats: bool = Field(
        default=False, description="true, with include_usage: every chunk has the usage so far"
    )
