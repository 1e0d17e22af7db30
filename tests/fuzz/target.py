"""The interface between a fuzzer and a decoder: valid inputs, a way to make others, and the call that must withstand
them.
"""

import contextlib
import random
import re
import resource
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tests.fuzz.mutations import mutated

MAX_GROWTH_KIB = 96 << 10  # of the process's memory by one input: no bound of a decoder is as large
Make = Callable[[random.Random], bytes]


class Refused(Exception):
    """The decoder named what is wrong with an input. `args[0]` is the name or the text of the refusal."""


class Found(Exception):
    """An input had a forbidden effect. `args`: the name of the defect, and the details."""


@dataclass(frozen=True)
class Target:
    """A decoder under test. `run` returns a word about the decoded value, or raises Refused; any other exception is a
    finding.
    """

    name: str
    make_seeds: Sequence[bytes] | Callable[[], Sequence[bytes]]  # a call where they need a server that runs
    run: Callable[[bytes], object]
    make: Make | None = None  # an input that fits the decoder's structure; None: only mutated seeds
    words: Sequence[bytes] = ()  # of the format, for mutations

    @cached_property
    def seeds(self) -> Sequence[bytes]:
        return self.make_seeds() if callable(self.make_seeds) else self.make_seeds

    def input(self, draw: random.Random, known: Sequence[bytes]) -> bytes:
        """Return an input: one with the decoder's structure, or a mutation of a known one."""
        if self.make is not None and draw.random() < 0.6:
            made = self.make(draw)
            return made if draw.random() < 0.8 else mutated(draw, [made], self.words)
        return mutated(draw, known, self.words)

    def try_input(self, data: bytes) -> str:
        """Run one input and return its outcome in words, without values. Raises Found."""
        before_kib = _peak_kib()
        try:
            outcome = f"accepted {self.run(data)!r:.200}"
        except Refused as refusal:
            outcome = f"refused {refusal.args[0]}"
        except Exception as error:
            raise Found(f"{_place(error)}: {type(error).__name__}", f"{error}"[:400]) from error
        if _peak_kib() - before_kib > MAX_GROWTH_KIB:
            raise Found("growth", f"the process grew by {(_peak_kib() - before_kib) >> 10} MiB")
        return re.sub(r"'[^']*'|\"[^\"]*\"|[0-9.]+|0x[0-9a-f]+", "_", outcome)[:300]


def _place(error: Exception) -> str:
    """Return the last line of Tandem's code in the traceback of the error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    own = [frame for frame in frames if "/tests/" not in frame.filename and "/lib/python" not in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextlib.contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Turn the named errors of a decoder into Refused."""
    try:
        yield
    except kinds as error:
        raise Refused(f"{type(error).__name__} {error}") from error
