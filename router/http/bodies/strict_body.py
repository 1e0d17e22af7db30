"""The base class of request bodies. No field of a client is ignored silently. A body lists its own fields, and the
fields of other servers that Tandem does not have, with their values without effect. Every other field, and every other
value, is refused by name. The JSON schema of a body says the same, and says which fields may be null.
"""

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

_MAX_FIELDS = 128  # of one object; checking a million would block the event loop
_ABOUT_THE_FIELD = ("title", "description", "default", "deprecated")
EMPTY: Any = ()  # the default of lists: pydantic copies a default that can change, for each body

NeutralValues = Mapping[str, tuple[object, ...]]


def _declare_what_is_accepted(schema: dict[str, Any], body: type["StrictBody"]) -> None:
    """Add null to every optional field, and add the fields of which only values without effect are accepted."""
    required = schema.get("required", ())
    properties = schema.setdefault("properties", {})
    for name, field in properties.items():
        if name not in required:
            properties[name] = _or_null(field)
    schema.update(body.rules)
    for name, neutral in body.asks_for_nothing.items():
        properties[name] = {
            "enum": [None, *neutral],
            "description": "not supported; accepted with these values, which ask for nothing",
        }


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    about = {name: field[name] for name in _ABOUT_THE_FIELD if name in field}
    values = {name: value for name, value in field.items() if name not in _ABOUT_THE_FIELD}
    alternatives = values.pop("anyOf", None)
    if alternatives is None:
        alternatives, values = [values], {}
    if {"type": "null"} not in alternatives:
        alternatives = [*alternatives, {"type": "null"}]
    return {"anyOf": alternatives} | values | about


class StrictBody(BaseModel):
    """An object that a client sends. `asks_for_nothing`: fields that Tandem does not have, with the values besides null
    that are accepted. `reads_numbers`: fields whose validators take 1.0 for 1 themselves."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), json_schema_extra=_declare_what_is_accepted
    )
    asks_for_nothing: ClassVar[NeutralValues] = {}
    reads_numbers: ClassVar[Collection[str]] = ()
    rules: ClassVar[Mapping[str, Any]] = {}  # of the JSON schema, about several fields together

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            raise ValueError(f"an object has {len(data)} fields; the maximum is {_MAX_FIELDS}")
        fields = cls.model_fields
        return {
            name: value if name in cls.reads_numbers else whole(value)
            for name, value in data.items()
            if (value is not None if name in fields else not cls._is_neutral(name, value))
        }

    @classmethod
    def _is_neutral(cls, name: object, value: object) -> bool:
        """Return whether the value of a field that Tandem does not have asks for nothing."""
        neutral = cls.asks_for_nothing.get(name) if isinstance(name, str) else None
        # `True == 1` in Python: a boolean is nothing only where a boolean is named.
        return neutral is not None and (value is None or any(value == n and type(value) in _alike(n) for n in neutral))


@cache
def all_bodies() -> frozenset[type[StrictBody]]:
    """Return every kind of object that clients may send."""
    found, left = set[type[StrictBody]](), [StrictBody]
    while left:
        body = left.pop()
        found.add(body)
        left += body.__subclasses__()
    return frozenset(found)


def whole(value: object) -> object:
    """Return 1.0 as 1, also in lists: a JSON schema's integer has no other form. Every number may be an integer."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and {float, list} & set(map(type, value)):
        return [whole(each) for each in value]
    return value


def _alike(neutral: object) -> tuple[type, ...]:
    return (int, float) if type(neutral) is int else (type(neutral),)
