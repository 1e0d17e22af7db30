"""The work that one worker has before and beside a new request: prompts that it will compute first, and sequences that
decode there. Pure; the time is an argument.

`PromptBacklog` counts a prompt from the moment this router sends it and forgets it once it is computed, so two requests
placed one after the other never find the same idle worker. Prompts of other routers are taken from heartbeats.
"""

from dataclasses import dataclass
from itertools import count

from cluster.service_times import ServiceTimes, StepLimit, attended_tokens

DEFAULT_MAX_CHUNK = 512  # of workers that do not register theirs


@dataclass(frozen=True, slots=True)
class PromptWork:
    """The part of a prompt that a worker computes. Sums of several prompts are of this type too."""

    num_new: float = 0  # tokens that are not cached
    attended: float = 0.0  # the sum of the tokens to which they attend

    @staticmethod
    def of(num_tokens: int, num_cached: int) -> "PromptWork":
        """Return the work of a prompt. The last token is always computed."""
        num_new = max(1, num_tokens - num_cached)
        return PromptWork(num_new, attended_tokens(num_new, num_tokens - num_new))

    def __add__(self, other: "PromptWork") -> "PromptWork":
        return PromptWork(self.num_new + other.num_new, self.attended + other.attended)

    def times(self, factor: float) -> "PromptWork":
        return PromptWork(self.num_new * factor, self.attended * factor)


NO_PROMPT = PromptWork()


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """The prompts that a worker computes before a new one."""

    work: PromptWork = NO_PROMPT  # of all of them
    first: PromptWork = NO_PROMPT  # of the one that is computed now
    elapsed_s: float = 0.0  # since the worker began with the first


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """The sequences that a worker decodes, or will decode as soon as their prompts are there."""

    num_running: int = 0
    num_joining: int = 0  # assigned to the worker; their prompts are still being computed or moved
    context: int = 0  # the sum of the lengths of both
    left: float = 0.0  # tokens that each of them may still generate, on average

    @property
    def num_sequences(self) -> int:
        return self.num_running + self.num_joining

    def with_others(self, num_others: int) -> "SequenceBatch":
        """Return the batch with that many sequences of other routers, which are taken to be as long as the present ones
        on average."""
        if num_others <= 0:
            return self
        context = self.context + num_others * self.context // max(1, self.num_sequences)
        return SequenceBatch(self.num_running + num_others, self.num_joining, context, self.left)


NO_SEQUENCES = SequenceBatch()


@dataclass(frozen=True, slots=True)
class WorkAhead:
    """The facts about one worker that prediction uses."""

    times: ServiceTimes
    prompts: PromptQueue = PromptQueue()
    batch: SequenceBatch = NO_SEQUENCES
    max_chunk: int = DEFAULT_MAX_CHUNK  # prompt tokens of one step
    max_running: int = 1 << 30  # sequences in one step
    step_limit: StepLimit | None = None  # of steps with prompts and running sequences; None: only `max_chunk`


class PromptBacklog:
    """The prompts that this router sent to one worker and that are not computed yet, in the order in which they were
    sent, and what the worker's heartbeats show of other routers' prompts."""

    def __init__(self) -> None:
        self._numbers = count()
        self._prompts: dict[int, PromptWork] = {}
        self._work = NO_PROMPT  # of all prompts
        self._since_s = 0.0  # when the worker began with the first one
        self._mean = NO_PROMPT  # of the prompts sent lately
        self._num_others = 0
        self._full_until_s = float("-inf")

    def add_prompt(self, work: PromptWork, now_s: float) -> int:
        """Record that a prompt was sent to the worker. Returns its number."""
        if not self._prompts:
            self._since_s = now_s
        number = next(self._numbers)
        self._prompts[number] = work
        self._work = self._work + work
        self._mean = work if self._mean is NO_PROMPT else self._mean.times(1 - _NEW_SHARE) + work.times(_NEW_SHARE)
        return number

    def record_computed(self, number: int, now_s: float) -> None:
        """Record that the worker has computed the prompt, so that its queue has room again."""
        self.remove_prompt(number)
        self._since_s = now_s
        self._full_until_s = float("-inf")

    def remove_prompt(self, number: int) -> None:
        """Remove a prompt that will not be computed. It has no effect on one that was."""
        work = self._prompts.pop(number, None)
        if work is not None:
            self._work = self._work + work.times(-1) if self._prompts else NO_PROMPT

    def record_heartbeat(self, num_prompts: int) -> None:
        """Record how many prompts the worker itself counts, over all routers: those that are not of this router stay
        ahead of every new prompt until the next heartbeat."""
        self._num_others = max(0, num_prompts - len(self._prompts))

    def record_full_queue(self, retry_after_s: float | None, now_s: float) -> None:
        """Record that the worker refused a prompt because its queue is full. Without a retry time it has no effect."""
        if retry_after_s is not None:
            self._full_until_s = now_s + retry_after_s

    def full_for_s(self, now_s: float) -> float:
        """Return for how long the queue is full, as the worker reported; 0 if it has room."""
        return max(0.0, self._full_until_s - now_s)

    def queue(self, now_s: float) -> PromptQueue:
        """Return what a new prompt finds ahead of it."""
        others = self._mean.times(self._num_others)
        if not self._prompts:
            return PromptQueue(others)
        return PromptQueue(self._work + others, next(iter(self._prompts.values())), now_s - self._since_s)


_NEW_SHARE = 0.2  # of the newest prompt in the mean
