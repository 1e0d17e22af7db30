"""The outstanding work at a worker as several routers see it: the work that each sent itself, and the worker's reports
about the others.

The state machine has a worker's real account, routers' real backlogs, and messages that are delivered late. Reports are
delivered in any order, more than once, or never.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.messages import MemberId
from cluster.outstanding_work import (
    NO_PROMPT,
    NO_SEQUENCE_WORK,
    OthersWork,
    OutstandingWork,
    PromptWork,
    SequenceOutlook,
    SequenceWork,
)
from cluster.request_size import RequestSize
from router.policies.prediction.work_ahead import PromptBacklog, SequenceProgress, batch_of
from tests.examples import num_examples

ROUTERS = [MemberId(f"router-{number}", "1") for number in range(3)]
A, B, C = ROUTERS
MAX_TOKENS = 20


@dataclass(eq=False)
class _Job:
    """A prompt for export, or sequences with or without a prompt of their own."""

    router: MemberId
    prompt: PromptWork | None
    number: int  # of the prompt in the router's backlog
    progress: dict[int, SequenceProgress] = field(default_factory=dict)
    is_export: bool = False
    is_computed: bool = False  # as the router knows


@dataclass(eq=False)
class _Router:
    member: MemberId
    backlog: PromptBacklog = field(default_factory=PromptBacklog)
    jobs: list[_Job] = field(default_factory=list)
    to_worker: deque[Callable[[], None]] = field(default_factory=deque)
    to_router: deque[Callable[[], None]] = field(default_factory=deque)

    def progress(self) -> list[SequenceProgress]:
        return [progress for job in self.jobs for progress in job.progress.values()]

    def remove(self, job: _Job, now_s: float, handle: int | None = None) -> None:
        """Forget a job, or one of its sequences."""
        if handle is not None:
            job.progress.pop(handle, None)
        if handle is None or not job.progress:
            self.backlog.remove_prompt(job.number, now_s)
            if job in self.jobs:
                self.jobs.remove(job)


class SeveralRouters(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.worker = OutstandingWork()
        self.routers = {member: _Router(member) for member in ROUTERS}
        self.numbers = itertools.count(1)
        self.exports: dict[int, _Job] = {}  # at the worker, by key
        self.decoding: dict[tuple[MemberId, int], tuple[_Job, int]] = {}  # at the worker: the job, tokens generated
        self.reports: list[tuple[MemberId, OthersWork]] = []

    @rule(router=st.sampled_from(ROUTERS), tokens=st.integers(1, 5000), cached=st.integers(0, 5000))
    def send_export(self, router: MemberId, tokens: int, cached: int) -> None:
        work, key = PromptWork.of(tokens, min(cached, tokens - 1)), next(self.numbers)
        number = self.routers[router].backlog.add_prompt(work, self.now_s)
        job = _Job(router, work, number, is_export=True)
        self.routers[router].jobs.append(job)

        def receive() -> None:
            self.exports[key] = job
            self.worker.add_export(key, router, work, 1, self.now_s)

        self.routers[router].to_worker.append(receive)

    @rule(router=st.sampled_from(ROUTERS), tokens=st.integers(1, 5000), choices=st.integers(1, 3), local=st.booleans())
    def send_sequences(self, router: MemberId, tokens: int, choices: int, local: bool) -> None:
        sender, work = self.routers[router], PromptWork.of(tokens, 0) if local else None
        number = sender.backlog.add_prompt(work, self.now_s) if work is not None else -1
        handles = [next(self.numbers) for _ in range(choices)]
        size = RequestSize(tokens, MAX_TOKENS)
        job = _Job(router, work, number, {handle: SequenceProgress(MAX_TOKENS, size, 8.0) for handle in handles})
        sender.jobs.append(job)

        def receive() -> None:
            self.decoding.update({(router, handle): (job, 0) for handle in handles})
            outlooks = dict.fromkeys(handles, SequenceOutlook(tokens, MAX_TOKENS, 8.0))
            self.worker.add_sequences(router, outlooks, work, self.now_s)

        sender.to_worker.append(receive)

    @rule(router=st.sampled_from(ROUTERS), which=st.integers(0, 100))
    def cancel(self, router: MemberId, which: int) -> None:
        sender = self.routers[router]
        if not sender.jobs:
            return
        job = sender.jobs[which % len(sender.jobs)]
        handle = next(iter(job.progress), None)
        sender.remove(job, self.now_s, handle)
        sender.to_worker.append(lambda: self._end_at_worker(job, handle))

    @rule(router=st.sampled_from(ROUTERS))
    def deliver_to_worker(self, router: MemberId) -> None:
        if self.routers[router].to_worker:
            self.routers[router].to_worker.popleft()()

    @rule(router=st.sampled_from(ROUTERS))
    def deliver_to_router(self, router: MemberId) -> None:
        if self.routers[router].to_router:
            self.routers[router].to_router.popleft()()

    @precondition(lambda self: self.exports)
    @rule()
    def compute_export(self) -> None:
        key, job = next(iter(self.exports.items()))
        del self.exports[key]
        self.worker.remove_export(key, self.now_s)
        router = self.routers[job.router]

        def receive() -> None:
            router.backlog.record_computed(job.number, self.now_s)
            router.remove(job, self.now_s)

        router.to_router.append(receive)

    @precondition(lambda self: self.decoding)
    @rule(which=st.integers(0, 100), ends=st.booleans())
    def generate(self, which: int, ends: bool) -> None:
        name = list(self.decoding)[which % len(self.decoding)]
        job, num_output = self.decoding[name]
        router, handle = self.routers[name[0]], name[1]
        self.decoding[name] = job, num_output + 1
        self.worker.record_output(*name, num_output + 1, self.now_s)
        is_last = ends or num_output + 1 == MAX_TOKENS
        if is_last:
            self._end_at_worker(job, handle)

        def receive() -> None:
            router.backlog.record_computed(job.number, self.now_s)
            job.is_computed = True
            if handle in job.progress:
                job.progress[handle].record_token(self.now_s)
                if is_last:
                    router.remove(job, self.now_s, handle)

        router.to_router.append(receive)

    @rule(seconds=st.floats(0.001, 10.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(router=st.sampled_from(ROUTERS))
    def report(self, router: MemberId) -> None:
        self.reports += self.worker.reports([router], self.now_s).items()

    @precondition(lambda self: self.reports)
    @rule(which=st.integers(0, 100), again=st.booleans())
    def deliver_report(self, which: int, again: bool) -> None:
        which %= len(self.reports)
        router, report = self.reports[which] if again else self.reports.pop(which)
        self.routers[router].backlog.record_report(report, self.now_s)

    @precondition(lambda self: self.reports)
    @rule(which=st.integers(0, 100))
    def lose_report(self, which: int) -> None:
        self.reports.pop(which % len(self.reports))

    @invariant()
    def nothing_is_negative(self) -> None:
        for router in self.routers.values():
            queue, others = router.backlog.queue(self.now_s), router.backlog.others
            batch = batch_of(router.progress(), others.sequences)
            assert min(queue.work.num_new, queue.work.attended, queue.elapsed_s, queue.first.num_new) >= 0
            assert min(batch.num_running, batch.num_joining, batch.context, batch.left, others.num_exported) >= 0

    def teardown(self) -> None:
        """Deliver every message, then one report to each router: all routers see the same work, which is all of it."""
        for router in self.routers.values():
            while router.to_worker:
                router.to_worker.popleft()()
        for router in self.routers.values():
            while router.to_router:
                router.to_router.popleft()()
        jobs = [job for router in self.routers.values() for job in router.jobs]
        pending = [job.prompt for job in jobs if job.prompt is not None and not job.is_computed]
        expected = batch_of([progress for job in jobs for progress in job.progress.values()])
        for member, report in self.worker.reports(ROUTERS, self.now_s).items():
            router = self.routers[member]
            router.backlog.record_report(report, self.now_s)
            batch = batch_of(router.progress(), router.backlog.others.sequences)
            assert router.backlog.queue(self.now_s).work == sum(pending, NO_PROMPT)
            assert batch.left == pytest.approx(expected.left)
            assert (batch.num_running, batch.num_joining, batch.context) == (
                expected.num_running,
                expected.num_joining,
                expected.context,
            )
            assert report.num_exported == sum(job.is_export for job in jobs if job.router != member)

    def _end_at_worker(self, job: _Job, handle: int | None) -> None:
        if handle is not None:
            self.decoding.pop((job.router, handle), None)
            self.worker.remove_sequences(job.router, [handle], self.now_s)
        for key in [key for key, known in self.exports.items() if known is job]:
            del self.exports[key]
            self.worker.remove_export(key, self.now_s)


TestSeveralRouters = SeveralRouters.TestCase
TestSeveralRouters.settings = settings(
    max_examples=num_examples(suite=17, search=50), stateful_step_count=40, deadline=None
)


def _reported(worker: OutstandingWork, router: MemberId, now_s: float = 0.0) -> OthersWork:
    return worker.reports([router], now_s)[router]


def test_a_router_receives_the_work_of_all_others_and_not_its_own() -> None:
    worker = OutstandingWork()
    worker.add_export(b"a", A, PromptWork.of(100, 0), 2, 0.0)
    worker.add_export(b"b", B, PromptWork.of(300, 100), 1, 0.0)
    worker.add_sequences(A, {7: SequenceOutlook(50, 20, 10.0, num_output=4)}, None, 0.0)
    to_a, to_b, to_c = (_reported(worker, router) for router in ROUTERS)
    assert (to_a.prompts.num_new, to_a.num_exported, to_a.sequences) == (200, 1, NO_SEQUENCE_WORK)
    assert (to_b.prompts.num_new, to_b.num_exported, to_b.sequences) == (100, 2, SequenceWork(0, 1, 54, 6.0))
    assert (to_c.prompts.num_new, to_c.num_exported, to_c.num_sequences) == (300, 3, 4)
    assert to_a.number < to_b.number < to_c.number


def test_the_prompt_being_computed_is_reported_to_all_routers_but_its_own() -> None:
    worker = OutstandingWork()
    worker.add_export(b"a", A, PromptWork.of(100, 0), 1, 10.0)
    worker.add_sequences(B, {1: SequenceOutlook(300, 20, 10.0)}, PromptWork.of(300, 0), 11.0)
    to_a, to_b = _reported(worker, A, 12.0), _reported(worker, B, 12.0)
    assert (to_a.first, to_b.first.num_new) == (NO_PROMPT, 100)
    assert to_a.elapsed_s == to_b.elapsed_s == 2.0
    worker.remove_export(b"a", 13.0)
    to_a, to_b = _reported(worker, A, 14.5), _reported(worker, B, 14.5)
    assert (to_a.first.num_new, to_b.first, to_a.elapsed_s) == (300, NO_PROMPT, 1.5)
    worker.record_output(B, 1, 1, 15.0)
    assert _reported(worker, A, 16.0).prompts == NO_PROMPT and _reported(worker, A, 16.0).elapsed_s == 0.0


def test_a_router_predicts_from_the_time_when_the_worker_began_with_the_prompt_of_another_router() -> None:
    worker, backlog = OutstandingWork(), PromptBacklog()
    worker.add_export(b"b", B, PromptWork.of(300, 0), 1, 10.0)
    backlog.record_report(_reported(worker, A, 12.0), 12.1)  # received by another clock, 0.1 s later
    own = backlog.add_prompt(PromptWork.of(100, 0), 12.5)
    queue = backlog.queue(13.1)
    assert (queue.work.num_new, queue.first.num_new, round(queue.elapsed_s, 6)) == (400, 300, 3.0)
    worker.add_export(b"a", A, PromptWork.of(100, 0), 1, 12.6)
    worker.remove_export(b"b", 14.0)
    backlog.record_report(_reported(worker, A, 15.0), 15.1)
    queue = backlog.queue(16.1)
    assert (queue.work.num_new, queue.first.num_new, round(queue.elapsed_s, 6)) == (100, 100, 2.0)
    backlog.record_computed(own, 17.0)
    assert backlog.queue(18.0).work == NO_PROMPT


def test_an_older_report_has_no_effect() -> None:
    worker, backlog = OutstandingWork(), PromptBacklog()
    worker.add_export(b"b", B, PromptWork.of(300, 0), 1, 0.0)
    older = _reported(worker, A)
    worker.remove_export(b"b", 1.0)
    backlog.record_report(_reported(worker, A), 1.0)
    backlog.record_report(older, 1.1)
    assert backlog.queue(2.0).work == NO_PROMPT


def test_a_local_prompt_counts_until_its_first_token_or_until_no_sequence_waits_for_it() -> None:
    worker = OutstandingWork()
    outlook = SequenceOutlook(100, 20, 10.0)
    worker.add_sequences(A, {1: outlook, 2: outlook}, PromptWork.of(100, 0), 0.0)
    worker.add_sequences(A, {3: outlook, 4: outlook}, PromptWork.of(100, 0), 0.0)
    worker.record_output(A, 1, 1, 1.0)
    assert _reported(worker, B).prompts.num_new == 100
    worker.remove_sequences(A, [1, 2, 3], 2.0)
    assert _reported(worker, B).prompts.num_new == 100
    worker.remove_sequences(A, [3, 4], 3.0)
    assert _reported(worker, B) == OthersWork(number=3)


def test_a_thawed_sequence_counts_once_under_its_new_handle() -> None:
    worker = OutstandingWork()
    worker.add_sequences(A, {1: SequenceOutlook(100, 20, 10.0)}, None, 0.0)
    worker.record_output(A, 1, 3, 1.0)
    worker.rename_sequence(A, 1, 9)
    worker.remove_sequences(A, [1], 2.0)
    assert _reported(worker, B).sequences == SequenceWork(1, 0, 103, 7.0)
    worker.remove_sequences(A, [9], 2.0)
    assert _reported(worker, B).sequences == NO_SEQUENCE_WORK


def test_changes_are_signalled_with_their_router_and_tokens_of_running_sequences_are_not() -> None:
    changed: list[MemberId] = []
    worker = OutstandingWork(changed.append)
    worker.add_export(b"a", A, PromptWork.of(100, 0), 1, 0.0)
    worker.add_sequences(B, {1: SequenceOutlook(100, 20, 10.0)}, None, 0.0)
    worker.remove_export(b"a", 1.0)
    worker.remove_export(b"a", 1.0)
    assert changed == [A, B, A]
    for num_output in range(1, 10):
        worker.record_output(B, 1, num_output, 2.0)
    assert changed == [A, B, A, B]
    worker.remove_sequences(B, [1, 2], 3.0)
    worker.remove_sequences(B, [1], 3.0)
    assert changed == [A, B, A, B, B]
