"""Converts between the messages of tandem/v1/inference.proto, chats included, and the router's own values.

This module checks shapes only: the checks of values are in router/request/validation.py.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from cluster.errors import InvalidRequest
from cluster.messages import Grammar, GrammarKind
from cluster.protocol import wire
from router.request.divided_answers import ChatSettings, Division
from router.requests import (
    Accepted,
    ChatMessage,
    ChatOptions,
    ChatPrompt,
    ChoiceDelta,
    GenerateRequest,
    Ledger,
    Output,
    Prompt,
    PromptToken,
    ResumedChoice,
    SamplingParams,
    StopConditions,
    TextPrompt,
    TokenPrompt,
    ToolCall,
)
from router.text.model_files import ModelInfo
from router.text.tokenization import Tokenization
from router.tools.call_forms import CallableTool
from router.tools.constraint import ToolUse
from router.tools.formats import AnswerParser
from router.tools.source import Arguments, CallBegun, Content, Piece, Reasoning
from tandem.enum_words import CHAT_ROLES, FINISH_REASONS, GRAMMAR_KINDS, REQUEST_PHASES, TOOL_CHOICE_MODES
from tandem.v1 import inference_pb2

_MOST_PROMPT_TOKENS = 512  # of a message: 130 kB where a request asks for most


def generate_request_from_wire(
    message: inference_pb2.GenerateRequest,
    timeout_s: float | None,
    client: bytes = b"",
) -> GenerateRequest:
    """`client` identifies the caller's API key. Raises InvalidRequest."""
    return GenerateRequest(
        prompt=_prompt(message),
        request_id=message.request_id,
        label=message.label,
        client=client,
        num_bytes=_num_bytes(message),
        model=message.model,
        sampling=_sampling(message.sampling),
        stop=_stop(message.stop),
        n=message.n or 1,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        timeout_s=timeout_s,
        cache_salt=message.cache_salt,
        priority=message.priority,
        is_batch=message.is_batch,
        grammar=_grammar(message.grammar) if message.HasField("grammar") else None,
        slo_ttft_s=message.slo_ttft_s if message.HasField("slo_ttft_s") else None,
        slo_tpot_s=message.slo_tpot_s if message.HasField("slo_tpot_s") else None,
        stream_interval=message.stream_interval or 1,
        resume_from=_resume_from(message.resume_from) if message.HasField("resume_from") else None,
        resume_number=message.resume_from.resume_number,
        acceptance=message.resume_from.acceptance,
        truncate_prompt_tokens=message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
    )


def output_to_wire(output: Output) -> inference_pb2.GenerateResponse:
    if output.summary is None and output.accepted is None:
        return inference_pb2.GenerateResponse(request_id=output.request_id, deltas=map(_delta, output.deltas))
    summary = None
    if output.summary is not None:
        usage = output.summary.usage
        summary = inference_pb2.Summary(
            usage=inference_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            ),
            ledger=ledger_to_wire(output.summary.ledger),
        )
    return inference_pb2.GenerateResponse(
        request_id=output.request_id,
        deltas=map(_delta, output.deltas),
        summary=summary,
        accepted=_accepted(output.accepted) if output.accepted is not None else None,
    )


def prompt_to_wire(output: Output) -> Iterator[inference_pb2.GenerateResponse]:
    """Yield the messages that an output's prompt needs, before the output's own."""
    tokens, position = output.prompt.tokens() if output.prompt is not None else iter(()), 1
    while part := [_prompt_token(token) for token in islice(tokens, _MOST_PROMPT_TOKENS)]:
        message = inference_pb2.PromptLogprobs(first_position=position, tokens=part)
        yield inference_pb2.GenerateResponse(request_id=output.request_id, prompt_logprobs=message)
        position += len(part)


def model_to_wire(model: ModelInfo) -> inference_pb2.Model:
    return inference_pb2.Model(
        id=model.name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        has_tokenizer=model.has_tokenizer,
        has_chat_template=model.has_chat_template,
    )


def _num_bytes(message: inference_pb2.GenerateRequest) -> int:
    return message.ByteSize() - message.resume_from.ByteSize()


