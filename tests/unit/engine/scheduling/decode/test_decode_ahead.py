"""Steps planned while one runs: every sequence runs as if alone, no block is freed under a step that writes to it, and
no announced block contains positions after the last token.
"""

import random
from collections.abc import Callable

import pytest

from cluster.messages import DecodeJob, LogitRules
from cluster.settings.worker_settings import SCHEDULING_POLICIES
from engine.scheduling.cache_commands import LeasePrefix
from engine.scheduling.commands import Quiet, Release
from engine.scheduling.step import BlockSwap, StepPlan
from engine.scheduling.steps_in_flight import StepsInFlight
from tests.examples import num_examples
from tests.unit.engine.rigs.ahead_bench import AheadBench
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.scheduler_bench import SPEEDS, HandOff, known_lengths

# Beside the first ones some that notice what those do not: places taken, swaps and starts under a running step.
_SEEDS = (*range(num_examples(suite=16, search=36)), 49, 52, 57, 152, 226, 244, 256, 263)
_NUM_TURNS = 90


class Play:
    """Random calls of every command, between and during steps that are planned ahead or not."""

    def __init__(self, seed: int, rules: LogitRules | None = None) -> None:
        self.dice = dice = random.Random(seed)
        is_roomy = dice.random() < 0.6
        self.bench = AheadBench(
            limits(
                num_blocks=dice.randint(30, 60) if is_roomy else dice.randint(4, 14),
                block_size=dice.randint(1, 4),
                max_num_seqs=dice.randint(1, 8),
                max_prefill_tokens=dice.choice([1, 3, 8, 30]),
                watermark=dice.choice([0.0, 0.1, 0.3]),
                max_queue=6,
                num_swap_slots=dice.choice([0, 0, 3, 20]),
            ),
            wire_dtype=dice.choice(["native", "int8"]),
            policy=dice.choice(["fcfs", "fcfs", *SCHEDULING_POLICIES]),
            lengths=known_lengths() if dice.random() < 0.3 else None,
            draft_period=dice.choice([0] * 9 + [3] if rules is None else [0, 3]),
            rules=rules,
            times=random.Random(seed + 1).choice(SPEEDS),  # of its own, so that the seeds above still notice the same
        )
        token_s = dice.choice([0.5, 9.0])
        self.bench.cost.copy_s_per_block, self.bench.cost.compute_s = 1.0, lambda num_tokens: token_s * num_tokens
        eagerness, self.num_computed = dice.choice([0.5, 0.95, 1.0]), dice.choice([(0,), (0, 1, 2), (2,)])
        self.bench.may_go_ahead = lambda: dice.random() < eagerness
        self.bench.computes = lambda: dice.choice(self.num_computed)
        misfortune = dice.choice([0.0, 0.0, 0.1, 0.5])
        self.bench.redraws = lambda: dice.random() < misfortune
        self.restlessness = dice.choice([0.1, 0.5, 0.9])
        self.offered: set[bytes] = set()

    @property
    def ways(self) -> tuple[Callable[[], None], ...]:
        return (
            *(self.admit, self.admit, self.reserve, self.reserve, self.finish, self.finish, self.finish),
            *(self.discard, self.quiet, self.cancel, self.freeze, self.thaw, self.release, self.offer, self.fail),
        )

    def play(self, num_turns: int) -> None:
        ways = self.ways
        for _ in range(num_turns):
            self.bench.now_s += 1.0
            while self.dice.random() < self.restlessness:
                self.dice.choice(ways)()
            for block_id in self.bench.quarantined:
                self.bench.runner.scribble(block_id, mark=99)
            self.bench.step()
        self.end()

    def job(self, num_choices: int, committed: tuple[int, ...] = (0,)) -> DecodeJob:
        dice = self.dice
        shared = range(1, dice.randint(1, 11))
        return self.bench.job(
            [*shared, *(dice.randint(1, 49) for _ in range(dice.randint(0, 6)))] or [1],
            max_tokens=dice.choice([1, 3, 12, 30]),
            num_choices=num_choices,
            committed=committed,
            min_tokens=dice.choice([0, 0, 4]),
            stops={dice.randint(0, 49) for _ in range(dice.choice([0, 2, 8]))},
            timeout_s=dice.choice([1e6, 1e6, 12.0]),
            priority=dice.randint(-1, 1),
            is_batch=dice.random() < 0.2,
        )

    def admit(self) -> None:
        num_choices = self.dice.choice([1, 1, 1, 3])
        committed = self.dice.choice([(0,), (0,), tuple(self.dice.randint(0, 3) for _ in range(num_choices))])
        self.bench.admit(self.job(num_choices, committed if len(committed) > 1 or num_choices == 1 else (0,)))

    def reserve(self) -> None:
        self.bench.reserve(self.job(self.dice.choice([1, 1, 1, 2])))

    def finish(self) -> None:
        if granted := [handoff for handoff in self.bench.handoffs.values() if handoff.block_ids is not None]:
            self.bench.finish(self.dice.choice(granted))

    def discard(self) -> None:
        if self.bench.handoffs:
            handoff: HandOff = self.dice.choice(list(self.bench.handoffs.values()))
            fresh_ids = (handoff.block_ids or ())[handoff.num_cached :]
            self.bench.discard(handoff, {block_id for block_id in fresh_ids if self.dice.random() < 0.3})

    def quiet(self) -> None:
        if self.bench.quarantined:
            self.bench.apply(Quiet(frozenset({self.bench.quarantined.pop()})))

    def cancel(self) -> None:
        if self.bench.live:
            self.bench.cancel({self.dice.choice(self.bench.live), 10_000})

    def freeze(self) -> None:
        if self.bench.live:
            self.bench.freeze(self.dice.choice(self.bench.live))

    def thaw(self) -> None:
        self.bench.settle()
        batch = self.bench.scheduler._batch
        if frozen := [handle for handle in self.bench.live if batch.is_frozen(self.bench.sequence(handle))]:
            self.bench.thaw(self.dice.choice(frozen))

    def release(self) -> None:
        if self.bench.frozen:
            self.bench.release(self.dice.choice(list(self.bench.frozen)))

    def offer(self) -> None:
        """Lease a prefix, or end the lease of an earlier one."""
        if self.offered and self.dice.random() < 0.5:
            self.bench.apply(Release(self.offered.pop()))
            return
        chain = self.bench.new_chain("", "native")
        chain.extend(range(1, 11))
        ticket_id = b"prefix %d" % self.dice.getrandbits(60)
        self.offered.add(ticket_id)
        self.bench.apply(LeasePrefix(ticket_id, tuple(chain.hashes), 1))

    def fail(self) -> None:
        if self.dice.random() < 0.1:
            self.bench.step(RuntimeError("out of memory"))

    def end(self) -> None:
        """Release all hand-offs and leases, and check that every sequence ends."""
        self.end_moves()
        self.bench.run()
        self.bench.end_all()

    def end_moves(self) -> None:
        """Thaw every frozen sequence and release every ticket."""
        bench = self.bench
        for ticket_id in list(bench.frozen):
            bench.release(ticket_id)
        bench.settle()
        for handle in bench.live:
            if bench.scheduler._batch.is_frozen(bench.sequence(handle)):
                bench.thaw(handle)
        for ticket_id in self.offered:
            bench.apply(Release(ticket_id))


