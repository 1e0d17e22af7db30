"""The fields of both generation endpoints that change logits; the pipeline checks their ranges."""

from typing import Annotated, Any

from pydantic import FailFast, Field, WithJsonSchema

from cluster.errors import InvalidRequest
from router.http.bodies.openapi import TOKEN_IDS
from router.http.bodies.strict_body import StrictBody
from router.request.logit_rules import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
)
from router.requests import SamplingParams
from router.text.model_files import PENALTY_RANGES

_MAX_LISTED = 4096
_ID_DIGITS = 10  # of 32 bits


def _penalty(name: str) -> dict[str, Any]:
    return dict(zip(("minimum", "maximum"), PENALTY_RANGES[name], strict=True))


class LogitFields(StrictBody):
    presence_penalty: float | None = Field(
        None,
        description="is subtracted from the logits of tokens that the output has",
        json_schema_extra=_penalty("presence_penalty"),
    )
    frequency_penalty: float | None = Field(
        None,
        description="the same, for each time that the output has the token",
        json_schema_extra=_penalty("frequency_penalty"),
    )
    repetition_penalty: float | None = Field(
        None,
        description="above 1: against tokens of the prompt and the output",
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
    ] = Field({}, description="by token id: is added to its logit")
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
    ] = Field([], description="no other token is drawn")
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
    ] = Field([], description="texts that are not generated")

    def logit_params(self) -> SamplingParams:
        """Return these fields as sampling parameters, with the others open. Raises InvalidRequest."""
        return SamplingParams(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._biases(),
            allowed_token_ids=tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
        )

    def _biases(self) -> tuple[tuple[int, float], ...]:
        def is_id(key: str) -> bool:
            return key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS

        wrong = next((key for key in self.logit_bias if not is_id(key)), None)
        if wrong is not None:
            raise InvalidRequest(f"logit_bias: {wrong!r:.40} is no token id", param="logit_bias")
        return tuple(sorted({int(key): bias for key, bias in self.logit_bias.items()}.items()))
