"""The exports of a worker, which leave it through tickets: leases of blocks, frozen sequences, and prompts that are
computed for export. Pure. Owned by the scheduler.

A ticket pins its blocks until it is released, even if its sequence ends. One block may belong to several tickets,
because the choices of one prompt share blocks and are frozen one by one.

An export waits, starts and is computed like a prompt that is decoded here. Its sealed blocks enter the prefix cache
too. It ends with the first token of each choice; its leases outlive it and end with Release.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    NotFound,
    QueueFull,
    TandemError,
)
from cluster.fair_queue import has_place
from cluster.messages import MAX_PREFILL_CHUNKS, ExportWait, PrefillJob, PromptLogprobs, SampledToken
from cluster.protocol.hashing import NATIVE, NewChain
from cluster.request_size import sealed_blocks, tail_length
from cluster.service_times import ServiceRate
from engine.kv.block_pool import BlockPool
from engine.scheduling.batching.batch import Batch
from engine.scheduling.batching.block_tables import BlockTables
from engine.scheduling.batching.chunks import finish_reason
from engine.scheduling.batching.sequences import Export, Group, LiveSequences, Sequence
from engine.scheduling.commands import (
    AdmitExport,
    Event,
    ExportAccepted,
    ExportFailed,
    ExportFinished,
    ExportRefused,
    Freeze,
    FreezeRefused,
    Frozen,
    Sealed,
    Tail,
    Thaw,
    Thawed,
    ThawRefused,
)
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.step import DrawnToken, ScoredTokens


class TicketLeases:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._tickets: dict[bytes, tuple[int, ...]] = {}
        self._waits: dict[bytes, ExportWait] = {}  # of the importers that have reported one

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket_id: bytes) -> bool:
        return ticket_id in self._tickets

    @property
    def ticket_ids(self) -> Iterable[bytes]:
        return self._tickets.keys()

    @property
    def leases(self) -> Counter[int]:
        """The number of leases per block."""
        return Counter(block_id for block_ids in self._tickets.values() for block_id in block_ids)

    def unverified(self, ticket_id: bytes) -> frozenset[int]:
        """Return the blocks of the ticket that are not verified."""
        return self._pool.unverified_among(self._tickets.get(ticket_id, ()))

    def lease(self, ticket_id: bytes, sequence: Sequence) -> tuple[tuple[int, ...], Tail | None]:
        """Lease the blocks with computed KV of a sequence. Return the sealed blocks and the tail."""
        assert ticket_id not in self._tickets, f"ticket {ticket_id.hex()} used twice"
        num_sealed = sealed_blocks(sequence.num_computed, self._block_size)
        num_valid = tail_length(sequence.num_computed, self._block_size)
        sealed_ids = sequence.block_ids[:num_sealed]
        tail = self.tail(sequence.block_ids[num_sealed], num_valid) if num_valid else None
        self._tickets[ticket_id] = sealed_ids if tail is None else (*sealed_ids, tail.block_id)
        self._pool.begin_lease(self._tickets[ticket_id])
        return sealed_ids, tail

    def tail(self, block_id: int, num_valid: int) -> Tail:
        return Tail(block_id, num_valid, is_unverified=bool(self._pool.unverified_among((block_id,))))

    def extend(self, ticket_id: bytes, block_ids: tuple[int, ...]) -> None:
        """Lease more blocks to the ticket of an export, in the order of its prompt."""
        self._pool.begin_lease(block_ids)
        self._tickets[ticket_id] = self._tickets.get(ticket_id, ()) + block_ids

    def lease_prefix(self, ticket_id: bytes, block_hashes: SequenceOf[bytes], min_blocks: int) -> tuple[int, ...]:
        """Lease the cached blocks of the longest known prefix of this chain. Return them, or () if they are fewer than
        `min_blocks`."""
        assert ticket_id not in self._tickets, f"ticket {ticket_id.hex()} used twice"
        block_ids = self._pool.find(block_hashes)
        if len(block_ids) < min_blocks:
            return ()
        self._tickets[ticket_id] = block_ids
        self._pool.lease_found(block_ids)
        return block_ids

    def lease_for_copy(self, ticket_id: bytes, block_hashes: SequenceOf[bytes], first: int) -> tuple[int, ...]:
        """Lease the cached blocks of this chain from index `first` on while they are copied. Return them."""
        assert ticket_id not in self._tickets, f"ticket {ticket_id.hex()} used twice"
        block_ids = self._tickets[ticket_id] = self._pool.find(block_hashes)[first:]
        self._pool.lease_copied(block_ids)
        return block_ids

    def release(self, ticket_id: bytes) -> None:
        """End the leases of a ticket. Does nothing for a ticket that leased nothing."""
        self._waits.pop(ticket_id, None)
        self._pool.end_lease(self._tickets.pop(ticket_id, ()))

    def record_wait(self, ticket_id: bytes, wait: ExportWait) -> None:
        self._waits[ticket_id] = wait

    def forget_waits(self) -> None:
        self._waits.clear()

    @property
    def wait_depths(self) -> set[int]:
        """The depths of the importers' waits. An importer that has reported none does not wait: 0."""
        return {0, *(wait.depth for wait in self._waits.values())}

    @property
    def wait_mark(self) -> int:
        """The greatest mark of the importers' waits."""
        return max((wait.mark for wait in self._waits.values()), default=0)

    def num_leased_beyond(self, depth: int) -> int:
        """Return the number of blocks that are leased to importers whose waits are deeper."""
        deeper = (ticket_id for ticket_id, wait in self._waits.items() if wait.depth > depth)
        return len({block_id for ticket_id in deeper for block_id in self._tickets.get(ticket_id, ())})


