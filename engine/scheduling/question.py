"""Questions to the step thread: commands that are answered with one event. Pure values."""

from collections.abc import Hashable
from typing import Generic, TypeAlias, TypeVar

from cluster.errors import TandemError

AnswerT = TypeVar("AnswerT")
Key: TypeAlias = tuple[Hashable, ...]


class Question(Generic[AnswerT]):
    """A command that the scheduler answers with one event: an AnswerT or a Refusal with the same key."""

    __slots__ = ()

    @property
    def key(self) -> Key:
        """A key that is unique among the questions that wait for an answer."""
        raise NotImplementedError


class Answer:
    """An event that answers a question."""

    __slots__ = ()

    @property
    def key(self) -> Key:
        """The key of the question."""
        raise NotImplementedError


class Refusal(Answer):
    """An answer that raises its error at the caller who asked."""

    __slots__ = ()
    error: TandemError
