"""The words of the protocol's enums equal the values that Python code uses."""

from collections.abc import Iterable
from dataclasses import fields
from enum import StrEnum
from typing import Any, get_args

import pytest

from cluster.member import DrainOutcome, MemberState
from cluster.messages import FinishReason, Role
from cluster.protocol import wire
from cluster.settings.worker_settings import TransferSettings
from router.http.bodies.messages import Message
from router.overview.history import EventKind
from router.policies.effect import Basis, Verdict
from router.request.account import PhaseName
from tandem import enum_words
from tandem.enum_words import EnumWords


@pytest.mark.parametrize(
    ("words", "used"),
    [
        (enum_words.FINISH_REASONS, FinishReason),
        (enum_words.REQUEST_PHASES, PhaseName),
        (enum_words.MEMBER_ROLES, Role),
        (enum_words.MEMBER_STATES, MemberState),
        (enum_words.DRAIN_OUTCOMES, [*DrainOutcome, "lost"]),
        (enum_words.DISAGGREGATION_VERDICTS, Verdict),
        (enum_words.EFFECT_BASES, Basis),
        (enum_words.EVENT_KINDS, EventKind),
    ],
)
def test_the_words_equal_the_values_that_python_code_uses(
    words: EnumWords[Any], used: type[StrEnum] | Iterable[str]
) -> None:
    assert words.words == tuple(map(str, used))
    assert [words.number(word) for word in words.words] == list(range(1, len(words.words) + 1))
    assert [words.word(words.number(word)) for word in words.words] == list(words.words)


def test_the_roles_of_a_conversation_equal_the_roles_of_the_http_api() -> None:
    """The HTTP API also accepts `developer`, as another name of `system`."""
    kinds = get_args(get_args(Message)[0])
    roles = {role for kind in kinds for role in get_args(kind.model_fields["role"].annotation)}
    assert set(enum_words.CHAT_ROLES.words) == roles - {"developer"}


def test_the_wire_dtypes_equal_the_choices_of_the_flag() -> None:
    (setting,) = (field for field in fields(TransferSettings) if field.name == "kv_wire_dtype")
    assert wire.WIRE_DTYPES.words == setting.metadata["choices"]


def test_the_empty_word_is_the_value_that_is_not_set() -> None:
    assert (enum_words.FINISH_REASONS.number(""), enum_words.FINISH_REASONS.word(0)) == (0, "")


def test_an_unknown_word_or_number_is_refused_with_the_known_words() -> None:
    with pytest.raises(ValueError, match="'halt' is not a valid FinishReason: use one of stop, length"):
        enum_words.FINISH_REASONS.number("halt")
    with pytest.raises(ValueError, match="7 is not a valid FinishReason: the known ones are stop, length"):
        enum_words.FINISH_REASONS.word(7)
    assert enum_words.FINISH_REASONS.label(7) == "7"
