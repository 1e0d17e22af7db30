"""Tests that long texts are tokenized on a few threads, not on the event loop, and that only the beginning of a far too
long text is tokenized."""

import asyncio
import threading
from pathlib import Path

import pytest

from cluster.errors import ContextLengthExceeded, Overloaded
from router.requests import ChatMessage
from router.text.tokenization import Tokenization, TokenizerThreads

DEMO_MODEL = Path(__file__).parents[4] / "examples" / "demo_model"
_LINE = "def f(x):\n    return x\n"


@pytest.fixture(scope="module")
def demo() -> Tokenization:
    return Tokenization.load(str(DEMO_MODEL))


async def test_the_event_loop_keeps_running_while_a_long_text_is_tokenized(demo: Tokenization) -> None:
    """If the library held Python's lock, the loop would make no turn between the two ends of the call."""
    threads, text, inside, num_turns = TokenizerThreads(), _LINE * 6_000, threading.Event(), 0

    def encode(text: str) -> tuple[int, ...]:
        inside.set()
        try:
            return demo.encode(text)
        finally:
            inside.clear()

    encoding = asyncio.create_task(threads.run(encode, text))
    while not encoding.done():
        await asyncio.sleep(0)
        num_turns += inside.is_set()
    assert len(encoding.result()) > len(text) / 4
    assert num_turns > 50


async def test_texts_run_on_a_bounded_number_of_threads_and_a_cancelled_waiting_text_never_runs() -> None:
    threads, began, inside, go = TokenizerThreads(1), list[int](), threading.Event(), threading.Event()

    def work(number: int) -> int:
        began.append(number)
        inside.set()
        go.wait(20)
        return number

    first, second, third = (asyncio.create_task(threads.run(work, number)) for number in range(3))
    assert await asyncio.to_thread(inside.wait, 20)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    go.set()
    assert [await first, await third] == [0, 2]
    assert began == [0, 2]


async def test_a_cancelled_callers_thread_is_busy_until_its_text_is_done() -> None:
    threads, go, inside = TokenizerThreads(1), threading.Event(), threading.Event()

    def work(number: int) -> int:
        inside.set()
        go.wait(20)
        return number

    first = asyncio.create_task(threads.run(work, 1))
    assert await asyncio.to_thread(inside.wait, 20)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(threads.run(work, 2))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not second.done()
    go.set()
    assert await second == 2


async def test_a_waiting_text_beyond_the_bound_is_refused_with_a_retry_time() -> None:
    threads, go = TokenizerThreads(1, max_waiting=1), threading.Event()
    tasks = [asyncio.create_task(threads.run(go.wait, 20.0)) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refusal:
        await threads.run(go.wait, 20.0)
    assert refusal.value.retry_after_s
    go.set()
    assert await asyncio.gather(*tasks) == [True, True]


def test_a_prompt_that_is_far_too_long_is_refused_by_tokenizing_only_its_beginning(demo: Tokenization) -> None:
    text = _LINE * 170_000  # eight seconds, if it were looked through
    for encode in (demo.encode_prompt, lambda text: demo.encode_chat([ChatMessage("user", text)], 0)):
        with pytest.raises(ContextLengthExceeded, match="the first 16384 of the prompt's"):
            encode(text)


def test_a_prompt_of_few_tokens_is_encoded_whole_for_any_number_of_characters(demo: Tokenization) -> None:
    for text in (_LINE * 3, _LINE * 700):  # the second is slightly too long: resolve reports by how many tokens
        assert demo.encode_prompt(text) == demo.encode(text)
