"""The work at one worker ahead of a new request: prompts that it will compute first, and sequences that decode there.
Pure; the time is an argument.

`PromptBacklog` counts a prompt from the moment this router sends it and forgets it once it is computed, so two requests
placed one after the other never find the same idle worker. Work of other routers is taken from the worker's reports.

`SequenceProgress` is the progress of one of those sequences: how long it is expected to run, and whether it can end
before its worker leaves.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

from cluster.messages import NO_TENANT, TenantShare
from cluster.outstanding_work import NO_PROMPT, NO_SEQUENCE_WORK, OthersWork, PromptWork, SequenceWork, expected_left
from cluster.request_size import RequestSize
from cluster.service_times import ServiceTimes, StepLimit
from router.policies.prediction.recent_prompts import NO_RECENT_PROMPTS, PromptArrivals, RecentPrompts

DEFAULT_MAX_CHUNK = 512  # of workers that do not register theirs


@dataclass(frozen=True, slots=True)
class TenantPrompts:
    """The prompts of one tenant and one class that this router has at a worker."""

    tenant: TenantShare
    work: PromptWork
    is_first: bool = False  # the one that is computed now is among them
    is_batch: bool = False  # of the batch class


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """The prompts that a worker computes before a new one."""

    work: PromptWork = NO_PROMPT  # of all of them
    first: PromptWork = NO_PROMPT  # of the one that is computed now
    elapsed_s: float = 0.0  # since the worker began with the first
    tenants: tuple[TenantPrompts, ...] = ()  # of `work`, what this router sent

    def before(self, newcomer: TenantShare, max_chunk: int, *, is_batch: bool = False) -> "PromptQueue":
        """Return the prompts that the worker computes before a new one of this tenant: all of its own, and of each
        other tenant as much as its weight allows meanwhile (cluster/fair_queue.py); all of these before one of the
        batch class, and none of that class before another one. The running step, of at most `max_chunk` tokens, ends
        in any case. What other routers sent counts in full, because they do not report it by tenant and class.
        """
        passed, first = NO_PROMPT, self.first
        of_class = [each for each in self.tenants if each.is_batch == is_batch]
        own = sum((each.work.num_new for each in of_class if each.tenant.label == newcomer.label), 0.0)
        for other in self.tenants:
            if other.is_batch < is_batch or (other.is_batch == is_batch and other.tenant.label == newcomer.label):
                continue
            most = own * other.tenant.weight / newcomer.weight if other.is_batch == is_batch else 0.0
            most = max(most, min(self.first.num_new, max_chunk)) if other.is_first else most
            if other.work.num_new > most:
                share = most / other.work.num_new
                passed = passed + other.work.times(1 - share)
                if other.is_first and first.num_new > most:
                    first = first.times(most / first.num_new)
        return replace(self, work=self.work + passed.times(-1), first=first) if passed.num_new else self


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
    recent: RecentPrompts = NO_RECENT_PROMPTS

    def longest_delay_s(self, num_tokens: float, quiet_s: float) -> float:
        """Return by how much a prompt that comes while a sequence decodes these tokens may delay it, on average.
        `quiet_s`: of a step without prompts. The prompt finds half of the tokens left, and the steps beside it take as
        long as `StepLimit` allows after half of its patience."""
        if self.step_limit is None:
            return math.inf
        return num_tokens / 2 * (self.step_limit.seconds(quiet_s, 0.5, 1.0) - quiet_s)


_Sender: TypeAlias = tuple[TenantShare, bool]  # a tenant, and whether its prompts are of the batch class


class PromptBacklog:
    """The prompts that this router sent to one worker and that are not computed yet, in the order in which they were
    sent, and the worker's latest report about the work of other routers."""

    def __init__(self) -> None:
        self._numbers = count()
        self._prompts: dict[int, tuple[PromptWork, _Sender, float]] = {}  # and when each was sent
        self._work = NO_PROMPT  # of all prompts
        self._senders: dict[_Sender, PromptWork] = {}
        self._since_s = 0.0  # when the worker began with the first one
        self.others = OthersWork()
        self._reported_s = 0.0  # when this router received `others`
        self._full_until_s: dict[str, float] = {}  # by label of the tenant that was refused
        self._arrivals = PromptArrivals()

    def add_prompt(
        self, work: PromptWork, now_s: float, tenant: TenantShare = NO_TENANT, *, is_batch: bool = False
    ) -> int:
        """Record that a prompt of a tenant, of the batch class or not, was sent to the worker. Returns its number."""
        if not self._prompts:
            self._since_s = now_s
        self._arrivals.record(work, now_s)
        number, sender = next(self._numbers), (tenant, is_batch)
        self._prompts[number] = work, sender, now_s
        self._work = self._work + work
        self._senders[sender] = self._senders.get(sender, NO_PROMPT) + work
        return number

    def record_computed(self, number: int, now_s: float) -> None:
        """Record that the worker has computed the prompt, so that its queue has room again."""
        self._remove(number)
        self._since_s = now_s
        self._full_until_s.clear()

    def remove_prompt(self, number: int, now_s: float) -> None:
        """Remove a prompt that will not be computed. It has no effect on one that was."""
        if number not in self._prompts:
            return
        if number == next(iter(self._prompts)):
            self._since_s = now_s  # the time for this prompt is no progress of the next one
        work, _, sent_s = self._prompts[number]
        self._arrivals.remove(work, sent_s)
        self._remove(number)

    def record_report(self, report: OthersWork, now_s: float) -> None:
        """Record what the worker reports about other routers. An older report than the present one has no effect.
        Where their prompts have become more, some have come. Those that came while as many were computed do not show,
        but a worker reports at once that one came."""
        if report.number <= self.others.number:
            return
        come = report.prompts + self.others.prompts.times(-1)
        if come.num_new > 0:
            self._arrivals.record(PromptWork(come.num_new, max(0.0, come.attended)), now_s)
        self.others, self._reported_s = report, now_s

    def record_full_queue(self, tenant: str, retry_after_s: float | None, now_s: float) -> None:
        """Record that the worker refused work of this tenant because its queue is full; it may accept other tenants.
        `tenant`: its label. Without a retry time it has no effect."""
        if retry_after_s is not None:
            self._full_until_s = {label: s for label, s in self._full_until_s.items() if s > now_s}
            self._full_until_s[tenant] = now_s + retry_after_s

    def record_accepted(self, tenant: str) -> None:
        """Record that the worker accepted work of this tenant, so that its queue has room again for it."""
        self._full_until_s.pop(tenant, None)

    def full_for_s(self, now_s: float) -> dict[str, float]:
        """Return the seconds for which the queue stays full, as the worker reported, by label of the tenant. It has
        room for the tenants that are not returned."""
        return {label: until_s - now_s for label, until_s in self._full_until_s.items() if until_s > now_s}

    def queue(self, now_s: float) -> PromptQueue:
        """Return the prompts ahead of a new one."""
        work = self._work + self.others.prompts
        began_s = self._reported_s - self.others.elapsed_s  # with its first prompt, as of the report
        if self.others.first.num_new:
            return PromptQueue(work, self.others.first, now_s - began_s, self._by_sender())
        if not self._prompts:
            return PromptQueue(work)
        first, sender, _ = next(iter(self._prompts.values()))
        return PromptQueue(work, first, now_s - max(self._since_s, began_s), self._by_sender(sender))

    def forget_recent(self) -> None:
        """Forget which prompts came of late: the worker has another role now, and as many will not come."""
        self._arrivals = PromptArrivals()

    def recent(self, times: ServiceTimes, now_s: float) -> RecentPrompts:
        """Return the recent prompts of all routers, at a worker of this speed."""
        return self._arrivals.recent(times, now_s)

    def _remove(self, number: int) -> None:
        if number not in self._prompts:
            return
        work, sender, _ = self._prompts.pop(number)
        self._work = self._work + work.times(-1) if self._prompts else NO_PROMPT
        self._senders[sender] = self._senders[sender] + work.times(-1)
        if self._senders[sender].num_new <= 0:
            del self._senders[sender]

    def _by_sender(self, first: _Sender | None = None) -> tuple[TenantPrompts, ...]:
        """Return the prompts by tenant and class. `first`: those whose prompt is computed now; None: another router's
        is."""
        return tuple(
            TenantPrompts(sender[0], work, sender == first, is_batch=sender[1])
            for sender, work in self._senders.items()
        )


