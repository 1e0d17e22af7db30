"""What a decode worker's step says of each sequence, as the router reads it."""

from cluster import wire
from cluster.messages import FinishReason
from router.decode_events import tokens_of
from tandem.v1 import worker_pb2


def test_a_sequence_ends_with_the_last_of_its_tokens_in_a_step() -> None:
    """Right guesses are several tokens of one step."""
    step = worker_pb2.StepOutput(
        handles=wire.pack_ids([5, 5, 6, 5, 7]),
        token_ids=wire.pack_ids([10, 11, 20, 12, 30]),
        indices=wire.pack_ids([3, 4, 0, 5, 9]),
        ends=[
            worker_pb2.SequenceEnd(handle=5, finish_reason=str(FinishReason.LENGTH)),
            worker_pb2.SequenceEnd(handle=7, finish_reason=str(FinishReason.STOP)),
        ],
    )
    assert [(token.handle, token.index, token.token.finish_reason) for token in tokens_of(step)] == [
        (5, 3, None),
        (5, 4, None),
        (6, 0, None),
        (5, 5, FinishReason.LENGTH),
        (7, 9, FinishReason.STOP),
    ]
