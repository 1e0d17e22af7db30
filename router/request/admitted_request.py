"""An admitted request while it is served: its choices, its account, its attempts, and the jobs for its workers.

One call of the pipeline owns it. Every token passes `deliver`, so the client's tokens and those from which a resumed
attempt starts are the same.
"""

import itertools
import math
from collections.abc import Sequence
from copy import copy

from cluster.clock import Clock
from cluster.errors import DeadlineExceeded, NoWorkerLargeEnough
from cluster.messages import (
    NO_TENANT,
    DecodeJob,
    MemberId,
    PrefillJob,
    PrefixSource,
    SampledToken,
    SequenceStart,
    TenantShare,
)
from cluster.request_size import RequestSize
from router.fleet.decode_events import SequencesStarted
from router.fleet.peer import FirstTokens
from router.fleet.prefix_locator import RequestChains
from router.policies.candidates import NO_TARGETS, SloTargets
from router.policies.hedging import Execution, may_append
from router.request.account import PhaseName, RequestAccount
from router.request.choice import Choice
from router.request.outbox import Outbox
from router.request.validation import ResolvedRequest
from router.requests import ChoiceDelta, ResumedChoice, ScoredPrompt, Usage

_RESUMED = "resumed"


class AdmittedRequest:
    def __init__(
        self,
        *,
        router: MemberId,
        request_id: str,
        request: ResolvedRequest,
        choices: Sequence[Choice],
        deadline_s: float,
        account: RequestAccount,
        outbox: Outbox,
        clock: Clock,
        expected_output: float,
        targets: SloTargets = NO_TARGETS,
        tenant: TenantShare = NO_TENANT,
        keeps_queue_position: bool = False,
        grammar_engine: str = "",
    ) -> None:
        """`expected_output`: tokens that a choice is expected to generate in all, at least 1.

        `targets`: the times that the client asked for, from the request's arrival.

        `grammar_engine`: the id of the grammar engine that a worker must have too; empty: the request has no grammar.

        `keeps_queue_position`: the request is new, or it resumes one whose first deadline has not passed."""
        self._router = router
        self.request_id = request_id
        self.request = request
        self.choices = tuple(choices)
        self.account = account
        self.expected_output = expected_output
        self.failed_members: set[MemberId] = set()
        self.too_small: set[MemberId] = set()  # workers that refused this request for its size
        self.chains = RequestChains(request.packed_prompt, request.cache_salt)
        self.execution = Execution()
        for choice in self.choices:
            choice.execution = self.execution
        self.grammar_engine = grammar_engine
        self._targets = targets
        self.tenant = tenant
        self._deadline_s = deadline_s
        self._outbox = outbox
        self._clock = clock
        self._attempts = itertools.count(1)
        self._keeps_queue_position = keeps_queue_position
        self._workers = "", ""  # of the present attempt of this execution: prefill, decode
        self._num_claimed = 0  # tokens that the client of a resumed request has
        self._prefilling: dict[MemberId, tuple[float, float]] = {}  # on decode workers: since when, after which queue
        self._shortages: dict[int, NoWorkerLargeEnough] = {}  # by the number of the first choice that waits

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.prompt_token_ids), self._num_committed, self.account.num_cached or 0)

    def next_attempt(self) -> int:
        return next(self._attempts)

    def time_left_s(self) -> float:
        """Return the time left for a remote call. Raises DeadlineExceeded."""
        left_s = self._deadline_s - self._clock.now_s()
        if left_s <= 0:
            raise DeadlineExceeded("the deadline has passed")
        return left_s

    @property
    def targets(self) -> SloTargets:
        """Return the client's latency targets, counted from now. Once the client has a token, there is no target for
        the next first token."""
        if self._targets == NO_TARGETS:
            return NO_TARGETS
        age_s = self._clock.now_s() - self.account.began_s
        return SloTargets(math.inf if self._has_tokens else self._targets.ttft_s - age_s, self._targets.itl_s)

    def size(self, num_committed: int = 0, num_choices: int = 1) -> RequestSize:
        """Return the size of the request at a worker. `num_committed`: output tokens that are prefilled with the
        prompt."""
        return RequestSize(
            len(self.request.prompt_token_ids), self.request.stops.max_tokens, num_committed, num_choices
        )

    @property
    def shortage(self) -> NoWorkerLargeEnough | None:
        """Return why choices of this request wait now, if they wait because no worker can hold them."""
        return next(iter(self._shortages.values()), None)

    def waits(self, choice: Choice, shortage: NoWorkerLargeEnough | None) -> None:
        """Record that this choice, and those attempted with it, wait for a worker. `shortage`: why no worker can hold
        them; None: they wait for another reason."""
        if shortage is None:
            self._shortages.pop(choice.number, None)
            return
        if not self._shortages:
            self.account.add_reason(shortage.reason)
        self._shortages[choice.number] = shortage

    def resume(self, has: Sequence[ResumedChoice]) -> list[ChoiceDelta]:
        """Continue from the tokens that the client received from another router. Returns the text and the ends that it
        has missed, which are not delivered yet. Raises InvalidRequest."""
        missed = [choice.resume(resumed) for choice, resumed in zip(self.choices, has, strict=True)]
        self._num_claimed = self._num_committed
        self.account.add_reason(_RESUMED)
        if self._has_tokens:
            self.account.continue_stream()
            self._enter(PhaseName.RETRY)
        return [delta for delta in missed if delta is not None]

    def hedged(self, execution: Execution, *, besides: MemberId) -> "AdmittedRequest":
        """Return the same request for another execution of some of its choices, which avoids the worker `besides`."""
        admitted = copy(self)
        admitted.execution = execution
        admitted.failed_members = self.failed_members | {besides}
        return admitted

    def deliver(self, choice: Choice, index: int, token: SampledToken, received_s: float) -> None:
        """Give a token to the client once; drop it if another execution owns the choice. `received_s`: when this router
        received it. Raises OutOfOrder."""
        if may_append(choice, self.execution):
            self._outbox.put(choice.append(index, token), received_s)
            self.account.record_token(received_s)

    def prefill_job(
        self,
        choices: Sequence[Choice],
        attempt: int,
        importer: MemberId | None,
        prefix_sources: tuple[PrefixSource, ...] = (),
        num_expected_cached: int = 0,
    ) -> PrefillJob:
        """Return a prefill worker's job. All `choices` have the same committed tokens. It has `num_expected_cached`."""
        committed = choices[0].committed
        assert all(choice.committed == committed for choice in choices)
        num_scored = self.request.num_prompt_logprobs if self.lacks_prompt_logprobs else None  # nothing is from caches
        return PrefillJob(
            router=self._router,
            request_id=self.request_id,
            attempt=attempt,
            token_ids=self.request.prompt_token_ids + committed,
            sampling=self.request.sampling,
            stops=self.request.stops,
            seeds=tuple(choice.seed for choice in choices),
            num_committed=len(committed),
            importer=importer,
            timeout_s=self.time_left_s(),
            cache_salt=self.request.cache_salt,
            prefix_sources=prefix_sources if num_scored is None else (),
            num_expected_cached=num_expected_cached if num_scored is None else 0,
            priority=self.request.priority,
            is_batch=self.request.is_batch,
            age_s=self._clock.now_s() - self.account.began_s,
            is_unproven=self._is_unproven,
            grammar=self.request.grammar,
            num_prompt_logprobs=num_scored,
            trace_parent=self.account.trace_parent,
            tenant=self.tenant,
            packed=self.request.packed_prompt,
        )

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Return whether the client asks for log-probabilities of the prompt and has not got them. They come before all
        tokens."""
        return self.request.num_prompt_logprobs is not None and not (self._outbox.had_prompt or self._has_tokens)

    def decode_job(
        self,
        sequences: dict[int, Choice],
        committed: tuple[int, ...],
        attempt: int,
        ticket: bytes | None,
        num_expected_cached: int = 0,
    ) -> DecodeJob:
        """Return the job for a decode worker. `sequences`: handle -> choice. `committed`: the tokens that the prefill
        covers. Without a ticket the decode worker prefills the prompt; `num_expected_cached` is as of `prefill_job`."""
        starts = tuple(SequenceStart(handle, choice.seed, committed) for handle, choice in sequences.items())
        return DecodeJob(
            request_id=self.request_id,
            attempt=attempt,
            router=self._router,
            prompt_token_ids=self.request.prompt_token_ids,
            sampling=self.request.sampling,
            stops=self.request.stops,
            sequences=starts,
            signed_ticket=ticket,
            num_expected_cached=num_expected_cached,
            num_expected_output=self.expected_output,
            timeout_s=self.time_left_s(),
            cache_salt=self.request.cache_salt,
            priority=self.request.priority,
            is_batch=self.request.is_batch,
            age_s=self._clock.now_s() - self.account.began_s,
            is_unproven=self._is_unproven,
            grammar=self.request.grammar,
            trace_parent=self.account.trace_parent,
            tenant=self.tenant,
            packed=self.request.packed_prompt,
        )

    def dispatched(self, *, prefill: MemberId | None = None, decode: MemberId | None = None) -> None:
        """Record the workers to which an attempt was sent. An interrupted stream stays in phase `retry` until its next
        token."""
        self._set_workers(str(prefill or ""), str(decode or ""))
        if not self._has_tokens:
            self._enter(PhaseName.PREFILL_QUEUE)

    def prefilled(self, first: FirstTokens, prefill: MemberId) -> float:
        """Record that the first tokens arrived, and return when. From now on the client waits for the transfer, unless
        other choices continue."""
        now_s = self._clock.now_s()
        if self.lacks_prompt_logprobs:
            self._outbox.put_prompt(ScoredPrompt(self.request.prompt_token_ids, first.prompt_logprobs))
        self._found(first.num_cached)
        self.account.add_worker_time(
            str(prefill), now_s, queue_s=first.queue_s, compute_s=first.prefill_s, chunks=first.chunks
        )
        if not self._has_tokens:
            self.account.enter(PhaseName.PREFILL, now_s - first.prefill_s)
        if self.account.phase is not PhaseName.DECODE:
            self.account.enter(PhaseName.TRANSFER, now_s)
        return now_s

    def started(self, started: SequencesStarted, decode: MemberId) -> None:
        """Record that sequences joined the decode worker's batch. Without first tokens, their prefill begins there."""
        now_s, worker = self._clock.now_s(), str(decode)
        self._found(started.num_cached)
        self.account.add_member(worker)
        self._set_workers(self._workers[0], worker)
        self.account.add_hand_off(started.hand_off(worker, now_s))
        if started.first_tokens:
            self.account.add_worker_time(worker, now_s, queue_s=started.queue_s, compute_s=0.0)
        else:
            self._prefilling[decode] = (now_s, started.queue_s)
        if self.account.phase is PhaseName.TRANSFER:
            self.account.enter(PhaseName.DECODE_QUEUE, now_s - started.queue_s)
            self.account.enter(PhaseName.DECODE, now_s)
        elif not self._has_tokens:
            self.account.enter(PhaseName.PREFILL, now_s)

    def decoding(self, decode: MemberId) -> None:
        """Record that a token came from this decode worker, or is about to."""
        if self._prefilling and decode in self._prefilling:
            began_s, queue_s = self._prefilling.pop(decode)
            now_s = self._clock.now_s()
            self.account.add_worker_time(str(decode), now_s, queue_s=queue_s, compute_s=now_s - began_s)
        if self.account.phase is not PhaseName.DECODE:
            self._enter(PhaseName.DECODE)

    def moving(self) -> None:
        """Record that a sequence is frozen: its client waits for the transfer."""
        self.account.has_moved = True
        self._enter(PhaseName.TRANSFER)

    def waits_for_hedge(self) -> None:
        """Record that a worker is suspect and a hedge starts."""
        self.account.teach_nothing()
        if self._has_tokens:
            self._enter(PhaseName.RETRY)

    def continues_without_hedge(self) -> None:
        """Record that a hedge was called off: the workers of this execution serve the request as before."""
        self.account.set_workers(*self._workers)

    def failed(self, reason: str, member: MemberId) -> None:
        self.failed_members.add(member)
        self.account.add_reason(reason)
        if any(choice.execution is self.execution for choice in self.choices):  # else a hedge serves the request
            self._set_workers("", "")
        self._enter(PhaseName.RETRY)

    def _set_workers(self, prefill: str, decode: str) -> None:
        self._workers = prefill, decode
        self.account.set_workers(prefill, decode)

    def _found(self, num_cached: int) -> None:
        """Record the cached tokens of the first prefill only: a later attempt may find blocks that an earlier one
        computed."""
        if self.account.num_cached is None:
            self.account.num_cached = min(num_cached, len(self.request.prompt_token_ids))

    @property
    def _num_committed(self) -> int:
        return sum(choice.num_committed for choice in self.choices)

    @property
    def _has_tokens(self) -> bool:
        return self._num_committed > 0

    @property
    def _is_unproven(self) -> bool:
        """Return whether the acceptance is old and no token was sampled here yet: a client may send it again long after
        its request ended."""
        return not self._keeps_queue_position and 0 < self._num_claimed == self._num_committed

    def _enter(self, phase: PhaseName) -> None:
        self.account.enter(phase, self._clock.now_s())