_NEWEST_SHARE = 0.1  # of the newest token in the pace
_TRUSTED_SHARE = 0.5  # of the time that is left: a batch may become slower, and a move takes time too
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 3.2
_NEWEST_LENGTH_SHARE = 0.05  # of the newest output in the expected length


class SequenceProgress:
    """The progress of one sequence. Only the router writes it."""

    def __init__(self, num_left: int, size: RequestSize | None = None, num_expected: float = math.inf) -> None:
        """`size`: what a worker must be able to hold to run the sequence to its end; None if it is not known.
        `num_expected`: tokens that it is expected to generate in all; infinite: all that it may generate.
        """
        self.num_left = num_left  # tokens that it may still get
        self.size = size
        self._num_expected = num_expected
        self.token_s: float | None = None  # from one token to the next; None: not known yet
        self.is_waiting = False  # was to move and did not decode: preempted, or computed again; no token since
        self._latest_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._stays_until_s = 0.0

    def work(self) -> tuple[bool, int, float]:
        """Return whether its worker has generated a token of it, the number of its tokens, prompt and output (0 if its
        size is not known), and the number of tokens that it is still expected to generate. A placement asks all
        sequences of the cluster, so this is one call.
        """
        size, is_decoding = self.size, self._latest_s is not None
        if size is None:
            return is_decoding, 0, float(self.num_left)
        num_output = size.max_tokens - self.num_left
        if self._num_expected >= size.max_tokens:
            return is_decoding, size.num_prompt + num_output, float(self.num_left)
        left = expected_left(num_output, self._num_expected, size.max_tokens)
        return is_decoding, size.num_prompt + num_output, left

    def record_token(self, now_s: float) -> None:
        """Record that a token arrived."""
        self.num_left -= 1
        if self.is_waiting:
            self.is_waiting, self._stays_until_s = False, now_s  # now it has KV that can move
        if self._latest_s is not None:
            newest_s = now_s - self._latest_s
            known_s = newest_s if self.token_s is None else self.token_s
            self.token_s = known_s + _NEWEST_SHARE * (newest_s - known_s)
        self._latest_s = now_s

    def record_failed_move(self, now_s: float) -> None:
        """Record that the sequence could not be moved. The next try is delayed, each time for longer."""
        self._stays_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def may_move(self, now_s: float) -> bool:
        return now_s >= self._stays_until_s

    def will_end_within(self, left_s: float) -> bool:
        """Return whether the sequence is expected to end in this time. It is not if its speed is unknown."""
        return self.token_s is not None and self.num_left * self.token_s <= left_s


