"""Predicts a request's time to first token and time between tokens at every candidate, and the delay that the candidate
causes to sequences that run there. Pure.

A candidate is a prefill worker and a decode worker, or one worker that does both. Each worker's next steps are
forecast (`Forecast`): the prompts ahead of the request at the worker that computes its prompt, then its own prompt; and
the decode batch from the time when the prompt and its KV will be there, until the request's last token. Prompts that
come meanwhile take the same share of the worker's time as recent ones (`RecentPrompts`): an idle moment of a worker
that computes many prompts promises nothing for the seconds in which a sequence would decode there. The delays that
service times leave out are learned from earlier requests and added (`Unmodelled`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from cluster.messages import MemberId
from cluster.outstanding_work import PromptWork
from router.policies.candidates import Pair, RequestFacts, WorkerLoad, transfer_s
from router.policies.prediction.forecast import Forecast
from router.policies.prediction.recent_prompts import RecentPrompts
from router.policies.prediction.work_ahead import WorkAhead


class RunningBeside(NamedTuple):
    """Sequences that run at one of the workers, and the mean time between their tokens from now to their ends."""

    number: int
    before_s: float  # without the request
    after_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted times of a request at one candidate, in seconds."""

    ttft_s: float  # from now to the first token
    itl_s: float  # the mean time between its tokens, from the first one on
    running_itl_s: float  # the same for sequences that run at these workers, from now to their ends; 0: none runs
    delay_s: float  # of all tokens after the first: its own, and those of running sequences as far as it delays them
    kv_bytes: float  # that a hand-off moves
    num_cached: int  # tokens of the prompt that the worker that computes it has cached
    modelled_ttft_s: float  # the first two as the service times alone predict them
    modelled_itl_s: float
    beside: tuple[RunningBeside, ...] = ()


AllRecent = Mapping[MemberId, RecentPrompts]  # by worker
NO_RECENT: AllRecent = MappingProxyType({})


def predict(
    prefill: WorkerLoad | None, decode: WorkerLoad, request: RequestFacts, *, after_s: float = 0.0
) -> Prediction | None:
    """Predict a request at one candidate; `prefill` None: the decode worker computes the prompt. Returns None if the
    speed of one of them is not known.

    `after_s`: predict it as if it were sent that much later, and nothing else arrived until then.
    """
    predictions = predict_all([(prefill, decode)], request, after_s=after_s)
    return predictions[0] if predictions is not None else None


def predict_all(
    ways: Sequence[Pair], request: RequestFacts, *, after_s: float = 0.0, recent: AllRecent = NO_RECENT
) -> list[Prediction] | None:
    """Predict a request at all candidates. Returns None if the speed of a worker is not known. `recent`:
    instead of the workers' own recent prompts."""
    predictor, computed = _Predictor(request, after_s, recent), list[_Computed]()
    for prefill, decode in ways:
        computing = prefill if prefill is not None else decode
        if computing.work is None or decode.work is None:
            return None
        computed.append(predictor.compute(computing))
    predictions: list[Prediction | None] = [None] * len(ways)
    for i in sorted(range(len(ways)), key=lambda i: computed[i].at_s):
        predictions[i] = predictor.predict(*ways[i], computed[i])
    return [prediction for prediction in predictions if prediction is not None]


class Predict(Protocol):
    """`predict_all`, or a function like it."""

    def __call__(
        self, ways: Sequence[Pair], request: RequestFacts, *, after_s: float = 0.0
    ) -> list[Prediction] | None: ...


class LatestPredictions:
    """Predicts a request at all candidates as `predict_all` does. It keeps its latest answer: the early refusal of a
    request and its placement ask the same, with the same objects."""

    def __init__(self, recent: Callable[[Sequence[Pair]], AllRecent] = lambda ways: NO_RECENT) -> None:
        """`recent` returns the recent prompts of the workers of these ways, for `predict_all`."""
        self._recent = recent
        self._request: RequestFacts | None = None
        self._ways: Sequence[Pair] = ()
        self._found: list[Prediction] | None = None

    def __call__(self, ways: Sequence[Pair], request: RequestFacts, *, after_s: float = 0.0) -> list[Prediction] | None:
        if after_s:
            return predict_all(ways, request, after_s=after_s, recent=self._recent(ways))
        if request is not self._request or ways != self._ways:
            found = predict_all(ways, request, recent=self._recent(ways))
            self._request, self._ways, self._found = request, ways, found
        return self._found


