"""An attempt at both legs for choices of a request that have the same committed tokens. `Attempt` owns the calls and
legs of the attempt; leaving it in any way cancels all sequences that have not ended, on every worker. It raises
AttemptFailed where another attempt may help, and Overtaken where a hedge has taken over its choices. It never retries
by itself, with one exception: `TicketImport` gives a ticket that one decode worker could not import to another decode
worker, so that the prefill is not repeated. docs/failover.md.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from cluster.auth.keys import ClusterKeys
from cluster.errors import HandOffFailed, WrongTokens
from cluster.messages import DecodeJob, MemberId
from cluster.observe.telemetry import Telemetry
from cluster.outstanding_work import PromptWork
from cluster.protocol import tickets
from cluster.protocol.hashing import BlockChain, pack_ids
from router.fleet.decode_events import MoveRequest
from router.fleet.fleet import Fleet
from router.fleet.peer import FirstTokens, Peer, PrefillCall
from router.fleet.prefix_locator import PrefixLocator
from router.pipeline.decode_leg import DecodeLeg
from router.pipeline.failures import DECODE, PREFILL, AttemptFailed, RetryBudget, leg
from router.pipeline.hedges import Hedges, Overtaken, PendingLeg
from router.pipeline.migration import Migrations
from router.pipeline.worker_choice import PairHealth, WorkerChoice
from router.request.admitted_request import AdmittedRequest
from router.request.choice import Choice
from router.running import branches, end, first_done

_REISSUED = "ticket_reissued"
_SUSPECT = "does not answer, and another one does"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext:
    """The parts of a router that all its attempts share."""

    keys: ClusterKeys  # sign tickets
    fleet: Fleet
    migrations: Migrations
    prefixes: PrefixLocator
    worker_choice: WorkerChoice
    pairs: PairHealth
    telemetry: Telemetry


class TicketImport:
    """Brings a ticket to the decode worker that will run its sequences, and to another one if that fails.

    Use it with `async with`: call `begin` with the ticket, `first_tokens_delivered` when the client has the first
    tokens, then await `running_leg`. It owns the decode leg until the sequences run, and abandons the ticket if they
    never do. The prefill continues meanwhile."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        choices: Sequence[Choice],
        retry_budget: RetryBudget,
        decode: Peer,
        exporter: MemberId,
        context: AttemptContext,
    ) -> None:
        """`choices` have the same committed tokens, which the prefill covers."""
        self._admitted = admitted
        self._choices = choices
        self._retry_budget = retry_budget
        self._exporter = exporter
        self._context = context
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
            await end(self._task)
        for each in self._legs:
            each.close()
        self._exit.close()

    def begin(self, ticket: bytes, attempt: int, prefill: Peer) -> None:
        """The prefill is queued: send its ticket to the decode worker at once."""
        self._task = asyncio.create_task(self._import(ticket, attempt, prefill), name="import a ticket")

    def first_tokens_delivered(self) -> None:
        """Record that the client has the first tokens."""
        self._first_tokens.set_result(None)

    def running_leg(self) -> "asyncio.Task[DecodeLeg]":
        """Return the task that waits until the sequences run at a decode worker, or have ended. Await it last. It
        raises AttemptFailed, TandemError."""
        assert self._task is not None, "no ticket was taken"
        return self._task

    async def _import(self, ticket: bytes, attempt: int, prefill: Peer) -> DecodeLeg:
        taken = self._exit.enter_context(prefill.abandoned_unless_imported(ticket))
        while True:
            decoding = self._legs[-1]
            try:
                with self._context.pairs.attempting(self._exporter, decoding.worker) as arrived:
                    await self._run(decoding, ticket, attempt)
                    if decoding.sequences.started:
                        arrived()
                        taken()
                    return decoding
            except AttemptFailed as failure:
                ticket, attempt = await self._go_elsewhere(failure, ticket, prefill)

    async def _run(self, decoding: DecodeLeg, ticket: bytes, attempt: int) -> None:
        job = self._admitted.decode_job(decoding.owners, self._committed, attempt, ticket)
        with leg(DECODE, decoding.worker):
            await self._unless_suspect(decoding.decode, self._start(decoding, job))

    async def _start(self, decoding: DecodeLeg, job: DecodeJob) -> None:
        await decoding.decode.start(job)
        while len(self._legs) > 1:  # only now: a cancelled importer settles its hand-off as unneeded
            self._legs.pop(0).close()
        await decoding.unless_failed(self._first_tokens)
        decoding.cancel_ended()
        await decoding.until_started()

    async def _unless_suspect(self, decode: Peer, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`. Raises the error of the importer's loss once the importer is suspect and another worker can
        import the ticket. This repeats no prefill, so no hedge is needed."""
        if self._is_replaceable(decode):
            work.close()
            raise decode.loss(_SUSPECT)
        loop, until_suspect = asyncio.get_running_loop(), asyncio.timeout(None)

        def look() -> None:
            if not until_suspect.expired() and self._is_replaceable(decode):
                until_suspect.reschedule(loop.time())

        try:
            async with until_suspect:
                with self._context.fleet.changes.calling(look):
                    await work
        except TimeoutError as error:
            if not until_suspect.expired():
                raise
            raise decode.loss(_SUSPECT) from error

    def _is_replaceable(self, decode: Peer) -> bool:
        """Return whether the importer has missed a health check and another worker can import the ticket."""
        tried = self._tried if decode.num_missed == 1 else set()
        return bool(decode.num_missed and self._others(decode) - tried)

    def _others(self, decode: Peer) -> set[MemberId]:
        """Return the other workers that may decode."""
        return {load.member for load in self._context.fleet.decode_loads()} - {decode.member.id}

    async def _go_elsewhere(self, failure: AttemptFailed, ticket: bytes, prefill: Peer) -> tuple[bytes, int]:
        """Open a leg at another importer and return the reissued ticket and its attempt. Raises `failure` if there is
        no other."""
        if failure.lacks_ticket and len(self._tried) > 1:  # too late; its exporter is not to blame
            self._retry_budget.refund()
            raise AttemptFailed(failure.leg, self._first, failure.reason, failure.error) from failure
        decode = await self._another(failure, prefill)
        if decode is None:
            raise failure
        attempt = self._admitted.next_attempt()
        try:
            ticket = tickets.reissue(ticket, self._context.keys, attempt=attempt, importer=decode.member.id)
        except HandOffFailed as error:  # another cluster's key
            raise failure from error
        self._retry_budget.record_failure(failure)
        self._admitted.account.add_reason(_REISSUED)
        self._retry_budget.explain(_REISSUED)
        self._admitted.dispatched(prefill=self._exporter, decode=decode.member.id)
        self._context.telemetry.count("tandem_tickets_reissued_total", leg=failure.leg, reason=failure.reason)
        self._tried.add(decode.member.id)
        self._legs.append(self._leg_at(decode))
        return ticket, attempt

    async def _another(self, failure: AttemptFailed, prefill: Peer) -> Peer | None:
        """Choose another importer. While the prefill runs, this waits for one. If the link failed, it waits until the
        exporter has answered a health check: a ticket of a lost exporter would fail at every importer."""
        if not (failure.leaves_ticket and self._retry_budget.leaves_two_attempts_after(failure)):
            return None
        fleet, num_cleared = self._context.fleet, prefill.num_cleared
        if failure.is_of_pair:
            prefill.suspect()
        while fleet.peer(self._exporter) is prefill:
            waits: set[asyncio.Future[None]] = {fleet.changes.next()}
            if not failure.is_of_pair or prefill.num_cleared > num_cleared:
                decode = self._context.worker_choice.choose_importer(
                    self._admitted, self._choices, prefill, num_committed=len(self._committed), besides=self._tried
                )
                if decode is not None or self._first_tokens.done():
                    return decode
                waits.add(self._first_tokens)
            await first_done(*waits)
        return None

    def _leg_at(self, decode: Peer) -> DecodeLeg:
        return DecodeLeg(self._admitted, decode, self._choices, exporter=self._exporter)


Answer = TypeVar("Answer")


class Attempt:
    """An attempt to serve choices of a request. Exactly one of its public methods is called, once."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        choices: Sequence[Choice],
        retry_budget: RetryBudget,
        hedges: Hedges,
        context: AttemptContext,
    ) -> None:
        self._admitted = admitted
        self._hedges = hedges
        self._choices = choices
        self._retry_budget = retry_budget
        self._fleet = context.fleet
        self._migrations = context.migrations
        self._prefixes = context.prefixes
        self._context = context
        self._number = admitted.next_attempt()

    async def hand_over(self, prefill_id: MemberId, decode_id: MemberId) -> None:
        """Prefill on one worker and decode on another: both legs run at once, and the first token precedes the KV."""
        with leg(DECODE, decode_id):
            decode = self._fleet.connected_peer(decode_id)
        ticket_import = TicketImport(
            self._admitted, self._choices, self._retry_budget, decode, prefill_id, self._context
        )
        async with ticket_import:
            self._admitted.dispatched(prefill=prefill_id, decode=decode_id)
            with leg(PREFILL, prefill_id):
                chain = self._chain(prefill_id, self._choices[0].committed)
                num_blocks = self._prefixes.leading_blocks(chain)
                sources = self._prefixes.sources(num_blocks, puller=prefill_id)
                num_cached = self._prefixes.num_cached(num_blocks, prefill_id)
                job = self._admitted.prefill_job(self._choices, self._number, decode_id, sources, num_cached)
                prefill = self._fleet.connected_peer(prefill_id)
                with prefill.prefill(job) as call:
                    begin = partial(ticket_import.begin, attempt=self._number, prefill=prefill)
                    first = await self._from(PREFILL, prefill, _first_tokens(call, begin))
                    self._deliver_first(first, prefill_id)
            if all(choice.ended for choice in self._choices):
                self._prefixes.note_routed(chain, prefill_id)
                return
            self._prefixes.note_routed(chain, prefill_id, decode_id)
            ticket_import.first_tokens_delivered()
            decoding = await self._from(PREFILL, prefill, ticket_import.running_leg())
            if decoding.worker != decode_id:
                self._prefixes.note_routed(chain, decoding.worker)
            await self._follow(decoding)
            self._note_outputs(decoding.worker)

    async def first_token_only(self, prefill_id: MemberId) -> None:
        """Serve a request that lacks one token, or whose prompt is to be scored by a worker that then decodes: prefill
        samples the token, and nothing is decoded."""
        self._admitted.dispatched(prefill=prefill_id)
        with leg(PREFILL, prefill_id):
            job = self._admitted.prefill_job(self._choices, self._number, importer=None)
            prefill = self._fleet.connected_peer(prefill_id)
            with prefill.prefill(job) as call:
                first = await self._from(PREFILL, prefill, _first_tokens(call, lambda ticket: None))
                self._deliver_first(first, prefill_id)

    async def on_decode(self, decode_id: MemberId) -> None:
        """Run both legs on one decode worker."""
        with leg(DECODE, decode_id):
            decode = self._fleet.connected_peer(decode_id)
            committed = self._choices[0].committed
            chain = self._chain(decode_id, committed)
            num_tokens = len(self._admitted.request.prompt_token_ids) + len(committed)
            num_cached = self._prefixes.num_cached(self._prefixes.leading_blocks(chain), decode_id)
            prompt = PromptWork.of(num_tokens, num_cached)
            with DecodeLeg(self._admitted, decode, self._choices, exporter=None, prompt=prompt) as decoding:
                self._admitted.dispatched(decode=decode_id)
                job = self._admitted.decode_job(decoding.owners, committed, self._number, None, num_cached)
                await self._from(DECODE, decode, decode.start(job))
                await self._follow(decoding)
                self._note_outputs(decode_id)

    def _chain(self, worker: MemberId, committed: tuple[int, ...]) -> BlockChain:
        packed = self._admitted.request.packed_prompt + pack_ids(committed)
        return self._prefixes.chain(worker, packed, self._admitted.chains)

    def _note_outputs(self, decode_id: MemberId) -> None:
        """Record in the prefix locator that the worker has the KV of the outputs, with which the next turn of a
        conversation starts. The KV of the last token was never computed."""
        for choice in self._choices:
            self._prefixes.note_routed(self._chain(decode_id, choice.committed[:-1]), decode_id)

    def _deliver_first(self, first: FirstTokens, prefill_id: MemberId) -> None:
        if len(first.tokens) != len(self._choices):
            raise WrongTokens(f"prefill gave {len(first.tokens)} first tokens for {len(self._choices)} choices")
        received_s = self._admitted.prefilled(first, prefill_id)
        for choice, token in zip(self._choices, first.tokens, strict=True):
            self._admitted.deliver(choice, choice.num_committed, token, received_s)

    async def _follow(self, decode: DecodeLeg) -> None:
        """Deliver tokens until every sequence has ended, wherever it was moved."""
        if (move := await self._followed(decode)) is None:  # of most requests
            return
        with ExitStack() as parted:  # holds those whose task never got to run
            async with branches() as travels:
                while move is not None:
                    travels.create_task(self._travel(parted.enter_context(decode.split(move.handle)), move))
                    move = await self._followed(decode)

    async def _travel(self, decode: DecodeLeg, move: MoveRequest | None) -> None:
        """Follow one sequence from worker to worker."""
        try:
            while move is not None:
                decode = await self._migrations.carry(self._admitted, decode, move)
                move = await self._followed(decode)
        finally:
            decode.close()

    async def _followed(self, decode: DecodeLeg) -> MoveRequest | None:
        """Deliver tokens until a sequence is to be moved. Returns None when every sequence of the leg has ended, or a
        hedge has ended it."""
        live_choices = [decode.owners[handle] for handle in decode.sequences.live]
        try:
            pending = PendingLeg(DECODE, decode.decode)
            return await self._hedges.unless_overtaken(self._admitted, live_choices, pending, decode.follow())
        except Overtaken as overtaken:
            decode.close()
            self._retry_budget.record_hedge(overtaken.name, overtaken.failure)
            await overtaken.end()
            return None

    async def _from(
        self, leg_name: str, peer: Peer, work: "Coroutine[Any, Any, Answer] | asyncio.Task[Answer]"
    ) -> Answer:
        """Await an answer for which all choices wait. Raises Overtaken."""
        return await self._hedges.unless_overtaken(self._admitted, self._choices, PendingLeg(leg_name, peer), work)


async def _first_tokens(call: PrefillCall, begin: Callable[[bytes], None]) -> FirstTokens:
    """Wait for the first tokens of a prefill. Calls `begin` with its ticket first."""
    begin(await call.ticket())
    return await call.first_tokens()
