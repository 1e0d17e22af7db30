"""A choice takes only tokens that a worker can have sampled for its request."""

import pytest

from cluster.errors import WrongTokens
from cluster.messages import FinishReason, MemberId, SampledToken
from router.pipeline.failures import DECODE, failure_of
from tests.unit.router.request.test_resumed_choice import EOS, demo, new_choice

ENDS = [None, FinishReason.STOP, FinishReason.LENGTH]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    ("token_id", "is_last", "right_end"),
    [(5, False, None), (5, True, FinishReason.LENGTH), (EOS, False, FinishReason.STOP), (EOS, True, FinishReason.STOP)],
)
def test_a_token_ends_its_choice_exactly_where_the_request_does(
    token_id: int, is_last: bool, right_end: FinishReason | None, end: FinishReason | None
) -> None:
    """The client of a choice whose last token has no end would wait until its deadline."""
    choice = new_choice(max_tokens=2 if is_last else 9)
    choice.append(0, SampledToken(5, None, None))
    if end is right_end:
        choice.append(1, SampledToken(token_id, None, end))
        assert choice.ended == (end is not None)
    else:
        with pytest.raises(WrongTokens):
            choice.append(1, SampledToken(token_id, None, end))
        assert choice.committed == (5,) and not choice.ended


def test_a_token_outside_the_vocabulary_is_a_failure_of_its_worker() -> None:
    """Once delivered, every worker would refuse it in the next attempt, as an error of the client."""
    vocab_size = demo()[0].get_vocab_size()
    choice = new_choice()
    choice.append(0, SampledToken(vocab_size - 1, None, None))
    with pytest.raises(WrongTokens) as wrong:
        choice.append(1, SampledToken(vocab_size, None, None))
    assert choice.committed == (vocab_size - 1,)
    failure = failure_of(DECODE, MemberId("d0", "1"), wrong.value)
    assert failure is not None and failure.name == "decode_wrong_tokens"