def _prompt(message: inference_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
        case "chat":
            return chat_from_wire(message.chat)
        case _:
            raise InvalidRequest("there is no prompt: set text, token_ids or chat")


def _sampling(message: inference_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        seed=message.seed if message.HasField("seed") else None,
        presence_penalty=message.presence_penalty if message.HasField("presence_penalty") else None,
        frequency_penalty=message.frequency_penalty if message.HasField("frequency_penalty") else None,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(message.bad_words),
    )


def _stop(message: inference_pb2.StopConditions) -> StopConditions:
    return StopConditions(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        include_stop_str_in_output=message.include_stop_str_in_output,
    )


def _grammar(message: inference_pb2.Grammar) -> Grammar:
    try:
        kind = GRAMMAR_KINDS.word(message.kind)
    except ValueError as error:
        raise InvalidRequest(f"grammar: kind: {error}") from None
    if not kind:
        raise InvalidRequest(f"grammar has no kind: set one of {', '.join(GRAMMAR_KINDS.words)}")
    return Grammar(GrammarKind(kind), message.text)


def _resume_from(message: inference_pb2.ResumeFrom) -> tuple[ResumedChoice, ...]:
    return tuple(
        ResumedChoice(
            tuple(choice.token_ids), choice.num_characters, wire.finish_reason_from_wire(choice.finish_reason)
        )
        for choice in message.choices
    )


def _accepted(accepted: Accepted) -> inference_pb2.AcceptedRequest:
    sampling = accepted.sampling
    return inference_pb2.AcceptedRequest(
        sampling=inference_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias),
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=sampling.bad_words,
        ),
        max_tokens=accepted.max_tokens,
        acceptance=accepted.acceptance,
    )


def _delta(delta: ChoiceDelta) -> inference_pb2.ChoiceDelta:
    if delta.finish_reason is None and not delta.logprobs:  # most deltas; every field takes time
        return inference_pb2.ChoiceDelta(
            choice=delta.choice, first_index=delta.first_index, token_ids=delta.token_ids, text=delta.text
        )
    return inference_pb2.ChoiceDelta(
        choice=delta.choice,
        first_index=delta.first_index,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[wire.logprobs_to_wire(logprobs) for logprobs in delta.logprobs],
        finish_reason=FINISH_REASONS.number(delta.finish_reason or ""),
        stop_cause="" if delta.stop_cause is None else str(delta.stop_cause),
    )


def _prompt_token(token: PromptToken) -> inference_pb2.PromptTokenLogprobs:
    return inference_pb2.PromptTokenLogprobs(
        token=inference_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob),
        rank=token.rank,
        top=[inference_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top],
    )


def ledger_to_wire(ledger: Ledger) -> inference_pb2.Ledger:
    return inference_pb2.Ledger(
        phases=[
            inference_pb2.Phase(phase=REQUEST_PHASES.number(phase.name), duration_s=phase.duration_s)
            for phase in ledger.phases
        ],
        wall_s=ledger.wall_s,
        ttft_s=ledger.ttft_s,
        members=ledger.members,
        transport=ledger.transport,
        kv_bytes=ledger.kv_bytes,
        reasons=ledger.reasons,
        worker_times=[
            inference_pb2.WorkerTime(
                member=spent.member, ended_s=spent.ended_s, queue_s=spent.queue_s, compute_s=spent.compute_s
            )
            for spent in ledger.worker_times
        ],
        label=ledger.label,
    )


_AUTO, _NONE, _REQUIRED = "auto", "none", "required"


def chat_from_wire(chat: inference_pb2.ChatPrompt) -> ChatPrompt:
    """Return a conversation. Raises InvalidRequest for a message without a known role and for text that is no JSON."""
    shown = chat.tools if _mode(chat) != _NONE else ()
    messages = tuple(_message(message) for message in chat.messages)
    if not (chat.tools or chat.template_arguments):
        return ChatPrompt(messages)
    arguments = _object(chat.template_arguments, "chat.template_arguments")
    return ChatPrompt(messages, ChatOptions(tools=tuple(map(_template_tool, shown)), arguments=arguments))


def tool_use_from_wire(chat: inference_pb2.ChatPrompt) -> ToolUse | None:
    """Return the use that the answer may make of the tools; None if it may call none. Raises InvalidRequest."""
    mode = _mode(chat)
    if mode == _NONE or (mode == _AUTO and not chat.tools):
        return None
    tools = {tool.name: CallableTool(tool.name, _parameters(tool), tool.strict) for tool in chat.tools}
    names = list(dict.fromkeys(chat.callable_tools)) or list(tools)
    if unknown := [name for name in names if name not in tools]:
        raise InvalidRequest(f"chat.callable_tools: there is no tool {unknown[0]!r}", param="chat.callable_tools")
    if not names:
        raise InvalidRequest("chat.tool_choice: a call is required, but there are no tools", param="chat.tool_choice")
    return ToolUse(
        tuple(tools[name] for name in names),
        must_call=mode == _REQUIRED,
        is_parallel=not chat.single_tool_call,
        is_named=mode == _REQUIRED and len(chat.callable_tools) == 1,
    )


