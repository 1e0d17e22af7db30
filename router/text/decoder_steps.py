"""The incremental form of each decoder that a `tokenizer.json` can name: one step of the chain in detokenizer.py.

A step is given the text's pieces in order and answers with those that no later piece can change. What each does as a
whole is the `tokenizers` library's definition; the tests hold them to it.
"""

import re
from collections.abc import Sequence
from typing import Protocol

from tokenizers import decoders

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SETTLED_TOKEN = "x"  # stands before a token to make it any but the first


class Step(Protocol):
    """One decoder of the chain. Pieces are tokens, or, behind Fuse, consecutive parts of the text."""

    def push(self, piece: str) -> Sequence[str]: ...

    def end(self) -> Sequence[str]: ...


class PerToken:
    """A decoder that maps every token by itself; the library's own, asked once per distinct token."""

    def __init__(self, component: decoders.Decoder, index: int, settled: dict[tuple[int, str], str]) -> None:
        self._component = component
        self._index = index
        self._settled = settled
        self._first = True

    def push(self, piece: str) -> Sequence[str]:
        if self._first:
            self._first = False
            return (self._component.decode([piece]),)
        key = (self._index, piece)
        text = self._settled.get(key)
        if text is None:
            before = len(self._component.decode([SETTLED_TOKEN]))
            text = self._settled[key] = self._component.decode([SETTLED_TOKEN, piece])[before:]
        return (text,)

    def end(self) -> Sequence[str]:
        return ()


class Joined:
    """No decoder: tokens with a space between them."""

    def __init__(self) -> None:
        self._first = True

    def push(self, piece: str) -> Sequence[str]:
        text = piece if self._first else " " + piece
        self._first = False
        return (text,)

    def end(self) -> Sequence[str]:
        return ()


class ByteRuns:
    """ByteFallback. A run of byte tokens is text only if all of it is valid UTF-8, so it is held until it ends."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: str) -> Sequence[str]:
        byte = BYTE_TOKEN.fullmatch(piece)
        if byte:
            self._run.append(int(byte[1], 16))
            return ()
        return (*self.end(), piece)

    def end(self) -> Sequence[str]:
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return ()
        try:
            return (run.decode(),)
        except UnicodeDecodeError:
            return ("\ufffd",) * len(run)


class WordEnds:
    """BPEDecoder. A word's end is a space, except behind the last token: each is held until another comes."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: str | None = None

    def push(self, piece: str) -> Sequence[str]:
        held, self._held = self._held, piece
        return () if held is None else (held.replace(self._suffix, " "),)

    def end(self) -> Sequence[str]:
        held, self._held = self._held, None
        return () if held is None else (held.replace(self._suffix, ""),)


class StripFront:
    """Strip behind Fuse: up to `start` characters off the whole text's front."""

    def __init__(self, content: str, start: int) -> None:
        self._content = content
        self._left = start

    def push(self, piece: str) -> Sequence[str]:
        while self._left and piece.startswith(self._content):
            piece = piece[1:]
            self._left -= 1
        if piece:
            self._left = 0
        return (piece,)

    def end(self) -> Sequence[str]:
        return ()


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet (Radford et al. 2019): printable bytes are their own letter, the rest follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
