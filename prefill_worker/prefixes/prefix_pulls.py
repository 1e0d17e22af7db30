"""Prefixes on their way into this worker's cache: before a prompt is queued, what another worker has of it is pulled.

Lives on the event loop. Owns the pulls in progress; it is the importer's view of the block pool for them (kvtransfer's
BlockSource), and every call becomes a command to the step thread. A pull helps or does nothing: whatever fails or takes
longer than computing would, the prompt is computed.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import grpc

from cluster import holders
from cluster.clock import Clock
from cluster.errors import HandOffFailed, HandOffReason, TandemError
from cluster.messages import MemberId, PrefillJob
from cluster.observe.telemetry import Telemetry
from cluster.protocol.hashing import NATIVE, BlockChain, NewChain
from cluster.protocol.received import checked, malformed
from kvtransfer.importer.block_source import Reservation
from kvtransfer.importer.exporter_channels import ExporterChannels
from kvtransfer.importer.importer import Expected, Importer
from kvtransfer.importer.pairs import PairBook
from prefill_worker.prefixes.pull_choice import MIN_BLOCKS, Pull, PullFacts, choose_pull
from prefill_worker.scheduling import commands
from prefill_worker.scheduling.rates import RunningRate
from tandem.v1 import kv_pb2, kv_pb2_grpc

_LOG = logging.getLogger("tandem.prefill.pulls")
_LEAST_DEADLINE_S = 0.1  # a pull may always take so long, however fast computing is
_LEFT_ALONE_S = 10.0  # a holder that failed, or was late


@dataclass(frozen=True, slots=True)
class PullMeans:
    """What every pull of one worker uses."""

    member: MemberId
    importer: Importer
    pairs: PairBook
    channels: ExporterChannels
    block_size: int
    block_bytes: int  # as they travel
    new_chain: NewChain
    compute: RunningRate  # tokens
    pull_ids: Iterator[int]  # unique among all that reserve blocks for a prefix
    clock: Clock
    telemetry: Telemetry


class PrefixPulls:
    def __init__(self, means: PullMeans, post: Callable[[commands.Command], None]) -> None:
        """`post` reaches the step thread."""
        self._means = means
        self._post = post
        self._hashes: dict[int, tuple[bytes, ...]] = {}  # of the blocks of each pull in progress
        self._reservations: dict[int, asyncio.Future[Reservation]] = {}
        self._questions: dict[int, asyncio.Future[int]] = {}
        self._left_alone_until_s: dict[MemberId, float] = {}
        self._num_pulls = 0
        self._tokens_pulled = 0

    def figures(self) -> dict[str, float]:
        return {"prefixes_pulled": float(self._num_pulls), "tokens_pulled": float(self._tokens_pulled)}

    def owners(self) -> Iterator[str]:
        """Holders of blocks that live here."""
        return map(holders.hand_off, self._hashes)

    async def fetch(self, job: PrefillJob) -> int:
        """Brings what is worth it into the cache. Answers how many of the job's tokens came. Never raises for it."""
        job = self._with_usable_holders(job)
        if not job.prefix_holders:
            return 0
        chain = self._means.new_chain(job.cache_salt, NATIVE)
        chain.extend(job.token_ids)
        if len(chain.hashes) < MIN_BLOCKS:
            return 0
        pull = choose_pull(job, await self._facts(job, chain))
        return await self._within_its_worth(job, pull, chain) if pull is not None else 0

    def on_event(self, event: commands.PrefixFound | commands.PullReserved) -> None:
        """What the step thread answers."""
        if isinstance(event, commands.PrefixFound):
            self._on_found(event)
        else:
            self._on_reserved(event)

    async def reserve(self, handoff_id: int, num_blocks: int) -> Reservation:
        """Of a pull. Raises HandOffFailed."""
        hashes = self._hashes[handoff_id]
        assert len(hashes) == num_blocks, f"a pull of {len(hashes)} blocks asks for {num_blocks}"
        answer: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._reservations[handoff_id] = answer
        self._post(commands.ReservePull(handoff_id, hashes))
        try:
            return await answer
        finally:
            del self._reservations[handoff_id]

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        self._post(commands.DiscardPull(handoff_id, quarantined))

    def quiet(self, block_ids: frozenset[int]) -> None:
        self._post(commands.Quiet(block_ids))

    async def close(self) -> None:
        await self._means.channels.close()

    def _on_found(self, event: commands.PrefixFound) -> None:
        question = self._questions.get(event.question_id)
        if question is not None and not question.done():
            question.set_result(event.num_blocks)

    def _on_reserved(self, event: commands.PullReserved) -> None:
        reservation = self._reservations.get(event.pull_id)
        if reservation is None or reservation.done():
            return
        if event.block_ids is None:
            reservation.set_exception(HandOffFailed(HandOffReason.NOT_ENOUGH_BLOCKS, "no room for a prefix now"))
        else:
            reservation.set_result(Reservation(event.block_ids, event.num_cached))

    def _with_usable_holders(self, job: PrefillJob) -> PrefillJob:
        now_s = self._means.clock.now_s()
        self._left_alone_until_s = {m: until_s for m, until_s in self._left_alone_until_s.items() if until_s > now_s}
        usable = tuple(h for h in job.prefix_holders if h.member not in self._left_alone_until_s)
        return replace(job, prefix_holders=tuple(h for h in usable if h.member != self._means.member))

    async def _facts(self, job: PrefillJob, chain: BlockChain) -> PullFacts:
        figures = {holder.member: self._means.pairs.best(holder.member) for holder in job.prefix_holders}
        return PullFacts(
            block_size=self._means.block_size,
            block_bytes=self._means.block_bytes,
            num_here=await self._num_here(chain.hashes),
            compute_tokens_per_s=self._means.compute.per_s,
            pairs={member: figure for member, figure in figures.items() if figure is not None},
        )

    async def _num_here(self, hashes: Sequence[bytes]) -> int:
        question_id = next(self._means.pull_ids)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._questions[question_id] = answer
        self._post(commands.FindPrefix(question_id, tuple(hashes)))
        try:
            return await answer
        finally:
            del self._questions[question_id]

    async def _within_its_worth(self, job: PrefillJob, pull: Pull, chain: BlockChain) -> int:
        num_tokens, outcome = 0, "late"
        try:
            async with asyncio.timeout(max(pull.compute_s, _LEAST_DEADLINE_S)):
                num_tokens = await self._pull(job, pull, chain)
            outcome = "ok" if num_tokens else "gone"
            self._num_pulls += bool(num_tokens)
            self._tokens_pulled += num_tokens
        except TimeoutError:
            pass
        except TandemError as error:
            outcome = error.handoff_reason if isinstance(error, HandOffFailed) else error.reason
        except grpc.aio.AioRpcError:
            outcome = "unreachable"
        except Exception:  # noqa: BLE001 - a pull is best-effort: its failure is logged, and costs a miss
            outcome = "failed"
            _LOG.exception("request %s: a prefix was not pulled", job.request_id)
        if outcome not in ("ok", "gone", HandOffReason.NOT_ENOUGH_BLOCKS):
            self._left_alone_until_s[pull.holder.member] = self._means.clock.now_s() + _LEFT_ALONE_S
            _LOG.info("request %s: no prefix from %s: %s", job.request_id, pull.holder.member, outcome)
        self._means.telemetry.count("tandem_prefix_pulls_total", outcome=outcome)
        return num_tokens

    async def _pull(self, job: PrefillJob, pull: Pull, chain: BlockChain) -> int:
        """Raises HandOffFailed, MalformedMessage, AioRpcError."""
        means = self._means
        offer = await self._ask(job, pull, chain.hashes[: pull.num_blocks])
        if not offer.ticket:
            return 0
        if offer.num_blocks > pull.num_blocks:
            raise malformed(offer, f"num_blocks must be at most {pull.num_blocks}, not {offer.num_blocks}")
        hashes = tuple(chain.hashes[: offer.num_blocks])
        pull_id = next(self._means.pull_ids)
        self._hashes[pull_id] = hashes
        try:
            imported = await means.importer.import_blocks(
                handoff_id=pull_id,
                signed_ticket=offer.ticket,
                expected=Expected(len(hashes) * means.block_size, hashes[-1], num_choices=0),
                blocks=self,
            )
        finally:
            del self._hashes[pull_id]
        self._post(commands.AdmitPull(pull_id, chain.parent_of(0), hashes, imported.unverified_block_ids))
        return (len(hashes) - imported.num_cached) * means.block_size

    async def _ask(self, job: PrefillJob, pull: Pull, hashes: Sequence[bytes]) -> kv_pb2.OfferPrefixResponse:
        request = kv_pb2.OfferPrefixRequest(
            request_id=job.request_id,
            attempt=job.attempt,
            importer=str(self._means.member),
            block_hashes=b"".join(hashes),
            min_blocks=MIN_BLOCKS,
        )
        async with self._means.channels.use(pull.holder.address) as channel:
            offer: kv_pb2.OfferPrefixResponse = await kv_pb2_grpc.KvTransferStub(channel).OfferPrefix(
                request, timeout=job.timeout_s
            )
        return checked(offer)
