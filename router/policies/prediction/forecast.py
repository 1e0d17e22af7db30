"""Simulates the next steps of one worker: it computes its prompts in their order, beside sequences that decode, join
and end. Pure.

Steps follow the rules of the worker's scheduler: every running sequence decodes one token per step, and prompts beside
running sequences get the time that `StepLimit` allows. Steps that are about equal are taken together, so a forecast
costs a few dozen of them however long the work is.
"""

import bisect
import math
from operator import neg
from typing import NamedTuple

from cluster.outstanding_work import PromptWork
from router.policies.prediction.work_ahead import WorkAhead

# The share by which a forecast may be wrong because equal steps are taken together. Over 78,000 random workers, more
# work ahead made the first token up to 1.5 % earlier.
PRECISION = 0.02
AGE_SHARE = 0.3  # steps are equal until the age of the oldest prompt and its patience have grown by this share
_TOKEN_SHARE = 0.25  # of the tokens to forecast: for this share steps count as equal, although sequences may end
_MOST_PARTS = 4  # into which the prompts after the first one are divided
_LEAST_TOKENS = 16  # that the scheduler computes of the first prompt in each step
_NEGLIGIBLE = 1e-6  # tokens, steps or seconds
LEAST_STEP_S = 1e-9  # a worker may report service times of 0; every step that does work takes some time
_MOST_SEQUENCES = 1024  # that are forecast one by one; the batch comes from the worker, and its size bounds the cost


class _Prompts(NamedTuple):
    """A prompt, or several equal ones in a row."""

    num_new: float  # tokens to compute
    attended: float  # per token
    alone_s: float  # that one prompt takes without sequences beside it
    arrived_s: float
    num_local: float = 0.0  # sequences that run here once they are computed
    is_own: bool = False  # of the request for which the forecast is made


class Beside(NamedTuple):
    """The sequences that decode in a step."""

    number: int
    decode_s: float  # of a step that does nothing else, by the model
    quiet_s: float  # the same, as the step limit counts it
    added_s: float = 0.0  # of it, because of the sequences of the request


class Steps:
    """The steps of one worker, which decode and compute parts of prompts. Their constants are looked up once."""

    def __init__(self, work: WorkAhead) -> None:
        times = work.times
        self._prefill, self._decode = times.prefill, times.decode
        self._factor = times.mixed.factor if times.mixed is not None else 1.0
        self._once_s = min(times.prefill.step_s, times.decode.step_s)
        self._max_chunk, self._limit = work.max_chunk, work.step_limit

    def beside(self, number: int, context: int) -> Beside:
        """Return sequences whose lengths sum to `context`."""
        decode_s = self._decode.seconds(number, context) if number else 0.0
        return Beside(number, decode_s, max(decode_s, LEAST_STEP_S) if number else 0.0)

    def chunk_tokens(self, beside: Beside, left: float, context: float, waited_s: float, alone_s: float) -> float:
        """Return how many tokens of a prompt the next step computes. `left`: tokens that are not computed; `context`:
        those that precede each of them; `waited_s`, `alone_s`: how long the prompt has waited, and takes without
        sequences."""
        room = self._max_chunk - beside.number
        most = left if left < room else room
        most = most if most > 1.0 else 1.0
        if not beside.number or self._limit is None:
            return most
        limit_s = self._limit.seconds(beside.quiet_s, waited_s, alone_s)
        both_s = limit_s / self._factor if self._factor else math.inf  # as in ServiceTimes.prompts_within_s
        prompts_s = both_s - beside.decode_s + self._once_s
        added_s = (limit_s if limit_s < prompts_s else prompts_s) - self._prefill.step_s
        within = self._prefill.tokens_within(added_s, context, math.ceil(most))
        within = within if within > _LEAST_TOKENS else _LEAST_TOKENS
        return most if most < within else within

    def seconds(self, beside: Beside, num_new: float, attended: float) -> float:
        """Return the time of a step that computes `num_new` tokens, which attend to `attended` tokens each."""
        longest_s = self._prefill.seconds(math.ceil(num_new), num_new * attended)
        if beside.number:
            both_s = self._factor * (longest_s + beside.decode_s - self._once_s)  # as in ServiceTimes.seconds
            longest_s = beside.decode_s if beside.decode_s > longest_s else longest_s
            longest_s = both_s if both_s > longest_s else longest_s
        return longest_s if longest_s > LEAST_STEP_S else LEAST_STEP_S


