"""One admitted request while it is served: its choices, its account, its attempts, and the jobs that workers get.

Owned by one story of the pipeline. Every token goes through `deliver`, so that what the client has and what a resumed
attempt starts from are the same.
"""

import itertools
from collections.abc import Sequence
from copy import copy

from cluster.clock import Clock
from cluster.errors import DeadlineExceeded, NoWorkerLargeEnough
from cluster.messages import DecodeJob, MemberId, PrefillJob, PrefixHolder, SampledToken, SequenceStart
from cluster.request_size import RequestSize
from router.fleet.decode_events import Started
from router.fleet.prefill_peer import FirstTokens
from router.policies.hedging import Line, may_append
from router.request.choice import Choice
from router.request.ledger import LedgerRecorder, PhaseName
from router.request.outbox import Outbox
from router.request.validation import ResolvedRequest
from router.requests import ChoiceDelta, ResumedChoice, Usage

_RESUMED = "resumed"


class LiveRequest:
    def __init__(
        self,
        *,
        request_id: str,
        request: ResolvedRequest,
        choices: Sequence[Choice],
        deadline_s: float,
        ledger: LedgerRecorder,
        outbox: Outbox,
        clock: Clock,
        keeps_its_turn: bool = False,
    ) -> None:
        """`keeps_its_turn`: it resumes a request that was accepted, and whose deadline has not passed."""
        self.request_id = request_id
        self.request = request
        self.choices = tuple(choices)
        self.ledger = ledger
        self.failed_members: set[MemberId] = set()
        self.too_small: set[MemberId] = set()  # workers that refused this request for its size
        self.line = Line()
        for choice in self.choices:
            choice.line = self.line
        self._deadline_s = deadline_s
        self._outbox = outbox
        self._clock = clock
        self._attempts = itertools.count(1)
        self._keeps_its_turn = keeps_its_turn
        self._num_claimed = 0  # tokens that its client says it has
        self._prefilling: dict[MemberId, tuple[float, float]] = {}  # on decode workers: since when, after which queue
        self._shortages: dict[int, NoWorkerLargeEnough] = {}  # by the number of the first choice that waits

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.prompt_token_ids), self._num_committed, self.ledger.num_cached or 0)

    def next_attempt(self) -> int:
        return next(self._attempts)

    def time_left_s(self) -> float:
        """For a remote call. Raises DeadlineExceeded."""
        left_s = self._deadline_s - self._clock.now_s()
        if left_s <= 0:
            raise DeadlineExceeded("no time is left")
        return left_s

    def size(self, num_committed: int = 0, num_choices: int = 1) -> RequestSize:
        """What a worker must be able to hold. `num_committed`: output tokens that are prefilled with the prompt."""
        return RequestSize(
            len(self.request.prompt_token_ids), self.request.stops.max_tokens, num_committed, num_choices
        )

    @property
    def shortage(self) -> NoWorkerLargeEnough | None:
        """Why choices of this request wait now, where it is because no worker can hold them."""
        return next(iter(self._shortages.values()), None)

    def waits(self, choice: Choice, shortage: NoWorkerLargeEnough | None) -> None:
        """`choice`, and the choices that go its way, wait for a worker. `shortage` None: any worker would do."""
        if shortage is None:
            self._shortages.pop(choice.number, None)
            return
        if not self._shortages:
            self.ledger.reason(shortage.reason)
        self._shortages[choice.number] = shortage

    def resume(self, has: Sequence[ResumedChoice]) -> list[ChoiceDelta]:
        """Goes on from what the client has from another router. Answers what it has missed of text and ends; they are
        not delivered yet. Raises InvalidRequest."""
        missed = [choice.resume(resumed) for choice, resumed in zip(self.choices, has, strict=True)]
        self._num_claimed = self._num_committed
        self.ledger.reason(_RESUMED)
        if self._has_tokens:
            self._enter(PhaseName.RETRY)
        return [delta for delta in missed if delta is not None]

    def hedged(self, line: Line, *, besides: MemberId) -> "LiveRequest":
        """The same request, for another line of work on some of its choices, which passes over this worker."""
        live = copy(self)
        live.line = line
        live.failed_members = self.failed_members | {besides}
        return live

    def deliver(self, choice: Choice, index: int, token: SampledToken) -> None:
        """To the client, exactly once; dropped where another line of work has the choice. Raises OutOfOrder."""
        if may_append(choice, self.line):
            self._outbox.put(choice.append(index, token))

    def prefill_job(
        self,
        choices: Sequence[Choice],
        attempt: int,
        importer: MemberId | None,
        prefix_holders: tuple[PrefixHolder, ...] = (),
    ) -> PrefillJob:
        """`choices` share what they have committed."""
        committed = choices[0].committed
        assert all(choice.committed == committed for choice in choices)
        return PrefillJob(
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
            prefix_holders=prefix_holders,
            priority=self.request.priority,
            is_batch=self.request.is_batch,
            age_s=self._clock.now_s() - self.ledger.began_s,
            is_unproven=self._is_unproven,
        )

    def decode_job(
        self,
        sequences: dict[int, Choice],
        committed: tuple[int, ...],
        attempt: int,
        router: MemberId,
        ticket: bytes | None,
    ) -> DecodeJob:
        """`sequences`: handle -> choice, `committed`: the tokens of each that the prefill covers. Without a ticket the
        prompt is prefilled on the decode worker."""
        starts = tuple(SequenceStart(handle, choice.seed, committed) for handle, choice in sequences.items())
        return self._decode_job(starts, attempt, router, ticket)

    def moved_job(self, handle: int, choice: Choice, attempt: int, router: MemberId, ticket: bytes) -> DecodeJob:
        """A running sequence's ticket covers all its tokens but the last, which is the hand-off's first token."""
        return self._decode_job((SequenceStart(handle, choice.seed, choice.committed[:-1]),), attempt, router, ticket)

    def _decode_job(
        self, starts: tuple[SequenceStart, ...], attempt: int, router: MemberId, ticket: bytes | None
    ) -> DecodeJob:
        return DecodeJob(
            request_id=self.request_id,
            attempt=attempt,
            router=router,
            prompt_token_ids=self.request.prompt_token_ids,
            sampling=self.request.sampling,
            stops=self.request.stops,
            sequences=starts,
            signed_ticket=ticket,
            timeout_s=self.time_left_s(),
            cache_salt=self.request.cache_salt,
            priority=self.request.priority,
            is_batch=self.request.is_batch,
            age_s=self._clock.now_s() - self.ledger.began_s,
            is_unproven=self._is_unproven,
        )

    def dispatched(self, *, prefill: MemberId | None = None, decode: MemberId | None = None) -> None:
        """Workers are being asked. A stream that was interrupted stays in `retry` until tokens flow again."""
        self.ledger.attempt(str(prefill or ""), str(decode or ""))
        if not self._has_tokens:
            self._enter(PhaseName.PREFILL_QUEUE)

    def prefilled(self, first: FirstTokens, prefill: MemberId) -> None:
        """First tokens are here; what the client waits for from now on is the transfer, unless other choices go on."""
        self._found(first.num_cached)
        self.ledger.member(str(prefill))
        self.ledger.worked(str(prefill), self._clock.now_s(), queue_s=first.queue_s, compute_s=first.prefill_s)
        if not self._has_tokens:
            self._enter(PhaseName.PREFILL, began_ago_s=first.prefill_s)
        if self.ledger.phase is not PhaseName.DECODE:
            self._enter(PhaseName.TRANSFER)

    def started(self, started: Started, decode: MemberId) -> None:
        """Sequences join the decode worker's batch; without first tokens their prefill begins there."""
        self._found(started.num_cached)
        self.ledger.member(str(decode))
        self.ledger.decode_member = str(decode)
        self.ledger.moved(started.transport, started.kv_bytes)
        if started.first_tokens:
            self.ledger.worked(str(decode), self._clock.now_s(), queue_s=started.queue_s, compute_s=0.0)
        else:
            self._prefilling[decode] = (self._clock.now_s(), started.queue_s)
        if self.ledger.phase is PhaseName.TRANSFER:
            self._enter(PhaseName.DECODE_QUEUE, began_ago_s=started.queue_s)
            self._enter(PhaseName.DECODE)
        elif not self._has_tokens:
            self._enter(PhaseName.PREFILL)

    def decoding(self, decode: MemberId) -> None:
        """A token came from this decode worker, or is about to."""
        began_s, queue_s = self._prefilling.pop(decode, (None, 0.0))
        if began_s is not None:
            now_s = self._clock.now_s()
            self.ledger.worked(str(decode), now_s, queue_s=queue_s, compute_s=now_s - began_s)
        self._enter(PhaseName.DECODE)

    def moving(self) -> None:
        """A sequence is frozen: what its client waits for from now on is the transfer."""
        self._enter(PhaseName.TRANSFER)

    def waits_for_hedge(self) -> None:
        """A worker is suspect: whoever gives the next token."""
        if self._has_tokens:
            self._enter(PhaseName.RETRY)

    def failed(self, reason: str, member: MemberId) -> None:
        self.failed_members.add(member)
        self.ledger.reason(reason)
        self.ledger.attempt()
        self._enter(PhaseName.RETRY)

    def _found(self, num_cached: int) -> None:
        """The first prefill's word counts: a later attempt may find what an earlier one left."""
        if self.ledger.num_cached is None:
            self.ledger.num_cached = min(num_cached, len(self.request.prompt_token_ids))

    @property
    def _num_committed(self) -> int:
        return sum(choice.num_committed for choice in self.choices)

    @property
    def _has_tokens(self) -> bool:
        return self._num_committed > 0

    @property
    def _is_unproven(self) -> bool:
        """The acceptance is old, and nothing was drawn here yet: it may be shown again long after its request ended."""
        return not self._keeps_its_turn and 0 < self._num_claimed == self._num_committed

    def _enter(self, phase: PhaseName, *, began_ago_s: float = 0.0) -> None:
        self.ledger.enter(phase, self._clock.now_s() - began_ago_s)