class AnswerParts:
    """Divides the text of one request's answers. A resumed request continues where its client's text ends."""

    def __init__(self, division: Division, request: GenerateRequest, tokenization: Tokenization) -> None:
        self._division = division
        self._parsers: dict[int, AnswerParser] = {}
        for choice, has in enumerate(request.resume_from or ()):
            stream = tokenization.text_stream((), 0, skips_special_tokens=request.skip_special_tokens)
            text = stream.push(has.token_ids).text + stream.flush()
            self._parser(choice).push(text[: has.num_characters])

    @staticmethod
    def asked_for(
        chat: inference_pb2.ChatPrompt, request: GenerateRequest, chats: ChatSettings, tokenization: Tokenization
    ) -> "tuple[GenerateRequest, AnswerParts | None]":
        """Return the request with its grammar, and the division of its answers; None if it requests none. Raises
        InvalidRequest.
        """
        prompt = request.prompt
        if not isinstance(prompt, ChatPrompt):
            return request, None
        use = tool_use_from_wire(chat)
        if use is None and not chat.divides_answer and request.grammar is None:
            return request, None
        request = chats.constrained(request, use, tokenization)
        if use is None and not chat.divides_answer:
            return request, None
        division = chats.division(prompt, use, tokenization, request.request_id)
        return request, AnswerParts(division, request, tokenization)

    def add_to(self, message: inference_pb2.GenerateResponse, output: Output) -> None:
        """Add the parts of an output to its message."""
        for delta, delta_message in zip(output.deltas, message.deltas, strict=True):
            parser = self._parser(delta.choice)
            pieces = parser.push(delta.text)
            if delta.finish_reason is not None:
                pieces += parser.end()
            wanted = self._division.wanted(pieces)
            delta_message.parts.extend(self._part(piece, delta.choice, output.request_id) for piece in wanted)

    def _parser(self, choice: int) -> AnswerParser:
        if choice not in self._parsers:
            self._parsers[choice] = self._division.new_parser()
        return self._parsers[choice]

    def _part(self, piece: Piece, choice: int, request_id: str) -> inference_pb2.AnswerPart:
        message = inference_pb2.AnswerPart
        match piece:
            case Content(text):
                return message(content=text)
            case Reasoning(text):
                return message(reasoning=text)
            case CallBegun(index, name):
                call_id = self._division.call_id(choice, index, answer_id=request_id)
                return message(call=message.CallBegin(index=index, id=call_id, name=name))
            case Arguments(index, text):
                return message(arguments=message.CallArguments(index=index, text=text))


def _message(message: inference_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(
        _role(message.role),
        message.content,
        message.name,
        tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        message.tool_call_id,
        message.reasoning,
    )


def _role(number: int) -> str:
    try:
        role = CHAT_ROLES.word(number)
    except ValueError as error:
        raise InvalidRequest(f"chat: role: {error}", param="chat") from None
    if not role:
        words = ", ".join(CHAT_ROLES.words)
        raise InvalidRequest(f"chat: a message has no role: set one of {words}", param="chat")
    return role


def _mode(chat: inference_pb2.ChatPrompt) -> str:
    try:
        return TOOL_CHOICE_MODES.word(chat.tool_choice) or _AUTO
    except ValueError as error:
        raise InvalidRequest(f"chat.tool_choice: {error}", param="chat.tool_choice") from None


def _template_tool(tool: inference_pb2.Tool) -> dict[str, Any]:
    """Return a tool as chat templates read it."""
    function: dict[str, Any] = {"name": tool.name}
    function |= {"description": tool.description} if tool.description else {}
    function |= {"parameters": _parameters(tool)} if tool.parameters else {}
    return {"type": "function", "function": function}


def _parameters(tool: inference_pb2.Tool) -> Mapping[str, Any]:
    return _object(tool.parameters, "chat.tools.parameters")


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", param=field) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be a JSON object", param=field)
    return value
