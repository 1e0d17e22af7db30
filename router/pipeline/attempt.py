"""One try at both legs for choices of a request that have the same tokens so far.

Owns the calls and legs of the try: leaving it, however, cancels on every worker what has not ended. Raises
AttemptFailed where another try may help, and Overtaken where a hedge has its choices; it never tries again itself.
"""

from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.errors import InternalError
from cluster.messages import MemberId
from cluster.protocol.hashing import BlockChain
from router.fleet.decode_events import Move
from router.fleet.fleet import Fleet
from router.fleet.peer import Peer
from router.fleet.prefill_peer import FirstTokens
from router.fleet.prefix_beliefs import PrefixBeliefs
from router.pipeline.decode_leg import DecodeLeg
from router.pipeline.failures import DECODE, PREFILL, leg
from router.pipeline.hedges import Hedges, Overtaken
from router.pipeline.importing import ImporterMeans, Importing
from router.pipeline.migration import Migrations
from router.pipeline.setbacks import Setbacks
from router.request.choice import Choice
from router.request.live_request import LiveRequest
from router.running import branches

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class AttemptMeans:
    fleet: Fleet
    migrations: Migrations
    prefixes: PrefixBeliefs
    router: MemberId
    importers: ImporterMeans


class Attempt:
    def __init__(
        self,
        live: LiveRequest,
        choices: Sequence[Choice],
        setbacks: Setbacks,
        hedges: Hedges,
        means: AttemptMeans,
    ) -> None:
        self._live = live
        self._hedges = hedges
        self._choices = choices
        self._setbacks = setbacks
        self._fleet = means.fleet
        self._migrations = means.migrations
        self._prefixes = means.prefixes
        self._router = means.router
        self._importers = means.importers
        self._number = live.next_attempt()

    async def hand_over(self, prefill_id: MemberId, decode_id: MemberId) -> None:
        """Prefill there, decode here: both legs at once, the first token before the KV has arrived."""
        with leg(DECODE, decode_id):
            decode = self._fleet.decode(decode_id)
        importing = Importing(self._live, self._choices, self._setbacks, decode, prefill_id, self._importers)
        async with importing:
            self._live.dispatched(prefill=prefill_id, decode=decode_id)
            with leg(PREFILL, prefill_id):
                chain = self._chain(prefill_id, self._choices[0].committed)
                holders = self._prefixes.holders(chain, besides=prefill_id)
                job = self._live.prefill_job(self._choices, self._number, decode_id, holders)
                prefill = self._fleet.prefill(prefill_id)
                async with prefill.prefill(job) as call:
                    importing.take(await self._from(prefill, call.ticket()), self._number, prefill)
                    self._deliver_first(await self._from(prefill, call.first_tokens()), prefill_id)
                    self._prefixes.note(chain, prefill_id)
            if all(choice.ended for choice in self._choices):
                return
            importing.first_tokens()
            decoding = await self._from(prefill, importing.decoding())
            self._prefixes.note(chain, decoding.worker)
            await self._follow(decoding)
            self._note_outputs(decoding.worker)

    async def first_token_only(self, prefill_id: MemberId) -> None:
        """One token is missing: prefill gives it, and there is nothing to decode."""
        self._live.dispatched(prefill=prefill_id)
        with leg(PREFILL, prefill_id):
            job = self._live.prefill_job(self._choices, self._number, importer=None)
            prefill = self._fleet.prefill(prefill_id)
            async with prefill.prefill(job) as call:
                await self._from(prefill, call.ticket())
                self._deliver_first(await self._from(prefill, call.first_tokens()), prefill_id)

    async def on_decode(self, decode_id: MemberId) -> None:
        """Both legs on one worker."""
        with leg(DECODE, decode_id):
            decode = self._fleet.decode(decode_id)
            with DecodeLeg(self._live, decode, self._choices, exporter=None) as decoding:
                self._live.dispatched(decode=decode_id)
                committed = self._choices[0].committed
                job = self._live.decode_job(decoding.owners, committed, self._number, self._router, None)
                await self._from(decode, decode.start(job))
                await self._follow(decoding)
                self._note_outputs(decode_id)

    def _chain(self, worker: MemberId, committed: tuple[int, ...]) -> BlockChain:
        request = self._live.request
        return self._prefixes.chain(worker, request.prompt_token_ids + committed, request.cache_salt)

    def _note_outputs(self, decode_id: MemberId) -> None:
        """The next turn of a conversation begins with these. The last token's KV was never computed."""
        for choice in self._choices:
            self._prefixes.note(self._chain(decode_id, choice.committed[:-1]), decode_id)

    def _deliver_first(self, first: FirstTokens, prefill_id: MemberId) -> None:
        if len(first.tokens) != len(self._choices):
            raise InternalError(f"prefill gave {len(first.tokens)} first tokens for {len(self._choices)} choices")
        self._live.prefilled(first, prefill_id)
        for choice, token in zip(self._choices, first.tokens, strict=True):
            self._live.deliver(choice, choice.num_committed, token)

    async def _follow(self, decode: DecodeLeg) -> None:
        """Until every sequence has ended, wherever it was moved."""
        with ExitStack() as parted:  # holds those whose task never got to run
            async with branches() as travels:
                while (move := await self._followed(decode)) is not None:
                    travels.create_task(self._travel(parted.enter_context(decode.part(move.handle)), move))

    async def _travel(self, decode: DecodeLeg, move: Move | None) -> None:
        """One sequence, from worker to worker as it is told."""
        try:
            while move is not None:
                decode = await self._migrations.carry(self._live, decode, move)
                move = await self._followed(decode)
        finally:
            decode.close()

    async def _followed(self, decode: DecodeLeg) -> Move | None:
        """None: every sequence of the leg has ended, there or by a hedge."""
        live_choices = [decode.owners[handle] for handle in decode.sequences.live]
        try:
            return await self._hedges.unless_overtaken(self._live, live_choices, decode.decode, decode.follow())
        except Overtaken as overtaken:
            decode.close()
            self._setbacks.note_hedged(overtaken.name, overtaken.failure)
            await overtaken.end()
            return None

    async def _from(self, peer: Peer, work: Coroutine[Any, Any, Answer]) -> Answer:
        """What all choices wait for. Raises Overtaken."""
        return await self._hedges.unless_overtaken(self._live, self._choices, peer, work)