class _Computed(NamedTuple):
    """The prefill of a request at one worker, in seconds from now."""

    forecast: Forecast  # at the end of the prompt
    at_s: float
    own_s: float
    num_steps: float  # that compute the prompt
    beside: RunningBeside
    delay_s: float


class _Predictor:
    """The predictions of one request, made in the order in which its prompt would be computed. Each worker is forecast
    once as the one that computes the prompt, and once as the one that imports it."""

    def __init__(self, request: RequestFacts, after_s: float, recent: AllRecent) -> None:
        self._request = request
        self._recent = recent
        self._num_later = max(0.0, request.expected_output - 1) if request.max_tokens > 1 else 0.0  # after the first
        self._after_s = after_s
        self._computed: dict[MemberId, _Computed] = {}
        self._present: dict[MemberId, Forecast] = {}
        self._importing: dict[MemberId, Forecast] = {}  # moved to the latest prompt that was predicted

    def compute(self, load: WorkerLoad) -> "_Computed":
        """Predict the prefill behind the worker's queue and beside its running sequences."""
        if load.member not in self._computed:
            self._computed[load.member] = self._compute(load)
        return self._computed[load.member]

    def predict(self, prefill: WorkerLoad | None, decode: WorkerLoad, computed: "_Computed") -> Prediction:
        if prefill is None:
            return self._prediction(decode, decode, computed, self._decode_here(decode, computed))
        if not self._num_later:
            return self._prediction(prefill, decode, computed, _NOTHING_DECODED)
        kv_bytes = max(0, self._request.num_prompt_tokens - self._num_cached(decode)) * decode.kv_bytes_per_token
        exposed_s = _exposed_s(_work(decode), transfer_s(prefill, decode, kv_bytes) or 0.0, computed)
        return self._prediction(prefill, decode, computed, self._decode_there(decode, computed, exposed_s), kv_bytes)

    def _num_cached(self, load: WorkerLoad) -> int:
        cached = self._request.cached_tokens
        return cached.get(load.member, 0) if cached else 0  # most requests have none

    def _compute(self, load: WorkerLoad) -> _Computed:
        work, request = _work(load), self._request
        before = work.prompts.before(request.tenant, work.max_chunk, is_batch=request.is_batch)
        forecast = self._forecast(load) if before is work.prompts else Forecast(replace(work, prompts=before))
        forecast.wait(self._after_s)
        forecast.compute(PromptWork.of(self._request.num_prompt_tokens, self._num_cached(load)))
        return _Computed(
            forecast=forecast,
            at_s=forecast.now_s,
            own_s=forecast.own_s,
            num_steps=forecast.own_steps,
            beside=_beside(forecast, work),
            delay_s=forecast.delay_s,
        )

    def _forecast(self, load: WorkerLoad) -> Forecast:
        """Return a forecast of the worker that begins at present."""
        if load.member not in self._present:
            self._present[load.member] = Forecast(_work(load))
        return self._present[load.member].copy()

    def _decode_here(self, load: WorkerLoad, computed: _Computed) -> "_Decoded":
        """Predict the decode batch of the worker that has computed the prompt."""
        if not self._num_later:
            return _NOTHING_DECODED
        return self._decode(load, computed.forecast.copy(), computed.at_s, computed.delay_s)

    def _decode_there(self, decode: WorkerLoad, computed: _Computed, exposed_s: float) -> "_Decoded":
        """Predict the decode batch of another worker, from the time when the KV has arrived."""
        importing = self._importing.get(decode.member)
        if importing is None:
            importing = self._importing[decode.member] = self._forecast(decode)
            importing.join_imports_until(computed.at_s)
        importing.wait(computed.at_s)
        forecast = importing.copy()
        forecast.wait(computed.at_s + exposed_s)
        return self._decode(decode, forecast, computed.at_s, 0.0)

    def _decode(self, load: WorkerLoad, forecast: Forecast, first_s: float, begun_s: float) -> "_Decoded":
        """Predict the decode batch from the forecast's present time. `begun_s`: the delay of other sequences that the
        forecast has counted already.
        """
        request = self._request
        joined_s, quiet_s = forecast.now_s, forecast.quiet_s(request.num_choices)
        beside = RunningBeside(0, 0.0, 0.0)
        if forecast.num_running:
            beside = RunningBeside(forecast.num_running, forecast.quiet_s(), quiet_s)
        length = request.num_prompt_tokens + request.expected_output / 2
        forecast.decode(request.num_choices, length, self._num_later)
        ended_s = joined_s + self._stretch(load, self._num_later, quiet_s) * (forecast.now_s - joined_s)
        return _Decoded((ended_s - first_s) / self._num_later, beside, forecast.delay_s - begun_s)

    def _stretch(self, load: WorkerLoad, num_tokens: float, quiet_s: float) -> float:
        """Return by which factor prompts that will come stretch the time between tokens. `quiet_s`: without prompts."""
        work = _work(load)
        recent = self._recent.get(load.member, work.recent)
        if self._after_s:
            recent = recent.after(self._after_s)
        return recent.stretch(work.longest_delay_s(num_tokens, quiet_s)) if recent.number else 1.0

    def _prediction(
        self, computing: WorkerLoad, decode: WorkerLoad, computed: _Computed, decoded: "_Decoded", kv_bytes: float = 0.0
    ) -> Prediction:
        request, is_export = self._request, computing is not decode
        unmodelled_s = computing.unmodelled.export_s if is_export else computing.unmodelled.here_s
        modelled_s, itl_s = computed.at_s - self._after_s, decoded.itl_s * decode.unmodelled.itl_factor
        besides = (computed.beside, computing), (decoded.beside, decode)
        beside = tuple(self._running(one, load) for one, load in besides if one.number)
        return Prediction(
            ttft_s=modelled_s + unmodelled_s,
            itl_s=itl_s,
            running_itl_s=max((each.after_s for each in beside), default=0.0),
            delay_s=computed.delay_s + decoded.delay_s + request.num_choices * self._num_later * itl_s,
            kv_bytes=kv_bytes,
            num_cached=min(self._num_cached(computing), request.num_prompt_tokens - 1),
            modelled_ttft_s=modelled_s,
            modelled_itl_s=decoded.itl_s,
            beside=beside,
        )

    def _running(self, beside: RunningBeside, load: WorkerLoad) -> RunningBeside:
        """Return the same with all that is known about this worker."""
        stretch = self._stretch(load, _work(load).batch.left, beside.before_s)
        factor = load.unmodelled.itl_factor * stretch
        return RunningBeside(beside.number, factor * beside.before_s, factor * beside.after_s)


