"""The demo model's loss of perplexity when its KV travels quantised: the limits that Tandem promises."""

import pytest

from tests.golden.wire_perplexity import Increase, increases

pytestmark = pytest.mark.slow

NUM_SEQUENCES = 16
MOST_PERCENT = {"int8": 0.5, "fp8": 0.5, "int4": 3.0}


@pytest.fixture(scope="module")
def measured() -> dict[str, Increase]:
    return increases(tuple(MOST_PERCENT), NUM_SEQUENCES)


@pytest.mark.parametrize("wire_dtype", MOST_PERCENT)
def test_perplexity_after_a_quantised_hand_off(measured: dict[str, Increase], wire_dtype: str) -> None:
    increase = measured[wire_dtype]
    assert increase.num_tokens >= 2_000
    assert increase.standard_error > 0  # it was quantised at all
    assert increase.percent + 3 * increase.standard_error < MOST_PERCENT[wire_dtype], increase
