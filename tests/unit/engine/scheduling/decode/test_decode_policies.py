"""The order of the policies in the decode worker: which sequence takes the slot and blocks of which; no token is
lost.
"""

from dataclasses import replace

import pytest

from cluster.messages import FinishReason
from engine.scheduling.batching.preemption import PredictedGrowth, peak_growth
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.scheduler_bench import SchedulerBench, known_lengths


def _ended(bench: SchedulerBench) -> set[str]:
    bench.run()
    bench.assert_idle()
    return {choice.ended for choice in bench.choices.values()}


def test_a_higher_ranked_sequence_takes_the_slot_and_the_displaced_one_keeps_its_blocks() -> None:
    bench = SchedulerBench(limits(max_num_seqs=1), policy="priority")
    (low,) = bench.admit(bench.job([1, 2, 3], max_tokens=20, priority=1))
    for _ in range(3):
        bench.step()
    (high,) = bench.admit(bench.job([4, 5, 6], max_tokens=4, priority=0))

    while not bench.choices[high].ended:
        bench.step()
    assert len(bench.choices[low].output) == 3

    assert _ended(bench) == {FinishReason.LENGTH}
    figures = bench.inspect().figures
    assert (figures["displaced"], figures["preemptions"]) == (1, 0)
    assert figures["tokens_computed"] == 3 + 19 + 3 + 3


@pytest.mark.parametrize(("num_swap_slots", "num_again"), [(0, 6), (8, 0)])
def test_a_higher_ranked_sequence_takes_scarce_blocks_and_the_preempted_one_continues_later(
    num_swap_slots: int, num_again: int
) -> None:
    bench = SchedulerBench(limits(num_blocks=5, num_swap_slots=num_swap_slots), policy="priority", prefix_caching=False)
    bench.admit(bench.job([1, 2, 3], max_tokens=12, priority=1))
    for _ in range(4):
        bench.step()
    (high,) = bench.admit(bench.job(range(10, 25), max_tokens=4, priority=0))
    bench.step()

    assert bench.choices[high].output

    assert _ended(bench) == {FinishReason.LENGTH}
    figures = bench.inspect().figures
    assert figures["preemptions"] == 1
    assert figures["tokens_computed"] == 3 + 11 + 15 + 3 + num_again


def test_a_higher_ranked_hand_off_gets_blocks_after_the_step_that_swaps_their_content_out() -> None:
    bench = SchedulerBench(limits(num_blocks=5, num_swap_slots=8), policy="priority", prefix_caching=False)
    (low,) = bench.admit(bench.job([1, 2, 3], max_tokens=15, priority=1))
    for _ in range(6):
        bench.step()
    handoff = bench.reserve(bench.job(range(10, 26), max_tokens=2, priority=0))
    assert handoff.block_ids is None

    plan = bench.step()

    assert plan is not None and plan.swaps_out
    assert handoff.block_ids is not None and set(handoff.block_ids) & {swap.block_id for swap in plan.swaps_out}
    bench.finish(handoff)
    assert _ended(bench) == {FinishReason.LENGTH}
    assert len(bench.choices[low].output) == 15


def test_the_waiting_hand_off_of_the_older_request_gets_its_blocks_first() -> None:
    bench = SchedulerBench(limits(num_blocks=5), prefix_caching=False)
    bench.admit(bench.job([1, 2, 3, 4, 5], max_tokens=3))
    bench.step()
    later = bench.reserve(bench.job(range(10, 26), max_tokens=2))
    lost = bench.reserve(replace(bench.job(range(30, 46), max_tokens=2), age_s=4.0))
    while lost.block_ids is None and later.block_ids is None:
        bench.step()
    assert (lost.block_ids is not None, later.block_ids) == (True, None)
    bench.finish(lost)
    while later.block_ids is None:
        bench.step()
    bench.finish(later)
    assert _ended(bench) == {FinishReason.LENGTH}


