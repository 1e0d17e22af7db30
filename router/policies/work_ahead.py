"""The work that one worker has before and beside a new request: prompts that it will compute first, and sequences that
decode there. Pure; the time is an argument.

`PromptBacklog` counts a prompt from the moment this router sends it and forgets it once it is computed, so two requests
placed one after the other never find the same idle worker. Work of other routers is taken from the worker's reports.
"""

from dataclasses import dataclass
from itertools import count

from cluster.outstanding_work import NO_PROMPT, OthersWork, PromptWork, SequenceWork
from cluster.service_times import ServiceTimes, StepLimit

DEFAULT_MAX_CHUNK = 512  # of workers that do not register theirs


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

    @staticmethod
    def of(work: SequenceWork) -> "SequenceBatch":
        """Return the batch of these sequences."""
        num_sequences = work.num_running + work.num_joining
        left = work.left / num_sequences if num_sequences else 0.0
        return SequenceBatch(work.num_running, work.num_joining, work.context, left)


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
    sent, and the worker's latest report about the work of other routers."""

    def __init__(self) -> None:
        self._numbers = count()
        self._prompts: dict[int, PromptWork] = {}
        self._work = NO_PROMPT  # of all prompts
        self._since_s = 0.0  # when the worker began with the first one
        self.others = OthersWork()
        self._reported_s = 0.0  # when this router received `others`
        self._full_until_s = float("-inf")

    def add_prompt(self, work: PromptWork, now_s: float) -> int:
        """Record that a prompt was sent to the worker. Returns its number."""
        if not self._prompts:
            self._since_s = now_s
        number = next(self._numbers)
        self._prompts[number] = work
        self._work = self._work + work
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

    def record_report(self, report: OthersWork, now_s: float) -> None:
        """Record what the worker reports about other routers. An older report than the present one has no effect."""
        if report.number > self.others.number:
            self.others, self._reported_s = report, now_s

    def record_full_queue(self, retry_after_s: float | None, now_s: float) -> None:
        """Record that the worker refused a prompt because its queue is full. Without a retry time it has no effect."""
        if retry_after_s is not None:
            self._full_until_s = now_s + retry_after_s

    def full_for_s(self, now_s: float) -> float:
        """Return for how long the queue is full, as the worker reported; 0 if it has room."""
        return max(0.0, self._full_until_s - now_s)

    def queue(self, now_s: float) -> PromptQueue:
        """Return what a new prompt finds ahead of it."""
        work = self._work + self.others.prompts
        began_s = self._reported_s - self.others.elapsed_s  # with its first prompt, as of the report
        if self.others.first.num_new:
            return PromptQueue(work, self.others.first, now_s - began_s)
        if not self._prompts:
            return PromptQueue(work)
        return PromptQueue(work, next(iter(self._prompts.values())), now_s - max(self._since_s, began_s))
