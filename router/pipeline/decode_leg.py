"""The decode leg of an attempt: sequences at one decode worker, from their start until each has ended or is moved.

Owns their handles: leaving it in any way cancels the sequences that have not ended at the worker. It delivers the
worker's tokens, and never starts or moves a sequence by itself.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self

from cluster.errors import WrongTokens
from cluster.messages import MemberId
from cluster.outstanding_work import PromptWork
from router.fleet.decode_events import (
    DecodeEvent,
    MoveRequest,
    Sequences,
    SequencesFailed,
    SequencesStarted,
    SequenceToken,
    StreamLost,
)
from router.fleet.peer import Peer
from router.pipeline.failures import (
    DECODE,
    FIRST_TOKEN_COUNT,
    FIRST_TOKEN_MISMATCH,
    AttemptFailed,
    failed_sequences,
    leg,
)
from router.policies.prediction.work_ahead import SequenceProgress
from router.request.admitted_request import AdmittedRequest
from router.request.choice import Choice


class DecodeLeg:
    def __init__(
        self,
        admitted: AdmittedRequest,
        decode: Peer,
        choices: Sequence[Choice],
        *,
        exporter: MemberId | None,  # whose KV it begins with
        prompt: PromptWork | None = None,  # without an exporter: what the worker computes
        opened: AbstractContextManager[Sequences] | None = None,  # handles that are there already
    ) -> None:
        self.decode = decode
        self.worker = decode.member.id
        self._admitted = admitted
        self._exporter = exporter
        self._exit = ExitStack()
        if opened is None:
            size, num_expected = admitted.size(), admitted.expected_output
            opened = decode.open_sequences(
                [SequenceProgress(choice.num_missing, size, num_expected) for choice in choices],
                prompt,
                admitted.tenant,
                is_batch=admitted.request.is_batch,
            )
        self.sequences = self._exit.enter_context(opened)
        self.owners = dict(zip(self.sequences.handles, choices, strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the sequences that have not ended. It may be called again."""
        self._exit.close()

    def split(self, handle: int) -> "DecodeLeg":
        """Return a separate leg for one sequence; this leg keeps the others."""
        opened = self.decode.split_sequence(self.sequences, handle)
        return DecodeLeg(self._admitted, self.decode, [self.owners[handle]], exporter=self._exporter, opened=opened)

    async def follow(self) -> MoveRequest | None:
        """Deliver tokens until every sequence has ended (None), or one is to be moved. Raises AttemptFailed,
        TandemError."""
        with leg(DECODE, self.worker):
            while (event := await self.sequences.next_besides_tokens(self._take_token)) is not None:
                if not isinstance(event, MoveRequest):
                    self._take(event)
                elif event.handle in self.sequences.live:
                    return event
        return None

    async def unless_failed(self, until: "asyncio.Future[None]") -> None:
        """Wait for `until`. Only a failure of the worker is handled meanwhile; other events wait in the queue. Raises
        AttemptFailed, TandemError."""
        with leg(DECODE, self.worker):
            if (failure := await self.sequences.unless_failed(until)) is not None:
                self._take(failure)

    async def until_started(self) -> None:
        """Wait until one of the sequences has joined the worker's batch, or all have ended. Raises AttemptFailed,
        TandemError."""
        with leg(DECODE, self.worker):
            while self.sequences.live and not self.sequences.started:
                self._take(await self.sequences.next())

    async def until_delivered(self, num_output: int, timeout_s: float) -> None:
        """Wait until the client has `num_output` tokens of the only sequence, or the sequence has ended. Raises
        AttemptFailed, TandemError."""
        (choice,) = self.owners.values()
        with leg(DECODE, self.worker):
            try:
                async with asyncio.timeout(timeout_s):
                    while self.sequences.live and choice.num_committed < num_output:
                        self._take(await self.sequences.next())
            except TimeoutError:
                missing = f"tokens {choice.num_committed} to {num_output - 1} did not arrive within {timeout_s:g} s"
                raise self.decode.loss(f"is lost: {missing}") from None

    def cancel_ended(self) -> None:
        """Cancel sequences that the router has ended: by a stop string, or with their first token."""
        ended = tuple(handle for handle in self.sequences.live if self.owners[handle].ended)
        if ended:
            self.decode.stream.cancel_sequences(self.sequences, ended)

    def _take(self, event: DecodeEvent) -> None:
        match event:
            case SequencesStarted() as started:
                self._check_first_tokens(started)
                self.sequences.started.update(started.handles)
                self._admitted.started(started, self.worker)
            case SequenceToken():
                self._take_token(event)
            case SequencesFailed(reason, detail):
                raise failed_sequences(reason, detail, prefill=self._exporter, decode=self.worker)
            case StreamLost(detail):
                raise self.decode.loss(f"is lost: {detail}")

    def _take_token(self, event: SequenceToken) -> None:
        handle, index, token, received_s = event
        if handle not in self.sequences.live:
            return
        if handle not in self.sequences.started:  # its first token was never compared
            raise self.decode.loss(f"is lost: the start message of sequence {handle} did not arrive")
        self._admitted.decoding(self.worker)
        choice = self.owners[handle]
        self._admitted.deliver(choice, index, token, received_s)
        if token.finish_reason is not None:
            self.decode.stream.end_sequence(self.sequences, handle)
        if choice.ended:
            self.cancel_ended()

    def _check_first_tokens(self, started: SequencesStarted) -> None:
        """Check that decode continues from the tokens that the client has. The worker names the first token of each
        sequence that began with a hand-off. Raises AttemptFailed.
        """
        num_expected = len(started.handles) if self._exporter is not None else 0
        if len(started.first_tokens) != num_expected:
            detail = f"{len(started.first_tokens)} first tokens, of {num_expected} sequences that began with a hand-off"
            raise AttemptFailed(DECODE, self.worker, FIRST_TOKEN_COUNT, WrongTokens(f"decode names {detail}"))
        if not num_expected:
            return
        for handle, token_id in zip(started.handles, started.first_tokens, strict=True):
            if handle in self.sequences.live and self.owners[handle].committed[-1] != token_id:
                delivered = self.owners[handle].committed[-1]
                error = WrongTokens(f"decode started from token {token_id}, the client was given {delivered}")
                raise AttemptFailed(DECODE, self.worker, FIRST_TOKEN_MISMATCH, error)
