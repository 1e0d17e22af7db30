"""A pipeline whose workers follow a script: the checks, choices and texts are the router's own; only tokens are
scripted.

The module also has a real HTTP server for an app.
"""

import asyncio
import struct
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI

from cluster.errors import TandemError
from cluster.messages import FinishReason, PromptLogprobs, SampledToken, TokenLogprobs
from cluster.protocol.wire import pack_ids
from router.request.choice import Choice, text_stream_of
from router.request.validation import ResolvedRequest, check, resolve
from router.requests import (
    ChatPrompt,
    DirectReader,
    GenerateRequest,
    Ledger,
    Output,
    Phase,
    ScoredPrompt,
    Summary,
    TextPrompt,
    Usage,
)
from router.text.tokenization import Tokenization, truncated

LEDGER = Ledger((Phase("prefill", 0.25), Phase("decode", 0.5)), 0.75, 0.25, ("p@1", "d@2"), "shm", 4096, ("retry",))


@dataclass
class ScriptedPipeline:
    """A pipeline whose odd choices generate `script`, and even ones its reverse; then EOS."""

    tokenization: Tokenization
    script: str = "The quick brown fox."
    error: Exception | None = None
    error_after: int = 0  # tokens of each choice that come before `error`
    signs_of_life: int = 0  # outputs without content that come first
    hold_after: int | None = None  # tokens of each choice after which nothing comes until the client leaves
    seen: list[GenerateRequest] = field(default_factory=list)
    keepalive_intervals_s: list[float | None] = field(default_factory=list)  # of the requests seen
    holding: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    async def generate(
        self,
        request: GenerateRequest,
        *,
        keepalive_interval_s: float | None = None,
        reader: DirectReader | None = None,
    ) -> AsyncGenerator[Output, None]:
        self.seen.append(request)
        self.keepalive_intervals_s.append(keepalive_interval_s)
        try:
            async for output in self._outputs(request):
                yield output
        finally:
            self.closed.set()

    async def _outputs(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        check(request, self.tokenization.model_info)
        model = self.tokenization.model_info
        resolved = resolve(request, truncated(request, self._prompt(request), model.max_model_len), model)
        choices = [self._choice(number, resolved) for number in range(request.n)]
        scripts = [self._tokens(number) for number in range(request.n)]
        for _ in range(self.signs_of_life):
            yield Output(request.request_id)
        yield Output(request.request_id, accepted=resolved.accepted(request.sampling, b""))
        index = 0
        while any(not choice.ended for choice in choices):
            if self.error is not None and index == self.error_after:
                raise self.error
            if index == self.hold_after:
                self.holding.set()
                await asyncio.Event().wait()
            deltas = tuple(
                choice.append(index, self._sampled(scripts[choice.number][index], index, resolved))
                for choice in choices
                if not choice.ended
            )
            yield Output(request.request_id, deltas, prompt=None if index else self._scored(resolved))
            index += 1
        usage = Usage(len(resolved.prompt_token_ids), sum(choice.num_committed for choice in choices), cached_tokens=1)
        yield Output(request.request_id, (), Summary(usage, LEDGER))

    def _scored(self, resolved: ResolvedRequest) -> ScoredPrompt | None:
        """Place p has the log-probability -p and rank p; the likeliest tokens there are p, p + 1 and so on."""
        width, num_tokens = resolved.num_prompt_logprobs, len(resolved.prompt_token_ids) - 1
        if width is None:
            return None
        places = range(1, num_tokens + 1)
        top = [(place + more, -more) for place in places for more in range(width)]
        packed = [struct.pack(f"<{len(each)}f", *each) for each in ([-p for p in places], [value for _, value in top])]
        ids = pack_ids([token_id for token_id, _ in top])
        part = PromptLogprobs(1, width, packed[0], pack_ids(places), ids, packed[1])
        return ScoredPrompt(resolved.prompt_token_ids, (part,))

    def _prompt(self, request: GenerateRequest) -> tuple[int, ...]:
        if isinstance(request.prompt, TextPrompt):
            return self.tokenization.encode(request.prompt.text)
        if isinstance(request.prompt, ChatPrompt):
            return self.tokenization.encode_chat(request.prompt.messages, 0, options=request.prompt.options)
        return request.prompt.token_ids

    def _choice(self, number: int, resolved: ResolvedRequest) -> Choice:
        return Choice(number, resolved, text_stream_of(resolved, self.tokenization))

    def _tokens(self, number: int) -> list[int]:
        if not self.tokenization.model_info.has_tokenizer:
            return [7, 8, 9, 0]
        return [*self.tokenization.encode(self.script[:: -1 if number % 2 else 1]), 0, *([5] * 200)]

    def _sampled(self, token_id: int, index: int, resolved: ResolvedRequest) -> SampledToken:
        wanted = resolved.sampling.num_logprobs
        top = tuple((token_id + i, -0.5 - i) for i in range(wanted or 0))
        logprobs = None if wanted is None else TokenLogprobs(token_id, -0.5, top)
        reason = None
        if token_id in resolved.stops.stop_token_ids and index >= resolved.stops.min_tokens:
            reason = FinishReason.STOP
        elif index + 1 == resolved.stops.max_tokens:
            reason = FinishReason.LENGTH
        return SampledToken(token_id, logprobs, reason)


def failing(tokenization: Tokenization, error: Exception, after: int = 0) -> ScriptedPipeline:
    assert not isinstance(error, TandemError) or error.message
    return ScriptedPipeline(tokenization, error=error, error_after=after)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup()
        self.up.set()


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve the app on a free port of a real server, and yield its base URL."""
    server = _Server(uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert server.up.wait(10), "the server did not start"
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"
