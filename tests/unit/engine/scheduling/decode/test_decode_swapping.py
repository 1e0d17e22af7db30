"""Preemption with swap space: no token is computed twice where copying is cheaper, no slot leaks, tokens are serial."""

import pytest

from cluster.messages import FinishReason
from engine.scheduling.batching.block_tables import PreemptionCost
from engine.scheduling.step import StepPlan
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.fake_paged_runner import num_tokens
from tests.unit.engine.rigs.scheduler_bench import SchedulerBench


def _until_preempted(bench: SchedulerBench) -> StepPlan:
    for _ in range(100):
        plan = bench.step()
        assert plan is not None
        if bench.inspect().figures["preemptions"]:
            return plan
    raise AssertionError("nothing was preempted")


def _two_that_outgrow_the_pool(bench: SchedulerBench) -> tuple[int, int]:
    (old,) = bench.admit(bench.job([1, 2, 3], max_tokens=17))
    (young,) = bench.admit(bench.job([4, 5, 6], max_tokens=17))
    return old, young


def test_a_swapped_sequence_continues_without_computing_a_token_again() -> None:
    bench = SchedulerBench(limits(num_blocks=6, num_swap_slots=8), prefix_caching=False)
    old, young = _two_that_outgrow_the_pool(bench)

    plan = _until_preempted(bench)
    seen = len(bench.choices[young].output)
    assert len(plan.swaps_out) == 3 and num_tokens(plan) == 1
    back = next(plan for plan in bench.run() if plan.swaps_in)

    assert len(back.swaps_in) == 3 and num_tokens(back) == 1  # the step that brings it back already decodes it
    assert {bench.choices[handle].ended for handle in (old, young)} == {FinishReason.LENGTH}
    assert 0 < seen < len(bench.choices[young].output)
    figures = bench.inspect().figures
    assert (figures["swapped_out"], figures["swapped_in"], figures["recomputed"]) == (1, 1, 0)
    assert figures["tokens_computed"] == 2 * (3 + 16)
    bench.assert_idle()


def test_a_preempted_sequence_is_recomputed_when_the_swap_space_is_full() -> None:
    bench = SchedulerBench(limits(num_blocks=6, num_swap_slots=2), prefix_caching=False)
    _two_that_outgrow_the_pool(bench)

    assert _until_preempted(bench).swaps_out == ()
    bench.run()

    figures = bench.inspect().figures
    assert (figures["swapped_out"], figures["recomputed"], figures["swap_full"]) == (0, 1, 1)
    bench.assert_idle()


@pytest.mark.parametrize(("compute_s_per_token", "swapped"), [(0.1, 0), (10.0, 1)])
def test_preemption_swaps_or_recomputes_whichever_is_cheaper(compute_s_per_token: float, swapped: int) -> None:
    bench = SchedulerBench(limits(num_blocks=6, num_swap_slots=8), prefix_caching=False)
    bench.cost.copy_s_per_block, bench.cost.compute_s = 1.0, lambda num_tokens: compute_s_per_token * num_tokens
    _two_that_outgrow_the_pool(bench)

    bench.run()

    figures = bench.inspect().figures
    assert (figures["swapped_out"], figures["recompute_cheaper"]) == (swapped, 1 - swapped)
    bench.assert_idle()


def test_a_failed_step_frees_the_swap_slots_reserved_for_it() -> None:
    bench = SchedulerBench(limits(num_blocks=6, num_swap_slots=8), prefix_caching=False)
    old, young = _two_that_outgrow_the_pool(bench)
    while len(bench.choices[old].output) < 10:
        bench.step()

    bench.step(RuntimeError("the device is gone"))

    assert bench.inspect().figures["swap_slots_used"] == 0
    assert bench.inspect().figures["swap_lost"] == 1
    bench.run()
    assert (bench.choices[old].ended, bench.choices[young].ended) == ("failed", FinishReason.LENGTH)
    bench.assert_idle()


def test_a_failed_swap_in_ends_the_sequence_and_frees_its_slots() -> None:
    bench = SchedulerBench(limits(num_blocks=6, num_swap_slots=8), prefix_caching=False)
    old, young = _two_that_outgrow_the_pool(bench)
    _until_preempted(bench)
    bench.cancel([old])

    bench.step(RuntimeError("the device is gone"))

    assert bench.choices[young].ended == "failed"
    bench.assert_idle()


