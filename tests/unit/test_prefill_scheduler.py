"""The prefill worker's decisions: chunks, seals and leases of every prompt, under any schedule."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    QueueFull,
    StepFailed,
    WorkerTooSmall,
)
from cluster.messages import FinishReason, MemberId, PrefillJob, Sampling, TokenStops
from cluster.protocol.hashing import NATIVE, BlockChain, keyed_chains, nameless_chains
from cluster.settings.engine_settings import SCHEDULING_POLICIES
from engine.scheduling.commands import Inspect, Inspected, LeasePrefix, PrefixLeased, Quiet, Release, Tail
from engine.scheduling.policies import make_policy
from engine.scheduling.schedule import banned_token_ids, finish_reason
from engine.scheduling.step import Sample, StepPlan
from prefill_worker.scheduling.commands import (
    Accepted,
    AdmitPull,
    Cancel,
    Command,
    DiscardPull,
    Event,
    Failed,
    Finished,
    Leave,
    PullReserved,
    Refused,
    ReservePull,
    Sealed,
    Submit,
)
from prefill_worker.scheduling.limits import PrefillLimits
from prefill_worker.scheduling.scheduler import PrefillScheduler
from tests.unit.fake_paged_runner import FakePagedRunner, next_token, num_tokens

_IMPORTER = MemberId("decode", "1")


def _job(
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
        age_s=age_s,
    )


@dataclass
class _Prefill:
    """The events received for one ticket."""

    job: PrefillJob
    sealed: tuple[int, ...] = ()
    finished: Finished | None = None
    error: Exception | None = None
    released: bool = False

    @property
    def is_live(self) -> bool:
        return self.finished is None and self.error is None

    @property
    def pinned(self) -> tuple[int, ...]:
        """Blocks that must not change, in the prompt's order."""
        if self.released:
            return ()
        tail = self.finished.tail if self.finished is not None else None
        return self.sealed + ((tail.block_id,) if tail is not None else ())


@dataclass
class _Pull:
    """The importer's view of one pulled prefix."""

    token_ids: tuple[int, ...]
    chain: BlockChain
    block_ids: tuple[int, ...] | None = None
    num_cached: int = 0


