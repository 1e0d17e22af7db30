"""Events whose bytes were prepared are those that encoding every chunk gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import FinishReason, TokenLogprobs
from router.http.errors import json_bytes
from router.http.openai_responses import ChatShape, CompletionShape, Envelope
from router.http.openai_stream import _Events
from router.requests import ChoiceDelta
from router.text.tokenization import Tokenization
from tests.system.rigs.members.router_harness import DEMO_MODEL

_TOKENIZATION = Tokenization.load(str(DEMO_MODEL))
# Half of a surrogate pair cannot come from a tokenizer, but must not break a stream.
_TEXTS = st.text(st.characters() | st.sampled_from('"\\\n\x00\ud800é🙂'), max_size=8)
_DELTAS = st.builds(
    lambda choice, text, token_ids, logprob, ended: ChoiceDelta(
        choice=choice,
        first_index=0,
        token_ids=tuple(token_ids),
        text=text,
        logprobs=(TokenLogprobs(5, -0.5, ()),) * logprob,
        finish_reason=FinishReason.LENGTH if ended else None,
    ),
    st.integers(0, 2),
    _TEXTS,
    st.lists(st.integers(1, 9), max_size=2),
    st.integers(0, 1),
    st.booleans(),
)


@pytest.mark.parametrize("shape_of", [ChatShape, CompletionShape])
@given(deltas=st.lists(_DELTAS, max_size=8), return_token_ids=st.booleans(), include_usage=st.booleans())
def test_prepared_events_have_the_bytes_of_encoded_chunks(
    shape_of: type[ChatShape] | type[CompletionShape],
    deltas: list[ChoiceDelta],
    return_token_ids: bool,
    include_usage: bool,
) -> None:
    envelope = Envelope('id "7"', "demo", 1, "whole", "chunk", include_usage)
    streamed, encoded = (shape_of(_TOKENIZATION, return_token_ids) for _ in range(2))
    events = _Events(streamed, envelope)
    for delta in deltas:
        expected = b"".join(
            b"data: " + json_bytes(envelope.chunk([choice])) + b"\n\n" for choice in encoded.chunks(delta)
        )
        assert events.of([delta]) == expected


def test_only_the_first_delta_of_a_chat_is_encoded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    events = _Events(ChatShape(_TOKENIZATION, False), Envelope("id", "demo", 1, "whole", "chunk", False))
    first, second = events.of([ChoiceDelta(0, 0, (5,), "a")]), events.of([ChoiceDelta(0, 1, (5,), "a")])
    monkeypatch.setattr("router.http.openai_stream._event", None)
    assert first.endswith(second) and events.of([ChoiceDelta(0, 2, (5,), "a")]) == second