class OutputLengths:
    """Statistics of the length of ended outputs: the mean share of `max_tokens` that was generated, for each power of
    two of `max_tokens`. Before the first one has ended, all of `max_tokens` is expected."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}  # by the bit length of max_tokens, so at most 32

    def record(self, num_output: int, max_tokens: int) -> None:
        """Record an output that ended."""
        share = num_output / max_tokens
        known = self._shares.get(max_tokens.bit_length(), share)
        self._shares[max_tokens.bit_length()] = known + _NEWEST_LENGTH_SHARE * (share - known)

    def expected(self, max_tokens: int) -> float:
        """Return the number of tokens, at least 1, that a choice is expected to generate in all."""
        return max(1.0, self._shares.get(max_tokens.bit_length(), 1.0) * max_tokens)


def work_of(all_progress: Iterable[SequenceProgress]) -> SequenceWork:
    """Return the sum over these sequences of one worker."""
    num_running, num_sequences, context, left = 0, 0, 0, 0.0
    for progress in all_progress:
        is_decoding, length, expected = progress.work()
        num_sequences += 1
        num_running += is_decoding
        context += length
        left += expected
    return SequenceWork(num_running, num_sequences - num_running, context, left)


def batch_of(all_progress: Iterable[SequenceProgress], others: SequenceWork = NO_SEQUENCE_WORK) -> SequenceBatch:
    """Return the batch of this router's sequences at one worker and those of other routers."""
    return SequenceBatch.of(work_of(all_progress) + others)


def sequences_to_move(all_progress: Mapping[int, SequenceProgress], now_s: float, drain_deadline_s: float) -> list[int]:
    """Return the handles of sequences that are not expected to end before the deadline, those with most tokens left
    first."""
    trusted_s = _TRUSTED_SHARE * (drain_deadline_s - now_s)
    late = [
        handle
        for handle, progress in all_progress.items()
        if progress.may_move(now_s) and not progress.will_end_within(trusted_s)
    ]
    return sorted(late, key=lambda handle: all_progress[handle].num_left, reverse=True)
