"""The decode leg of an attempt: sequences at one decode worker, from their start to each one's end or move.

Owns their handles: leaving it, however, cancels at the worker what has not ended. Delivers what the worker says of
them; never starts or moves one itself.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self

from cluster.errors import InternalError, WorkerLost
from cluster.messages import MemberId
from router.fleet.decode_events import DecodeEvent, Failed, Lost, Move, Sequences, Started, Token
from router.fleet.decode_peer import DecodePeer
from router.pipeline.failures import (
    DECODE,
    FIRST_TOKEN_COUNT,
    FIRST_TOKEN_MISMATCH,
    AttemptFailed,
    failed_sequences,
    leg,
)
from router.policies.course import Course
from router.request.choice import Choice
from router.request.live_request import LiveRequest
from router.running import running


class DecodeLeg:
    def __init__(
        self,
        live: LiveRequest,
        decode: DecodePeer,
        choices: Sequence[Choice],
        *,
        exporter: MemberId | None,  # whose KV it begins with
        opened: AbstractContextManager[Sequences] | None = None,  # handles that are there already
    ) -> None:
        self.decode = decode
        self.worker = decode.member.id
        self._live = live
        self._exporter = exporter
        self._exit = ExitStack()
        if opened is None:
            opened = decode.open([Course(choice.num_missing, live.size()) for choice in choices])
        self.sequences = self._exit.enter_context(opened)
        self.owners = dict(zip(self.sequences.handles, choices, strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Safe to call again."""
        self._exit.close()

    def part(self, handle: int) -> "DecodeLeg":
        """One sequence's leg of its own; this one goes on with the others."""
        opened = self.decode.part(self.sequences, handle)
        return DecodeLeg(self._live, self.decode, [self.owners[handle]], exporter=self._exporter, opened=opened)

    async def follow(self) -> Move | None:
        """Until every sequence has ended, or one is to move. Raises AttemptFailed, TandemError."""
        with leg(DECODE, self.worker):
            while self.sequences.live:
                event = await self.sequences.next()
                if not isinstance(event, Move):
                    self._take(event)
                elif event.handle in self.sequences.live:
                    return event
        return None

    async def unless_failed(self, until: "asyncio.Future[None]") -> None:
        """Until then. What the worker says before is heard later, except that it will not do, or is lost. Raises
        AttemptFailed, TandemError."""
        with leg(DECODE, self.worker):
            async with running(self.sequences.failure()) as failing:
                await asyncio.wait((failing, until), return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    self._take(failing.result())

    async def until_started(self) -> None:
        """Until one of its sequences has joined the worker's batch, or all have ended. Raises AttemptFailed,
        TandemError."""
        with leg(DECODE, self.worker):
            while self.sequences.live and not self.sequences.started:
                self._take(await self.sequences.next())

    async def until_delivered(self, num_output: int, timeout_s: float) -> None:
        """Until the client has so many tokens of the only sequence, or the sequence has ended before. Raises
        AttemptFailed, TandemError."""
        (choice,) = self.owners.values()
        with leg(DECODE, self.worker):
            try:
                async with asyncio.timeout(timeout_s):
                    while self.sequences.live and choice.num_committed < num_output:
                        self._take(await self.sequences.next())
            except TimeoutError:
                missing = f"tokens {choice.num_committed} to {num_output - 1} did not arrive within {timeout_s:g} s"
                raise WorkerLost(f"decode worker {self.worker}: {missing}") from None

    def cancel_ended(self) -> None:
        """The worker does not know of choices that ended here: by a stop string, or with their first token."""
        ended = tuple(handle for handle in self.sequences.live if self.owners[handle].ended)
        if ended:
            self.decode.stream.cancel(self.sequences, ended)

    def _take(self, event: DecodeEvent) -> None:
        match event:
            case Started() as started:
                self._check_first_tokens(started)
                self.sequences.started.update(started.handles)
                self._live.started(started, self.worker)
            case Token(handle, index, token) if handle in self.sequences.live:
                self._live.decoding(self.worker)
                self._live.deliver(self.owners[handle], index, token)
                if token.finish_reason is not None:
                    self.decode.stream.release(self.sequences, handle)
                self.cancel_ended()
            case Failed(reason, detail):
                raise failed_sequences(reason, detail, prefill=self._exporter, decode=self.worker)
            case Lost(detail):
                raise WorkerLost(f"decode worker {self.worker.id} is lost: {detail}")

    def _check_first_tokens(self, started: Started) -> None:
        """Decode goes on from what the client was given, or not at all. The worker names the first token of each
        sequence that began with a hand-off."""
        num_expected = len(started.handles) if self._exporter is not None else 0
        if len(started.first_tokens) != num_expected:
            detail = f"{len(started.first_tokens)} first tokens, of {num_expected} sequences that began with a hand-off"
            raise AttemptFailed(DECODE, self.worker, FIRST_TOKEN_COUNT, InternalError(f"decode names {detail}"))
        if not num_expected:
            return
        for handle, token_id in zip(started.handles, started.first_tokens, strict=True):
            if handle in self.sequences.live and self.owners[handle].committed[-1] != token_id:
                delivered = self.owners[handle].committed[-1]
                error = InternalError(f"decode started from token {token_id}, the client was given {delivered}")
                raise AttemptFailed(DECODE, self.worker, FIRST_TOKEN_MISMATCH, error)
