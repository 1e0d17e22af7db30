"""Draft tokens in the decode worker: the tokens of a serial run in fewer steps, at no other sequence's expense."""

from dataclasses import dataclass, replace

import pytest

from cluster.messages import FinishReason
from cluster.protocol.hashing import nameless_chains
from engine.scheduling.commands import AdmitLocal, StepTokens
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import Runner, Sample, StepPlan, StepResult
from engine.speculation.drafter import Acceptance, ModelDrafter
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.fake_paged_runner import FakePagedRunner, next_token
from tests.unit.engine.rigs.scheduler_bench import SchedulerBench


def test_accepted_draft_tokens_give_the_same_tokens_in_fewer_steps() -> None:
    bench = SchedulerBench(limits(), draft_period=1000)
    (handle,) = bench.admit(bench.job([1, 2, 3], max_tokens=25))

    plans = bench.run()

    assert len(plans) == 1 + 24 // 6  # five draft tokens and one more in each step after the prompt's
    figures = bench.inspect().figures
    assert (figures["draft_tokens"], figures["draft_tokens_accepted"], figures["tokens_drawn"]) == (20, 20, 25)
    assert len(bench.choices[handle].output) == 25
    bench.assert_idle()


def test_rejected_draft_tokens_cost_no_block_and_no_token() -> None:
    bench = SchedulerBench(limits(), draft_period=1)
    (handle,) = bench.admit(bench.job([1, 2, 3], max_tokens=25))

    while bench.live:
        bench.step()
        num_computed = len(bench.choices[handle].output) + 2
        assert bench.inspect().blocks["held"] == (-(-num_computed // 4) if bench.live else 0)

    figures = bench.inspect().figures
    assert figures["draft_tokens_accepted"] == 0 < figures["draft_tokens"]
    bench.assert_idle()


def test_a_stop_token_among_accepted_draft_tokens_ends_the_sequence() -> None:
    stops = range(0, 50, 7)
    outputs = []
    for draft_period in (0, 1000):
        bench = SchedulerBench(limits(num_blocks=300), draft_period=draft_period)
        handles = [bench.admit(bench.job([place], max_tokens=40, min_tokens=6, stops=stops))[0] for place in range(30)]
        bench.run()
        bench.assert_idle()
        assert all(bench.choices[handle].ended == FinishReason.STOP for handle in handles)
        assert all(len(bench.choices[handle].output) > 6 for handle in handles)
        outputs.append([bench.choices[handle].output for handle in handles])

    assert outputs[0] == outputs[1]
    assert len({len(output) % 6 for output in outputs[1]}) > 3  # they ended anywhere in a run


def test_no_draft_token_goes_past_the_last_token() -> None:
    bench = SchedulerBench(limits(), draft_period=1000)
    bench.admit(bench.job([1, 2, 3], max_tokens=6))

    plans = bench.run()

    assert [plan.chunks[0].num_draft_tokens for plan in plans] == [0, 4]
    bench.assert_idle()


def test_speculation_reserves_no_block_that_a_hand_off_waits_for() -> None:
    bench = SchedulerBench(limits(num_blocks=5), draft_period=1000)
    bench.admit(bench.job([1, 2, 3], max_tokens=12))
    bench.step()
    handoff = bench.reserve(bench.job(range(1, 20)))
    assert handoff.block_ids is None

    plan = bench.step()

    assert plan is not None
    assert plan.chunks[0].num_draft_tokens == 0  # the newest token has the last position of its block
    assert bench.inspect().figures["preemptions"] == 0
    bench.run()


def test_a_full_step_leaves_no_room_for_draft_tokens() -> None:
    bench = SchedulerBench(limits(max_prefill_tokens=8), draft_period=1000)
    bench.admit(bench.job([1, 2, 3], max_tokens=30))
    bench.step()
    (long,) = bench.admit(bench.job(range(1, 40), max_tokens=2))

    while not bench.choices[long].output:
        plan = bench.step()
        assert plan is not None and sum(len(chunk.token_ids) for chunk in plan.chunks) <= 8


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_a_sequence_with_draft_tokens_moves_with_accepted_tokens_only(num_steps: int) -> None:
    source, target = SchedulerBench(limits(), draft_period=4), SchedulerBench(limits(), draft_period=3)
    (moving,) = source.admit(source.job(range(1, 6), max_tokens=30))
    for _ in range(num_steps):
        source.step()
    frozen = source.freeze(moving)
    assert frozen is not None

    arrived = target.receive(source, frozen, moving)
    source.cancel([moving])
    source.release(frozen.ticket_id)
    target.run()

    job = source.choices[moving].job
    expected = source.serial(job.prompt_token_ids, job.stops, seed=moving, num_output=30)
    assert tuple(target.choices[arrived].output) == expected
    source.assert_idle()
    target.assert_idle()


@dataclass
class _DraftingRunner:
    """A runner whose draft model proposes the tokens that will be drawn."""

    runner: Runner
    seed: int

    def run(self, plan: StepPlan) -> StepResult:
        result = self.runner.run(plan)
        drafts: list[tuple[int, ...]] = []
        for chunk, drawn in zip(plan.chunks, result.tokens, strict=True):
            drafted: tuple[int, ...] = ()
            if chunk.draft is not None:
                known = (*chunk.draft.token_ids, *(token.token_id for token in drawn))
                for _ in range(chunk.draft.max_draft_tokens):
                    sample = Sample(self.seed, len(known) + len(drafted), chunk.samples[0].sampling)
                    drafted += (next_token(known + drafted, sample),)
            drafts.append(drafted)
        return replace(result, draft_tokens=tuple(drafts))


def test_tokens_drafted_by_the_runner_are_verified_in_the_next_step() -> None:
    bench = SchedulerBench(limits())
    job = bench.job([1, 2, 3], max_tokens=13)
    scheduler = SequenceScheduler(
        bench.limits, new_chain=nameless_chains(), new_drafter=lambda: ModelDrafter(Acceptance(3, 16))
    )
    runner = _DraftingRunner(FakePagedRunner(bench.limits.num_blocks, 4), job.sequences[0].seed)
    scheduler.apply(AdmitLocal(job), 0.0)
    output: list[int] = []
    num_steps = 0
    while (plan := scheduler.plan(0.0)[1]) is not None:
        events = scheduler.complete(plan, runner.run(plan), 0.0)
        output += [told.token.token_id for e in events if isinstance(e, StepTokens) for told in e.tokens]
        num_steps += 1

    assert tuple(output) == bench.serial(job.prompt_token_ids, job.stops, job.sequences[0].seed, 13)
    assert num_steps == 1 + 12 // 4