@pytest.mark.parametrize("place", range(4))
def test_any_schedule_planned_ahead_gives_every_sequence_its_serial_tokens_and_leaks_no_block(place: int) -> None:
    for seed in _SEEDS[place::4]:
        Play(seed).play(_NUM_TURNS)


def test_any_schedule_gives_sequences_with_logit_rules_their_serial_tokens() -> None:
    for seed in range(1000, 1000 + num_examples(suite=8, search=20)):
        Play(seed, LogitRules(frequency_penalty=1.0, bad_words=((7,), (3, 4)))).play(_NUM_TURNS)


@pytest.mark.parametrize(
    ("rules", "may_plan_ahead"),
    [
        (LogitRules(logit_bias=((3, 1.0),), allowed_token_ids=(1, 2), bad_words=((4,),)), True),
        (LogitRules(repetition_penalty=1.1), False),
        (LogitRules(presence_penalty=1.1), False),
        (LogitRules(bad_words=((4, 5),)), False),
    ],
)
def test_a_step_is_planned_ahead_unless_the_next_logits_depend_on_its_token(
    rules: LogitRules, may_plan_ahead: bool
) -> None:
    bench = AheadBench(limits(), rules=rules)
    bench.admit(bench.job([1, 2, 3]))
    for is_planned in (True, may_plan_ahead):  # the first job has no rules
        _, plan = bench.scheduler.plan(0.0)
        assert plan is not None
        assert bench.scheduler.may_plan_ahead == is_planned
        bench.scheduler.complete(plan, bench.runner.run(plan), 0.0)
        bench.admit(bench.job([1, 2, 3]))


def test_no_step_is_planned_ahead_of_a_step_that_forks_or_copies() -> None:
    bench = AheadBench(limits())
    bench.admit(bench.job(range(1, 11), num_choices=4, max_tokens=8))
    found = []
    for _ in range(3):
        _, plan = bench.scheduler.plan(0.0)
        assert plan is not None
        found.append((len(plan.copies), bench.scheduler.may_plan_ahead))
        bench.scheduler.complete(plan, bench.runner.run(plan), 0.0)
    assert found == [(0, False), (3, False), (0, True)]


@pytest.mark.parametrize("moves", [{"swaps_out": (BlockSwap(0, 0),)}, {"swaps_in": (BlockSwap(0, 0),)}])
def test_no_step_is_planned_ahead_of_a_step_that_swaps(moves: dict[str, tuple[BlockSwap]]) -> None:
    steps = StepsInFlight()
    steps.begin(StepPlan((), **moves), (), 0.0)  # type: ignore[arg-type]
    assert steps.only is not None and not steps.only.may_plan_ahead
