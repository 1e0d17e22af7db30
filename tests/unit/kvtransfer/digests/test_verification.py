"""The blocks of a hand-off that are verified in each mode."""

import random

import pytest

from cluster.observe.telemetry import Telemetry
from kvtransfer.counters import TransferCounters
from kvtransfer.digests import VerifyMode, unverified_places


def _verified(mode: VerifyMode, num_cached: int, num_sealed: int, num_blocks: int, seed: int = 0) -> set[int]:
    unverified = unverified_places(
        mode, num_cached=num_cached, num_sealed=num_sealed, num_blocks=num_blocks, dice=random.Random(seed)
    )
    return set(range(num_blocks)) - unverified


def test_modes_all_and_keyed_verify_every_block_and_mode_off_no_block() -> None:
    for mode in (VerifyMode.ALL, VerifyMode.KEYED):
        assert _verified(mode, 0, 40, 41) == set(range(41)) and mode.verifies_all
    assert _verified(VerifyMode.OFF, 0, 40, 41) == set()


@pytest.mark.parametrize(("num_cached", "num_sealed", "num_blocks"), [(0, 1, 1), (7, 8, 10), (0, 0, 1), (8, 8, 9)])
def test_mode_sample_verifies_at_least_one_block_of_each_read(
    num_cached: int, num_sealed: int, num_blocks: int
) -> None:
    for seed in range(50):
        assert any(
            place >= num_cached for place in _verified(VerifyMode.SAMPLE, num_cached, num_sealed, num_blocks, seed)
        )


def test_mode_sample_verifies_one_in_sixteen_blocks_drawn_again_each_time() -> None:
    samples = [frozenset(_verified(VerifyMode.SAMPLE, 32, 352, 352, seed) - set(range(32))) for seed in range(200)]

    assert {len(sample) for sample in samples} == {20}
    assert len(set(samples)) > 150
    assert len(set().union(*samples)) > 300  # none is spared for ever


@pytest.mark.parametrize(
    ("mode", "said"),
    [(VerifyMode.ALL, ""), (VerifyMode.KEYED, ""), (VerifyMode.SAMPLE, "one in 16"), (VerifyMode.OFF, "no KV block")],
)
def test_verify_mode_is_logged_at_start_and_shown_as_a_metric(
    mode: VerifyMode, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry()

    TransferCounters(telemetry).verifies(mode)

    assert [record.levelname for record in caplog.records] == (["WARNING"] if said else [])
    assert said in caplog.text
    assert telemetry.value("tandem_kv_verify_mode", mode=mode) == 1
