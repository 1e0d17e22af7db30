"""The story of a request: tokenize, admit, choose workers, dispatch both legs, first token, decode's tokens, end.

Retry, failover and cancellation live here and nowhere else. A token that a client was given stays: whatever fails after
that, the next attempt starts from the prompt and the tokens committed. Never computes anything about a model.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.clock import Clock
from cluster.errors import DeadlineExceeded, Draining, ResumeRefused
from cluster.messages import MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.request_size import most_output
from router.fleet.fleet import Fleet
from router.fleet.prefix_beliefs import PrefixBeliefs
from router.pipeline.attempt import Attempt, AttemptMeans
from router.pipeline.failures import AttemptFailed
from router.pipeline.hedges import Hedges, Hedging, Overtaken
from router.pipeline.importing import ImporterMeans
from router.pipeline.migration import Migrations
from router.pipeline.pair_trust import PairTrust
from router.pipeline.pairing import Pairing
from router.pipeline.setbacks import Setbacks
from router.policies.admission import Admission
from router.policies.breakers import BreakerPolicy
from router.policies.hedging import claim
from router.policies.placement import Placement, Policy
from router.request.arrivals import Arrival, Arrivals
from router.request.choice import Choice
from router.request.ledger import PhaseName
from router.request.live_request import LiveRequest
from router.request.live_streams import LiveStreams
from router.request.message_sizes import MessageLimits
from router.request.outbox import Outboxes
from router.request.request_acceptance import STREAM_ID_BYTES, Acceptance, AcceptanceSigner, accept
from router.request.validation import ResolvedRequest, check, resolve
from router.requests import (
    ChatPrompt,
    ChoiceDelta,
    GenerateRequest,
    Output,
    Prompt,
    Summary,
    TextPrompt,
    TokenPrompt,
)
from router.running import all_of, running
from router.text.tokenization import Tokenization
from router.text.tokenizer_threads import TokenizerThreads

_INLINE_CHARACTERS = 2048  # a longer text is tokenized off the event loop
_INLINE_TOKENS = 1024  # more are replayed off it
_COLOCATED = "colocated"
_NO_PREFILL_WORKER = "no_prefill_worker"
_PAIRS_OPEN = "pairs_open"  # there are prefill workers, none that a decode worker may be paired with
_NO_LARGE_PAIR = "no_large_pair"  # there are prefill workers; they are too small, or decode workers to import so much


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    request_timeout_s: float  # of a request that brings none
    max_attempts: int  # in a row without a token from decode
    messages: MessageLimits
    breakers: BreakerPolicy = field(default_factory=BreakerPolicy)


class Pipeline:
    def __init__(
        self,
        *,
        router: MemberId,
        tokenization: Tokenization,
        admission: Admission,
        policy: Policy,
        fleet: Fleet,
        migrations: Migrations,
        prefixes: PrefixBeliefs,
        outboxes: Outboxes,
        key: bytes,
        settings: PipelineSettings,
        clock: Clock,
        telemetry: Telemetry,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`key`: the cluster's, which signs tickets and acceptances."""
        self._tokenization = tokenization
        self._model = tokenization.model_info
        self._admission = admission
        self._fleet = fleet
        self._pairs = PairTrust(policy=settings.breakers, fleet=fleet, telemetry=telemetry)
        self._pairing = Pairing(fleet=fleet, policy=policy, prefixes=prefixes, pairs=self._pairs, telemetry=telemetry)
        importers = ImporterMeans(router, key, fleet, self._pairing, self._pairs, telemetry)
        self._means = AttemptMeans(fleet, migrations, prefixes, router, importers)
        self._arrivals = Arrivals(admission=admission, outboxes=outboxes, clock=clock, telemetry=telemetry)
        self._hedging = Hedging(
            fleet=fleet, pairing=self._pairing, num_running=lambda: self.num_live, telemetry=telemetry
        )
        self._streams = LiveStreams()
        self._threads = TokenizerThreads()
        self._settings = settings
        self._clock = clock
        self._telemetry = telemetry
        self._signer = AcceptanceSigner(key)
        self._wall_clock = wall_clock
        self._draining = False

    @property
    def num_live(self) -> int:
        return self._arrivals.num_live

    @property
    def live(self) -> tuple[Arrival, ...]:
        """The oldest first."""
        return self._arrivals.live

    @property
    def is_ready(self) -> bool:
        """A request that came now would be served."""
        return self._fleet.is_ready and not self._draining

    def refuse_new(self) -> None:
        """From now on; those that are live go on."""
        self._draining = True

    async def drain(self) -> None:
        """Takes no new request; returns when the present ones have ended."""
        self.refuse_new()
        await self._arrivals.none_left()

    def end_all(self) -> None:
        """The drain's grace is over: streams end, and say that another router goes on with them."""
        self._streams.end_all(Draining("this router leaves before the request's end; resume it at another"))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        """The request's stream; its last output has the summary. Closing it early cancels the request on every worker.
        Raises TandemError, at any point."""
        with self._arrivals.arrived(request, takes_over=self._takes_over(request)) as arrival:
            async with running(self._serve(arrival)) as story:
                arrival.outbox.on_slow(story.cancel)
                async for output in _until_accepted(arrival, story):
                    yield output
                while (deltas := await arrival.outbox.take(request.sign_every_s)) != ():
                    if deltas is None:
                        yield Output(arrival.request_id)
                        continue
                    arrival.ledger.token_handed_over(self._clock.now_s())
                    arrival.account.handed_over(deltas, self._clock.now_s())
                    yield Output(arrival.request_id, deltas)
                live = await story
            yield Output(arrival.request_id, summary=Summary(live.usage, arrival.ledger.ledger(self._clock.now_s())))

    async def _serve(self, arrival: Arrival) -> LiveRequest:
        """The story itself, from arrival to the last token in the outbox."""
        ledger, live = arrival.ledger, None
        try:
            timeout_s = self._checked(arrival.request)
            deadline_s = self._clock.now_s() + timeout_s
            async with asyncio.timeout(timeout_s):
                resolved, acceptance = await self._accept(arrival, timeout_s)
                live = self._live_request(arrival, resolved, acceptance, deadline_s)
                missed = await self._resume(live, arrival.request, acceptance)
                if arrival.request.resume_from is None:
                    self._refuse_early(live)
                with self._admitted(arrival, acceptance):
                    arrival.account.admitted(len(resolved.prompt_token_ids))
                    signed = self._signer.sign(arrival.request_id, acceptance)
                    arrival.accepted.set_result(resolved.accepted(signed))
                    for delta in missed:
                        arrival.outbox.put(delta)
                    async with self._hedging.of_request(self._complete) as hedges:
                        await self._complete(hedges, live, live.choices)
                    return live
        except (TimeoutError, DeadlineExceeded) as error:
            if live is not None and live.shortage is not None:
                raise live.shortage from error
            raise DeadlineExceeded(
                f"the request's {timeout_s:g} s passed in phase {ledger.phase}; allow more, or ask for less"
            ) from error
        finally:
            ledger.end(self._clock.now_s())
            arrival.outbox.end()

    async def _accept(self, arrival: Arrival, timeout_s: float) -> tuple[ResolvedRequest, Acceptance]:
        """Of a resumed request the acceptance that its client shows. Raises TandemError."""
        request = arrival.request
        shown = self._signer.shown(request) if request.resume_from is not None else None
        rendered_at_us = shown.rendered_at_us if shown is not None else self._wall_us()
        prompt_token_ids = await self._tokenize(request.prompt, rendered_at_us)
        arrival.ledger.enter(PhaseName.ADMIT, self._clock.now_s())
        if shown is not None:
            return shown.resolved(request, prompt_token_ids, self._model), shown
        resolved = await self._resolved(request, prompt_token_ids)
        stream_id = secrets.token_bytes(STREAM_ID_BYTES)
        return resolved, accept(
            request, resolved, self._model, stream_id=stream_id, rendered_at_us=rendered_at_us, timeout_s=timeout_s
        )

    def _takes_over(self, request: GenerateRequest) -> bool:
        """Whether it resumes a stream that is live here, and may."""
        if request.resume_from is None:
            return False
        try:
            return self._streams.may_be_taken_over(self._signer.shown(request).stream_id, request.resume_number)
        except ResumeRefused:
            return False

    def _wall_us(self) -> int:
        return int(self._wall_clock() * 1e6)

    def _refuse_early(self, live: LiveRequest) -> None:
        """Before any worker hears of it. Raises NoWorkerLargeEnough, Overloaded."""
        size = live.size(num_choices=len(live.choices))
        refusal = self._pairing.refusal(size) or self._fleet.early_refusal(size, live.time_left_s())
        if refusal is not None:
            raise refusal

    async def _resolved(self, request: GenerateRequest, prompt_token_ids: tuple[int, ...]) -> ResolvedRequest:
        """A new request. Where the client gives no max_tokens: what the largest decode worker can hold, and what fits
        one message. Waits until a worker is known. Raises InvalidRequest."""
        resolved = resolve(request, prompt_token_ids, self._model)
        sizes = request.num_bytes, len(prompt_token_ids), request.n
        if request.stop.max_tokens is None:
            while not (capacities := self._fleet.capacities(Role.DECODE)) and not self._fleet.is_ready:
                await self._fleet.changed()
            most = most_output(capacities, len(prompt_token_ids))
            resolved = resolved.at_most(most).at_most(self._settings.messages.most_output(*sizes))
        self._settings.messages.check(*sizes, resolved.stops.max_tokens)
        return resolved

    async def _tokenize(self, prompt: Prompt, rendered_at_us: int) -> tuple[int, ...]:
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text):
                if len(text) <= _INLINE_CHARACTERS:
                    return self._tokenization.encode(text)
                return await self._threads.run(self._tokenization.encode_prompt, text)
            case ChatPrompt(messages):
                encode = partial(self._tokenization.encode_chat, rendered_at_us=rendered_at_us)
                return await self._threads.run(encode, messages)

    async def _resume(self, live: LiveRequest, request: GenerateRequest, acceptance: Acceptance) -> list[ChoiceDelta]:
        """What the client of a resumed request has missed. Its earlier stream on this router has ended then.

        Raises InvalidRequest, ResumeSuperseded."""
        if (has := request.resume_from) is None:
            return []
        if sum(len(choice.token_ids) for choice in has) <= _INLINE_TOKENS:
            missed = live.resume(has)
        else:
            missed = await self._threads.run(live.resume, has)
        await self._streams.take_over(acceptance.stream_id, request.resume_number)
        return missed

    async def _complete(self, hedges: Hedges, live: LiveRequest, choices: Sequence[Choice]) -> None:
        """Attempt after attempt, until every one of `choices` has ended. Raises TandemError when none is left."""
        local_reason = ""
        setbacks = Setbacks(
            live, max_attempts=self._settings.max_attempts, fleet=self._fleet, telemetry=self._telemetry
        )
        while choices := [choice for choice in choices if not choice.ended]:
            if len(groups := _by_committed(choices)) > 1:  # a prefill takes one prompt: each group goes its own way
                await all_of(self._complete(hedges, live, group) for group in groups)
                return
            num_committed = sum(choice.num_committed for choice in choices)
            placement = await self._pairing.pair(live, choices, without_prefill=bool(local_reason))
            claim(choices, live.line)
            attempt = Attempt(live, choices, setbacks, hedges, self._means)
            try:
                await self._try(attempt, live, choices, placement, local_reason)
            except Overtaken as overtaken:
                setbacks.note_hedged(overtaken.name, overtaken.failure)
                await overtaken.end()
            except AttemptFailed as failure:
                num_gained = sum(choice.num_committed for choice in choices) - num_committed
                if num_gained > len(choices):  # more than prefill's own: decode worked
                    setbacks.forget()
                setbacks.note(failure)
                if setbacks.is_enough:
                    raise failure.error from failure
                is_last_resort = setbacks.leaves_one_try and _may_be_last_resort(failure, choices)
                local_reason = failure.name if is_last_resort else ""

    async def _try(
        self, attempt: Attempt, live: LiveRequest, choices: Sequence[Choice], placement: Placement, local_reason: str
    ) -> None:
        """One try at both legs. Raises AttemptFailed; what the client has by then is committed."""
        if placement.prefill is None or local_reason:
            self._note_local(live, choices, local_reason)
            await attempt.on_decode(placement.decode)
        elif choices[0].num_missing == 1:
            await attempt.first_token_only(placement.prefill)
        else:
            await attempt.hand_over(placement.prefill, placement.decode)

    def _note_local(self, live: LiveRequest, choices: Sequence[Choice], reason: str) -> None:
        """Where there was never a prefill worker, prefill on decode is the way it works; else it is a fallback."""
        if not reason and self._fleet.prefill_loads():
            reason = _PAIRS_OPEN if self._pairing.has_large_pair(live, choices) else _NO_LARGE_PAIR
        elif not reason:
            reason = _NO_PREFILL_WORKER if self._fleet.has_prefill_pool else _COLOCATED
        self._telemetry.count("tandem_local_prefills_total", reason=reason)
        if reason != _COLOCATED:
            live.ledger.reason(reason)

    def _checked(self, request: GenerateRequest) -> float:
        """The request's timeout. Raises TandemError before anything is spent on it."""
        if self._draining:
            raise Draining("this router is leaving; try another")
        check(request, self._model)
        return request.timeout_s if request.timeout_s is not None else self._settings.request_timeout_s

    def _live_request(
        self, arrival: Arrival, request: ResolvedRequest, acceptance: Acceptance, deadline_s: float
    ) -> LiveRequest:
        stop, min_tokens = request.stop_strings, request.stops.min_tokens
        return LiveRequest(
            request_id=arrival.request_id,
            request=request,
            choices=[
                Choice(number, request, self._tokenization.text_stream(stop, min_tokens))
                for number in range(len(request.seeds))
            ],
            deadline_s=deadline_s,
            ledger=arrival.ledger,
            outbox=arrival.outbox,
            clock=self._clock,
            keeps_its_turn=acceptance.is_recent(self._wall_us()),
        )

    @contextmanager
    def _admitted(self, arrival: Arrival, acceptance: Acceptance) -> Iterator[None]:
        self._admission.admit(arrival.request_id, is_resumed=arrival.request.resume_from is not None)
        try:
            with self._streams.listed(acceptance.stream_id, arrival.outbox, arrival.request.resume_number):
                yield
        finally:
            self._admission.release(arrival.request_id)


async def _until_accepted(arrival: Arrival, story: "asyncio.Task[LiveRequest]") -> AsyncGenerator[Output, None]:
    """Signs of life, then the acceptance; nothing more where the story ends without one."""
    while not (arrival.accepted.done() or story.done()):
        waiting: set[asyncio.Future[Any]] = {arrival.accepted, story}
        await asyncio.wait(waiting, timeout=arrival.request.sign_every_s, return_when=asyncio.FIRST_COMPLETED)
        if not (arrival.accepted.done() or story.done()):
            yield Output(arrival.request_id)
    if arrival.accepted.done():
        yield Output(arrival.request_id, accepted=arrival.accepted.result())


def _may_be_last_resort(failure: AttemptFailed, choices: Sequence[Choice]) -> bool:
    """The last try does without a hand-off, so that a broken prefill pool costs time, not the request. A client that
    has nothing yet and meets full queues is better told to come back."""
    return not failure.is_full_queue or any(choice.num_committed for choice in choices)


def _by_committed(choices: Sequence[Choice]) -> list[list[Choice]]:
    groups: dict[tuple[int, ...], list[Choice]] = {}
    for choice in choices:
        groups.setdefault(choice.committed, []).append(choice)
    return list(groups.values())