def test_a_swapped_sequence_that_is_cancelled_frees_its_slots_at_once() -> None:
    bench = SchedulerBench(limits(num_blocks=6, num_swap_slots=8))
    _, young = _two_that_outgrow_the_pool(bench)
    _until_preempted(bench)
    assert bench.inspect().figures["swap_slots_used"] == 3

    bench.cancel([young])

    assert bench.inspect().figures["swap_slots_used"] == 0
    bench.run()
    bench.assert_idle()


def test_blocks_shared_with_other_sequences_are_not_swapped_out_and_are_reused() -> None:
    bench = SchedulerBench(limits(num_blocks=8, num_swap_slots=8))
    handles = bench.admit(bench.job(range(1, 13), num_choices=3, max_tokens=11))

    plan = _until_preempted(bench)
    assert len(plan.swaps_out) == 1 and bench.inspect().figures["swapped_out"] == 1  # three blocks of prompt stay
    bench.run()

    assert {bench.choices[handle].ended for handle in handles} == {FinishReason.LENGTH}
    assert bench.inspect().figures["recomputed"] == 0
    bench.assert_idle()


def test_shared_blocks_that_were_freed_are_computed_again() -> None:
    bench = SchedulerBench(limits(num_blocks=9, num_swap_slots=8))
    (old,) = bench.admit(bench.job(range(30, 41), max_tokens=24))  # will need every block
    first, second, third = bench.admit(bench.job(range(1, 13), num_choices=3, max_tokens=20))
    while len(bench.choices[old].output) < 20:
        bench.step()
    assert bench.inspect().figures["swapped_out"] == 3

    bench.cancel([first, second])  # the first one has the prompt's blocks in its own slots
    bench.run()

    assert bench.inspect().figures["swap_lost"] == 1
    assert bench.choices[third].ended == FinishReason.LENGTH
    bench.assert_idle()


def test_an_imported_sequence_is_swapped_in_with_the_imported_bytes() -> None:
    """The open tail comes back too: its bytes are the imported ones, which this worker would not have computed."""
    bench = SchedulerBench(limits(num_blocks=6, num_swap_slots=8), prefix_caching=False, wire_dtype="int8")
    bench.admit(bench.job([1, 2, 3], max_tokens=17))
    handoff = bench.reserve(bench.job([4, 5, 6], max_tokens=17))
    bench.finish(handoff)

    bench.run()

    figures = bench.inspect().figures
    assert (figures["swapped_in"], figures["recomputed"]) == (1, 0)
    assert figures["tokens_computed"] == 3 + 16 + 16
    bench.assert_idle()


def test_a_half_computed_prompt_continues_after_preemption() -> None:
    bench = SchedulerBench(limits(num_blocks=12, num_swap_slots=20, max_prefill_tokens=5), prefix_caching=False)
    (old,) = bench.admit(bench.job([1, 2, 3], max_tokens=30))
    bench.step()
    (young,) = bench.admit(bench.job(range(1, 41), max_tokens=3))

    bench.run()

    figures = bench.inspect().figures
    assert figures["swapped_in"] >= 1 and figures["recomputed"] == 0
    assert figures["tokens_computed"] == 3 + 29 + 40 + 2
    assert {bench.choices[handle].ended for handle in (old, young)} == {FinishReason.LENGTH}
    bench.assert_idle()


def test_preemption_cost_follows_the_measured_times_of_copies() -> None:
    cost = PreemptionCost(compute_s=lambda num_tokens: 0.01 * num_tokens)
    assert cost.is_swap_cheaper(num_blocks=100, num_tokens=1)  # no copy was measured

    cost.observe_copies(num_blocks=10, seconds=1.0)
    assert cost.is_swap_cheaper(num_blocks=1, num_tokens=21) and not cost.is_swap_cheaper(num_blocks=1, num_tokens=19)

    for _ in range(40):
        cost.observe_copies(num_blocks=10, seconds=0.1)
    assert cost.is_swap_cheaper(num_blocks=1, num_tokens=3) and not cost.is_swap_cheaper(num_blocks=1, num_tokens=1)
