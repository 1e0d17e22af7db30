"""The values that clients send and receive, the same for gRPC and HTTP. They mirror tandem/v1/inference.proto.

`None` in SamplingParams and StopConditions means that the client did not set the field: the model's generation defaults
apply, in router/request/validation.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from cluster.accounts.keys import Caller
from cluster.messages import FinishReason, Grammar, PromptLogprobs, TokenLogprobs
from cluster.observe.trace_context import RequestTrace


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made. `arguments` is the JSON text of an object, as the client sent it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    tool_call_id: str = ""  # of a tool: the call that it answers
    reasoning: str = ""  # of an assistant


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The values that a chat template gets beside the messages, as plain JSON."""

    tools: tuple[Mapping[str, Any], ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()
    template: str | None = None  # in place of the model's own
    arguments: Mapping[str, Any] = field(default_factory=dict)  # by the names that the template has for them
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the prompt ends within the last message


NO_CHAT_OPTIONS = ChatOptions()
ANY_CLIENT = Caller()


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt in token ids, used without any added special token."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]
    options: ChatOptions = NO_CHAT_OPTIONS


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # by token id, ascending
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StopConditions:
    max_tokens: int | None = None
    default_max_tokens: int | None = None  # replaces a max_tokens of None, within the context that is left
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False  # the text of a stop token too


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """The tokens of one choice that a client has already received."""

    token_ids: tuple[int, ...] = ()
    num_characters: int = 0  # of the text that came with them
    finish_reason: FinishReason | None = None  # where it has ended


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request. Without `request_id` the router makes one; without `model` the served one is used; without `timeout_s`
    the router's default applies.
    """

    prompt: Prompt
    request_id: str = ""
    label: str = ""  # the client's name for it in logs and listings; need not be unique
    caller: Caller = ANY_CLIENT  # the tenant and the limits of the API key that it came with
    address: str = ""  # of the host that it came from; empty: unknown
    trace: RequestTrace | None = None  # None: this router makes no spans
    client: bytes = b""  # identifies the API key that it came with; empty: this router asks for none
    num_bytes: int = 0  # of its message from the client, without `resume_from`; 0: it cannot be resumed
    model: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopConditions = field(default_factory=StopConditions)
    n: int = 1
    logprobs: int | None = None  # None: none; k: the chosen token's and those of the k most likely
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    timeout_s: float | None = None
    cache_salt: str = ""  # only requests with the same salt share the KV of common prefixes
    priority: int = 0  # lower goes first, if the workers' scheduling policy uses priorities
    is_batch: bool = False  # uses only capacity that no other request needs
    slo_ttft_s: float | None = None  # asks for its first token within this time; None: any time will do
    grammar: Grammar | None = None  # that the text of each choice must match
    grammar_field: str = "grammar"  # the client's field that holds it
    slo_tpot_s: float | None = None  # asks for this mean time between the tokens of a choice
    stream_interval: int = 1  # tokens of a choice that come together, except at its beginning and its end
    resume_from: tuple[ResumedChoice, ...] | None = None  # one per choice: resumes an accepted request
    resume_number: int = 0  # with `resume_from`: from 1, higher in each later call of the client; 0: the first call
    acceptance: bytes = b""  # with `resume_from`: what the router gave that accepted the request
    truncate_prompt_tokens: int | None = None  # keep only the prompt's last ones; -1: all that fit beside max_tokens
    skip_special_tokens: bool = True  # in the text

    @property
    def prompt_field(self) -> str:
        """Return the client's field that holds the prompt."""
        return "messages" if isinstance(self.prompt, ChatPrompt) else "prompt"


class ChoiceDelta(NamedTuple):
    """New tokens and text of one choice. `token_ids` may be empty when only text that was held back is released. It is
    a tuple because there is one per token, as with `SequenceToken` in router/fleet/decode_events.py.
    """

    choice: int
    first_index: int  # how many tokens of this choice came before
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for
    finish_reason: FinishReason | None = None  # once, on the choice's last delta
    stop_cause: str | int | None = None  # the stop string, or the request's stop token


class PromptToken(NamedTuple):
    """One token of a prompt, given those before it."""

    token_id: int
    logprob: float
    rank: int  # 1: no token was more likely
    top: tuple[tuple[int, float], ...]  # the most likely tokens with their log-probabilities, best first


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt and the log-probabilities of its tokens, packed as a worker sent them."""

    token_ids: tuple[int, ...]
    parts: tuple[PromptLogprobs, ...]  # of all tokens but the first, which has none

    @property
    def num_values(self) -> int:
        return sum(part.num_tokens * (1 + part.num_top) for part in self.parts)

    def tokens(self) -> Iterator[PromptToken]:
        """Yield all tokens but the first."""
        values = (value for part in self.parts for value in part.values())
        for token_id, (logprob, rank, top) in zip(self.token_ids[1:], values, strict=True):
            yield PromptToken(token_id, logprob, rank, top)


class DirectReader(Protocol):
    """A client to which deltas are written as they come, without a switch to the task that serves it."""

    def can_write(self) -> bool:
        """Return whether the client takes deltas now. Others wait in its outbox for the stream of outputs."""
        ...

    def write(self, deltas: Sequence[ChoiceDelta]) -> None:
        """Write deltas. An error ends the stream of outputs."""
        ...


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt, that were not computed


class Phase(NamedTuple):
    name: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """The time that one worker needed for the next token of one attempt, by the worker's own clock."""

    member: str
    ended_s: float  # after the request's arrival
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account of a request's time: the phases are disjoint and sum to `wall_s`."""

    phases: tuple[Phase, ...]
    wall_s: float  # from arrival to the last token
    ttft_s: float  # from arrival to the first token handed to the client
    members: tuple[str, ...]
    transport: str
    kv_bytes: int
    reasons: tuple[str, ...]
    worker_times: tuple[WorkerTime, ...] = ()
    label: str = ""  # the request's


@dataclass(frozen=True, slots=True)
class Summary:
    usage: Usage
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class Accepted:
    """The values to which the request's open fields were resolved. No field of `sampling` is None."""

    sampling: SamplingParams
    max_tokens: int
    acceptance: bytes  # of router/request/request_acceptance.py
    prompt_token_ids: tuple[int, ...] = ()  # that the request keeps

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Output:
    """A message of a request's stream. Every message has the id, and the last one the summary. `accepted` comes alone,
    before the first deltas. A message with only the id is a keep-alive message. `prompt` comes with the first deltas
    of a request that asks for its log-probabilities.
    """

    request_id: str
    deltas: tuple[ChoiceDelta, ...] = ()
    summary: Summary | None = None
    accepted: Accepted | None = None
    prompt: ScoredPrompt | None = None
    first_choice: int = 0  # of its request among those of one response
