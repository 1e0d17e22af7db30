"""A ticket on its way to the decode worker on which its sequences will run: the one it was issued for or, where that
one refuses it, fails or is lost before they run, another one, for which it is issued anew.

Owns the decode leg until the sequences run, and gives the ticket back if they never do. Its prefill goes on meanwhile,
and is not repeated for as long as its worker keeps the blocks; after that it refuses, and there is only prefill.
docs/failover.md.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from cluster.errors import HandOffFailed, WorkerLost
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from cluster.protocol import tickets
from router.fleet.decode_peer import DecodePeer
from router.fleet.fleet import Fleet
from router.fleet.prefill_peer import PrefillPeer
from router.pipeline.decode_leg import DecodeLeg
from router.pipeline.failures import DECODE, AttemptFailed, leg
from router.pipeline.pair_trust import PairTrust
from router.pipeline.pairing import Pairing
from router.pipeline.setbacks import Setbacks
from router.request.choice import Choice
from router.request.live_request import LiveRequest
from router.running import running

_REISSUED = "ticket_reissued"


@dataclass(frozen=True, slots=True)
class ImporterMeans:
    """What a router needs to send tickets on."""

    router: MemberId
    key: bytes  # the cluster's, with which tickets are signed
    fleet: Fleet
    pairing: Pairing
    pairs: PairTrust
    telemetry: Telemetry


class Importing:
    """`async with` it; `take` the ticket, say when the `first_tokens` are delivered, wait for the `decoding` leg."""

    def __init__(
        self,
        live: LiveRequest,
        choices: Sequence[Choice],
        setbacks: Setbacks,
        decode: DecodePeer,
        exporter: MemberId,
        means: ImporterMeans,
    ) -> None:
        """`choices` have the same tokens so far, those that the prefill covers."""
        self._live = live
        self._choices = choices
        self._setbacks = setbacks
        self._exporter = exporter
        self._means = means
        self._committed = choices[0].committed
        self._first_tokens: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._legs = [self._leg_at(decode)]  # the last one counts; those before it are about to be closed
        self._first = decode.member.id
        self._tried = {self._first}
        self._exit = ExitStack()
        self._task: asyncio.Task[DecodeLeg] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for each in self._legs:
            each.close()
        self._exit.close()

    def take(self, ticket: bytes, attempt: int, prefill: PrefillPeer) -> None:
        """The prefill is queued: its ticket goes to the decode worker at once."""
        self._task = asyncio.create_task(self._import(ticket, attempt, prefill), name="import a ticket")

    def first_tokens(self) -> None:
        """The client has them."""
        self._first_tokens.set_result(None)

    async def decoding(self) -> DecodeLeg:
        """After both. Waits until the sequences run at a decode worker, or have ended. Raises AttemptFailed,
        TandemError."""
        assert self._task is not None, "no ticket was taken"
        return await self._task

    async def _import(self, ticket: bytes, attempt: int, prefill: PrefillPeer) -> DecodeLeg:
        taken = self._exit.enter_context(prefill.abandoned_unless_taken(ticket))
        while True:
            decoding = self._legs[-1]
            try:
                with self._means.pairs.trying(self._exporter, decoding.worker) as arrived:
                    await self._begin(decoding, ticket, attempt)
                    if decoding.sequences.started:
                        arrived()
                        taken()
                    return decoding
            except AttemptFailed as failure:
                ticket, attempt = await self._go_elsewhere(failure, ticket, prefill)

    async def _begin(self, decoding: DecodeLeg, ticket: bytes, attempt: int) -> None:
        job = self._live.decode_job(decoding.owners, self._committed, attempt, self._means.router, ticket)
        with leg(DECODE, decoding.worker):
            await self._unless_suspect(decoding.decode, decoding.decode.start(job))
        while len(self._legs) > 1:  # only now: an importer that is told to stop says that nobody needs the blocks
            self._legs.pop(0).close()
        with leg(DECODE, decoding.worker):
            await self._unless_suspect(decoding.decode, decoding.unless_failed(self._first_tokens))
            decoding.cancel_ended()
            await self._unless_suspect(decoding.decode, decoding.until_started())

    async def _unless_suspect(self, decode: DecodePeer, work: Coroutine[Any, Any, None]) -> None:
        """Raises WorkerLost where the importer is suspect and another one can have the ticket: that repeats no
        prefill, so it needs no hedge."""
        fleet = self._means.fleet
        async with running(work) as working:
            while not working.done():
                others = {load.member for load in fleet.decode_loads()} - {decode.member.id}
                if decode.num_missed and others - (self._tried if decode.num_missed == 1 else set()):
                    raise WorkerLost(f"decode worker {decode.member.id} does not answer, and another one does")
                async with running(fleet.changed()) as changed:
                    await asyncio.wait((working, changed), return_when=asyncio.FIRST_COMPLETED)
            working.result()

    async def _go_elsewhere(self, failure: AttemptFailed, ticket: bytes, prefill: PrefillPeer) -> tuple[bytes, int]:
        """Opens the next importer's leg. The ticket and the attempt for it. Raises `failure` where there is none."""
        if failure.lacks_ticket and len(self._tried) > 1:  # too late; its exporter is not to blame
            self._setbacks.forgive()
            raise AttemptFailed(failure.leg, self._first, failure.reason, failure.error) from failure
        decode = await self._another(failure, prefill)
        if decode is None:
            raise failure
        attempt = self._live.next_attempt()
        try:
            ticket = tickets.reissue(ticket, self._means.key, attempt=attempt, importer=decode.member.id)
        except HandOffFailed as error:  # another cluster's key
            raise failure from error
        self._setbacks.note(failure)
        self._live.ledger.reason(_REISSUED)
        self._live.dispatched(prefill=self._exporter, decode=decode.member.id)
        self._means.telemetry.count("tandem_tickets_reissued_total", leg=failure.leg, reason=failure.reason)
        self._tried.add(decode.member.id)
        self._legs.append(self._leg_at(decode))
        return ticket, attempt

    async def _another(self, failure: AttemptFailed, prefill: PrefillPeer) -> DecodePeer | None:
        """As long as its prefill goes on it is waited for."""
        if not (failure.leaves_ticket and self._setbacks.leave_two_tries(failure)):
            return None
        fleet = self._means.fleet
        while fleet.peer(self._exporter) is prefill:
            decode = self._means.pairing.importer(
                self._live, self._choices, prefill, num_committed=len(self._committed), besides=self._tried
            )
            if decode is not None or self._first_tokens.done():
                return decode
            changed = asyncio.ensure_future(fleet.changed())
            try:
                await asyncio.wait((changed, self._first_tokens), return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
        return None

    def _leg_at(self, decode: DecodePeer) -> DecodeLeg:
        return DecodeLeg(self._live, decode, self._choices, exporter=self._exporter)
