"""The callers on the event loop that wait for the step thread's answers.

A caller that asks for blocks must post the command that gives them back however `ask` ends, because an answer whose
caller was cancelled is dropped. The step thread applies commands in the order in which they were posted, so it applies
that command after the question.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from cluster.errors import Unavailable
from engine.scheduling.step import Answer, Key, Question, Refusal

AnswerT = TypeVar("AnswerT")
EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT", contravariant=True)


class Asked(Protocol):
    """A step thread that answers questions: engine.steps.step_loop.StepLoop."""

    async def ask(self, question: Question[AnswerT], /) -> AnswerT: ...


class StepInbox(Asked, Protocol[CommandT]):
    """The step thread as objects on the event loop see it: engine.steps.step_loop.StepLoop."""

    def post(self, command: CommandT, /) -> None: ...


class Questions:
    """The questions that wait for an answer. Every method except `end` is called on the event loop."""

    def __init__(self, post: Callable[[Any], None]) -> None:
        """`post` sends a command to the step thread."""
        self.post = post
        self._waiting: dict[Key, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # None before the first question
        self._has_ended = False

    async def ask(self, question: Question[AnswerT]) -> AnswerT:
        """Post the question and return its answer. Raises the error of a Refusal, and Unavailable when the step thread
        ends before it answers."""
        loop = self._loop = asyncio.get_running_loop()
        if self._has_ended:
            raise _ended()
        key = question.key
        assert key not in self._waiting, f"{question} is already waiting for its answer"
        answer: asyncio.Future[AnswerT] = loop.create_future()
        self._waiting[key] = answer
        try:
            self.post(question)
            return await answer
        finally:
            del self._waiting[key]

    def settle(self, events: tuple[EventT, ...]) -> tuple[EventT, ...]:
        """Give the answers among these events to their callers and return the other events, in order."""
        others = []
        for event in events:
            if isinstance(event, Answer):
                self._answer(event)
            else:
                others.append(event)
        return tuple(others)

    def end(self) -> None:
        """Raise Unavailable at every waiting caller, because no answer will come any more. Called by any thread."""
        self._has_ended = True  # before the loop is read: a concurrent `ask` sees this, or this sees its loop
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop has closed, so no caller waits
                self._loop.call_soon_threadsafe(self._fail_all)

    def _answer(self, event: Answer) -> None:
        waiting = self._waiting.get(event.key)
        if waiting is None or waiting.done():
            return
        if isinstance(event, Refusal):
            waiting.set_exception(event.error)
        else:
            waiting.set_result(event)

    def _fail_all(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_ended())


def _ended() -> Unavailable:
    return Unavailable("the step thread has ended; the worker is shutting down")