class SequenceFreezer:
    def __init__(self, batch: Batch, live: LiveSequences, leases: TicketLeases) -> None:
        self._batch = batch
        self._live = live
        self._leases = leases

    def freeze(self, command: Freeze, now_s: float) -> Event:
        sequence = self._live.get(command.router, command.handle)
        if sequence is None or not self._batch.can_freeze(sequence):
            return FreezeRefused(command.ticket_id, NotFound(f"sequence {command.handle} does not decode here"))
        self._batch.freeze(sequence, now_s)
        sealed_ids, tail = self._leases.lease(command.ticket_id, sequence)
        return Frozen(
            ticket_id=command.ticket_id,
            request_id=sequence.group.job.request_id,
            token_ids=tuple(sequence.token_ids[: sequence.num_computed]),
            last_token_id=sequence.token_ids[-1],
            num_output=sequence.num_output,
            sealed_block_ids=sealed_ids,
            tail=tail,
            unverified=self._leases.unverified(command.ticket_id),
        )

    def thaw(self, command: Thaw, now_s: float) -> Event:
        router, new_handle = command.router, command.new_handle
        sequence = self._live.get(router, command.handle)
        if sequence is None or not self._batch.is_frozen(sequence):
            return ThawRefused(router, new_handle, NotFound(f"sequence {command.handle} is not frozen here"))
        if (router, new_handle) in self._live:
            return ThawRefused(router, new_handle, DuplicateRequest(f"handle {new_handle} is in use"))
        self._batch.thaw(sequence, now_s)
        self._live.rename(sequence, new_handle)
        return Thawed(router, new_handle)


