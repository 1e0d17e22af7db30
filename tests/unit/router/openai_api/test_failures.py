"""The OpenAI endpoint: failures while a response is produced, and clients that disconnect."""

import asyncio
import threading

import httpx
import openai
import pytest

from cluster.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    NoWorkers,
    QueueFull,
    SlowClient,
    TandemError,
    WorkerLost,
)
from router.text.tokenization import Tokenization
from tests.unit.router.openai_api.endpoint import check_stream, endpoint


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("the queue is full", retry_after_s=2.2), 429, openai.RateLimitError),
        (NoWorkers("no decode worker"), 503, openai.InternalServerError),
        (Draining("leaving"), 503, openai.InternalServerError),
        (DeadlineExceeded("ran out in prefill"), 408, openai.APIStatusError),
        (InternalError("ours"), 500, openai.InternalServerError),
    ],
)
def test_an_early_failure_has_its_own_status(
    demo: Tokenization, error: TandemError, status: int, kind: type[openai.APIStatusError], stream: bool
) -> None:
    with endpoint(demo, error=error) as running, pytest.raises(kind) as raised:
        running.client.completions.create(model="", prompt="x", stream=stream)
    assert (raised.value.status_code, raised.value.code) == (status, error.reason)
    told = "3" if status == 429 else "1" if isinstance(error, Draining) else None
    assert raised.value.response.headers.get("retry-after") == told


def test_a_failure_in_mid_stream_is_an_error_event(demo: Tokenization) -> None:
    with endpoint(demo, error=WorkerLost("both pools are gone"), error_after=2) as running:
        stream = running.client.completions.create(model="", prompt="x", stream=True)
        text = next(stream).choices[0].text + next(stream).choices[0].text
        with pytest.raises(openai.APIError, match="both pools are gone") as raised:
            next(stream)
        raw = running.post("/v1/completions", {"prompt": "x", "stream": True}).text
        check_stream("/v1/completions", raw, running.http.get("/openapi.json").json())
    assert text == "The "
    assert raised.value.code == "worker_lost"
    assert "event: error\ndata: " in raw
    assert "[DONE]" not in raw


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_an_internal_error_shows_no_trace_and_is_logged_with_the_request_id(
    demo: Tokenization, caplog: pytest.LogCaptureFixture, after: int, stream: bool
) -> None:
    with endpoint(demo, error=ZeroDivisionError("secret detail"), error_after=after) as running:
        answer = running.post("/v1/completions", {"prompt": "x", "stream": stream}, **{"x-request-id": "r-7"})
    assert answer.status_code == (200 if stream and after else 500)
    assert "internal error; the router's log has it under request id r-7" in answer.text
    assert "ZeroDivision" not in answer.text
    assert "secret" not in answer.text
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_one_failing_prompt_ends_the_batch(demo: Tokenization) -> None:
    with endpoint(demo, error=SlowClient("too slow"), error_after=1) as running, pytest.raises(openai.RateLimitError):
        running.client.completions.create(model="", prompt=["a", "b", "c"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
@pytest.mark.parametrize("hold_after", [0, 3])
def test_a_client_that_disconnects_cancels_its_request(
    demo: Tokenization, stream: bool, prompt: str | list[str], hold_after: int
) -> None:
    async def leave(url: str, holding: threading.Event) -> None:
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(verify=False)) as client:
            body = {"prompt": prompt, "stream": stream}
            asking = asyncio.create_task(client.post(url + "/v1/completions", json=body, timeout=30))
            assert await asyncio.to_thread(holding.wait, 10), "the pipeline never held"
            assert not asking.done()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    with endpoint(demo, hold_after=hold_after) as running:
        asyncio.run(leave(running.url, running.pipeline.holding))
        assert running.pipeline.closed.wait(10), "the generator lived on"


def test_a_stream_closed_by_its_reader_cancels_the_request(demo: Tokenization) -> None:
    with endpoint(demo, hold_after=2) as running:
        stream = running.client.completions.create(model="", prompt="x", stream=True)
        assert next(iter(stream)).choices[0].text == "The"
        stream.close()
        assert running.pipeline.closed.wait(10), "the generator lived on"