class Forecast:
    """The future of one worker, which the caller moves forward. `now_s` counts from the present."""

    def __init__(self, work: WorkAhead) -> None:
        batch = work.batch
        self._work = work
        self._steps = Steps(work)
        self._prompts = _prompts_ahead(work)
        self._left = self._prompts[0].num_new if self._prompts else 0.0  # tokens of the first that are not computed
        self._length = batch.context / max(1, batch.num_sequences)  # of a sequence, on average
        # Sequences that join have all their tokens left, those that run anything between that and nothing.
        halves = batch.num_running / 2 + batch.num_joining
        self._new_left = batch.left * batch.num_sequences / halves if halves else 0.0
        self._num_tokens = 0.0  # that each running sequence has decoded since the forecast began
        # The numbers of tokens at which the running sequences end, the last first.
        num_running = min(batch.num_running, _MOST_SEQUENCES)
        self._ends = [self._new_left * (i + 0.5) / num_running for i in reversed(range(num_running))]
        num_joining = min(batch.num_joining, _MOST_SEQUENCES)
        self._num_imports = max(0.0, num_joining - sum(prompts.num_local for prompts in self._prompts))
        self._imports_s: list[float] = []  # when they will join, the last first
        self._num_due = 0.0  # sequences that join, in parts
        self._num_own = 0  # sequences of the request
        self._own_length = 0.0
        self._besides: dict[tuple[int, int], Beside] = {}  # by the number of other sequences and of own ones
        # It begins in the past, when the worker began with its first prompt.
        self.now_s = -work.prompts.elapsed_s if self._prompts else 0.0
        self.num_steps = 0.0  # from the present on
        self.own_steps, self.own_s = 0.0, 0.0  # steps that compute the own prompt
        self.delay_s = 0.0  # the sum over all other sequences, caused by the own prompt and the own sequences
        while self.now_s < 0 and self._prompts:
            self._take_steps(0.0, math.inf)
        self.now_s = max(0.0, self.now_s)
        self.first_quiet_s = self.quiet_s()  # the time of a step at present, without prompts

    def copy(self) -> "Forecast":
        """Return an independent copy of this forecast. Copies decode the same own sequences, if any."""
        other = Forecast.__new__(Forecast)
        other.__dict__.update(self.__dict__)  # copy.copy takes ten times as long
        other._prompts, other._ends, other._imports_s = self._prompts[:], self._ends[:], self._imports_s[:]
        return other

    @property
    def num_running(self) -> int:
        """Return the number of other sequences that run now."""
        return len(self._ends)

    def join_imports_until(self, until_s: float) -> None:
        """Let the sequences whose prompts other workers compute join one after the other until that time."""
        number = round(self._num_imports)
        self._imports_s = [until_s * (number - i) / (number + 1) for i in range(number)]

    def wait(self, until_s: float) -> None:
        """Move forward to this time, or to the end of the step that then runs."""
        while self.now_s < until_s and (self._ends or self._prompts or self._imports_s):
            self._take_steps(until_s, math.inf)
        self.now_s = max(self.now_s, until_s)

    def compute(self, own: PromptWork) -> None:
        """Move forward until a prompt that arrives now is computed."""
        alone_s = _alone_s(self._work, own)
        if not self._prompts:
            self._left = own.num_new
        self._prompts.append(_Prompts(own.num_new, own.attended / own.num_new, alone_s, self.now_s, is_own=True))
        while self._prompts:
            self._take_steps(math.inf, math.inf)

    def decode(self, num_sequences: int, length: float, num_tokens: float) -> None:
        """Let sequences join now and move forward until each has decoded `num_tokens` tokens. They wait until there is
        room for them. Other sequences that end meanwhile are assumed to be replaced by new ones.
        """
        while self._ends and len(self._ends) + num_sequences > self._work.max_running:
            self._take_steps(math.inf, self._ends[-1] - self._num_tokens)
        self._num_own, self._own_length = num_sequences, length
        left = num_tokens
        while left > _NEGLIGIBLE and self._prompts:
            left -= self._take_steps(math.inf, left)
        beside = self._beside()
        self._record(beside, beside.quiet_s, max(0.0, left), is_own=False)
        self.now_s += max(0.0, left) * beside.quiet_s

    def quiet_s(self, num_more: int = 0) -> float:
        """Return the seconds of a step without prompts, with `num_more` sequences more than run now."""
        number = min(len(self._ends) + self._num_own + num_more, self._work.max_running)
        length = self._own_length if self._num_own and not self._ends else self._length
        return max(self._work.times.decode.seconds(number, round(number * length)), LEAST_STEP_S) if number else 0.0

    def _take_steps(self, until_s: float, num_tokens: float) -> float:
        """Simulate some equal steps, at most about until `until_s` and for `num_tokens` tokens. Returns their
        number.
        """
        prompts = self._prompts[0] if self._prompts else None
        beside, num_new = self._beside(), 0.0
        step_s = beside.quiet_s
        if prompts is not None:  # the step computes a part of the first one
            waited_s = self.now_s - prompts.arrived_s
            num_new = self._steps.chunk_tokens(beside, self._left, prompts.attended, waited_s, prompts.alone_s)
            step_s = self._steps.seconds(beside, num_new, prompts.attended)
        if step_s <= 0:  # there is nothing to do before the next sequence joins
            self._move(self._next_change_s(until_s), prompts)
            return num_tokens
        number = self._num_equal(step_s, num_new, prompts, until_s, num_tokens)
        if self.now_s >= 0:
            self._record(beside, step_s, number, is_own=prompts is not None and prompts.is_own)
        self._left -= number * num_new
        self._move(self.now_s + number * step_s, prompts)
        return number

    def _beside(self) -> Beside:
        """Return the sequences that the next step decodes."""
        num_others, num_own = key = len(self._ends), self._num_own
        if (known := self._besides.get(key)) is None:
            number, others = (min(each, self._work.max_running) for each in (num_others + num_own, num_others))
            known = self._steps.beside(number, round(number * self._length))
            if num_own:
                quiet_s, alone = self.quiet_s(), self._steps.beside(others, round(others * self._length))
                known = Beside(number, known.decode_s, quiet_s, max(0.0, quiet_s - alone.decode_s))
            self._besides[key] = known
        return known

    def _next_change_s(self, until_s: float) -> float:
        """Return when the next sequence joins, at most `until_s`."""
        imports_s = self._imports_s
        return imports_s[-1] if imports_s and imports_s[-1] < until_s else until_s

    def _num_equal(
        self, step_s: float, num_new: float, prompts: _Prompts | None, until_s: float, num_tokens: float
    ) -> float:
        """Return the number of steps that are about equal from now on. `num_new`: tokens of prompts in each."""
        # Comparisons take a third of the time of `min` and `max`, and this runs up to 200 times for a placement.
        number, ends = num_tokens, self._ends
        if prompts is not None:
            whole = math.floor(self._left / num_new + _NEGLIGIBLE) or 1
            number = whole if whole < number else number
            if number > 1 and ends and self._work.step_limit is not None:
                grown_s = self.now_s - prompts.arrived_s + self._work.step_limit.patience_s(prompts.alone_s)
                alike = AGE_SHARE * grown_s / step_s
                alike = alike if alike > 1.0 else 1.0
                number = alike if alike < number else number
        change_s = self._next_change_s(until_s)
        if change_s < math.inf:
            steps = (change_s - self.now_s) / step_s if change_s > self.now_s else 0.0
            if num_new and not ends:
                steps = math.ceil(steps) or 1.0
            number = steps if steps < number else number
        if ends and self.now_s >= 0:
            first, last = ends[-1] - self._num_tokens, ends[0] - self._num_tokens
            # Steps without any sequence are much shorter.
            together = min(_TOKEN_SHARE * min(self._new_left, num_tokens, number), last)
            together = together if together > first else first
            number = together if together < number else number
        return number if number > _NEGLIGIBLE else _NEGLIGIBLE

    def _record(self, beside: Beside, step_s: float, number: float, *, is_own: bool) -> None:
        ends = self._ends
        self.num_steps += number
        if is_own:
            self.own_steps += number
            self.own_s += number * step_s
            self.delay_s += min(len(ends), self._work.max_running) * number * (step_s - beside.quiet_s)
        if beside.added_s:
            self.delay_s += min(len(ends), self._work.max_running) * number * beside.added_s
        self._num_tokens += number
        ended = self._num_tokens + _NEGLIGIBLE
        while ends and ends[-1] <= ended:
            ends.pop()

    def _move(self, to_s: float, prompts: _Prompts | None) -> None:
        """Move to a time, and let sequences join whose prompts are there by then."""
        if prompts is not None and self._left <= _NEGLIGIBLE:
            to_s = max(0.0, to_s)  # what should be computed by now is about to be
            self._prompts.pop(0)
            self._left = self._prompts[0].num_new if self._prompts else 0.0
            self._num_due += prompts.num_local
        self.now_s = to_s
        imports_s = self._imports_s
        while imports_s and imports_s[-1] <= to_s + _NEGLIGIBLE:
            imports_s.pop()
            self._num_due += 1
        while self._num_due >= 0.5:
            self._num_due -= 1
            bisect.insort(self._ends, self._num_tokens + self._new_left, key=neg)


def _prompts_ahead(work: WorkAhead) -> list[_Prompts]:
    """Return the prompts of the queue: the first one, and the rest in a few parts."""
    queue = work.prompts
    first = queue.first if queue.first.num_new else queue.work
    if queue.work.num_new <= 0:
        return []
    rest = queue.work.num_new - first.num_new
    number = max(1, round(rest / first.num_new)) if rest > _NEGLIGIBLE else 0
    num_local = min(work.batch.num_joining, 1 + number, _MOST_SEQUENCES)
    attended = queue.work.attended / queue.work.num_new
    num_first = min(1, num_local)
    found = [_Prompts(first.num_new, attended, _alone_s(work, first), -queue.elapsed_s, num_first)]
    parts = min(_MOST_PARTS, number)
    alone_s = _alone_s(work, PromptWork(rest / number, rest / number * attended)) if number else 0.0
    for part in range(parts):
        arrived_s = -queue.elapsed_s * (1 - (part + 1) / parts)
        found.append(_Prompts(rest / parts, attended, alone_s, arrived_s, (num_local - num_first) / parts))
    return found


def _alone_s(work: WorkAhead, prompt: PromptWork) -> float:
    return work.times.prefill.seconds(math.ceil(prompt.num_new), prompt.attended)