class PromptExports:
    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        batch: Batch,
        pool: BlockPool,
        tables: BlockTables,
        live: LiveSequences,
        leases: TicketLeases,
        new_chain: NewChain,
    ) -> None:
        self._limits = limits
        self.max_queue = limits.max_queue
        self._batch = batch
        self._pool = pool
        self._tables = tables
        self._live = live
        self._leases = leases
        self._new_chain = new_chain
        self._is_draining = False
        self._rate = ServiceRate()
        self._num_finished = 0
        self._num_failed = 0

    @property
    def figures(self) -> dict[str, int]:
        return {"prompts_done": self._num_finished, "prompts_failed": self._num_failed}

    def admit(self, command: AdmitExport, now_s: float) -> Event:
        ticket_id, job = command.ticket_id, command.job
        is_used = ticket_id in self._leases or self._live.get_export(ticket_id) is not None
        assert not is_used, f"ticket {ticket_id.hex()} used twice"
        refusal = self._refusal(job)
        if refusal is not None:
            return ExportRefused(ticket_id, refusal)
        wanted = job.num_prompt_logprobs
        export = Export(ticket_id, has_importer=job.importer is not None, num_prompt_logprobs=wanted)
        sequence = self._live.new_export(export, job, self._new_chain(job.cache_salt, NATIVE), now_s)
        self._batch.add_waiting(sequence, now_s)
        return ExportAccepted(ticket_id)

    def cancel(self, ticket_id: bytes) -> tuple[Event, ...]:
        return self._abort(ticket_id, Cancelled("the prefill was cancelled"))

    def drain(self) -> tuple[Event, ...]:
        """Refuse new exports from now on, and end those that have no blocks yet."""
        self._is_draining = True
        reason = Draining("this worker is draining and had not started this prefill; try another")
        return tuple(event for ticket_id in self._batch.waiting_exports() for event in self._abort(ticket_id, reason))

    def release(self, ticket_id: bytes) -> None:
        """End the leases of a ticket. An export that still waits or runs continues without an importer."""
        self._leases.release(ticket_id)
        sequence = self._live.get_export(ticket_id)
        if sequence is not None:
            export = _export(sequence)
            export.has_importer, export.num_leased = False, 0

    def start(self, sequence: Sequence, now_s: float) -> tuple[Event, ...]:
        """Announce the cached blocks of an export whose first step is being planned."""
        _export(sequence).started_s = now_s
        return self._seal(sequence, sequence.num_computed)

    def will_seal(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether computing that many tokens fills a block that an importer waits for."""
        export, end = sequence.group.export, sequence.num_computed + num_tokens
        return export is not None and export.has_importer and self._num_sealed(end) > export.num_leased

    def announce(self, sequence: Sequence, num_written: int) -> tuple[Event, ...]:
        """Announce the blocks that are full with `num_written` tokens, before the step that wrote them has ended."""
        return () if sequence.group.export is None or sequence.is_over else self._seal(sequence, num_written)

    def score(self, prompts: SequenceOf[tuple[Sequence, int]], first_place: int) -> tuple[ScoredTokens, ...]:
        """Return the tokens of these prompts, given with their numbers of tokens, that the step being planned scores.
        `first_place`: the place of the first prompt's chunk."""
        scored = (_scored(place, *prompt) for place, prompt in enumerate(prompts, first_place) if prompt[0].is_scored)
        return tuple(each for each in scored if each.token_ids)

    def record_scored(self, sequence: Sequence, logprobs: PromptLogprobs) -> None:
        """Keep the log-probabilities of a prompt that a step has computed."""
        _export(sequence).prompt_logprobs.append(logprobs)

    def advance(self, sequence: Sequence, drawn: tuple[DrawnToken, ...], now_s: float) -> tuple[Event, ...]:
        """Announce the blocks that a step has sealed and not announced. With the first tokens the export ends."""
        self._tables.cache_sealed(sequence)
        _note_chunk(sequence, now_s)
        sealed = self._seal(sequence, sequence.num_computed)
        return (*sealed, self._finish(sequence, drawn, now_s)) if drawn else sealed

    def fail(self, sequence: Sequence, error: TandemError) -> tuple[Event, ...]:
        return self._abort(_export(sequence).ticket_id, error)

    def expire(self, group: Group) -> tuple[Event, ...]:
        """End an export whose deadline has passed."""
        assert group.export is not None
        sequence, timeout_s = self._live.get_export(group.export.ticket_id), group.job.timeout_s
        assert sequence is not None
        if sequence.block_ids:
            progress = f"in prefill, after {sequence.num_computed} of {len(sequence.token_ids)} tokens"
        else:
            progress = "in the prefill queue"
        return self._abort(group.export.ticket_id, DeadlineExceeded(f"{timeout_s:.3g} s passed {progress}"))

    def _refusal(self, job: PrefillJob) -> TandemError | None:
        if self._is_draining:
            return Draining("this worker is draining; try another")
        refusal, waiting = self._limits.export_refusal(job), self._batch.waiting_tenants
        if refusal is None and not has_place(job.tenant, waiting, self.max_queue):
            refusal = QueueFull(
                f"{len(waiting)} sequences wait and --max-queue is {self.max_queue}: try later",
                retry_after_s=self._rate.retry_after_s(),
            )
        return refusal

    def _num_sealed(self, num_tokens: int) -> int:
        return sealed_blocks(num_tokens, self._limits.block_size)

    def _seal(self, sequence: Sequence, num_written: int) -> tuple[Event, ...]:
        """Lease and announce the blocks that were sealed since the last call, if an importer will come."""
        export, num_sealed = _export(sequence), self._num_sealed(num_written)
        first, newly_sealed = export.num_leased, sequence.block_ids[export.num_leased : num_sealed]
        if not export.has_importer or not newly_sealed:
            return ()
        self._leases.extend(export.ticket_id, newly_sealed)
        export.num_leased = num_sealed
        return (Sealed(export.ticket_id, first, newly_sealed, self._pool.unverified_among(newly_sealed)),)

    def _finish(self, sequence: Sequence, drawn: tuple[DrawnToken, ...], now_s: float) -> Event:
        export, group = _export(sequence), sequence.group
        tail = self._lease_tail(sequence, export)
        self._end(export.ticket_id)
        self._rate.note_end(now_s, now_s - group.admitted_s)
        self._num_finished += 1
        stops, num_output = group.job.stops, sequence.num_output + 1
        tokens = tuple(
            SampledToken(token.token_id, token.logprobs, finish_reason(stops, token.token_id, num_output))
            for token in drawn
        )
        return ExportFinished(
            ticket_id=export.ticket_id,
            tokens=tokens,
            tail=tail,
            num_cached=sequence.num_cached,
            queue_s=export.started_s - group.admitted_s,
            prefill_s=now_s - export.started_s,
            ended_s=now_s,
            chunks=tuple(export.chunks),
            prompt_logprobs=tuple(export.prompt_logprobs),
        )

    def _lease_tail(self, sequence: Sequence, export: Export) -> Tail | None:
        """Lease the partly filled last block. None: the prompt fills its last block, or no importer will come."""
        num_valid = tail_length(sequence.num_computed, self._limits.block_size)
        if not export.has_importer or not num_valid:
            return None
        self._leases.extend(export.ticket_id, sequence.block_ids[-1:])
        return self._leases.tail(sequence.block_ids[-1], num_valid)

    def _abort(self, ticket_id: bytes, error: TandemError) -> tuple[Event, ...]:
        """End an export that is not finished. Does nothing if it has ended."""
        if not self._end(ticket_id):
            return ()
        self._num_failed += 1
        return (ExportFailed(ticket_id, error),)

    def _end(self, ticket_id: bytes) -> bool:
        """Remove an export; its leases stay. Returns False if it had ended before."""
        sequence = self._live.end_export(ticket_id)
        if sequence is None:
            return False
        self._batch.remove(sequence)
        return True


def _note_chunk(sequence: Sequence, now_s: float) -> None:
    """Record the chunk of a prompt that a step computed. Beyond MAX_PREFILL_CHUNKS the last chunk grows."""
    export = _export(sequence)
    num_tokens = max(0, sequence.num_computed - max(export.num_noted, sequence.num_cached))
    export.num_noted = sequence.num_computed
    if len(export.chunks) == MAX_PREFILL_CHUNKS:
        num_tokens += export.chunks.pop()[0]
    export.chunks.append((num_tokens, now_s - export.started_s))


def _scored(place: int, sequence: Sequence, num_tokens: int) -> ScoredTokens:
    """Return the tokens that the next chunk of a prompt, at this place of a plan, has logits for and that no step has
    scored: a prompt that is computed again is not scored again."""
    export, first = _export(sequence), _export(sequence).num_scored
    assert export.num_prompt_logprobs is not None and sequence.num_computed < first
    end = min(sequence.num_computed + num_tokens + 1, sequence.group.num_prompt)
    export.num_scored = max(first, end)
    return ScoredTokens(place, first, tuple(sequence.token_ids[first : export.num_scored]), export.num_prompt_logprobs)


def _export(sequence: Sequence) -> Export:
    export = sequence.group.export
    assert export is not None
    return export
