"""Drives a SequenceScheduler step by step on the fake runner: exports, pulls and offered prefixes. Judges every first
token, and every leased block after each step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.messages import NO_TENANT, MemberId, PrefillJob, Sampling, TenantShare, TokenStops
from cluster.protocol.hashing import NATIVE, BlockChain, keyed_chains, nameless_chains
from cluster.service_times import ServiceTimes
from engine.scheduling.batching.block_tables import PreemptionCost
from engine.scheduling.batching.chunks import NewDrafter, banned_token_ids, finish_reason
from engine.scheduling.cache_commands import AdmitPull, LeasePrefix, PrefixLeased, PullReserved, ReservePull
from engine.scheduling.commands import (
    AdmitExport,
    Command,
    Discard,
    Event,
    ExportAccepted,
    ExportFailed,
    ExportFinished,
    ExportRefused,
    Inspect,
    Inspected,
    Quiet,
    Release,
    Sealed,
    WaitsForExports,
)
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import make_policy
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import StepPlan
from tests.unit.engine.rigs.fake_paged_runner import FakePagedRunner, next_token, sample_after

_IMPORTER = MemberId("decode", "1")


def limits(**changed: int | float) -> SchedulerLimits:
    values: dict[str, int | float] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 200,
        "max_num_seqs": 8,
        "max_prefill_tokens": 16,
        "max_queue": 64,
    }
    return SchedulerLimits(**(values | changed))  # type: ignore[arg-type]


def export_job(
    token_ids: Iterable[int],
    *,
    num_choices: int = 1,
    imported: bool = True,
    stops: TokenStops | None = None,
    num_committed: int = 0,
    timeout_s: float = 1e6,
    salt: str = "",
    priority: int = 0,
    is_batch: bool = False,
    tenant: TenantShare = NO_TENANT,
    age_s: float = 0.0,
) -> PrefillJob:
    return PrefillJob(
        request_id="request",
        attempt=0,
        token_ids=tuple(token_ids),
        sampling=Sampling(),
        stops=stops or TokenStops(max_tokens=100),
        seeds=tuple(range(num_choices)),
        num_committed=num_committed,
        importer=_IMPORTER if imported else None,
        timeout_s=timeout_s,
        cache_salt=salt,
        priority=priority,
        is_batch=is_batch,
        tenant=tenant,
        age_s=age_s,
    )


@dataclass
class Exported:
    """The events received for one ticket."""

    job: PrefillJob
    sealed: tuple[int, ...] = ()
    finished: ExportFinished | None = None
    error: Exception | None = None
    released: bool = False

    @property
    def is_live(self) -> bool:
        return self.finished is None and self.error is None

    @property
    def pinned(self) -> tuple[int, ...]:
        """Return the blocks that must not change, in the prompt's order."""
        if self.released:
            return ()
        tail = self.finished.tail if self.finished is not None else None
        return self.sealed + ((tail.block_id,) if tail is not None else ())


@dataclass
class Pull:
    """The importer's view of one pulled prefix."""

    token_ids: tuple[int, ...]
    chain: BlockChain
    block_ids: tuple[int, ...] | None = None
    num_cached: int = 0


