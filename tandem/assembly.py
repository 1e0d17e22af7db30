"""A result in the making, from one router's stream or from several. Holds the promise that every token comes exactly
once and in order, whatever the streams say. Never calls anybody."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.errors import InternalError
from tandem.results import Choice, Delta, Result, Usage, delta_from_wire, ledger_from_wire, pack_ids
from tandem.v1 import inference_pb2


class Assembly:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.accepted: inference_pb2.AcceptedRequest | None = None  # what a router gave the request's open fields
        self._choices: dict[int, _Growth] = {}
        self._summary: inference_pb2.Summary | None = None

    def add(self, response: inference_pb2.GenerateResponse) -> list[Delta]:
        """What is new in it. Raises InternalError when a token is missing, or one that came is another now."""
        if response.HasField("accepted"):
            self.accepted = response.accepted
        if response.HasField("summary"):
            self._summary = response.summary
        deltas = [delta_from_wire(message) for message in response.deltas]
        grown = [self._choices.setdefault(delta.choice, _Growth()).add(delta) for delta in deltas]
        return [delta for delta in grown if delta is not None]

    def resume_from(self, num_choices: int, resume_number: int) -> inference_pb2.ResumeFrom:
        """What another router must know of an accepted request. What is added from here on is its stream."""
        assert self.accepted is not None
        choices = [self._choices.setdefault(number, _Growth()) for number in range(num_choices)]
        return inference_pb2.ResumeFrom(
            choices=[choice.resume() for choice in choices],
            acceptance=self.accepted.acceptance,
            resume_number=resume_number,
        )

    def result(self) -> Result:
        """After the last response. Raises InternalError when the stream ended early."""
        if self._summary is None:
            raise InternalError("the stream ended without its summary", reason="no_summary")
        usage = self._summary.usage
        return Result(
            request_id=self.request_id,
            choices=tuple(_choice(self._choices[n].deltas) for n in sorted(self._choices) if self._choices[n].deltas),
            usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            ledger=ledger_from_wire(self._summary.ledger),
        )


@dataclass(slots=True)
class _Growth:
    """One choice: what there is of it, and where the present stream stands, which may be behind."""

    deltas: list[Delta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_characters: int = 0
    finish_reason: str = ""
    num_read: int = 0
    num_characters_read: int = 0
    is_new_stream: bool = True

    def add(self, delta: Delta) -> Delta | None:
        if delta.first_index == 0 and self.is_new_stream:  # of a router that knows no resuming, it begins anew
            self.num_read = self.num_characters_read = 0
        self.is_new_stream = False
        if delta.first_index != self.num_read:
            raise _out_of_order(delta, f"continues at token {delta.first_index}, {self.num_read} came before")
        num_known = len(self.token_ids) - self.num_read
        num_characters_known = self.num_characters - self.num_characters_read
        if delta.token_ids[:num_known] != tuple(self.token_ids[self.num_read : self.num_read + len(delta.token_ids)]):
            raise _out_of_order(delta, f"has other tokens from {delta.first_index} on than those that came before")
        self.num_read += len(delta.token_ids)
        self.num_characters_read += len(delta.text)
        if num_known or num_characters_known:
            delta = replace(
                delta,
                first_index=delta.first_index + min(num_known, len(delta.token_ids)),
                token_ids=delta.token_ids[num_known:],
                text=delta.text[num_characters_known:],
                logprobs=delta.logprobs[num_known:],
            )
            if not (delta.token_ids or delta.text or delta.finish_reason):
                return None
        if self.finish_reason:
            if delta.token_ids or delta.text:
                raise _out_of_order(delta, f"goes on after its end at token {len(self.token_ids)}")
            return None
        self.token_ids.extend(delta.token_ids)
        self.num_characters += len(delta.text)
        self.finish_reason = delta.finish_reason
        self.deltas.append(delta)
        return delta

    def resume(self) -> inference_pb2.ResumedChoice:
        self.num_read, self.num_characters_read, self.is_new_stream = len(self.token_ids), self.num_characters, True
        return inference_pb2.ResumedChoice(
            token_ids=pack_ids(self.token_ids),
            num_characters=self.num_characters,
            finish_reason=self.finish_reason,
        )


def _out_of_order(delta: Delta, what: str) -> InternalError:
    return InternalError(f"choice {delta.choice} {what}", reason="out_of_order")


def _choice(deltas: Sequence[Delta]) -> Choice:
    return Choice(
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(position for delta in deltas for position in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
        stop_cause=deltas[-1].stop_cause,
    )
