"""Chat completions whose text is divided into reasoning, content and tool calls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import InvalidRequest
from cluster.messages import FinishReason
from router.http.openai_responses import ChatShape, Json, choice_end, chunk_choice, token_ids
from router.http.openai_schema import ChatCompletionRequest
from router.request.divided_answers import ChatSettings, Division
from router.requests import ChoiceDelta
from router.text.tokenization import Tokenization
from router.tools.constraint import ToolUse
from router.tools.formats import AnswerParser
from router.tools.source import Arguments, CallBegun, Content, Piece, Reasoning


@dataclass(slots=True)
class _Dividing:
    """The parser of one choice, and how many calls its client has received."""

    parser: AnswerParser
    num_calls: int = 0


@dataclass(slots=True, kw_only=True)
class DividedChatShape(ChatShape):
    division: Division
    _choices: dict[int, _Dividing] = field(default_factory=dict)

    def plain(self, choice: int, text: str) -> Json | None:
        return None

    def chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        if delta.choice not in self._choices:
            self._choices[delta.choice] = _Dividing(self.division.new_parser())
            yield chunk_choice(delta.choice, {"delta": {"role": "assistant", "content": self.echo}, "logprobs": None})
        dividing = self._choices[delta.choice]
        pieces = dividing.parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += dividing.parser.end()
        parts = [self._delta(delta.choice, piece) for piece in self.division.wanted(pieces)]
        dividing.num_calls += sum(isinstance(piece, CallBegun) for piece in pieces)
        logprobs, ids = self._logprobs([delta]), token_ids([delta], wanted=self.return_token_ids)
        if not parts and (logprobs or ids.get("token_ids")):
            parts = [{}]
        for number, part in enumerate(parts):
            more = {"logprobs": logprobs} | ids if number == 0 else {"logprobs": None}
            yield chunk_choice(delta.choice, {"delta": part} | more)
        if delta.finish_reason is not None:
            yield chunk_choice(delta.choice, {"delta": {}, "logprobs": None} | self._end([delta], dividing.num_calls))

    def whole(self, deltas: Sequence[ChoiceDelta]) -> Json:
        choice = deltas[0].choice
        parser = self.division.new_parser()
        pieces = self.division.wanted([*parser.push("".join(delta.text for delta in deltas)), *parser.end()])
        message, num_calls = self._message(choice, pieces)
        return {
            "index": choice,
            "message": message,
            "logprobs": self._logprobs(deltas),
            **self._end(deltas, num_calls),
        } | token_ids(deltas, wanted=self.return_token_ids)

    def _delta(self, choice: int, piece: Piece) -> Json:
        match piece:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return _reasoning(text)
            case CallBegun(index, name):
                return {"tool_calls": [{"index": index} | self._call(choice, index, name, "")]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _message(self, choice: int, pieces: Sequence[Piece]) -> tuple[Json, int]:
        content = self.echo + "".join(piece.text for piece in pieces if isinstance(piece, Content))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls = [
            self._call(choice, begun.index, begun.name, _arguments(pieces, begun.index))
            for begun in pieces
            if isinstance(begun, CallBegun)
        ]
        message: Json = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        message |= _reasoning(reasoning) if reasoning else {}
        return message | ({"tool_calls": calls} if calls else {}), len(calls)

    def _end(self, deltas: Sequence[ChoiceDelta], num_calls: int) -> Json:
        end = choice_end(deltas)
        ends_by_calls = num_calls and not self.division.is_named and end["finish_reason"] == FinishReason.STOP
        return end | {"finish_reason": "tool_calls"} if ends_by_calls else end

    def _call(self, choice: int, index: int, name: str, arguments: str) -> Json:
        function = {"name": name, "arguments": arguments}
        return {"id": self.division.call_id(choice, index), "type": "function", "function": function}


def _arguments(pieces: Sequence[Piece], index: int) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Arguments) and piece.index == index)


def _reasoning(text: str) -> dict[str, Any]:
    """Return reasoning under the names that DeepSeek's clients and vLLM's clients read."""
    return {"reasoning_content": text, "reasoning": text}


def chat_shape(
    chats: ChatSettings, body: ChatCompletionRequest, use: ToolUse | None, tokenization: Tokenization, answer_id: str
) -> ChatShape:
    """Return the response format for a request. Raises InvalidRequest for a template of the request that is not
    trusted, and for tools where the router has no parser for calls."""
    if body.chat_template is not None and not chats.trusts_templates:
        raise InvalidRequest(
            "chat_template: this router takes no templates from requests: leave it out, or start the router with"
            " --trust-request-chat-template on",
            param="chat_template",
        )
    names, echo = (body.return_token_ids, body.return_tokens_as_token_ids), body.continued()
    if use is None and chats.answers.reasoning is None:
        return ChatShape(tokenization, *names, echo=echo)
    division = chats.division(
        body.chat,
        use,
        tokenization,
        answer_id,
        has_reasoning=body.include_reasoning,
    )
    return DividedChatShape(tokenization, *names, echo=echo, division=division)
