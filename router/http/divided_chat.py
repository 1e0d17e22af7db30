"""Chat completions whose text is divided into reasoning, content and tool calls.

What a client receives is a function of the text alone: a text that continues on another worker is divided as if nothing
had happened.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.errors import InvalidRequest
from cluster.messages import FinishReason
from router.http.openai_responses import ChatShape, Json, choice_end, chunk_choice, token_ids
from router.http.openai_schema import ChatCompletionRequest
from router.requests import ChatPrompt, ChoiceDelta, GenerateRequest
from router.text.tokenization import Tokenization
from router.tools.constraint import ToolUse, constrained
from router.tools.formats import AnswerFormat, AnswerParser
from router.tools.pieces import Arguments, CallBegun, Content, Piece, Reasoning

_ID_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Division:
    """The division of the answers to one request, and the parts of them that the client receives."""

    new_parser: Callable[[], AnswerParser]
    answer_id: str  # the calls' ids follow from it
    id_characters: int
    has_reasoning: bool
    is_parallel: bool  # not: only the first call
    is_named: bool = False  # the request names the call: the answer ends as one without calls, as OpenAI has it

    def wanted(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [piece for piece in pieces if self._is_wanted(piece)]

    def call_id(self, choice: int, index: int) -> str:
        digest = hashlib.blake2b(f"{self.answer_id}/{choice}/{index}".encode()).hexdigest()[: self.id_characters]
        return digest if self.id_characters < _ID_CHARACTERS else f"call_{digest}"

    def _is_wanted(self, piece: Piece) -> bool:
        match piece:
            case Content():
                return True
            case Reasoning():
                return self.has_reasoning
            case CallBegun(index, _) | Arguments(index, _):
                return self.is_parallel or index == 0


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


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The settings of a router for chats: how it divides answers, and whose templates it renders."""

    answers: AnswerFormat = field(default_factory=AnswerFormat)
    trusts_templates: bool = False  # that requests bring

    def shape(
        self, body: ChatCompletionRequest, use: ToolUse | None, tokenization: Tokenization, answer_id: str
    ) -> ChatShape:
        """Return the response format for a request. Raises InvalidRequest for a template of the request that is not
        trusted, and for tools where the router has no parser for calls."""
        if body.chat_template is not None and not self.trusts_templates:
            raise InvalidRequest(
                "chat_template: this router takes no templates from requests: leave it out, or start the router with"
                " --trust-request-chat-template on",
                param="chat_template",
            )
        names, echo = (body.return_token_ids, body.return_tokens_as_token_ids), body.continued()
        if use is None and self.answers.reasoning is None:
            return ChatShape(tokenization, *names, echo=echo)
        division = self.division(
            body.chat,
            use,
            tokenization,
            answer_id,
            has_reasoning=body.include_reasoning,
        )
        return DividedChatShape(tokenization, *names, echo=echo, division=division)

    def division(
        self,
        chat: ChatPrompt,
        use: ToolUse | None,
        tokenization: Tokenization,
        answer_id: str,
        *,
        has_reasoning: bool = True,
    ) -> Division:
        """Return how the answers to a chat are divided. Raises InvalidRequest for tools where the router has no parser
        for calls."""
        if use is not None and self.answers.tools is None:
            raise InvalidRequest(
                "tools: this router reads no calls from answers: send tool_choice none, or start the router with"
                " --tool-call-parser",
                param="tools",
            )
        prompt_end = tokenization.prompt_end(chat) if self.answers.reasoning is not None else ""
        return Division(
            new_parser=partial(self.answers.parser, use.schemas if use is not None else None, prompt_end),
            answer_id=answer_id,
            id_characters=self.answers.tools.id_characters if self.answers.tools is not None else _ID_CHARACTERS,
            has_reasoning=has_reasoning,
            is_parallel=use is None or use.is_parallel,
            is_named=use is not None and use.is_named,
        )

    def constrained(self, request: GenerateRequest, use: ToolUse | None, tokenization: Tokenization) -> GenerateRequest:
        """Return a chat's request with the grammar that its tools and its reasoning ask for. Raises InvalidGrammar."""
        if request.grammar is None and (use is None or not use.is_constrained):
            return request
        assert isinstance(request.prompt, ChatPrompt)
        prompt_end = tokenization.prompt_end(request.prompt)
        return constrained(request, use, self.answers, token_ids=tokenization.marker_token_ids, prompt_end=prompt_end)