@dataclass
class ExportBench:
    limits: SchedulerLimits
    prefix_caching: bool = True
    wire_dtype: str = NATIVE
    policy: str = "fcfs"
    lengths: LengthPredictor | None = None
    times: ServiceTimes | None = None  # by which prompts beside running sequences are limited
    now_s: float = 0.0
    steps: int = 0
    tickets: dict[bytes, Exported] = field(default_factory=dict)
    refused: list[ExportRefused] = field(default_factory=list)
    pulls: dict[int, Pull] = field(default_factory=dict)
    offered: dict[bytes, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)  # blocks, their tokens
    quarantined: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.new_chain = keyed_chains(b"key", self.limits.block_size) if self.prefix_caching else nameless_chains()
        self.cost = PreemptionCost()
        self.scheduler = SequenceScheduler(
            self.limits,
            new_chain=self.new_chain,
            wire_dtype=self.wire_dtype,
            cost=self.cost,
            policy=make_policy(self.policy),
            lengths=self.lengths,
            new_drafter=self._new_drafter(),
            times=lambda: self.times,
        )
        self.runner = FakePagedRunner(self.limits.num_blocks, self.limits.block_size)
        self._num_tickets = 0
        self._num_handoffs = 0

    def admit_export(self, job: PrefillJob) -> bytes:
        ticket_id = self.new_ticket()
        self.tickets[ticket_id] = Exported(job)
        self.apply(AdmitExport(ticket_id, job))
        return ticket_id

    def release_export(self, ticket_id: bytes) -> None:
        self.tickets[ticket_id].released = True
        self.apply(Release(ticket_id))

    def pull(self, token_ids: Iterable[int]) -> int:
        """Reserve blocks for a pull of full blocks that another worker has."""
        pull_id = self.new_handoff_id()
        pull = self.pulls[pull_id] = Pull(tuple(token_ids), self.new_chain("", NATIVE))
        pull.chain.extend(pull.token_ids)
        self.apply(ReservePull(pull_id, tuple(pull.chain.hashes)))
        return pull_id

    def finish_pull(self, pull_id: int) -> None:
        """End a pull whose blocks the importer has read and verified."""
        pull = self.pulls.pop(pull_id)
        assert pull.block_ids is not None
        size = self.limits.block_size
        for place, token_id in enumerate(pull.token_ids):
            if place >= pull.num_cached * size:
                self.runner.written[pull.block_ids[place // size]][place % size] = token_id
        self.apply(AdmitPull(pull_id, pull.chain.parent_of(0), tuple(pull.chain.hashes)))

    def discard_pull(self, pull_id: int, quarantined: Iterable[int] = ()) -> None:
        del self.pulls[pull_id]
        self.quarantined |= set(quarantined)
        self.apply(Discard(pull_id, frozenset(quarantined)))

    def offer(self, token_ids: Iterable[int], min_blocks: int = 1) -> bytes:
        """Offer a cached prefix to another worker."""
        ticket_id, token_ids = self.new_ticket(), tuple(token_ids)
        chain = self.new_chain("", NATIVE)
        chain.extend(token_ids)
        self.offered[ticket_id] = (), token_ids
        self.apply(LeasePrefix(ticket_id, tuple(chain.hashes), min_blocks))
        return ticket_id

    def end_offer(self, ticket_id: bytes) -> None:
        del self.offered[ticket_id]
        self.apply(Release(ticket_id))

    def apply(self, command: Command) -> None:
        self._take_in(self.scheduler.apply(command, self.now_s))

    def step(self, error: Exception | None = None) -> StepPlan | None:
        """Run one turn of the loop after the commands. With an error, the runner raises it. Every second step announces
        its blocks before its end."""
        self._take_in(self.scheduler.reap(self.now_s)[0])
        plan = self._plan()
        if plan is not None:
            self.steps += 1
            result = self.runner.run(plan)
            if plan.announces and self.steps % 2:
                self._take_in(self.scheduler.written(plan))
            if error is None:
                self._take_in(self.scheduler.complete(plan, result, self.now_s))
            else:
                self._take_in(self.scheduler.fail(plan, error, self.now_s))
        self.scheduler.check()
        self.check_leased()
        return plan

    def run(self, most_steps: int = 10_000) -> list[StepPlan]:
        """Run until there is nothing to compute."""
        plans: list[StepPlan] = []
        while (plan := self.step()) is not None:
            plans.append(plan)
            assert len(plans) <= most_steps, "no end"
        return plans

    def inspect(self) -> Inspected:
        (inspected,) = self.scheduler.apply(Inspect(1), self.now_s)
        assert isinstance(inspected, Inspected)
        return inspected

    def check_leased(self) -> None:
        """Assert that no block which another worker may read has changed."""
        size = self.limits.block_size
        for exported in self.tickets.values():
            tokens = exported.job.token_ids[: len(exported.pinned) * size]
            assert self.runner.read(exported.pinned, len(tokens)) == tokens, "a leased block changed"
        for block_ids, token_ids in self.offered.values():
            num_tokens = len(block_ids) * size
            assert self.runner.read(block_ids, num_tokens) == token_ids[:num_tokens], "an offered block changed"

    def assert_none_in_use(self) -> None:
        inspected = self.inspect()
        assert inspected.violation == ""
        blocks = inspected.blocks
        assert blocks["free"] + blocks["cached"] == self.limits.num_blocks
        assert self.prefix_caching or not blocks["cached"]

    def end_quarantine(self) -> None:
        """Report that no read can write to a quarantined block any more."""
        self.apply(Quiet(frozenset(self.quarantined)))
        self.quarantined.clear()

    def end_exports(self) -> None:
        """End every offer, pull and export, and release every ticket."""
        for ticket_id in list(self.offered):
            self.end_offer(ticket_id)
        for pull_id in list(self.pulls):
            self.discard_pull(pull_id)
        self.run()
        while pinned := [ticket_id for ticket_id, exported in self.tickets.items() if exported.pinned]:
            self.release_export(pinned[0])
            self.run()
        assert not any(exported.is_live for exported in self.tickets.values())

    def new_ticket(self) -> bytes:
        self._num_tickets += 1
        return self._num_tickets.to_bytes(4, "big")

    def new_handoff_id(self) -> int:
        """Return a new id of a hand-off or a pull."""
        self._num_handoffs += 1
        return self._num_handoffs - 1

    def _new_drafter(self) -> NewDrafter | None:
        return None

    def _plan(self) -> StepPlan | None:
        events, plan = self.scheduler.plan(self.now_s)
        # The outside must not receive blocks before the step has copied what was in them. Sealed ones are not copied.
        assert plan is None or all(isinstance(event, Sealed) for event in events)
        self._take_in(events)
        return plan

    def _take_in(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case Sealed(ticket_id, first_index, block_ids):
                exported = self.tickets[ticket_id]
                assert exported.is_live and not exported.released and exported.job.importer is not None
                assert first_index == len(exported.sealed) and block_ids
                exported.sealed += block_ids
            case ExportFinished(ticket_id):
                self._finish(self.tickets[ticket_id], event)
            case ExportFailed(ticket_id, error):
                assert self.tickets[ticket_id].is_live
                self.tickets[ticket_id].error = error
            case ExportRefused(ticket_id):
                self.refused.append(event)
                del self.tickets[ticket_id]
            case PullReserved(pull_id, None):
                del self.pulls[pull_id]
            case PullReserved(pull_id, block_ids, num_cached) if block_ids is not None:
                self._begin_pull(self.pulls[pull_id], block_ids, num_cached, mark=pull_id + 1)
            case PrefixLeased(ticket_id, block_ids) if ticket_id in self.offered:
                self.offered[ticket_id] = block_ids, self.offered[ticket_id][1]
            case ExportAccepted() | PrefixLeased() | Inspected() | WaitsForExports():
                pass
            case _:
                raise AssertionError(f"an unexpected event: {event}")

    def _begin_pull(self, pull: Pull, block_ids: tuple[int, ...], num_cached: int, *, mark: int) -> None:
        pull.block_ids, pull.num_cached = block_ids, num_cached
        found = pull.token_ids[: num_cached * self.limits.block_size]
        assert self.runner.read(block_ids[:num_cached], len(found)) == found
        for block_id in block_ids[num_cached:]:
            self.runner.scribble(block_id, mark=mark)

    def _finish(self, exported: Exported, event: ExportFinished) -> None:
        assert exported.is_live
        exported.finished = event
        job, size = exported.job, self.limits.block_size
        banned = banned_token_ids(job.stops, job.num_committed)
        for seed, token in zip(job.seeds, event.tokens, strict=True):
            num_prompt = len(job.token_ids) - job.num_committed
            sample = sample_after(job.token_ids, num_prompt, seed=seed, sampling=job.sampling, banned=banned)
            assert token.token_id == next_token(job.token_ids, sample)
            assert token.finish_reason == finish_reason(job.stops, token.token_id, job.num_committed + 1)
        if job.importer is None or exported.released:
            assert event.tail is None
        else:
            assert len(exported.sealed) == len(job.token_ids) // size
            assert (event.tail.num_valid if event.tail else 0) == len(job.token_ids) % size


def export_bench(*, prefix_caching: bool = True, policy: str = "fcfs", **sizes: int) -> ExportBench:
    return ExportBench(limits(max_model_len=1 << 20, **sizes), prefix_caching, policy=policy)
