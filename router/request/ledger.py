"""Where a request's time went. Sums to the wall time by construction: there is always exactly one phase, and entering
the next ends it.

Owns one request's account while it is served. Time is an argument.
"""

from enum import StrEnum

from router.requests import Ledger, Phase, WorkerTime


class PhaseName(StrEnum):
    TOKENIZE = "tokenize"
    ADMIT = "admit"  # checks, the wait for a worker, the choice
    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"  # only what the client waits for: from its first token on
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"
    RETRY = "retry"  # from a failure until tokens flow again


class LedgerRecorder:
    def __init__(self, now_s: float, phase: PhaseName = PhaseName.TOKENIZE, *, label: str = "") -> None:
        self._label = label
        self._marks: list[tuple[PhaseName, float]] = [(phase, now_s)]
        self._first_token_s: float | None = None
        self._end_s: float | None = None
        self._members: list[str] = []
        self._reasons: list[str] = []
        self._worker_times: list[WorkerTime] = []
        self.num_cached: int | None = None  # prompt tokens that the first prefill found
        self._transport = ""
        self._kv_bytes = 0
        self.prefill_member = self.decode_member = ""  # of the present attempt

    @property
    def phase(self) -> PhaseName:
        return self._marks[-1][0]

    @property
    def began_s(self) -> float:
        return self._marks[0][1]

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._reasons)

    def enter(self, phase: PhaseName, at_s: float) -> None:
        """A time before the present phase began (another machine's durations) counts as its beginning."""
        if phase is not self.phase:
            self._marks.append((phase, max(at_s, self._marks[-1][1])))

    def token_handed_over(self, now_s: float) -> None:
        """The client was given a token; the first time counts."""
        if self._first_token_s is None:
            self._first_token_s = now_s

    def attempt(self, prefill: str = "", decode: str = "") -> None:
        """Who is asked now."""
        self.prefill_member, self.decode_member = prefill, decode

    def member(self, member: str) -> None:
        """One that serves the request, in the order they join."""
        if member not in self._members:
            self._members.append(member)

    def reason(self, reason: str) -> None:
        self._reasons.append(reason)

    def worked(self, member: str, now_s: float, *, queue_s: float, compute_s: float) -> None:
        """A worker has just computed an attempt's next token, or is about to: what that took by its own clock."""
        self._worker_times.append(WorkerTime(member, now_s - self.began_s, queue_s, compute_s))

    def moved(self, transport: str, kv_bytes: int) -> None:
        self._transport = transport
        self._kv_bytes += kv_bytes

    def end(self, now_s: float) -> None:
        """The last token is there."""
        self._end_s = max(now_s, self._marks[-1][1])

    def ledger(self, now_s: float) -> Ledger:
        end_s = self._end_s if self._end_s is not None else max(now_s, self._marks[-1][1])
        ends_s = [at_s for _, at_s in self._marks[1:]] + [end_s]
        durations_s: dict[PhaseName, float] = {}
        for (phase, at_s), until_s in zip(self._marks, ends_s, strict=True):
            durations_s[phase] = durations_s.get(phase, 0.0) + (until_s - at_s)
        return Ledger(
            phases=tuple(Phase(str(phase), durations_s[phase]) for phase in PhaseName if phase in durations_s),
            wall_s=end_s - self.began_s,
            ttft_s=(self._first_token_s if self._first_token_s is not None else end_s) - self.began_s,
            members=tuple(self._members),
            transport=self._transport,
            kv_bytes=self._kv_bytes,
            reasons=self.reasons,
            worker_times=tuple(self._worker_times),
            label=self._label,
        )
