"""Admission of jobs and imported hand-offs as sequences that are decoded here, or their refusal. Pure. Owned by the
scheduler.
"""

from cluster.errors import DuplicateRequest, InternalError, QueueFull, TandemError
from cluster.fair_queue import has_place
from cluster.messages import NO_TENANT, DecodeJob
from cluster.protocol.hashing import NATIVE, BlockChain, NewChain
from engine.kv.block_pool import BlockPool
from engine.scheduling.batching.batch import Batch
from engine.scheduling.batching.reservations import BlockGrant, Reservations, block_request_of
from engine.scheduling.batching.sequences import Choices, LiveSequences
from engine.scheduling.commands import AdmitImported, Event, Failed, Reserve, Reserved, Unreservable
from engine.scheduling.export_waits import ExportWaits
from engine.scheduling.exports import TicketLeases
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.limits import SchedulerLimits


class SequenceAdmission:
    """`wire_dtype`: the data type in which KV is imported."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        batch: Batch,
        pool: BlockPool,
        reservations: Reservations,
        live: LiveSequences,
        leases: TicketLeases,
        new_chain: NewChain,
        wire_dtype: str,
        lengths: LengthPredictor | None,
    ) -> None:
        self._limits = limits
        self.max_queue = limits.max_queue
        self._batch = batch
        self._pool = pool
        self._reservations = reservations
        self._live = live
        self._new_chain = new_chain
        self._wire_dtype = wire_dtype
        self._lengths = lengths
        self._waits = ExportWaits(
            pool, leases=leases, reservations=reservations, batch=batch, num_watermark=limits.num_watermark_blocks
        )

    def reserve(self, command: Reserve, now_s: float) -> tuple[Event, ...]:
        refusal = self._limits.reservation_refusal(command.num_blocks)
        tenant, waiting = NO_TENANT if command.job is None else command.job.tenant, self._reservations.waiting_tenants
        if refusal is None and not has_place(tenant, waiting, self.max_queue):
            problem = f"{len(waiting)} hand-offs wait for blocks and --max-queue is {self.max_queue}"
            refusal = QueueFull(f"{problem}: try later")
        if refusal is not None:
            return (Unreservable(command.handoff_id, refusal),)
        request = block_request_of(command, self._live.next_arrival(), now_s, self._limits.block_size, self._lengths)
        self._reservations.add(request)
        return ()

    def grant_blocks(self, now_s: float) -> tuple[Event, ...]:
        """Answer the hand-offs that now get their blocks, and report how the others wait. Must not be called while a
        step is being planned."""
        granted = self._batch.grant_reservations(now_s)
        reserved = (Reserved(grant.request.handoff_id, grant.block_ids, grant.num_cached) for grant in granted)
        return (*reserved, *self._waits.events())

    def admit_imported(self, command: AdmitImported, now_s: float) -> tuple[Event, ...]:
        job, grant = command.job, self._reservations.pop_grant(command.handoff_id)
        if grant is None:
            return (_refused(job, InternalError(f"hand-off {command.handoff_id} has no blocks here")),)
        refusal = self._refusal(job) or self._limits.import_refusal(command, grant.block_ids)
        if refusal is None:
            chain = self._new_chain(job.cache_salt, self._wire_dtype)
            chain.hashes = list(grant.request.block_hashes)
            self._pool.mark_unverified(command.unverified)
            self._pool.keep(command.sealed_block_ids, chain.hashes, chain.parent_of(0))
            if any(token_id is not None for token_id in command.first_tokens):
                self._admit_choices(command, grant, chain, now_s)
        self._pool.drop_references(grant.block_ids)  # blocks that no sequence shares are now free, or cached
        return (_refused(job, refusal),) if refusal is not None else ()

    def admit_local(self, job: DecodeJob, now_s: float) -> tuple[Event, ...]:
        refusal, waiting = self._refusal(job), self._batch.waiting_tenants
        if refusal is None and not has_place(job.tenant, waiting, self.max_queue):
            refusal = QueueFull(f"{len(waiting)} sequences wait and --max-queue is {self.max_queue}: try later")
        if refusal is not None:
            return (_refused(job, refusal),)
        group = self._live.new_group(self._live.next_arrival(), job, now_s)
        fresh = tuple((i, start) for i, start in enumerate(job.sequences) if not start.committed_token_ids)
        alone: list[Choices] = [((i, start),) for i, start in enumerate(job.sequences) if start.committed_token_ids]
        if fresh and self._limits.fit_together(len(job.prompt_token_ids), len(fresh)):
            alone.insert(0, fresh)
        else:
            alone += [(choice,) for choice in fresh]
        for choices in alone:
            chain = self._new_chain(job.cache_salt, NATIVE)
            self._batch.add_waiting(self._live.new_sequence(group, choices, chain), now_s)
        return ()

    def _admit_choices(self, command: AdmitImported, grant: BlockGrant, chain: BlockChain, now_s: float) -> None:
        group = self._live.new_group(grant.request.number, command.job, now_s)
        for index, (start, first_token_id) in enumerate(zip(command.job.sequences, command.first_tokens, strict=True)):
            if first_token_id is None:
                continue
            sequence = self._live.new_sequence(group, ((index, start),), chain.copy())
            sequence.advance(len(sequence.token_ids))
            sequence.num_kept = len(command.sealed_block_ids)
            sequence.num_cached = grant.num_cached * self._limits.block_size
            sequence.token_ids.append(first_token_id)
            tail_ids = command.tail_block_ids[index : index + 1]
            sequence.block_ids = command.sealed_block_ids + tail_ids
            self._pool.add_references(sequence.block_ids)
            if self._pool.unverified_among(sequence.block_ids):
                self._pool.mark_unverified(tail_ids)  # its next tokens are computed from the other blocks
            self._batch.add_ready(sequence, now_s)

    def _refusal(self, job: DecodeJob) -> TandemError | None:
        refusal = self._limits.job_refusal(job)
        if refusal is None and any((job.router, start.handle) in self._live for start in job.sequences):
            refusal = DuplicateRequest("a handle of this job is in use")
        return refusal


def _refused(job: DecodeJob, error: TandemError) -> Failed:
    return Failed(job.router, tuple(start.handle for start in job.sequences), error)