def test_fcfs_displaces_no_sequence() -> None:
    bench = SchedulerBench(limits(max_num_seqs=1))
    (first,) = bench.admit(bench.job([1, 2, 3], max_tokens=20, priority=1))
    bench.step()
    (second,) = bench.admit(bench.job([4, 5, 6], max_tokens=4, priority=0))

    while not bench.choices[first].ended:
        bench.step()

    assert not bench.choices[second].started


@pytest.mark.parametrize("policy", ["fcfs", "shortest", "mlfq"])
def test_the_batch_class_yields_to_every_other_request(policy: str) -> None:
    bench = SchedulerBench(limits(num_blocks=6, max_num_seqs=2), policy=policy)
    batch = bench.admit(bench.job([1, 2, 3], max_tokens=14, is_batch=True))
    batch += bench.admit(bench.job([1, 2, 4], max_tokens=14, is_batch=True))
    for _ in range(4):
        bench.step()
    held = [len(bench.choices[handle].output) for handle in batch]

    bench.admit(bench.job(range(10, 20), max_tokens=6))
    bench.admit(bench.job([7, 8], max_tokens=6))
    while len(bench.live) == 4:
        bench.step()

    assert [len(bench.choices[handle].output) for handle in batch] == held
    assert _ended(bench) == {FinishReason.LENGTH}


def test_blocks_that_running_sequences_are_predicted_to_need_stay_free() -> None:
    """Each sequence has six tokens: three sequences of one block will need two each."""
    bench = SchedulerBench(limits(num_blocks=5), lengths=known_lengths(6))
    handles = [bench.admit(bench.job([place, 2, 3], max_tokens=6))[0] for place in range(3)]

    bench.step()

    assert [bench.choices[handle].started for handle in handles] == [True, True, False]
    assert _ended(bench) == {FinishReason.LENGTH}
    assert bench.inspect().figures["preemptions"] == 0


def test_a_sequence_longer_than_predicted_preempts_and_no_token_is_lost() -> None:
    bench = SchedulerBench(limits(num_blocks=6, num_swap_slots=10), lengths=known_lengths(2))
    for place in range(4):
        bench.admit(bench.job([place, 2, 3], max_tokens=15))

    assert _ended(bench) == {FinishReason.LENGTH}
    assert bench.inspect().figures["preemptions"] > 0


@pytest.mark.parametrize("num_handoffs", [0, 9])
def test_hand_offs_leave_room_to_grow_for_an_older_waiting_prompt(num_handoffs: int) -> None:
    bench = SchedulerBench(limits(num_blocks=8), lengths=known_lengths(12), prefix_caching=False)
    bench.admit(bench.job([1, 2, 3], max_tokens=12))
    bench.step()
    (waiting,) = bench.admit(bench.job(range(10, 20), max_tokens=12))  # three blocks, and three to grow by
    for place in range(num_handoffs):
        bench.reserve(bench.job([place, 2], max_tokens=2))

    while not bench.choices[waiting].started:
        assert bench.step() is not None

    assert bench.steps == 6  # with and without them


def test_a_hand_off_predicted_to_outgrow_the_pool_is_granted_when_no_sequence_runs() -> None:
    bench = SchedulerBench(limits(num_blocks=8), lengths=known_lengths(20))

    handoff = bench.reserve(bench.job(range(1, 5), num_choices=4, max_tokens=20))

    assert handoff.block_ids is not None


def test_predicted_growth_is_the_number_of_blocks_at_the_worst_moment() -> None:
    """The sequence that ends first gives its blocks to the others."""
    short, long = PredictedGrowth(4, 5, 1), PredictedGrowth(4, 13, 1)

    assert peak_growth([long], 4) == 3
    assert peak_growth([short, long], 4) == 2  # at the short one's end 2 + 2 blocks, at the other's 4, of 2 now
    assert peak_growth([PredictedGrowth(4, 11, 1), long], 4) == 6  # 4 + 4, of 2 now
    assert peak_growth([PredictedGrowth(40, 5, 10), long], 4) == 2
    assert peak_growth([], 4) == 0
