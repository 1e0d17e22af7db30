"""Predicts a request's time to first token and time between tokens at every candidate, and the delay that the candidate
causes to sequences that run there. Pure.

A candidate is a prefill worker and a decode worker, or one worker that does both. The predictions follow the life of a
request: the prompts ahead of it at the worker that computes its prompt, its own prompt, the part of the hand-off that
prefill does not hide, and the decode batch *at the time when the prefill will have ended*. By then the sequences that
are still being prefilled will have joined the batch, and some that run now will have ended.
"""

from dataclasses import dataclass

from router.policies.candidates import RequestFacts, WorkerLoad, transfer_s
from router.policies.work_ahead import PromptWork, WorkAhead


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted times of a request at one candidate, in seconds."""

    ttft_s: float  # from now to the first token
    itl_s: float  # the mean time between its tokens, from the first one on
    running_itl_s: float  # the same for sequences that run at these workers, from now to their ends; 0: none runs
    delay_s: float  # of all tokens after the first: its own, and those of running sequences as far as it delays them
    kv_bytes: float  # that a hand-off moves
    num_cached: int  # tokens of the prompt that the worker that computes it has cached


def predict(
    prefill: WorkerLoad | None, decode: WorkerLoad, request: RequestFacts, *, after_s: float = 0.0
) -> Prediction | None:
    """Predict a request at one candidate; `prefill` None: the decode worker computes the prompt. Returns None if the
    speed of one of them is not known.

    `after_s`: predict it as if it were sent so much later, and nothing else arrived until then."""
    computing = prefill if prefill is not None else decode
    if computing.work is None or decode.work is None:
        return None
    num_cached = request.cached_tokens.get(computing.member, 0)
    prompt = _prefill(computing.work, PromptWork.of(request.num_prompt_tokens, num_cached), after_s)
    kv_bytes = 0.0
    exposed_s = 0.0
    if prefill is not None and request.max_tokens > 1:
        kv_bytes = _kv_bytes(decode, request)
        exposed_s = _exposed_s(decode.work, transfer_s(prefill, decode, kv_bytes) or 0.0, prompt)
    num_later = max(0.0, request.expected_output - 1)
    joined = _joined(decode.work, request, prompt.end_s, after_s) if num_later else _NOTHING_JOINED
    itl_s = joined.step_s + (exposed_s + joined.wait_s) / max(1.0, num_later) if num_later else 0.0
    return Prediction(
        ttft_s=prompt.end_s,
        itl_s=itl_s,
        running_itl_s=max(prompt.running_itl_s, joined.running_itl_s),
        delay_s=prompt.delay_s + joined.delay_s + request.num_choices * num_later * itl_s,
        kv_bytes=kv_bytes,
        num_cached=min(num_cached, request.num_prompt_tokens - 1),
    )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prefill of a request at one worker."""

    end_s: float
    own_s: float  # of that, its own prompt
    last_step_s: float  # of that, the last step
    running_itl_s: float
    delay_s: float  # the sum over all sequences that run at the worker


def _prefill(work: WorkAhead, own: PromptWork, after_s: float) -> _Prompt:
    """Predict a prefill behind the worker's queue and beside its running sequences."""
    batch, queue = work.batch, work.prompts
    num_running = min(batch.num_running, work.max_running)
    ahead = work.prompt_steps(queue.work, num_running)
    done_s = min(queue.elapsed_s, work.prompt_s(queue.first, num_running)) + after_s
    both = work.prompt_steps(queue.work + own, num_running)
    own_s = max(0.0, both.seconds - ahead.seconds)
    num_steps = max(work.num_steps(own), both.number - ahead.number)
    quiet_s = work.step_s(num_running, work.context_of(num_running))
    slower_s = max(0.0, own_s - num_steps * quiet_s)
    return _Prompt(
        end_s=max(0.0, ahead.seconds - done_s) + own_s,
        own_s=own_s,
        last_step_s=own_s / num_steps,
        running_itl_s=quiet_s + slower_s / max(1.0, batch.left, num_steps) if num_running else 0.0,
        delay_s=num_running * slower_s,
    )


def _kv_bytes(decode: WorkerLoad, request: RequestFacts) -> float:
    num_cached = request.cached_tokens.get(decode.member, 0)
    return max(0, request.num_prompt_tokens - num_cached) * decode.kv_bytes_per_token


def _exposed_s(decode: WorkAhead, moving_s: float, prompt: _Prompt) -> float:
    """Predict the part of the hand-off for which the client waits after its first token. Blocks move while the next
    chunk is computed. So the last chunk's blocks are exposed, and the rest where the link is slower than prefill."""
    fixed_s = decode.times.hand_off.fixed_s if decode.times.hand_off is not None else 0.0
    hidden_share = 1 - prompt.last_step_s / prompt.own_s if prompt.own_s else 0.0
    hidden_s = min(moving_s * hidden_share, prompt.own_s - prompt.last_step_s)
    return fixed_s + moving_s - hidden_s


@dataclass(frozen=True, slots=True)
class _Joined:
    """The decode batch after the request has joined it."""

    step_s: float
    wait_s: float  # for a place in the batch, and for prompts that the worker itself computes then
    running_itl_s: float
    delay_s: float  # the sum over the other sequences


_NOTHING_JOINED = _Joined(0.0, 0.0, 0.0, 0.0)


def _joined(work: WorkAhead, request: RequestFacts, prefill_s: float, after_s: float) -> _Joined:
    """Predict the batch at the time when the prefill will have ended, `prefill_s` after the request was sent. Sequences
    that are being prefilled when it is sent will all have joined by then, and none of them will have ended."""
    batch = work.batch
    now_s = work.step_s(batch.num_running, work.context_of(batch.num_running))
    at_s = after_s + prefill_s
    num_present = _still_running(batch.num_running, batch.left, now_s, at_s)
    num_present += _still_running(batch.num_joining, batch.left, now_s, after_s)
    num_others = min(num_present, work.max_running)
    num_after = min(num_present + request.num_choices, work.max_running)
    own_context = request.num_prompt_tokens + request.expected_output / 2
    before_s = work.step_s(num_others, work.context_of(num_others))
    step_s = work.step_s(num_after, work.context_of(num_others) + request.num_choices * own_context)
    num_waiting = max(0.0, num_present + request.num_choices - work.max_running)
    local_s = max(0.0, work.prompt_s(work.prompts.work, round(num_others)) - at_s)
    return _Joined(
        step_s=step_s,
        wait_s=num_waiting * 2 * batch.left * step_s / work.max_running + local_s,
        running_itl_s=step_s if num_others >= 1 else 0.0,
        delay_s=num_others * max(0.0, step_s - before_s) * min(batch.left, request.expected_output),
    )


def _still_running(num_running: int, left: float, step_s: float, at_s: float) -> float:
    """Return how many sequences will still run after `at_s`. What they have left is taken to be spread evenly between
    nothing and twice the mean `left`, so equally many end in each second."""
    last_s = 2 * left * step_s
    return num_running * max(0.0, 1 - at_s / last_s) if last_s > 0 else num_running
