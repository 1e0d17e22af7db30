"""The description of a schedule that failed."""

from dataclasses import fields, replace

import pytest

from tests.chaos.simulated.results.story import describe
from tests.chaos.simulated.schedules.mix import SEPARATE, DirectAsk, Flip, Mix, ProofFaults, Rotation, Wires
from tests.chaos.simulated.schedules.schedule import plain_schedule

_OTHERS = Mix(
    placement="auto",
    slo_ttft_ms=1.0,
    slo_tpot_ms=1.0,
    warm_up_s=1.0,
    is_colocated=True,
    direct_asks=(DirectAsk(0.0, "prefill0", "decode0", 0, 0, 8, 4),),
    of_both=("decode0",),
    flips=(Flip(0.0, "decode0", "both", 1.0),),
    is_keyed=True,
    wires=Wires(),
    rotation=Rotation((0.0, 2.0, 4.0), 0.1),
    proofs=ProofFaults(0.1, 4),
)


@pytest.mark.parametrize("name", [field.name for field in fields(Mix)])
def test_everything_that_is_mixed_into_a_schedule_shows_in_its_description(name: str) -> None:
    plain = replace(plain_schedule(1), mix=SEPARATE)
    other = replace(SEPARATE, **{name: getattr(_OTHERS, name)})
    assert other != SEPARATE and describe(replace(plain, mix=other)) != describe(plain)
