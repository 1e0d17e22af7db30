"""The rules by which sequences get slots and blocks, and by which they are preempted. Pure. Owned by the scheduler.

The batch owns the queues of sequences. It never sees a command or an event. A *slot* is one of the `max_num_seqs`
places in a step; a sequence uses one per choice, and an export uses one.

A sequence is in exactly one state:

* *running*: it has blocks and slots;
* *ready*: it has blocks and waits for slots (a finished import, a thawed sequence, or one that lost its slots);
* *waiting*: it has no blocks. It is new, or it was preempted; then its KV is in the swap space or is recomputed;
* *frozen*: it has blocks, uses no slot, and may continue on another worker.

Sequences and hand-offs are ordered by rank: the batch class ranks after everything else, then the tenants' fair queue
decides, then the policy (by default the earlier arrival ranks first). The sequence that ranks first is served first.

1. **Hand-offs.** A hand-off reserves all its blocks at once or waits. Cached blocks of its prompt are shared and not
   counted. The watermark must remain available for sequences that grow.
2. **Start.** A waiting sequence gets the blocks of all its known tokens at once or waits. The predicted growth of the
   sequences that have blocks must remain available. The choices of one prompt share its blocks until its last chunk.
3. **Growth.** A decoding sequence gets one more block when it crosses a block boundary. If none is available, the last
   in rank of the running and ready sequences is preempted, again and again until there is a block. If the sequence
   that wants to grow is itself the last, it skips steps and keeps its blocks until others free some or preempt it.
4. **Preemption for waiting work.** If the policy is preemptive, the last sequence is of the batch class, or tenants
   compete, waiting work that ranks before running sequences takes their slots and, if memory is short, their blocks.
   This happens before the step is planned.
5. **Exports.** An export may lose its slot, and is passed over while prompts that rank before it use the step's
   budget, but it keeps its blocks: they are leased as they are sealed, and an importer may read them.
6. **Freezing.** A frozen sequence keeps its blocks and gives up its slots. When it is thawed, it is ready.

There is no deadlock. In every plan the first in rank can get every block except those of exports, of frozen sequences,
of hand-offs in progress in either direction and of quarantine; these are freed without waiting for anything here but a
slot, and a sequence that cannot grow gives up its slot to an export. Two kinds may wait for another worker that waits
for this one: hand-offs whose exporter has not begun to compute, and exports on a worker that also imports. So these
together leave enough blocks for the longest hand-off whose exporter computes. A single export starts even if it leaves
less, because other workers may wait for it; such hand-offs leave room for it beforehand. In a pool of less than two
longest sequences such a wait may still arise, and export_waits.py ends it. A job that does not fit into the whole pool
is refused at admission.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable

from cluster.fair_queue import FairQueue
from cluster.messages import Role, TenantShare
from engine.kv.block_pool import BlockPool, BlockState
from engine.scheduling.batching.block_tables import BlockTables, SwapSpace
from engine.scheduling.batching.preemption import ExportRoom, Preemption, Watermark
from engine.scheduling.batching.queues import Ranking, SequenceQueues, prompt_cost
from engine.scheduling.batching.reservations import BlockGrant, BlockRequest, Reservations
from engine.scheduling.batching.sequences import Sequence
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import Policy
from engine.scheduling.step import ChunkBudget, PromptTime

# Called with a function that returns how many seconds the oldest prompt has waited, and its number of tokens; returns
# None for no limit.
NewPromptTime = Callable[[Callable[[], tuple[float, int]]], PromptTime | None]


class Batch:
    """The queues of sequences and the rules above. The scheduler shares the pool, the tables, the reservations and the
    swap space with it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        pool: BlockPool,
        swaps: SwapSpace,
        tables: BlockTables,
        reservations: Reservations,
        policy: Policy,
        tenants: FairQueue,
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._swaps = swaps
        self._tables = tables
        self._reservations = reservations
        self._tenants = tenants
        self._ranking = Ranking(policy, tenants)
        self._queues = SequenceQueues(self._ranking, reservations, limits.max_num_seqs)
        self.export_room = ExportRoom(self._queues, tables, pool, reservations)
        self._watermark = Watermark(limits, self._queues, tables, self.export_room)
        self._preemption = Preemption(
            self._ranking, self._queues, tables, pool, reservations, self._watermark, self.export_room
        )
        self._ended_in_flight: set[Sequence] = set()  # ended, but a step in flight writes to their blocks
        self._lacked_room_s = -math.inf  # when prompts last waited for blocks or slots, not for their part of a step

    @property
    def num_waiting(self) -> int:
        return self._queues.waiting.num_slots + self._queues.ready.num_slots

    @property
    def waiting_tenants(self) -> list[TenantShare]:
        """The tenant of each waiting sequence, once for each slot that it needs."""
        waiting = (*self._queues.waiting.in_any_order, *self._queues.ready)
        return [sequence.group.job.tenant for sequence in waiting for _ in range(sequence.num_slots)]

    @property
    def num_spare_blocks(self) -> int:
        """Available blocks above the watermark; 0 if a sequence or a hand-off waits for blocks."""
        if len(self._queues.waiting) or self._reservations.num_waiting:
            return 0
        return max(0, self._pool.num_available - self._limits.num_watermark_blocks)

    def figures(self, now_s: float) -> dict[str, int]:
        return {
            "running": self._queues.running.num_slots,
            "waiting": self.num_waiting,
            "frozen": len(self._queues.frozen),
            "handoffs_waiting": self._reservations.num_waiting,
            "preemptions": self._preemption.preemptions,
            "preemptions_last_minute": self._preemption.num_last_minute(now_s),
            "displaced": self._preemption.displaced,
            "tokens_cached": self._tables.tokens_cached,
            "evicted_blocks": self._pool.num_evicted,
            **self._swaps.figures,
        }

    def add_ready(self, sequence: Sequence, now_s: float) -> None:
        """Add a sequence that holds a reference to each of its blocks."""
        self._queues.add_ready(sequence, now_s)

    def add_waiting(self, sequence: Sequence, now_s: float) -> None:
        self._queues.add_waiting(sequence, now_s)

    @property
    def num_blocks_waited_for(self) -> int:
        """The number of blocks that waiting sequences and hand-offs need."""
        return (
            sum(map(self._tables.num_needed, self._queues.waiting.in_any_order))
            + self._reservations.num_blocks_waited_for
        )

    def set_role(self, role: Role) -> None:
        """Let exports and hand-offs leave room for each other as a worker of this role must."""
        self.export_room.expects_imports = role.decodes
        self._reservations.leaves_room_for_export = role.decodes and role.prefills

    def waiting_exports(self) -> list[bytes]:
        """Return the tickets of exports that have no blocks yet."""
        exports = (sequence.group.export for sequence in self._queues.waiting)
        return [export.ticket_id for export in exports if export is not None]

    def grant_reservations(self, now_s: float) -> list[BlockGrant]:
        """Give hand-offs their blocks, in rank order, while the pool has enough. Must not be called while a step is
        being planned: the blocks that the step swaps out are not copied yet."""
        if not self._reservations.num_waiting:
            return []
        if self._ranking.orders_tenants:
            self._queues.sort(now_s)
        else:
            self._reservations.sort(self._ranking.request_rank, now_s)
        granted = self._reservations.grant(self._watermark.for_handoff)
        self._tables.tokens_cached += sum(grant.num_cached for grant in granted) * self._limits.block_size
        return granted

    def num_needed_before(self, request: BlockRequest) -> int:
        """Return the most blocks that one sequence needs which goes before this waiting hand-off: a waiting one that
        ranks before it, or one that cannot grow and keeps its blocks."""
        before = itertools.takewhile(lambda sequence: sequence.rank < request.rank, self.export_room.waiting())
        needs = [self._tables.num_newly_used(sequence) for sequence in before]
        last = self._queues.last_preemptible
        if last is not None and self._preemption.is_stalled(last):
            held = [block_id for block_id in last.block_ids if self._pool.state(block_id) is not BlockState.LEASED]
            needs.append(len(held) + len(last.spare_ids) + self._tables.num_lacking(last))
        return max(needs, default=0)

    def begin_step(self, now_s: float) -> None:
        """Sort the queues by the ranks at `now_s`, preempt for waiting work, and give slots to ready sequences."""
        self._queues.sort(now_s)
        num_promised = self._preemption.preempt_for_waiting(now_s)
        if len(self._queues.ready):
            self._join_ready(num_promised, now_s)

    def decoding(self, now_s: float) -> list[Sequence]:
        """Return the running sequences with one token to compute. Each has the block for that token's KV."""
        decoding = []
        # In rank order, so that a preempted sequence always ranks after all that were examined before. It has no blocks
        # when its turn comes.
        for sequence in tuple(self._queues.running):
            decodes = sequence.num_left == 1 and sequence.block_ids and sequence.group.export is None
            if decodes and self._preemption.grow(sequence, now_s):
                decoding.append(sequence)
        return decoding

    def resume_swapped(self, now_s: float) -> list[Sequence]:
        """Start the leading waiting sequences that were swapped out while they decoded. They decode in this step and
        use nothing of the prompts' budget."""
        resumed = []
        while (sequence := self.export_room.first_waiting) is not None:
            if sequence.swapped is None or sequence.num_left > 1 or self._start_waiting(now_s) is not sequence:
                break
            resumed.append(sequence)
        return resumed

    def prompt_parts(self, budget: ChunkBudget, prompt_time: NewPromptTime, now_s: float) -> list[tuple[Sequence, int]]:
        """Divide the step's remaining budget among prompts: running ones in rank order, each after the waiting ones
        that go before it. Return each with its number of tokens. Waiting sequences that get tokens start to run.
        `prompt_time` is called if there are prompts, and limits them."""
        # The last token of an export is a prompt's too; that of a sequence decoded here is computed like a decode.
        running = deque(
            s for s in self._queues.running if s.num_left > 1 or (s.group.export is not None and s.num_left)
        )
        parts: list[tuple[Sequence, int]] = []
        passed_over: list[Sequence] = []
        if not running and not len(self._queues.waiting):
            return parts
        waiting = self._queues.waiting.in_any_order
        budget.limit_prompts(prompt_time(lambda: self._oldest((*running, *waiting), now_s)))
        while budget.has_room_for_prompts and (sequence := self._next_prompt(running, now_s)) is not None:
            take = budget.take_for_scored_prompt if sequence.is_scored else budget.take_for_prompt
            if num_tokens := take(sequence.num_left, sequence.num_computed):
                sequence.run(now_s)
                parts.append((sequence, num_tokens))
            else:
                passed_over.append(sequence)
        for sequence in (*passed_over, *running):
            sequence.wait(now_s)
        if budget.has_room_for_prompts and len(self._queues.waiting):
            self._lacked_room_s = now_s
        return parts

    def charge(self, decoding: list[Sequence], prompts: list[tuple[Sequence, int]]) -> None:
        """Charge tenants for a step: its decodes, and its prompts, each with its number of tokens. What is computed
        again after a preemption costs nothing."""
        for sequence, num_tokens in prompts:
            cost = prompt_cost(max(0, sequence.num_computed + num_tokens - sequence.num_done))
            sequence.charged += cost
            self._tenants.charge(sequence.group.job.tenant, cost)
        if self._tenants.is_contended:
            for sequence in decoding:
                self._tenants.charge(sequence.group.job.tenant, 1.0)
        elif decoding:
            self._tenants.charge(decoding[0].group.job.tenant, float(len(decoding)))

    def split_choices(self, sequence: Sequence, new_number: Callable[[], int], now_s: float) -> list[Sequence]:
        """Split a sequence into one running sequence per choice, all on the same blocks. Each but the first has a spare
        block for a copy of the tail. Return all of them."""
        others = self._tables.split_choices(sequence, new_number)
        for other in others:
            self._queues.add_running(other, now_s)
        return [sequence, *others]

    def can_freeze(self, sequence: Sequence) -> bool:
        """Return whether the sequence can be frozen: it decodes, no step in flight contains it, and it shares its tail
        block with no other choice."""
        is_between_tokens = sequence.num_left == 1 and sequence.num_output > 0
        is_settled = not sequence.spare_ids and not sequence.num_steps_in_flight
        return sequence in self._queues.running and sequence.has_run and is_between_tokens and is_settled

    def freeze(self, sequence: Sequence, now_s: float) -> None:
        """Exclude the sequence from steps until `thaw`. It must satisfy `can_freeze`."""
        assert self.can_freeze(sequence)
        self._queues.freeze(sequence, now_s)

    def is_frozen(self, sequence: Sequence) -> bool:
        return sequence in self._queues.frozen

    def thaw(self, sequence: Sequence, now_s: float) -> None:
        self._queues.thaw(sequence, now_s)

    def can_plan_ahead(self) -> bool:
        """Return whether the next step can be planned without preempting, copying or swapping."""
        if not self._swaps.is_idle:
            return False
        num_lacking = 0
        for sequence in self._queues.holders:
            if (sequence.spare_ids and len(sequence.choices) == 1) or self._tables.is_tail_leased(sequence):
                return False
            num_lacking += self._tables.num_lacking(sequence)
        return num_lacking <= self._pool.num_available and not self._preemption.may_preempt()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ended. Its blocks are freed now, or by `free_ended` if a step in flight contains
        it."""
        self._queues.remove(sequence)
        sequence.is_over = True
        if sequence.num_steps_in_flight:
            self._ended_in_flight.add(sequence)
        else:
            self._tables.free(sequence)

    def free_ended(self, sequence: Sequence) -> None:
        """Free the blocks of a removed sequence unless another step in flight contains it."""
        if not sequence.num_steps_in_flight:
            self._ended_in_flight.remove(sequence)
            self._tables.free(sequence)

    def remove_choice(self, sequence: Sequence, handle: int, now_s: float) -> None:
        """Remove one of several choices. The other choices continue."""
        assert len(sequence.choices) > 1
        self._queues.remove_choice(sequence, handle, now_s)
        self._tables.free_spare(sequence)

    def check(self, live: set[int]) -> None:
        """Raise AssertionError if the pool's reference counts differ from the blocks that sequences and hand-offs hold.
        `live`: the numbers of the sequences that must be in the queues."""
        self._pool.check()
        references = [0] * self._pool.num_blocks
        for sequence in (*self._queues.holders, *self._queues.frozen, *self._ended_in_flight):
            for block_id in sequence.block_ids + sequence.spare_ids:
                references[block_id] += 1
        for block_id in self._reservations.granted_block_ids:
            references[block_id] += 1
        self._pool.check_references(references)
        self._swaps.check(list(self._queues.waiting))
        self._queues.check(live)

    def _join_ready(self, num_promised: int, now_s: float) -> None:
        """Give free slots to ready sequences, except slots that a waiting sequence which ranks before them can use
        now."""
        self._preemption.free_stalled_slot(now_s)
        head = self.export_room.first_waiting
        if head is not None and not self._can_start(head):
            head = None
        for sequence in tuple(self._queues.ready):
            if self._preemption.is_stalled(sequence):
                continue
            num_slots = self._queues.num_free_slots
            if head is not None and head.rank < sequence.rank:
                num_slots -= max(head.num_slots, num_promised)
            if num_slots < sequence.num_slots:
                break
            self._queues.start_running(sequence, now_s)

    def _oldest(self, prompts: Iterable[Sequence], now_s: float) -> tuple[float, int]:
        """Return for how many seconds the oldest of these prompts has waited for its computation, and its number of
        tokens. The time until it had blocks and slots does not count, and neither does the batch class."""
        entitled = (s for s in prompts if s.num_left > 1 and not s.group.job.is_batch)
        oldest = min(entitled, key=lambda sequence: (sequence.group.admitted_s, sequence.number), default=None)
        if oldest is None:
            return 0.0, 0
        since_s = max(oldest.group.admitted_s, self._lacked_room_s)
        return now_s - since_s, len(oldest.token_ids) - oldest.num_cached

    def _next_prompt(self, running: deque[Sequence], now_s: float) -> Sequence | None:
        """Return the prompt that comes next: the first waiting one if it displaces the first of `running` and can
        start, or else the first of `running`, which is removed from there."""
        head = self.export_room.first_waiting
        goes_first = head is not None and (not running or self._ranking.overtakes(head, running[0], now_s))
        if goes_first and self._start_waiting(now_s) is head:
            return head
        return running.popleft() if running else None

    def _start_waiting(self, now_s: float) -> Sequence | None:
        """Start the first waiting sequence and return it, or return None if it has to wait. It gets the blocks of all
        its known tokens; the KV of cached and swapped blocks counts as computed."""
        sequence = self.export_room.first_waiting
        if sequence is None or sequence.num_slots > self._queues.num_free_slots:
            return None
        if not self._can_start(sequence) or not self._tables.can_allocate(sequence):
            return None
        self._tables.allocate(sequence)
        self._queues.start_running(sequence, now_s)
        return sequence

    def _can_start(self, sequence: Sequence) -> bool:
        """Return whether the pool has enough blocks for a waiting sequence and no hand-off ranks before it."""
        request = self._reservations.first
        if request is not None and request.rank < sequence.rank:
            return False
        num_left = self._pool.num_available - self._tables.num_newly_used(sequence)
        return num_left >= self._watermark.for_sequence(sequence)
