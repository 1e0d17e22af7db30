"""The fields by which HTTP clients ask for structured output.

OpenAI has `response_format`, vLLM `structured_outputs` and the older `guided_*`. All of them become one grammar, which
router/grammars/ checks.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from cluster.errors import InvalidGrammar
from cluster.messages import Grammar, GrammarKind
from router.http.bodies.strict_body import NeutralValues, StrictBody

_MAX_CHOICES = 4096
_ANY_OBJECT = '{"type": "object"}'
Schema = Annotated[dict[str, Any] | str, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})]
Choices = Annotated[list[str], Field(min_length=1, max_length=_MAX_CHOICES)]


class JsonSchemaFormat(StrictBody):
    """A schema and its name."""

    name: str = Field("", description="accepted; changes nothing")
    description: str | None = Field(None, description="accepted; changes nothing")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="absent: any JSON object")
    strict: bool | None = Field(None, description="accepted; every schema is enforced")


class ResponseFormat(StrictBody):
    """OpenAI's field."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.type == "json_schema" and self.json_schema is not None else None
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

    json_: Schema | None = Field(None, alias="json", description="a JSON schema")
    regex: str | None = None
    choice: Choices | None = Field(None, description="the answer is one of these texts")
    grammar: str | None = Field(None, description="Lark in llguidance's variant, or GBNF")
    json_object: Literal[True] | None = Field(None, description="any JSON object")

    def grammars(self) -> list[Grammar]:
        schema = _ANY_OBJECT if self.json_object else None
        return [*_grammars(self.json_, self.regex, self.choice, self.grammar), *_grammars(schema, None, None, None)]


class StructuredOutputFields(StrictBody):
    """The fields of both endpoints."""

    response_format: ResponseFormat | None = Field(None, description="json_object, or a json_schema to follow")
    structured_outputs: StructuredOutputs | None = Field(None, description="one constraint: json, regex, choice, ...")
    guided_json: Schema | None = Field(None, description="as structured_outputs.json")
    guided_regex: str | None = Field(None, description="as structured_outputs.regex")
    guided_choice: Choices | None = Field(None, description="as structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="as structured_outputs.grammar")

    def grammar(self) -> tuple[Grammar | None, str]:
        """Return the grammar and the field that holds it. Raises InvalidGrammar for more than one."""
        found: list[tuple[Grammar, str]] = []
        if self.response_format is not None and (grammar := self.response_format.grammar()) is not None:
            found.append((grammar, "response_format"))
        if self.structured_outputs is not None:
            given = self.structured_outputs.grammars()
            if not given:
                raise InvalidGrammar("structured_outputs has no constraint", param="structured_outputs")
            found += [(grammar, "structured_outputs") for grammar in given]
        found += [(grammar, "guided_json") for grammar in _grammars(self.guided_json, None, None, None)]
        found += [(grammar, "guided_regex") for grammar in _grammars(None, self.guided_regex, None, None)]
        found += [(grammar, "guided_choice") for grammar in _grammars(None, None, self.guided_choice, None)]
        found += [(grammar, "guided_grammar") for grammar in _grammars(None, None, None, self.guided_grammar)]
        if len(found) > 1:
            named = " and ".join(field for _, field in found)
            raise InvalidGrammar(f"an answer can follow one grammar, but there are {named}", param=found[1][1])
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
