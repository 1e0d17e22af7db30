"""Reads JSON incrementally, and passes the source text of a call's arguments on without waiting for their end."""

import json
from collections.abc import Collection

from router.tools.source import Emit, NoSuchForm, Source, TextEnded, Waiting

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("type", "id", "function")  # of calls, beside their name and arguments


def json_value(source: Source, emit: Emit) -> Waiting[None]:
    """Read one JSON value and emit its source text. Raises NoSuchForm, TextEnded."""
    first = yield from source.next_character()
    if first == '"':
        emit((yield from _quoted(source)))
    elif first in ("{", "["):
        yield from _nested(source, emit)
    elif first in "-0123456789tfn" and first:
        yield from _word(source, emit)
    else:
        raise NoSuchForm if first else TextEnded


def json_string(source: Source) -> Waiting[str]:
    """Read a JSON string and return its value. Raises NoSuchForm, TextEnded."""
    if (yield from source.next_character()) != '"':
        raise NoSuchForm
    try:
        return str(json.loads((yield from _quoted(source)), strict=False))
    except ValueError as error:
        raise NoSuchForm from error


def json_call(source: Source, known: Collection[str] | None = None) -> Waiting[bool]:
    """Read an object with a name and arguments, and emit the call. Without that form, all of it stays unread.

    `known`: the names of tools; another name is no call. None: every name is one. Returns whether it was a call. From
    its beginning on a call stays one: if the form breaks later, its arguments end there.
    """
    num_before = source.num_calls
    source.mark()
    try:
        yield from _call(source, known)
    except (NoSuchForm, TextEnded):
        if source.num_calls == num_before:
            source.back_to_mark()
            return False
    source.unmark()
    return True


def _call(source: Source, known: Collection[str] | None) -> Waiting[None]:
    name, held, is_begun = "", "", False
    yield from source.expect("{")
    while True:
        yield from source.skip_space()
        key = yield from json_string(source)
        if key not in ("name", *_ARGUMENTS, *_OTHERS):
            raise NoSuchForm
        yield from _separator(source, ":")
        if key == "name":
            name = yield from json_string(source)
            if known is not None and name not in known:
                raise NoSuchForm
            source.begin_call(name)
            source.unmark()
            source.arguments(held)
        elif key in _ARGUMENTS and name:
            is_begun = True
            yield from _argument_value(source, source.arguments)
        elif key in _ARGUMENTS:
            parts: list[str] = []
            yield from _argument_value(source, parts.append)
            held, is_begun = "".join(parts), True
        else:
            yield from json_value(source, source.nowhere)
        yield from source.skip_space()
        if (yield from source.read()) == "}":
            break
    if not name:
        raise NoSuchForm
    if not is_begun:
        source.arguments("{}")


def _argument_value(source: Source, emit: Emit) -> Waiting[None]:
    """Read the value of a call's arguments: an object, or a string that holds one. Another string stays a string."""
    if (yield from source.next_character()) == '"':
        text = yield from json_string(source)
        emit(text if text.lstrip().startswith("{") else json.dumps(text, ensure_ascii=False))
    else:
        yield from json_value(source, emit)


def _separator(source: Source, character: str) -> Waiting[None]:
    yield from source.skip_space()
    yield from source.expect(character)
    yield from source.skip_space()


def _quoted(source: Source) -> Waiting[str]:
    parts = [(yield from source.read())]
    while True:
        character = yield from source.read()
        parts.append(character)
        if character == '"':
            return "".join(parts)
        if character == "\\":
            parts.append((yield from source.read()))


def _nested(source: Source, emit: Emit) -> Waiting[None]:
    depth, quoted = 0, False
    while True:
        character = yield from source.read()
        emit(character)
        if quoted:
            if character == "\\":
                emit((yield from source.read()))
            quoted = character != '"'
            continue
        quoted = character == '"'
        depth += (character in "{[") - (character in "}]")
        if depth == 0:
            return


def _word(source: Source, emit: Emit) -> Waiting[None]:
    while (character := (yield from source.next_character())) and character not in ",}] \n\t\r":
        emit(character)
        yield from source.read()
