"""Divides the answer to a chat into reasoning, content and tool calls, and derives its grammar. The same for HTTP and
gRPC. The parts that a client receives are a function of the text alone: a text that continues on another worker, or at
another router, is divided as if nothing had happened.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cluster.errors import InvalidRequest
from router.requests import ChatPrompt, GenerateRequest
from router.text.tokenization import Tokenization
from router.tools.constraint import ToolUse, constrained
from router.tools.formats import AnswerFormat, AnswerParser
from router.tools.source import Arguments, CallBegun, Content, Piece, Reasoning

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

    def call_id(self, choice: int, index: int, answer_id: str = "") -> str:
        """Return the id of a call. `answer_id` stands in for the division's own."""
        digest = hashlib.blake2b(f"{answer_id or self.answer_id}/{choice}/{index}".encode()).hexdigest()[
            : self.id_characters
        ]
        return digest if self.id_characters < _ID_CHARACTERS else f"call_{digest}"

    def _is_wanted(self, piece: Piece) -> bool:
        match piece:
            case Content():
                return True
            case Reasoning():
                return self.has_reasoning
            case CallBegun(index, _) | Arguments(index, _):
                return self.is_parallel or index == 0


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The settings of a router for chats: how it divides answers, and whose templates it renders."""

    answers: AnswerFormat = field(default_factory=AnswerFormat)
    trusts_templates: bool = False  # that requests bring

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
        self._refuse_unparsed(use)
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
        """Return a chat's request with the grammar that its tools and its reasoning ask for. Raises InvalidGrammar, and
        InvalidRequest as `division` does."""
        self._refuse_unparsed(use)
        if request.grammar is None and (use is None or not use.is_constrained):
            return request
        assert isinstance(request.prompt, ChatPrompt)
        prompt_end = tokenization.prompt_end(request.prompt)
        return constrained(request, use, self.answers, token_ids=tokenization.marker_token_ids, prompt_end=prompt_end)

    def _refuse_unparsed(self, use: ToolUse | None) -> None:
        if use is not None and self.answers.tools is None:
            raise InvalidRequest(
                "tools: this router parses no tool calls: send tool_choice none, or start the router with"
                " --tool-call-parser",
                param="tools",
            )
