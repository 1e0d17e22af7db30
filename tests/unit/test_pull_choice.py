"""When a prefix is worth pulling, and from whom."""

from cluster.messages import MemberId, PairFigure, PrefillJob, PrefixHolder
from prefill_worker.prefixes.pull_choice import PullFacts, choose_pull
from tests.prefill_jobs import prefill_job

_BLOCK = 16
_NEAR, _FAR = MemberId("near", "1"), MemberId("far", "1")


def _job(*holders: tuple[MemberId, int], num_tokens: int = 1001) -> PrefillJob:
    held = tuple(PrefixHolder(member, "host:1", num_held) for member, num_held in holders)
    return prefill_job(range(num_tokens), max_tokens=9, prefix_holders=held)


def _facts(
    num_here: int = 0, tokens_per_s: float | None = 1000.0, near_bytes_per_s: float = 1e9, far_bytes_per_s: float = 1e7
) -> PullFacts:
    return PullFacts(
        block_size=_BLOCK,
        block_bytes=1 << 20,
        num_here=num_here,
        compute_tokens_per_s=tokens_per_s,
        pairs={
            _NEAR: PairFigure(_NEAR, "shm", near_bytes_per_s, 0.001),
            _FAR: PairFigure(_FAR, "tcp", far_bytes_per_s, 0.002),
        },
    )


def test_a_prefix_is_pulled_where_that_is_cheaper_than_computing_it() -> None:
    pull = choose_pull(_job((_NEAR, 640)), _facts())
    assert pull is not None and (pull.holder.member, pull.num_blocks, pull.compute_s) == (_NEAR, 40, 0.64)
    assert choose_pull(_job((_NEAR, 640)), _facts(near_bytes_per_s=5e7)) is None
    assert choose_pull(_job((_NEAR, 640)), _facts(tokens_per_s=1e6)) is None


def test_what_is_here_is_not_pulled_and_little_is_not_worth_it() -> None:
    pull = choose_pull(_job((_NEAR, 640)), _facts(num_here=30))
    assert pull is not None and pull.compute_s == 0.16
    assert choose_pull(_job((_NEAR, 640)), _facts(num_here=37)) is None
    assert choose_pull(_job((_NEAR, 63)), _facts()) is None


def test_the_block_of_the_last_token_is_computed_whoever_has_it() -> None:
    pull = choose_pull(_job((_NEAR, 5000), num_tokens=160), _facts())
    assert pull is not None and pull.num_blocks == 9


def test_of_several_holders_the_one_that_saves_most() -> None:
    shorter_but_fast = choose_pull(_job((_FAR, 960), (_NEAR, 800)), _facts(far_bytes_per_s=1e8))
    assert shorter_but_fast is not None and shorter_but_fast.holder.member == _NEAR
    longer = choose_pull(_job((_FAR, 960), (_NEAR, 320)), _facts(far_bytes_per_s=1e9))
    assert longer is not None and longer.holder.member == _FAR


def test_a_pair_that_nobody_measured_is_tried_but_not_before_computing_is_known() -> None:
    stranger = MemberId("stranger", "1")
    assert choose_pull(_job((stranger, 640)), _facts()) is not None
    assert choose_pull(_job((stranger, 640)), _facts(tokens_per_s=None)) is None
    assert choose_pull(_job(), _facts()) is None