def _work(load: WorkerLoad) -> WorkAhead:
    assert load.work is not None, "a worker of unknown speed was predicted"
    return load.work


class _Decoded(NamedTuple):
    """The tokens after the first one."""

    itl_s: float
    beside: RunningBeside
    delay_s: float  # of other sequences


_NOTHING_DECODED = _Decoded(0.0, RunningBeside(0, 0.0, 0.0), 0.0)


def _beside(forecast: Forecast, work: WorkAhead) -> RunningBeside:
    """Predict the time between tokens of the sequences that run now at the worker that computes the prompt."""
    number = work.batch.num_running
    if not number:
        return RunningBeside(0, 0.0, 0.0)
    left = max(0.0, work.batch.left - forecast.num_steps)
    after_s = (forecast.now_s + left * forecast.first_quiet_s) / max(1.0, forecast.num_steps + left)
    return RunningBeside(number, min(forecast.first_quiet_s, after_s), after_s)


def _exposed_s(decode: WorkAhead, moving_s: float, computed: _Computed) -> float:
    """Predict the part of the hand-off for which the client waits after its first token. Blocks move while the next
    chunk is computed. So the last chunk's blocks are exposed, and the rest where the link is slower than prefill."""
    fixed_s = decode.times.hand_off.fixed_s if decode.times.hand_off is not None else 0.0
    hidden_share = 1 - 1 / max(1.0, computed.num_steps)
    return fixed_s + moving_s - hidden_share * min(moving_s, computed.own_s)
