"""Questions to the step thread: each caller gets its own answer, its named error, or the end of the thread."""

import asyncio
import threading
from dataclasses import dataclass

import pytest

from cluster.errors import NotFound, TandemError, Unavailable
from engine.scheduling.step import Answer, Key, Question, Refusal
from engine.steps.questions import Questions


@dataclass(frozen=True, slots=True)
class _Counted(Answer):
    name: str
    number: int

    @property
    def key(self) -> Key:
        return _Count, self.name


@dataclass(frozen=True, slots=True)
class _CountRefused(Refusal):
    name: str
    error: TandemError

    @property
    def key(self) -> Key:
        return _Count, self.name


@dataclass(frozen=True, slots=True)
class _Count(Question[_Counted]):
    name: str

    @property
    def key(self) -> Key:
        return _Count, self.name


class _Bench:
    def __init__(self) -> None:
        self.posted: list[object] = []
        self.questions = Questions(self.posted.append)

    async def asked(self, name: str) -> "asyncio.Task[_Counted]":
        task = asyncio.create_task(self.questions.ask(_Count(name)))
        await asyncio.sleep(0)
        return task


async def test_each_caller_gets_the_answer_to_its_own_question() -> None:
    bench = _Bench()
    first, second = await bench.asked("a"), await bench.asked("b")
    assert bench.posted == [_Count("a"), _Count("b")]
    assert bench.questions.settle((_Counted("b", 2), _Counted("a", 1))) == ()
    assert (await first).number == 1 and (await second).number == 2


async def test_events_that_answer_no_question_pass_in_their_order() -> None:
    bench = _Bench()
    task = await bench.asked("a")
    assert bench.questions.settle(("x", _Counted("a", 1), "y")) == ("x", "y")
    await task


async def test_a_refusal_raises_its_named_error() -> None:
    bench = _Bench()
    task = await bench.asked("a")
    bench.questions.settle((_CountRefused("a", NotFound("no such thing")),))
    with pytest.raises(NotFound, match="no such thing"):
        await task


@pytest.mark.parametrize("event", [_Counted("a", 1), _CountRefused("a", NotFound("none"))])
async def test_an_answer_to_a_cancelled_caller_is_dropped(event: Answer) -> None:
    bench = _Bench()
    task = await bench.asked("a")
    task.cancel()
    assert bench.questions.settle((event,)) == ()  # the caller's future is cancelled, its task has not run yet
    await asyncio.wait([task])
    assert task.cancelled()
    assert bench.questions.settle((event,)) == ()
    again = await bench.asked("a")
    bench.questions.settle((_Counted("a", 2),))
    assert (await again).number == 2


async def test_a_caller_that_times_out_leaves_no_pending_question() -> None:
    bench = _Bench()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await bench.questions.ask(_Count("a"))
    task = await bench.asked("a")  # the name is free again
    task.cancel()


async def test_a_command_that_cannot_be_posted_raises_at_its_caller() -> None:
    def refuse(command: object) -> None:
        raise MemoryError

    questions = Questions(refuse)
    for _ in range(2):
        with pytest.raises(MemoryError):
            await questions.ask(_Count("a"))


async def test_the_end_of_the_step_thread_fails_every_waiting_caller_and_no_earlier_answer() -> None:
    bench = _Bench()
    answered, waiting, cancelled = [await bench.asked(name) for name in "abc"]
    cancelled.cancel()
    bench.questions.settle((_Counted("a", 1),))
    thread = threading.Thread(target=bench.questions.end)
    thread.start()
    thread.join()
    with pytest.raises(Unavailable, match="has ended"):
        await waiting
    assert (await answered).number == 1 and cancelled.cancelled()
    with pytest.raises(Unavailable, match="has ended"):
        await bench.questions.ask(_Count("d"))
    assert len(bench.posted) == 3, "nothing is posted to a thread that has ended"


def test_a_step_thread_that_ends_after_its_event_loop_reaches_no_caller() -> None:
    bench = _Bench()

    async def ask() -> None:
        (await bench.asked("a")).cancel()

    asyncio.run(ask())
    bench.questions.end()
