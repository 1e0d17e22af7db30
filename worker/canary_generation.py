"""Canary generations: short prompts that are prefilled and decoded on this worker, without a router."""

import asyncio
import secrets
from collections.abc import Callable, Iterator

from cluster import holders
from cluster.messages import DecodeJob, MemberId, Sampling, SequenceStart, TokenStops
from engine.scheduling import commands

_NO_ROUTER = MemberId("canary", "here")
_NUM_TOKENS = 4
_PROMPT_TOKENS = 8  # with the tokens that follow, less than a block of the usual size: nothing of it is cached


class CanaryGeneration:
    """Runs one canary at a time, on the event loop. `take` removes its events before the services get those of the
    step thread."""

    def __init__(self, post: Callable[[commands.Command], None], *, vocab_size: int, timeout_s: float) -> None:
        self._post = post
        self._prompt = tuple(1 + place % (vocab_size - 1) for place in range(_PROMPT_TOKENS))
        self._timeout_s = timeout_s
        self._salt = secrets.token_hex(8)  # so that it shares no cached block with a request
        self._number = 0
        self._token_ids: list[int] = []
        self._answer: asyncio.Future[tuple[int, ...]] | None = None
        self.was_alone = True  # there was no other work since `begin`

    def begin(self, number: int) -> asyncio.Future[tuple[int, ...]]:
        """Start a canary. The future returns all its tokens."""
        self._number, self._token_ids, self.was_alone = number, [], True
        self._answer = asyncio.get_running_loop().create_future()
        self._post(
            commands.AdmitLocal(
                DecodeJob(
                    request_id=f"canary-{number}",
                    attempt=0,
                    router=_NO_ROUTER,
                    prompt_token_ids=self._prompt,
                    sampling=Sampling(),
                    stops=TokenStops(max_tokens=_NUM_TOKENS),
                    sequences=(SequenceStart(handle=number, seed=0),),
                    signed_ticket=None,
                    timeout_s=self._timeout_s,
                    cache_salt=self._salt,
                    is_batch=True,
                )
            )
        )
        return self._answer

    def end(self, number: int) -> None:
        """Remove what is left of the canary, whether or not it has ended."""
        self._post(commands.CancelSequences(_NO_ROUTER, frozenset({number})))
        self._answer = None

    def owners(self) -> Iterator[str]:
        """Yield the running canary, as a holder of blocks."""
        yield holders.sequence(_NO_ROUTER, self._number)

    def take(self, events: tuple[commands.Event, ...]) -> tuple[commands.Event, ...]:
        """Return the events that do not belong to a canary."""
        return tuple(left for event in events if (left := self._without_own(event)) is not None)

    def _without_own(self, event: commands.Event) -> commands.Event | None:
        match event:
            case commands.Started(router=router) | commands.Failed(router=router):
                if router == _NO_ROUTER:
                    return None
                self.was_alone = False
            case commands.ExportAccepted() | commands.Sealed() | commands.ExportFinished() | commands.ExportFailed():
                self.was_alone = False
            case commands.StepTokens(step, tokens):
                for token in tokens:
                    if token.router == _NO_ROUTER:
                        self._on_token(token)
                others = tuple(token for token in tokens if token.router != _NO_ROUTER)
                self.was_alone &= not others
                return commands.StepTokens(step, others) if others else None
        return event

    def _on_token(self, token: commands.SequenceToken) -> None:
        if self._answer is None or token.handle != self._number or self._answer.done():
            return
        self._token_ids.append(token.token.token_id)
        if token.token.finish_reason is not None:
            self._answer.set_result(tuple(self._token_ids))
