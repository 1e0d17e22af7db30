"""Convert between the messages of tandem/v1/inference.proto and the router's own values.

This module checks shapes only: the checks of values are in router/request/validation.py.
"""

from cluster.errors import InvalidRequest
from cluster.messages import Grammar, GrammarKind
from cluster.protocol import wire
from router.grpc_api.chat_wire import chat_from_wire
from router.requests import (
    Accepted,
    ChoiceDelta,
    GenerateRequest,
    Ledger,
    Output,
    Prompt,
    ResumedChoice,
    SamplingParams,
    StopConditions,
    TextPrompt,
    TokenPrompt,
)
from router.text.model_files import ModelInfo
from tandem.enum_words import FINISH_REASONS, GRAMMAR_KINDS, REQUEST_PHASES
from tandem.v1 import inference_pb2


def generate_request_from_wire(
    message: inference_pb2.GenerateRequest,
    timeout_s: float | None,
    keepalive_interval_s: float | None = None,
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
        keepalive_interval_s=keepalive_interval_s,
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
