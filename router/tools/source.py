"""The text that a parser reads, and the pieces that it makes.

A parser is a generator: it reads from a `Source`, emits pieces, and yields where it needs more text. It decides by
complete markers and characters only, never by where the text so far ends, so the pieces that it makes of a text join to
the same whatever parts the text came in.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls this tool. `index` counts the calls of one answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = Content | Reasoning | CallBegun | Arguments


T = TypeVar("T")
Waiting = Generator[None, None, T]
Emit = Callable[[str], None]


class TextEnded(Exception):
    """The text has ended where a parser needs more of it."""


class NoSuchForm(Exception):
    """The text does not have the form that the parser expects here."""


class HeldSpace:
    """Passes a text on, and holds the white space at its end until the parser knows what follows."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._held = emit, ""

    def __call__(self, text: str) -> None:
        text = self._held + text
        visible = text.rstrip()
        self._held = text[len(visible) :]
        self._emit(visible)

    def release(self) -> None:
        self._emit(self._held)
        self._held = ""

    def drop(self) -> None:
        self._held = ""


class Source:
    """The unread text of one answer. `mark` keeps text that may have to be read in another way."""

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._mark: int | None = None
        self._pieces: list[Piece] = []
        self._closed = False
        self.num_calls = 0

    def feed(self, text: str) -> None:
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        if self._mark is not None:
            self._mark = 0

    def close(self) -> None:
        self._closed = True

    def drain(self) -> list[Piece]:
        """Return the pieces made since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    # What parsers emit.

    def content(self, text: str) -> None:
        if text:
            self._join(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._join(Reasoning(text))

    def begin_call(self, name: str) -> None:
        self._pieces.append(CallBegun(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Emit arguments of the call that was begun last."""
        if text:
            self._join(Arguments(self.num_calls - 1, text))

    def _join(self, piece: Content | Reasoning | Arguments) -> None:
        """Add to the last piece what continues it."""
        last = self._pieces[-1] if self._pieces else None
        if type(last) is type(piece):
            assert isinstance(last, Content | Reasoning | Arguments)
            self._pieces[-1] = replace(last, text=last.text + piece.text)
        else:
            self._pieces.append(piece)

    @staticmethod
    def nowhere(text: str) -> None:
        """Drop a text."""

    # What parsers read.

    def mark(self) -> None:
        self._mark = self._at

    def unmark(self) -> None:
        self._mark = None

    def back_to_mark(self) -> None:
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    def next_character(self) -> Waiting[str]:
        """Return the next character without reading it; empty at the end of the text."""
        while self._at >= len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def read(self) -> Waiting[str]:
        """Read one character. Raises TextEnded."""
        character = yield from self.next_character()
        if not character:
            raise TextEnded
        self._at += 1
        return character

    def skip_space(self) -> Waiting[str]:
        """Read white space. Returns the character after it; empty at the end of the text."""
        while (character := (yield from self.next_character())).isspace():
            self._at += 1
        return character

    def starts_with(self, word: str) -> Waiting[bool]:
        """Return whether the unread text begins with this word, and read it if so."""
        while not self._text.startswith(word, self._at):
            if self._closed or not word.startswith(self._text[self._at :]):
                return False
            yield
        self._at += len(word)
        return True

    def one_of(self, words: Sequence[str]) -> Waiting[str]:
        """Read the first of these words with which the unread text begins. Returns it; empty if there is none."""
        for word in words:
            if (yield from self.starts_with(word)):
                return word
        return ""

    def unread(self, word: str) -> None:
        """Take back the word that was read last. The parser must not have waited since."""
        self._at -= len(word)
        assert self._text.startswith(word, self._at)

    def expect(self, word: str) -> Waiting[None]:
        """Read this word. Raises NoSuchForm."""
        if not (yield from self.starts_with(word)):
            raise NoSuchForm

    def until(self, markers: Sequence[str], emit: Emit, *, trims: bool = False) -> Waiting[str]:
        """Read up to the first of these markers, and the marker. Returns the marker; empty if the text ended without.

        `trims`: white space directly before a marker is dropped. No marker may be a prefix of another.
        """
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
            if found:
                at, marker = min(found)
                self._emit_up_to(at, emit, trims=trims)
                self._at = at + len(marker)
                return marker
            if self._closed:
                self._emit_up_to(len(self._text), emit, trims=False)
                return ""
            self._emit_up_to(self._first_undecided(markers, trims=trims), emit, trims=False)
            yield

    def text_until(self, markers: Sequence[str]) -> Waiting[tuple[str, str]]:
        """Read up to the first of these markers. Returns the text before it and the marker. Raises TextEnded."""
        parts: list[str] = []
        marker = yield from self.until(markers, parts.append)
        if not marker:
            raise TextEnded
        return "".join(parts), marker

    def _emit_up_to(self, end: int, emit: Emit, *, trims: bool) -> None:
        text = self._text[self._at : end]
        emit(text.rstrip() if trims else text)
        self._at = max(self._at, end)

    def _first_undecided(self, markers: Sequence[str], *, trims: bool) -> int:
        """Return where text begins that may be a marker's beginning, or white space before one."""
        end = len(self._text)
        for marker in markers:
            for length in range(min(len(marker) - 1, len(self._text) - self._at), 0, -1):
                if self._text.endswith(marker[:length]):
                    end = min(end, len(self._text) - length)
                    break
        if trims:
            while end > self._at and self._text[end - 1].isspace():
                end -= 1
        return end
