"""The policy's order in the decode worker: who takes whose slot and blocks, and that nobody loses a token by it."""

from dataclasses import replace

import pytest

from cluster.messages import FinishReason
from decode_worker.scheduling.growth import Future, most_growth
from tests.unit.decode_bench import DecodeBench, known_lengths, limits


def _ended(bench: DecodeBench) -> set[str]:
    bench.run()
    bench.assert_idle()
    return {choice.ended for choice in bench.choices.values()}


def test_who_ranks_first_takes_the_slot_and_the_other_one_keeps_its_blocks() -> None:
    bench = DecodeBench(limits(max_num_seqs=1), policy="priority")
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
def test_where_blocks_are_short_too_it_takes_them_and_the_other_one_goes_on_later(
    num_swap_slots: int, num_again: int
) -> None:
    bench = DecodeBench(limits(num_blocks=5, num_swap_slots=num_swap_slots), policy="priority", prefix_caching=False)
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


def test_a_hand_off_that_ranks_first_is_granted_its_blocks_after_the_step_that_copies_them() -> None:
    bench = DecodeBench(limits(num_blocks=5, num_swap_slots=8), policy="priority", prefix_caching=False)
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


def test_of_two_hand_offs_that_wait_the_one_whose_request_is_older_is_granted_first() -> None:
    bench = DecodeBench(limits(num_blocks=5), prefix_caching=False)
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


def test_fcfs_displaces_nobody() -> None:
    bench = DecodeBench(limits(max_num_seqs=1))
    (first,) = bench.admit(bench.job([1, 2, 3], max_tokens=20, priority=1))
    bench.step()
    (second,) = bench.admit(bench.job([4, 5, 6], max_tokens=4, priority=0))

    while not bench.choices[first].ended:
        bench.step()

    assert not bench.choices[second].started


@pytest.mark.parametrize("policy", ["fcfs", "shortest", "mlfq"])
def test_the_batch_class_gives_way_to_anything(policy: str) -> None:
    bench = DecodeBench(limits(num_blocks=6, max_num_seqs=2), policy=policy)
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


def test_a_batch_that_was_formed_is_joined_by_nobody_until_it_has_ended() -> None:
    bench = DecodeBench(limits(max_num_seqs=3, max_prefill_tokens=5), policy="static")
    group = [bench.admit(bench.job([1, 2, place, 4], max_tokens=3 + 5 * place))[0] for place in range(3)]
    late = bench.admit(bench.job([9, 9], max_tokens=2))[0]

    while any(not bench.choices[handle].ended for handle in group):
        assert not bench.choices[late].started
        bench.step()

    bench.step()
    assert bench.choices[late].started
    assert _ended(bench) == {FinishReason.LENGTH}


def test_what_runs_is_predicted_to_grow_into_stays_free() -> None:
    """Six tokens each: three sequences of one block will need two each."""
    bench = DecodeBench(limits(num_blocks=5), lengths=known_lengths(6))
    handles = [bench.admit(bench.job([place, 2, 3], max_tokens=6))[0] for place in range(3)]

    bench.step()

    assert [bench.choices[handle].started for handle in handles] == [True, True, False]
    assert _ended(bench) == {FinishReason.LENGTH}
    assert bench.inspect().figures["preemptions"] == 0


def test_what_outlives_its_prediction_preempts_and_nothing_is_lost() -> None:
    bench = DecodeBench(limits(num_blocks=6, num_swap_slots=10), lengths=known_lengths(2))
    for place in range(4):
        bench.admit(bench.job([place, 2, 3], max_tokens=15))

    assert _ended(bench) == {FinishReason.LENGTH}
    assert bench.inspect().figures["preemptions"] > 0


@pytest.mark.parametrize("num_handoffs", [0, 9])
def test_hand_offs_leave_a_prompt_that_waits_before_them_room_to_grow(num_handoffs: int) -> None:
    bench = DecodeBench(limits(num_blocks=8), lengths=known_lengths(12), prefix_caching=False)
    bench.admit(bench.job([1, 2, 3], max_tokens=12))
    bench.step()
    (waiting,) = bench.admit(bench.job(range(10, 20), max_tokens=12))  # three blocks, and three to grow by
    for place in range(num_handoffs):
        bench.reserve(bench.job([place, 2], max_tokens=2))

    while not bench.choices[waiting].started:
        assert bench.step() is not None

    assert bench.steps == 6  # with and without them


def test_a_hand_off_that_could_never_grow_as_predicted_is_granted_where_nothing_runs() -> None:
    bench = DecodeBench(limits(num_blocks=8), lengths=known_lengths(20))

    handoff = bench.reserve(bench.job(range(1, 5), num_choices=4, max_tokens=20))

    assert handoff.block_ids is not None


def test_growth_is_what_is_needed_at_the_worst_moment() -> None:
    """The one that ends first gives its blocks to the others."""
    short, long = Future(4, 5, 1), Future(4, 13, 1)

    assert most_growth([long], 4) == 3
    assert most_growth([short, long], 4) == 2  # at the short one's end 2 + 2 blocks, at the other's 4, of 2 now
    assert most_growth([Future(4, 11, 1), long], 4) == 6  # 4 + 4, of 2 now
    assert most_growth([Future(40, 5, 10), long], 4) == 2
    assert most_growth([], 4) == 0