@dataclass
class _Bench:
    """Drives a PrefillScheduler on the fake runner; judges first tokens, and leased blocks after every step."""

    num_blocks: int = 64
    block_size: int = 4
    max_prefill_tokens: int = 16
    max_num_seqs: int = 8
    max_queue: int = 64
    prefix_caching: bool = True
    policy: str = "fcfs"
    now_s: float = 0.0
    tickets: dict[bytes, _Prefill] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    pulls: dict[int, _Pull] = field(default_factory=dict)
    offered: dict[bytes, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)  # blocks, their tokens
    quarantined: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.new_chain = keyed_chains(b"key", self.block_size) if self.prefix_caching else nameless_chains()
        self.scheduler = PrefillScheduler(
            PrefillLimits(
                num_blocks=self.num_blocks,
                max_model_len=1 << 20,
                block_size=self.block_size,
                max_prefill_tokens=self.max_prefill_tokens,
                max_num_seqs=self.max_num_seqs,
                max_queue=self.max_queue,
            ),
            new_chain=self.new_chain,
            policy=make_policy(self.policy),
        )
        self.runner = FakePagedRunner(self.num_blocks, self.block_size)
        self._next_ticket = 0
        self._next_pull = 0

    def submit(self, job: PrefillJob) -> bytes:
        ticket_id, self._next_ticket = self._next_ticket.to_bytes(4, "big"), self._next_ticket + 1
        self.tickets[ticket_id] = _Prefill(job)
        self.apply(Submit(ticket_id, job))
        return ticket_id

    def release(self, ticket_id: bytes) -> None:
        self.tickets[ticket_id].released = True
        self.apply(Release(ticket_id))

    def pull(self, token_ids: Iterable[int]) -> int:
        """Full blocks that another worker has."""
        pull_id, self._next_pull = self._next_pull, self._next_pull + 1
        pull = self.pulls[pull_id] = _Pull(tuple(token_ids), self.new_chain("", NATIVE))
        pull.chain.extend(pull.token_ids)
        self.apply(ReservePull(pull_id, tuple(pull.chain.hashes)))
        return pull_id

    def finish_pull(self, pull_id: int) -> None:
        """End a pull whose blocks the importer has read and verified."""
        pull = self.pulls.pop(pull_id)
        assert pull.block_ids is not None
        for place, token_id in enumerate(pull.token_ids):
            if place >= pull.num_cached * self.block_size:
                self.runner.written[pull.block_ids[place // self.block_size]][place % self.block_size] = token_id
        self.apply(AdmitPull(pull_id, pull.chain.parent_of(0), tuple(pull.chain.hashes)))

    def discard_pull(self, pull_id: int, quarantined: Iterable[int] = ()) -> None:
        del self.pulls[pull_id]
        self.quarantined |= set(quarantined)
        self.apply(DiscardPull(pull_id, frozenset(quarantined)))

    def offer(self, token_ids: Iterable[int], min_blocks: int = 1) -> bytes:
        ticket_id, self._next_ticket = self._next_ticket.to_bytes(4, "big"), self._next_ticket + 1
        token_ids = tuple(token_ids)
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
        self._take_in(self.scheduler.reap(self.now_s)[0])
        events, plan = self.scheduler.plan(self.now_s)
        self._take_in(events)
        if plan is not None and error is None:
            self._take_in(self.scheduler.complete(plan, self.runner.run(plan), self.now_s))
        elif plan is not None and error is not None:
            self._take_in(self.scheduler.fail(plan, error, self.now_s))
        self.scheduler.check()
        for prefill in self.tickets.values():
            self._check_pinned(prefill)
        for block_ids, token_ids in self.offered.values():
            num_tokens = len(block_ids) * self.block_size
            assert self.runner.read(block_ids, num_tokens) == token_ids[:num_tokens], "an offered block changed"
        return plan

    def run(self) -> list[StepPlan]:
        plans = []
        while (plan := self.step()) is not None:
            plans.append(plan)
        return plans

    def inspect(self) -> Inspected:
        (inspected,) = self.scheduler.apply(Inspect(1), self.now_s)
        assert isinstance(inspected, Inspected)
        assert inspected.violation == ""
        return inspected

    def assert_none_in_use(self) -> None:
        blocks = self.inspect().blocks
        assert blocks["free"] + blocks["cached"] == self.num_blocks
        assert self.prefix_caching or not blocks["cached"]

    def _check_pinned(self, prefill: _Prefill) -> None:
        tokens = prefill.job.token_ids[: len(prefill.pinned) * self.block_size]
        assert self.runner.read(prefill.pinned, len(tokens)) == tokens, "a leased block changed"

    def _take_in(self, events: tuple[Event, ...]) -> None:
        for event in events:
            match event:
                case Sealed(ticket_id, first_index, block_ids):
                    prefill = self.tickets[ticket_id]
                    assert prefill.is_live and not prefill.released and prefill.job.importer is not None
                    assert first_index == len(prefill.sealed) and block_ids
                    prefill.sealed += block_ids
                case Finished(ticket_id):
                    self._finish(self.tickets[ticket_id], event)
                case Failed(ticket_id, error):
                    assert self.tickets[ticket_id].is_live
                    self.tickets[ticket_id].error = error
                case Refused(ticket_id, error):
                    self.refused.append(event)
                    del self.tickets[ticket_id]
                case PullReserved(pull_id, None):
                    del self.pulls[pull_id]
                case PullReserved(pull_id, block_ids, num_cached) if block_ids is not None:
                    pull = self.pulls[pull_id]
                    pull.block_ids, pull.num_cached = block_ids, num_cached
                    found = pull.token_ids[: num_cached * self.block_size]
                    assert self.runner.read(block_ids[:num_cached], len(found)) == found
                    for block_id in block_ids[num_cached:]:
                        self.runner.scribble(block_id, mark=pull_id + 1)
                case PrefixLeased(ticket_id, block_ids):
                    self.offered[ticket_id] = block_ids, self.offered[ticket_id][1]
                case Accepted() | Inspected():
                    pass

    def _finish(self, prefill: _Prefill, event: Finished) -> None:
        assert prefill.is_live
        prefill.finished = event
        job, size = prefill.job, self.block_size
        banned = banned_token_ids(job.stops, job.num_committed)
        for seed, token in zip(job.seeds, event.tokens, strict=True):
            sample = Sample(seed, len(job.token_ids), job.sampling, banned)
            assert token.token_id == next_token(job.token_ids, sample)
            assert token.finish_reason == finish_reason(job.stops, token.token_id, job.num_committed + 1)
        if job.importer is None or prefill.released:
            assert event.tail is None
        else:
            assert len(prefill.sealed) == len(job.token_ids) // size
            assert (event.tail.num_valid if event.tail else 0) == len(job.token_ids) % size


class _AnySchedule(RuleBasedStateMachine):
    """Prompts, cancels, lapsed leases, failing steps and deadlines over pools too small for all."""

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.integers(1, 4),
        max_prefill_tokens=st.integers(1, 9),
        max_num_seqs=st.integers(1, 4),
        policy=st.sampled_from(SCHEDULING_POLICIES),
    )
    def start(self, num_blocks: int, block_size: int, max_prefill_tokens: int, max_num_seqs: int, policy: str) -> None:
        self.bench = _Bench(num_blocks, block_size, max_prefill_tokens, max_num_seqs, max_queue=4, policy=policy)

    @rule(
        num_shared=st.integers(0, 16),
        token_ids=st.lists(st.integers(1, 49), max_size=8),
        num_choices=st.integers(1, 3),
        imported=st.booleans(),
        patient=st.booleans(),
        salt=st.sampled_from(["", "", "tenant"]),
        priority=st.integers(-1, 1),
    )
    def submit(
        self,
        num_shared: int,
        token_ids: list[int],
        num_choices: int,
        imported: bool,
        patient: bool,
        salt: str,
        priority: int,
    ) -> None:
        """Prompts that begin alike, and part."""
        job = _job(
            [*range(1, num_shared + 1), *token_ids],
            num_choices=num_choices,
            imported=imported,
            timeout_s=1e6 if patient else 8.0,
            salt=salt,
            priority=priority,
            is_batch=priority > 0,
        )
        self.bench.submit(job)

    @precondition(lambda self: self.bench.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket_id = data.draw(st.sampled_from(list(self.bench.tickets)))
        was_live = self.bench.tickets[ticket_id].is_live
        self.bench.apply(Cancel(ticket_id))
        assert isinstance(self.bench.tickets[ticket_id].error, Cancelled) or not was_live

    @precondition(lambda self: self.bench.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.bench.release(data.draw(st.sampled_from(list(self.bench.tickets))))

    @rule(num_tokens=st.integers(1, 16))
    def pull(self, num_tokens: int) -> None:
        num_blocks = num_tokens // self.bench.block_size
        if num_blocks:
            self.bench.pull(range(1, num_blocks * self.bench.block_size + 1))

    @precondition(lambda self: self.bench.pulls)
    @rule(data=st.data())
    def finish_pull(self, data: st.DataObject) -> None:
        self.bench.finish_pull(data.draw(st.sampled_from(list(self.bench.pulls))))

    @precondition(lambda self: self.bench.pulls)
    @rule(data=st.data())
    def discard_pull(self, data: st.DataObject) -> None:
        pull_id = data.draw(st.sampled_from(list(self.bench.pulls)))
        pull = self.bench.pulls[pull_id]
        fresh_ids = (pull.block_ids or ())[pull.num_cached :]
        self.bench.discard_pull(pull_id, data.draw(st.sets(st.sampled_from(fresh_ids))) if fresh_ids else set())

    @precondition(lambda self: self.bench.quarantined)
    @rule()
    def quiet(self) -> None:
        self.bench.apply(Quiet(frozenset({self.bench.quarantined.pop()})))

    @rule(num_tokens=st.integers(1, 16), min_blocks=st.integers(1, 3))
    def offer(self, num_tokens: int, min_blocks: int) -> None:
        self.bench.offer(range(1, num_tokens + 1), min_blocks)

    @precondition(lambda self: self.bench.offered)
    @rule(data=st.data())
    def end_offer(self, data: st.DataObject) -> None:
        self.bench.end_offer(data.draw(st.sampled_from(list(self.bench.offered))))

    @rule()
    def failing_step(self) -> None:
        self.bench.step(RuntimeError("out of memory"))

    @rule(num_steps=st.integers(1, 5))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.bench.now_s += 1.0
            self.bench.step()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        for ticket_id in list(bench.offered):
            bench.end_offer(ticket_id)
        for pull_id in list(bench.pulls):
            bench.discard_pull(pull_id)
        bench.apply(Quiet(frozenset(bench.quarantined)))
        bench.run()
        while pinned := [ticket_id for ticket_id, prefill in bench.tickets.items() if prefill.pinned]:
            bench.release(pinned[0])
            bench.run()
        assert not any(prefill.is_live for prefill in bench.tickets.values())
        bench.assert_none_in_use()


TestAnyScheduleKeepsLeasedBlocksAndLeaksNone = _AnySchedule.TestCase
TestAnyScheduleKeepsLeasedBlocksAndLeaksNone.settings = settings(max_examples=100, stateful_step_count=40)


def test_blocks_are_sealed_chunk_by_chunk_before_the_prompt_is_done() -> None:
    bench = _Bench()
    ticket_id = bench.submit(_job(range(1, 51)))

    sealed = []
    for _ in range(3):
        bench.step()
        sealed.append(len(bench.tickets[ticket_id].sealed))

    assert sealed == [4, 8, 12]
    assert bench.tickets[ticket_id].is_live
    bench.step()
    finished = bench.tickets[ticket_id].finished
    assert finished is not None and isinstance(finished.tail, Tail) and finished.tail.num_valid == 2


def test_leased_blocks_stay_until_release_and_only_until_then() -> None:
    bench = _Bench(num_blocks=3)
    first = bench.submit(_job(range(1, 11)))
    second = bench.submit(_job(range(1, 5)))
    bench.run()
    assert bench.inspect().blocks["leased"] == 3
    assert bench.tickets[second].is_live

    bench.release(first)
    bench.run()

    assert bench.tickets[second].finished is not None
    bench.release(second)
    bench.assert_none_in_use()


def test_unclaimed_tickets_block_prefill_until_the_full_queue_refuses_with_a_retry_time() -> None:
    """Decode is full: prefill runs ahead of it by no more than its own pool."""
    bench = _Bench(num_blocks=6, max_queue=2, prefix_caching=False)
    first, second = (bench.submit(_job(range(1, 11))) for _ in range(2))
    bench.now_s = 3.0
    bench.run()
    third, fourth = (bench.submit(_job(range(1, 11))) for _ in range(2))
    bench.run()
    assert bench.tickets[third].is_live and bench.tickets[fourth].is_live
    assert bench.inspect().blocks["leased"] == 6

    bench.submit(_job(range(1, 11)))
    (refusal,) = (refused.error for refused in bench.refused)
    assert isinstance(refusal, QueueFull) and refusal.retry_after_s is not None

    bench.release(first)
    bench.run()
    assert bench.tickets[third].finished is not None and bench.tickets[fourth].is_live
    for ticket_id in (second, third):
        bench.release(ticket_id)
    bench.run()
    bench.release(fourth)
    bench.assert_none_in_use()


def test_a_prompt_without_an_importer_frees_all_blocks_at_its_end() -> None:
    bench = _Bench()
    ticket_id = bench.submit(_job(range(1, 11), imported=False))

    bench.run()

    assert bench.tickets[ticket_id].finished is not None
    bench.assert_none_in_use()


def test_a_released_ticket_that_still_runs_is_finished_without_leases() -> None:
    bench = _Bench()
    ticket_id = bench.submit(_job(range(1, 51)))
    bench.step()
    bench.release(ticket_id)

    bench.run()

    assert bench.tickets[ticket_id].finished is not None
    bench.assert_none_in_use()


def test_a_prompt_reserves_all_its_blocks_at_once_and_later_prompts_do_not_overtake() -> None:
    bench = _Bench(num_blocks=10, prefix_caching=False)
    first = bench.submit(_job(range(1, 25)))
    large, small = bench.submit(_job(range(1, 25))), bench.submit(_job([1, 2]))
    bench.step()
    assert bench.inspect().blocks == {"quarantined": 0, "leased": 4, "held": 2, "cached": 0, "free": 4}

    bench.run()
    assert bench.tickets[large].is_live and bench.tickets[small].is_live
    bench.release(first)
    bench.run()

    assert bench.tickets[large].finished and bench.tickets[small].finished


def test_a_prompt_lost_at_another_worker_goes_before_younger_requests_and_after_running_prompts() -> None:
    bench = _Bench(max_prefill_tokens=16)
    running = bench.submit(_job(range(32)))
    bench.step()
    bench.now_s = 5.0
    later = bench.submit(_job(range(100, 116)))
    lost = bench.submit(_job(range(200, 216), age_s=4.0))
    oldest = bench.submit(_job(range(300, 316), age_s=7.0))
    interrupted = bench.submit(_job(range(400, 416), age_s=1.0, num_committed=1))
    ended = []
    while bench.step() is not None:
        ended += [ticket for ticket in bench.tickets if not bench.tickets[ticket].is_live and ticket not in ended]
    assert ended == [running, interrupted, oldest, lost, later]


def test_with_a_backlog_steps_carry_exactly_the_budget_shared_by_prompts() -> None:
    bench = _Bench(num_blocks=500, max_queue=100, prefix_caching=False)
    for place in range(80):
        bench.submit(_job(range(1, 8 + 5 * (place % 9)), imported=False))

    plans = bench.run()

    full = [plan for plan in plans if num_tokens(plan) == bench.max_prefill_tokens]
    assert len(plans) > 100 and len(full) >= 0.95 * len(plans)
    assert max(len(plan.chunks) for plan in plans) > 1


def test_a_step_holds_at_most_max_num_seqs_prompts() -> None:
    bench = _Bench(max_num_seqs=3)
    for _ in range(8):
        bench.submit(_job([1, 2], imported=False))

    assert [len(plan.chunks) for plan in bench.run()] == [3, 3, 2]


def test_cancel_frees_unsealed_blocks_and_release_frees_sealed_blocks() -> None:
    bench = _Bench()
    running, waiting = bench.submit(_job(range(1, 101))), bench.submit(_job(range(1, 31)))
    bench.step()

    bench.apply(Cancel(running))
    bench.apply(Cancel(waiting))

    assert bench.inspect().blocks["leased"] == 4 and bench.inspect().blocks["held"] == 0
    assert bench.run() == []
    bench.release(running)
    bench.assert_none_in_use()


def test_choices_get_a_first_token_each_from_one_prefill() -> None:
    bench = _Bench()
    ticket_id = bench.submit(_job(range(1, 11), num_choices=3))

    bench.run()

    finished = bench.tickets[ticket_id].finished
    assert finished is not None and len({token.token_id for token in finished.tokens}) > 1
    assert bench.inspect().figures["tokens_computed"] == 10


@pytest.mark.parametrize(
    ("stops", "num_committed", "expected"),
    [
        (TokenStops(max_tokens=1), 0, FinishReason.LENGTH),
        (TokenStops(max_tokens=6), 5, FinishReason.LENGTH),
        (TokenStops(max_tokens=6), 4, None),
        (TokenStops(max_tokens=6, stop_token_ids=frozenset(range(50))), 0, FinishReason.STOP),
        (TokenStops(max_tokens=6, min_tokens=2, stop_token_ids=frozenset(range(49))), 1, None),
        (TokenStops(max_tokens=6, min_tokens=2, stop_token_ids=frozenset(range(50))), 2, FinishReason.STOP),
    ],
)
def test_the_first_token_obeys_the_stop_rules_at_its_index(
    stops: TokenStops, num_committed: int, expected: FinishReason | None
) -> None:
    bench = _Bench()
    ticket_id = bench.submit(_job(range(1, 11), stops=stops, num_committed=num_committed))

    bench.run()

    finished = bench.tickets[ticket_id].finished
    assert finished is not None and finished.tokens[0].finish_reason is expected


def test_prompts_that_are_too_long_empty_or_too_many_are_refused() -> None:
    bench = _Bench(num_blocks=10, max_queue=1)
    bench.submit(_job(range(41)))
    bench.submit(_job([]))
    bench.submit(_job([1]))
    bench.submit(_job([2]))

    too_long, empty, full = (refused.error for refused in bench.refused)

    assert isinstance(too_long, WorkerTooSmall) and "41 tokens" in str(too_long) and "holds at most 40" in str(too_long)
    assert isinstance(empty, InvalidRequest)
    assert isinstance(full, QueueFull) and "--max-queue is 1" in str(full)


def test_an_exceeded_deadline_names_the_phase_of_the_prompt() -> None:
    bench = _Bench(max_num_seqs=1)
    running = bench.submit(_job(range(1, 101), timeout_s=3.0))
    waiting = bench.submit(_job(range(1, 101), timeout_s=2.0))
    bench.step()
    assert bench.scheduler.reap(1.0) == ((), 2.0)

    bench.now_s = 3.0
    assert bench.step() is None

    errors = [bench.tickets[ticket_id].error for ticket_id in (running, waiting)]
    assert all(isinstance(error, DeadlineExceeded) for error in errors)
    assert [str(error) for error in errors] == [
        "3 s passed in prefill, after 16 of 100 tokens",
        "2 s passed in the prefill queue",
    ]


def test_a_failing_step_ends_its_prompts_only_and_keeps_their_leases() -> None:
    bench = _Bench()
    hit = bench.submit(_job(range(1, 41)))
    spared = bench.submit(_job(range(1, 9)))
    bench.step()

    bench.step(RuntimeError("the device is gone"))

    error = bench.tickets[hit].error
    assert isinstance(error, StepFailed) and "RuntimeError: the device is gone" in str(error)
    assert bench.inspect().blocks["leased"] == 4
    bench.run()
    assert bench.tickets[spared].finished is not None


def test_finished_accounts_for_queue_and_prefill_time() -> None:
    bench = _Bench()
    ticket_id = bench.submit(_job(range(1, 21), imported=False))
    bench.now_s = 2.0
    _, plan = bench.scheduler.plan(2.0)
    assert plan is not None
    bench.scheduler.complete(plan, bench.runner.run(plan), 3.0)
    bench.now_s = 7.0
    bench.run()

    finished = bench.tickets[ticket_id].finished
    assert finished is not None and (finished.queue_s, finished.prefill_s) == (2.0, 5.0)


def test_a_prompt_with_a_cached_prefix_computes_only_the_rest() -> None:
    bench = _Bench()
    first = bench.submit(_job(range(1, 31)))
    bench.run()
    bench.release(first)
    assert bench.inspect().blocks["cached"] == 7

    second = bench.submit(_job([*range(1, 23), *range(40, 48)]))
    plans = bench.run()

    assert num_tokens(plans[0]) == 10 and len(plans) == 1
    finished = bench.tickets[second].finished
    assert finished is not None and finished.num_cached == 20
    assert bench.inspect().figures["tokens_cached"] == 20


def test_cached_blocks_are_announced_before_the_first_chunk_is_computed() -> None:
    bench = _Bench()
    bench.submit(_job(range(1, 31)))
    bench.run()
    second = bench.submit(_job(range(1, 41)))

    events, plan = bench.scheduler.plan(bench.now_s)

    (sealed,) = events
    assert isinstance(sealed, Sealed) and plan is not None
    assert (sealed.ticket_id, sealed.first_index, len(sealed.block_ids)) == (second, 0, 7)
    assert sealed.block_ids == plan.chunks[0].block_ids[:7]


@pytest.mark.parametrize("length", [16, 17])
def test_the_last_token_is_computed_in_a_private_block_however_much_is_cached(length: int) -> None:
    bench = _Bench()
    before = bench.submit(_job(range(1, length + 1)))
    bench.run()

    again = bench.submit(_job(range(1, length + 1)))
    (plan,) = bench.run()

    assert num_tokens(plan) == length - (length - 1) // 4 * 4
    finished, repeated = bench.tickets[before].finished, bench.tickets[again].finished
    assert finished is not None and repeated is not None and repeated.tokens == finished.tokens
    written = plan.chunks[0].block_ids[-1]
    assert written not in bench.tickets[before].pinned


def test_a_block_that_two_tickets_have_pinned_stays_until_both_are_released() -> None:
    bench = _Bench(num_blocks=6)
    first, second = bench.submit(_job(range(1, 18))), bench.submit(_job(range(1, 18)))
    bench.run()
    assert bench.tickets[first].sealed == bench.tickets[second].sealed
    assert bench.inspect().blocks["leased"] == 6

    bench.release(first)
    bench.submit(_job(range(20, 45), imported=False))
    bench.run()

    assert bench.inspect().blocks["leased"] == 5
    bench.release(second)
    bench.run()
    bench.assert_none_in_use()


def test_only_unused_cached_blocks_are_evicted_for_another_prompt() -> None:
    bench = _Bench(num_blocks=10, max_prefill_tokens=4)
    for start in (1, 30):
        bench.release(bench.submit(_job(range(start, start + 17), imported=False)))
        bench.run()
    assert bench.inspect().blocks["cached"] == 8

    running = bench.submit(_job([*range(30, 47), 1, 2, 3, 4, 5]))
    bench.step()
    bench.submit(_job(range(60, 76), imported=False))
    bench.run()

    finished = bench.tickets[running].finished
    assert finished is not None and finished.num_cached == 16
    assert bench.inspect().figures["blocks_evicted"] == 4


def test_tenants_share_no_prefix() -> None:
    bench = _Bench()
    for salt, num_cached in (("a", 0), ("b", 0), ("", 0), ("a", 16)):
        ticket_id = bench.submit(_job(range(1, 18), salt=salt))
        bench.run()
        finished = bench.tickets[ticket_id].finished
        assert finished is not None and finished.num_cached == num_cached


def test_blocks_sealed_by_a_cancelled_or_failed_prefill_are_reused_by_the_next() -> None:
    bench = _Bench()
    cancelled = bench.submit(_job(range(1, 49), imported=False))
    bench.step()
    bench.apply(Cancel(cancelled))
    failed = bench.submit(_job(range(1, 49), imported=False))
    bench.step(RuntimeError("the device is gone"))
    assert bench.tickets[failed].error is not None

    ticket_id = bench.submit(_job(range(1, 49), imported=False))
    bench.run()

    finished = bench.tickets[ticket_id].finished
    assert finished is not None and finished.num_cached == 16


def test_without_prefix_caching_no_block_is_reused_or_cached() -> None:
    bench = _Bench(prefix_caching=False)
    for _ in range(2):
        ticket_id = bench.submit(_job(range(1, 31), imported=False))
        bench.run()
        finished = bench.tickets[ticket_id].finished
        assert finished is not None and finished.num_cached == 0
    assert bench.inspect().blocks["free"] == bench.num_blocks


def test_a_prompt_reuses_the_prefix_pulled_for_it() -> None:
    bench = _Bench()
    bench.finish_pull(bench.pull(range(1, 17)))

    ticket_id = bench.submit(_job(range(1, 20)))
    (plan,) = bench.run()

    assert num_tokens(plan) == 3
    finished = bench.tickets[ticket_id].finished
    assert finished is not None and finished.num_cached == 16


def test_a_pull_reuses_cached_blocks_and_reserves_no_block_that_a_waiting_prompt_needs() -> None:
    bench = _Bench(num_blocks=10, max_num_seqs=1, max_prefill_tokens=4)
    bench.submit(_job(range(30, 50), imported=False))
    bench.submit(_job(range(60, 76), imported=False))
    bench.step()

    refused = bench.pull(range(1, 17))
    assert refused not in bench.pulls
    bench.run()
    bench.finish_pull(bench.pull(range(1, 17)))
    longer = bench.pull(range(1, 25))
    assert bench.pulls[longer].num_cached == 4 and len(bench.pulls[longer].block_ids or ()) == 6
    bench.discard_pull(longer)
    bench.assert_none_in_use()


def test_an_offered_prefix_is_pinned_until_released_and_a_too_short_one_is_not_pinned() -> None:
    bench = _Bench(num_blocks=6)
    bench.submit(_job(range(1, 14), imported=False))
    bench.run()

    few, offered = bench.offer(range(1, 9), min_blocks=3), bench.offer(range(1, 30), min_blocks=3)
    assert (len(bench.offered[few][0]), len(bench.offered[offered][0])) == (0, 3)
    assert bench.inspect().blocks["leased"] == 3
    bench.submit(_job(range(30, 43), imported=False))
    assert bench.step() is None

    bench.end_offer(offered)
    bench.run()
    bench.assert_none_in_use()


def test_a_draining_worker_finishes_begun_prompts_and_refuses_waiting_and_new_ones() -> None:
    bench = _Bench(max_prefill_tokens=16)
    begun, waiting = bench.submit(_job(range(40))), bench.submit(_job(range(100, 140)))
    bench.step()
    bench.apply(Leave())
    bench.submit(_job(range(8)))
    bench.run()
    assert bench.tickets[begun].finished is not None
    assert isinstance(bench.tickets[waiting].error, Draining)
    assert [type(refused.error) for refused in bench.refused] == [Draining]
    bench.release(begun)
    bench.assert_none_in_use()
