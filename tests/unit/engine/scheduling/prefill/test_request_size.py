"""One rule decides which requests a worker can hold: workers refuse by it, and routers choose by it. An admitted
request runs to its end alone on the worker; a refused one could not.
"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import WorkerTooSmall
from cluster.member import Capacity, Member, from_json, to_json
from cluster.messages import MemberId, Role
from cluster.protocol.hashing import keyed_chains
from cluster.request_size import (
    LengthLimits,
    RequestSize,
    decode_shortage,
    handoff_shortage,
    most_output,
    most_tokens,
    prefill_shortage,
    too_large,
)
from engine.scheduling.commands import AdmitExport, ExportAccepted, ExportFinished, ExportRefused
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from tests.examples import num_examples
from tests.prefill_jobs import prefill_job
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.fake_paged_runner import FakePagedRunner
from tests.unit.engine.rigs.scheduler_bench import SchedulerBench

LENGTHS = st.builds(LengthLimits, st.sampled_from([0, 0, 0, 5]), st.sampled_from([0, 0, 0, 6]))
DECODE_LIMITS = st.builds(
    lambda lengths, **sizes: replace(limits(**sizes), lengths=lengths),
    LENGTHS,
    num_blocks=st.integers(1, 7),
    block_size=st.integers(1, 4),
    max_model_len=st.integers(1, 24),
    max_num_seqs=st.integers(1, 4),
    max_prefill_tokens=st.integers(1, 5),
    watermark=st.sampled_from([0.0, 0.2, 0.5]),
    num_swap_slots=st.sampled_from([0, 2]),
)
SIZES = st.builds(
    lambda num_prompt, max_tokens, num_committed, num_choices: RequestSize(
        num_prompt, max_tokens, min(num_committed, max_tokens - 1), num_choices
    ),
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(0, 11),
    st.integers(1, 4),
)


def capacity(**changed: int) -> Capacity:
    values = {"num_blocks": 10, "block_size": 4, "max_num_seqs": 8, "max_model_len": 1000}
    return Capacity(**(values | changed))


@settings(max_examples=num_examples(suite=40, search=120))
@given(DECODE_LIMITS, SIZES)
def test_a_decode_worker_finishes_exactly_the_requests_that_fit_by_the_routers_rule(
    worker: SchedulerLimits, size: RequestSize
) -> None:
    bench = SchedulerBench(worker)
    prompt = [1 + place % 40 for place in range(size.num_prompt)]
    committed = [size.num_committed]  # of each choice
    job = bench.job(prompt, max_tokens=size.max_tokens, num_choices=size.num_choices, committed=committed)

    bench.admit(job)
    bench.run()

    bench.assert_idle()
    if decode_shortage(worker.capacity, size):
        assert [type(failed.error) for failed in bench.failures] == [WorkerTooSmall]
    else:
        assert bench.failures == []
        assert all(len(bench.choices[start.handle].output) == size.max_tokens for start in job.sequences)


@settings(max_examples=num_examples(suite=40, search=120))
@given(DECODE_LIMITS, SIZES)
def test_a_decode_worker_imports_exactly_the_requests_that_fit_by_the_routers_rule(
    worker: SchedulerLimits, size: RequestSize
) -> None:
    bench = SchedulerBench(worker)
    starts = bench.job(range(1, size.num_prompt + 1), max_tokens=size.max_tokens, num_choices=size.num_choices)
    known = tuple(1 + place % 40 for place in range(size.num_committed))
    sequences = tuple(replace(start, committed_token_ids=known) for start in starts.sequences)
    job = replace(starts, sequences=sequences, signed_ticket=b"ticket")
    is_large = not decode_shortage(worker.capacity, size) and not handoff_shortage(worker.capacity, size)

    assert (worker.job_refusal(job) is None) == is_large
    if not decode_shortage(worker.capacity, size):
        handoff = bench.reserve(job)
        assert (handoff.block_ids is not None) == is_large
        assert len(bench.refused_handoffs) == (not is_large)
        if is_large:
            bench.finish(handoff)
            bench.run()
            bench.assert_idle()
            assert bench.failures == []


@settings(max_examples=num_examples(suite=35, search=100))
@given(SIZES, LENGTHS, st.integers(1, 6), st.integers(1, 4), st.integers(1, 24))
def test_a_prefill_worker_computes_exactly_the_requests_that_fit_by_the_routers_rule(
    size: RequestSize, lengths: LengthLimits, num_blocks: int, block_size: int, max_model_len: int
) -> None:
    worker = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_prefill_tokens=3,
        max_num_seqs=2,
        max_queue=4,
        lengths=lengths,
    )
    scheduler = SequenceScheduler(worker, new_chain=keyed_chains(b"key", block_size))
    runner = FakePagedRunner(num_blocks, block_size)
    job = prefill_job(
        [1 + place % 40 for place in range(size.num_known)],
        max_tokens=size.max_tokens,
        seeds=tuple(range(size.num_choices)),
        num_committed=size.num_committed,
    )
    (event,) = scheduler.apply(AdmitExport(b"ticket", job), 0.0)

    assert isinstance(event, ExportRefused if prefill_shortage(worker.capacity, size) else ExportAccepted)
    if isinstance(event, ExportRefused):
        assert isinstance(event.error, WorkerTooSmall)
        return
    finished = []
    while (plan := scheduler.plan(0.0)[1]) is not None:
        finished += [e for e in scheduler.complete(plan, runner.run(plan), 0.0) if isinstance(e, ExportFinished)]
    assert len(finished) == 1


@given(st.lists(DECODE_LIMITS, min_size=1, max_size=3), st.integers(1, 24))
def test_most_output_is_exactly_the_limit_of_the_largest_worker(
    workers: list[SchedulerLimits], num_prompt: int
) -> None:
    most = most_output([worker.capacity for worker in workers], num_prompt)

    def fits(num_output: int) -> bool:
        return any(not decode_shortage(worker.capacity, RequestSize(num_prompt, num_output)) for worker in workers)

    assert most == 0 or fits(most)
    assert not fits(most + 1)


def test_a_request_may_be_one_token_longer_than_the_pool_since_the_last_tokens_kv_is_not_computed() -> None:
    assert most_tokens(capacity()) == 41
    assert decode_shortage(capacity(), RequestSize(2, 39)) == ""
    assert "holds at most 41" in decode_shortage(capacity(), RequestSize(2, 40))


def test_every_choice_needs_a_copy_of_a_last_block_that_is_not_full() -> None:
    assert handoff_shortage(capacity(), RequestSize(36, 2, num_choices=10)) == ""  # nine full blocks
    assert handoff_shortage(capacity(), RequestSize(34, 2, num_choices=2)) == ""
    assert "needs 11 blocks" in handoff_shortage(capacity(), RequestSize(34, 2, num_choices=3))


def test_the_watermark_limits_hand_offs_and_not_the_workers_own_prefills() -> None:
    marked, size = capacity(num_watermark_blocks=2), RequestSize(33, 2)
    assert "at most 8" in handoff_shortage(marked, size)
    assert decode_shortage(marked, size) == ""


def test_a_resumed_prompt_counts_the_tokens_that_its_client_has() -> None:
    assert prefill_shortage(capacity(), RequestSize(30, 20, num_committed=10)) == ""
    assert "41 tokens; this worker holds at most 40" in prefill_shortage(
        capacity(), RequestSize(30, 20, num_committed=11)
    )


def test_the_error_names_the_largest_worker_and_the_flags_to_raise() -> None:
    small, large = capacity(), capacity(num_blocks=20)
    error = too_large(RequestSize(60, 40), [small, large])
    assert "60 + max_tokens 40 = 100 tokens" in error.message
    assert "largest of 2 decode worker(s) holds 81" in error.message
    assert "--num-blocks" in error.message and "--max-model-len" not in error.message
    assert "--max-model-len" in too_large(RequestSize(60, 40), [capacity(max_model_len=30)]).message


def test_a_worker_registers_the_limits_by_which_it_refuses() -> None:
    worker = replace(limits(num_blocks=10, watermark=0.3, max_model_len=77), lengths=LengthLimits(7, 5))
    member = Member(
        id=MemberId("d", "1"), role=Role.DECODE, address="", model="m", capacity=worker.capacity, transports=("tcp",)
    )
    registered = from_json(to_json(member)).capacity
    assert registered == worker.capacity
    assert registered is not None and registered.num_watermark_blocks == worker.num_watermark_blocks == 3
