"""Tests when pulling a prefix is cheaper than computing it, and from which worker."""

from cluster.messages import LinkSpeed, MemberId, PrefillJob, PrefixSource
from prefill_worker.prefixes.prefix_pulls import PullFacts, choose_pull
from tests.prefill_jobs import prefill_job

_BLOCK = 16
_NEAR, _FAR = MemberId("near", "1"), MemberId("far", "1")


def _job(*sources: tuple[MemberId, int], num_tokens: int = 1001) -> PrefillJob:
    held = tuple(PrefixSource(member, "host:1", num_held) for member, num_held in sources)
    return prefill_job(range(num_tokens), max_tokens=9, prefix_sources=held)


def _facts(
    num_cached: int = 0,
    tokens_per_s: float = 1000.0,
    near_bytes_per_s: float = 1e9,
    far_bytes_per_s: float = 1e7,
) -> PullFacts:
    return PullFacts(
        block_size=_BLOCK,
        block_bytes=1 << 20,
        num_cached=num_cached,
        compute_s=lambda num_tokens, num_before: num_tokens / tokens_per_s,
        links={
            _NEAR: LinkSpeed(_NEAR, "shm", near_bytes_per_s, 0.001),
            _FAR: LinkSpeed(_FAR, "tcp", far_bytes_per_s, 0.002),
        },
    )


def test_a_prefix_is_pulled_if_cheaper_than_computing() -> None:
    pull = choose_pull(_job((_NEAR, 640)), _facts())
    assert pull is not None and (pull.source.member, pull.num_blocks, pull.compute_s) == (_NEAR, 40, 0.64)
    assert choose_pull(_job((_NEAR, 640)), _facts(near_bytes_per_s=5e7)) is None
    assert choose_pull(_job((_NEAR, 640)), _facts(tokens_per_s=1e6)) is None


def test_cached_blocks_are_not_pulled_and_fewer_than_four_are_not_worth_a_pull() -> None:
    pull = choose_pull(_job((_NEAR, 640)), _facts(num_cached=30))
    assert pull is not None and pull.compute_s == 0.16
    assert choose_pull(_job((_NEAR, 640)), _facts(num_cached=37)) is None
    assert choose_pull(_job((_NEAR, 63)), _facts()) is None


def test_the_block_of_the_last_token_is_never_pulled() -> None:
    pull = choose_pull(_job((_NEAR, 5000), num_tokens=160), _facts())
    assert pull is not None and pull.num_blocks == 9


def test_the_source_that_saves_most_time_is_chosen() -> None:
    shorter_but_fast = choose_pull(_job((_FAR, 960), (_NEAR, 800)), _facts(far_bytes_per_s=1e8))
    assert shorter_but_fast is not None and shorter_but_fast.source.member == _NEAR
    longer = choose_pull(_job((_FAR, 960), (_NEAR, 320)), _facts(far_bytes_per_s=1e9))
    assert longer is not None and longer.source.member == _FAR


def test_an_unmeasured_source_is_tried() -> None:
    stranger = MemberId("stranger", "1")
    assert choose_pull(_job((stranger, 640)), _facts()) is not None
    assert choose_pull(_job(), _facts()) is None


def test_a_pull_names_no_more_blocks_than_one_message_may() -> None:
    pull = choose_pull(_job((_NEAR, 17 * 70_000), num_tokens=17 * 70_000), _facts())
    assert pull is not None and pull.num_blocks == 65_536
