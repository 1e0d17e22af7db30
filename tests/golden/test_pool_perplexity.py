"""The demo model's loss of quality when its pool keeps KV of 8 bits: the limits that Tandem promises."""

import pytest

from tests.golden.pool_perplexity import Loss, losses

NUM_SEQUENCES, NUM_OF_DIVERGENCE = 8, 1
MOST_PERCENT = 0.5
MOST_DIVERGENCE = {"int8": 5e-4, "fp8": 3e-3}  # nats; measured: 2.5e-4 and 1.5e-3


@pytest.fixture(scope="module")
def measured() -> dict[str, Loss]:
    return losses(tuple(MOST_DIVERGENCE), NUM_SEQUENCES)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", MOST_DIVERGENCE)
def test_perplexity_over_a_pool_of_eight_bits(measured: dict[str, Loss], kv_dtype: str) -> None:
    loss = measured[kv_dtype]
    assert loss.increase.num_tokens >= 1_000
    assert loss.increase.percent < MOST_PERCENT, loss
    assert 0 < loss.divergence < MOST_DIVERGENCE[kv_dtype], loss


def test_divergence_over_a_pool_of_eight_bits() -> None:
    """The sharper limit of the two needs no luck with the text. 0: nothing was quantised at all."""
    for kv_dtype, loss in losses(tuple(MOST_DIVERGENCE), NUM_OF_DIVERGENCE).items():
        assert 0 < loss.divergence < MOST_DIVERGENCE[kv_dtype], (kv_dtype, loss)
