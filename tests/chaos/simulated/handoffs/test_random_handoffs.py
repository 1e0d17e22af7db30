"""Two real pools through thousands of random hand-offs, cancels, deaths and expiries, the accounts checked after each.

Real: both pools and their bytes, exporter, importer, their machines, messages and servicer, prefix caches. Replaced:
the step threads, gRPC (queues in this process), transports (loopback, with faults), and time and helper threads (those
of the simulated cluster). A hand-off costs about three milliseconds.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.digests import VerifyMode
from tests.chaos.simulated.handoffs.world import HandOff, Mishap, Plan, run_plan
from tests.contract.rigs.kv_pools import BLOCK_SIZE
from tests.loopback import Fault

_PER_PLAN = 25
_seconds = st.sampled_from((0.0, 0.1, 0.5, 1.0, 2.5, 4.0, 9.0, 14.0))
_hand_offs = st.builds(
    HandOff,
    start_s=st.integers(0, 60).map(lambda tenths: tenths / 3),
    exporter=st.integers(0, 1),
    num_tokens=st.integers(1, 6 * BLOCK_SIZE + 1),
    num_choices=st.integers(1, 2),
    has_ended=st.booleans(),
    num_shared=st.integers(0, 4),
    chunk_blocks=st.integers(1, 3),
    chunk_s=_seconds,
    attach_s=_seconds,
    cancel_s=st.none() | _seconds,
    abort_s=st.none() | st.none() | _seconds,
    again_s=st.none() | st.none() | _seconds,
    decode_s=_seconds,
)
_mishaps = st.builds(
    Mishap,
    at_s=st.integers(0, 90).map(lambda tenths: tenths / 3),
    kind=st.sampled_from(("jump", "sever", "die")),
    worker=st.integers(0, 1),
    number=st.integers(0, 9),
)
_HARMLESS = (Fault.DROP, Fault.DELAY, Fault.DUPLICATE, Fault.REORDER, Fault.STOP)


@st.composite
def plans(draw: st.DrawFn, size: int = _PER_PLAN) -> Plan:
    verify = draw(st.sampled_from(tuple(VerifyMode)))
    # Damaged bytes are found only when every block is verified.
    kinds = (*_HARMLESS, Fault.CORRUPT) if verify.verifies_all else _HARMLESS
    return Plan(
        hand_offs=tuple(draw(st.lists(_hand_offs, min_size=size, max_size=size))),
        mishaps=tuple(draw(st.lists(_mishaps, max_size=6))),
        faults=draw(st.dictionaries(st.integers(0, 2 * size), st.sampled_from(kinds), min_size=2, max_size=size)),
        verify=verify,
        num_blocks=draw(st.integers(7, 60)),
    )


def _drive(num_handoffs: int) -> "Counter[str]":
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=num_handoffs // _PER_PLAN,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(plans())
    def run(plan: Plan) -> None:
        outcomes.update(run_plan(plan))

    run()
    return outcomes


def _assert_covered(outcomes: "Counter[str]", num_handoffs: int) -> None:
    print(dict(outcomes.most_common()))
    assert outcomes.total() >= num_handoffs * 0.8  # those that died with their worker have no outcome
    for outcome in ("ok", "cancelled", "exporter_lost", "prefill_failed", "lease_lapsed", "unknown_ticket"):
        assert outcomes[outcome] >= num_handoffs / 500, f"too few ended with {outcome}: the plans test little of it"


def test_a_thousand_random_hand_offs_leave_every_account_right() -> None:
    _assert_covered(_drive(1_000), 1_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_random_hand_offs_leave_every_account_right() -> None:
    _assert_covered(_drive(10_000), 10_000)
