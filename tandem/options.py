"""What may be asked of a generation, and its wire message."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from tandem.results import pack_ids
from tandem.v1 import inference_pb2

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}


# What the message can hold; what makes sense is the router's to say.
_RANGES = {
    "n": (1, 2**32 - 1),
    "max_tokens": (0, 2**32 - 1),
    "min_tokens": (0, 2**32 - 1),
    "top_k": (0, 2**32 - 1),
    "seed": (0, 2**64 - 1),
    "logprobs": (0, 2**32 - 1),
    "priority": (-(2**31), 2**31 - 1),
}


class GenerateOptions(TypedDict, total=False):
    """What `generate` takes besides the prompt. What is left out is the model's own default."""

    model: str
    request_id: str  # names it in logs and ledger, and must not be live; left out: a random one
    label: str  # a further name for logs, the ledger and listings that need not be unique
    n: int
    max_tokens: int
    min_tokens: int
    temperature: float  # 0 is greedy
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int  # the chosen token's log-probability and those of this many most likely ones
    cache_salt: str  # KV of equal beginnings is shared among requests of one salt only
    priority: int  # less goes first, where the workers' scheduling policy asks for it
    is_batch: bool  # the batch class: uses only what no other request wants


def generate_request(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Iterable[Message] | None,
    options: GenerateOptions,
) -> inference_pb2.GenerateRequest:
    """Raises ValueError for what the message cannot hold, TypeError for an option that does not exist."""
    unknown = sorted(set(options) - set(GenerateOptions.__annotations__))
    if unknown:
        raise TypeError(f"unknown options: {', '.join(unknown)}")
    if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
        raise ValueError("give exactly one of prompt, token_ids and messages")
    for name, (least, most) in _RANGES.items():
        value = options.get(name)
        if isinstance(value, int) and not least <= value <= most:
            raise ValueError(f"{name} must be from {least} to {most}, not {value}")
    stop = options.get("stop", ())
    return inference_pb2.GenerateRequest(
        request_id=options.get("request_id") or secrets.token_hex(12),
        label=options.get("label", ""),
        model=options.get("model", ""),
        text=prompt,
        token_ids=pack_ids(token_ids) if token_ids is not None else None,
        chat=_chat(messages) if messages is not None else None,
        sampling=inference_pb2.SamplingParams(
            temperature=options.get("temperature"),
            top_k=options.get("top_k"),
            top_p=options.get("top_p"),
            min_p=options.get("min_p"),
            seed=options.get("seed"),
        ),
        stop=inference_pb2.StopConditions(
            max_tokens=options.get("max_tokens"),
            min_tokens=options.get("min_tokens", 0),
            ignore_eos=options.get("ignore_eos", False),
            stop=[stop] if isinstance(stop, str) else stop,
            stop_token_ids=pack_ids(options.get("stop_token_ids", ())),
        ),
        n=options.get("n", 1),
        logprobs=options.get("logprobs"),
        cache_salt=options.get("cache_salt", ""),
        priority=options.get("priority", 0),
        is_batch=options.get("is_batch", False),
    )


def tokenize_request(text: str | None, messages: Iterable[Message] | None) -> inference_pb2.TokenizeRequest:
    """Raises ValueError."""
    if (text is None) == (messages is None):
        raise ValueError("give exactly one of text and messages")
    return inference_pb2.TokenizeRequest(text=text, chat=_chat(messages) if messages is not None else None)


def _chat(messages: Iterable[Message]) -> inference_pb2.ChatPrompt:
    prompt = inference_pb2.ChatPrompt()
    for message in messages:
        unknown = sorted(set(message) - {"role", "content"})
        if unknown:
            raise ValueError(f"a message has role and content, not {', '.join(unknown)}")
        prompt.messages.add(role=message["role"], content=message["content"])
    return prompt
