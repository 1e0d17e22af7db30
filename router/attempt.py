"""One try at both legs for choices of a request that have the same tokens so far.

Owns the calls and handles of the try: leaving it, however, cancels on every worker what has not ended. Raises
AttemptFailed where another try may help; it never tries again itself.
"""

from collections.abc import Sequence

from cluster.errors import InternalError, WorkerLost
from cluster.messages import MemberId
from router.choice import Choice
from router.decode_events import Failed, Lost, Sequences, Started, Token
from router.failures import DECODE, FIRST_TOKEN_MISMATCH, PREFILL, AttemptFailed, failed_sequences, leg
from router.fleet import Fleet
from router.live_request import LiveRequest
from router.peer import DecodePeer, FirstTokens
from router.running import running


class Attempt:
    def __init__(self, live: LiveRequest, choices: Sequence[Choice], *, fleet: Fleet, router: MemberId) -> None:
        self._live = live
        self._choices = choices
        self._fleet = fleet
        self._router = router
        self._number = live.next_attempt()
        self._owners: dict[int, Choice] = {}  # by the handles of this attempt

    async def hand_over(self, prefill_id: MemberId, decode_id: MemberId) -> None:
        """Prefill there, decode here: both legs at once, the first token before the KV has arrived."""
        with leg(DECODE, decode_id):
            decode = self._fleet.decode(decode_id)
        with decode.open(len(self._choices)) as sequences:
            self._owners = dict(zip(sequences.handles, self._choices, strict=True))
            self._live.dispatched()
            with leg(PREFILL, prefill_id):
                job = self._live.prefill_job(self._choices, self._number, importer=decode_id)
                prefill = self._fleet.prefill(prefill_id)
                async with prefill.prefill(job) as call:
                    ticket = await call.ticket()
                    start = decode.start(self._live.decode_job(self._owners, self._number, self._router, ticket))
                    with prefill.abandoned_unless_taken(ticket) as taken:
                        async with running(start) as starting:
                            self._deliver_first(await call.first_tokens(), prefill_id)
                            self._cancel_ended(decode, sequences)
                            if sequences.live:
                                with leg(DECODE, decode_id):
                                    await starting
                                taken()
            await self._follow(decode, sequences, prefill_id)

    async def first_token_only(self, prefill_id: MemberId) -> None:
        """One token is missing: prefill gives it, and there is nothing to decode."""
        self._live.dispatched()
        with leg(PREFILL, prefill_id):
            job = self._live.prefill_job(self._choices, self._number, importer=None)
            async with self._fleet.prefill(prefill_id).prefill(job) as call:
                await call.ticket()
                self._deliver_first(await call.first_tokens(), prefill_id)

    async def on_decode(self, decode_id: MemberId) -> None:
        """Both legs on one worker."""
        with leg(DECODE, decode_id):
            decode = self._fleet.decode(decode_id)
            with decode.open(len(self._choices)) as sequences:
                self._owners = dict(zip(sequences.handles, self._choices, strict=True))
                self._live.dispatched()
                await decode.start(self._live.decode_job(self._owners, self._number, self._router, ticket=None))
                await self._follow(decode, sequences, prefill_id=None)

    def _deliver_first(self, first: FirstTokens, prefill_id: MemberId) -> None:
        if len(first.tokens) != len(self._choices):
            raise InternalError(f"prefill gave {len(first.tokens)} first tokens for {len(self._choices)} choices")
        self._live.prefilled(first.prefill_s, prefill_id, num_cached=first.num_cached)
        for choice, token in zip(self._choices, first.tokens, strict=True):
            self._live.deliver(choice, choice.num_committed, token)

    async def _follow(self, decode: DecodePeer, sequences: Sequences, prefill_id: MemberId | None) -> None:
        """Decode's tokens, until every sequence has ended."""
        decode_id = decode.member.id
        with leg(DECODE, decode_id):
            while sequences.live:
                match await sequences.next():
                    case Started() as started:
                        self._check_first_tokens(started, sequences, decode_id)
                        self._live.started(started, decode_id)
                    case Token(handle, index, token) if handle in sequences.live:
                        self._live.decoding()
                        self._live.deliver(self._owners[handle], index, token)
                        if token.finish_reason is not None:
                            decode.stream.release(sequences, handle)
                        self._cancel_ended(decode, sequences)
                    case Failed(reason, detail):
                        raise failed_sequences(reason, detail, prefill=prefill_id, decode=decode_id)
                    case Lost(detail):
                        raise WorkerLost(f"decode worker {decode_id.id} is lost: {detail}")

    def _check_first_tokens(self, started: Started, sequences: Sequences, decode_id: MemberId) -> None:
        """Decode goes on from what the client was given, or not at all."""
        for handle, token_id in zip(started.handles, started.first_tokens, strict=False):
            if handle in sequences.live and self._owners[handle].committed[-1] != token_id:
                delivered = self._owners[handle].committed[-1]
                error = InternalError(f"decode started from token {token_id}, the client was given {delivered}")
                raise AttemptFailed(DECODE, decode_id, FIRST_TOKEN_MISMATCH, error)

    def _cancel_ended(self, decode: DecodePeer, sequences: Sequences) -> None:
        """The worker does not know of choices that ended here: by a stop string, or with their first token."""
        ended = tuple(handle for handle in sequences.live if self._owners[handle].ended)
        if ended:
            decode.stream.cancel(sequences, ended)
