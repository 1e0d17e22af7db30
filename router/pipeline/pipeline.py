"""The life of a request, from top to bottom: tokenize, admit, choose workers, dispatch both legs, yield tokens, finish.

Retry, failover and cancellation are in this folder and nowhere else. A token that the client was given is committed:
whatever fails afterwards, the next attempt starts from the prompt and the committed tokens. Nothing here computes
anything about a model.
"""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster.accounts.keys import tenant_salt, tenant_share
from cluster.accounts.usage import check_request
from cluster.auth.keys import CachePurpose, ClusterKeys
from cluster.clock import Clock
from cluster.errors import DeadlineExceeded, Draining, InvalidRequest, ResumeRefused
from cluster.messages import MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.request_size import most_output
from cluster.settings.worker_settings import PRIORITY_POLICY
from router.fleet.fleet import Fleet
from router.fleet.prefix_locator import PrefixLocator
from router.grammars.checker import GrammarCheck, check_grammar_of
from router.pipeline.attempt import Attempt, AttemptContext
from router.pipeline.failures import AttemptFailed, RetryBudget
from router.pipeline.hedges import Hedges, Hedging, Overtaken
from router.pipeline.migration import Migrations
from router.pipeline.worker_choice import Options, PairHealth, WorkerChoice
from router.policies.breakers import BreakerPolicy
from router.policies.candidates import SloTargets
from router.policies.hedging import claim
from router.policies.placement import Placement, Policy
from router.policies.prediction.work_ahead import OutputLengths
from router.request.account import PhaseName
from router.request.admitted_request import AdmittedRequest
from router.request.choice import Choice, text_stream_of
from router.request.live_requests import LiveRequest, LiveRequests
from router.request.request_acceptance import STREAM_ID_BYTES, Acceptance, AcceptanceSigner, accept
from router.request.validation import MessageLimits, ResolvedRequest, check, resolve
from router.requests import (
    ChoiceDelta,
    DirectReader,
    GenerateRequest,
    Output,
    Summary,
)
from router.running import all_of, first_done, running
from router.text.tokenization import Prompts, Tokenization, TokenizerThreads

_INLINE_TOKENS = 1024  # a resumed request with more tokens is replayed off the event loop


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    request_timeout_s: float  # of a request that sets no timeout
    max_attempts: int  # failed in a row without a token from decode
    messages: MessageLimits
    breakers: BreakerPolicy = field(default_factory=BreakerPolicy)


class Pipeline:
    def __init__(
        self,
        *,
        router: MemberId,
        tokenization: Tokenization,
        live_requests: LiveRequests,
        policy: Policy,
        fleet: Fleet,
        migrations: Migrations,
        prefixes: PrefixLocator,
        grammars: GrammarCheck,
        keys: ClusterKeys,
        settings: PipelineSettings,
        clock: Clock,
        telemetry: Telemetry,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`keys` sign tickets and acceptances."""
        self._tokenization = tokenization
        self._model = tokenization.model_info
        self._live_requests = live_requests
        self._fleet = fleet
        self._grammars = grammars
        self.pairs = pairs = PairHealth(policy=settings.breakers, fleet=fleet, telemetry=telemetry)
        self._worker_choice = WorkerChoice(
            fleet=fleet, policy=policy, prefixes=prefixes, pairs=pairs, telemetry=telemetry
        )
        self._router = router
        self._attempt_context = AttemptContext(
            keys=keys,
            fleet=fleet,
            migrations=migrations,
            prefixes=prefixes,
            worker_choice=self._worker_choice,
            pairs=pairs,
            telemetry=telemetry,
        )
        self._hedging = Hedging(
            fleet=fleet,
            worker_choice=self._worker_choice,
            num_running=lambda: len(live_requests),
            telemetry=telemetry,
        )
        self._threads = TokenizerThreads()
        self._prompts = Prompts(tokenization, self._threads)
        self._outputs = OutputLengths()
        self._settings, self.request_timeout_s = settings, settings.request_timeout_s
        self._clock = clock
        self._telemetry = telemetry
        self._signer = AcceptanceSigner(keys)
        self._salt_key = keys.cache_key(CachePurpose.SALTS)
        self._wall_clock = wall_clock
        self._draining = False

    async def generate(
        self,
        request: GenerateRequest,
        *,
        keepalive_interval_s: float | None = None,
        reader: DirectReader | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request; the last one has the summary. After `keepalive_interval_s` without an output
        it yields an empty one. `reader` gets deltas past the outputs, where it can.

        Closing the generator early cancels the request on every worker. Raises TandemError, at any point."""
        with self._live_requests.arrived(request, takes_over=self._takes_over(request)) as live:
            async with running(self._serve(live)) as serving:
                live.outbox.on_failure(serving.cancel)
                if reader is not None and request.prompt_logprobs is None:
                    live.outbox.connect(reader, live.account.record_delivery)
                async for output in _until_accepted(live, serving, keepalive_interval_s):
                    yield output
                while (deltas := await live.outbox.next_deltas(keepalive_interval_s)) != ():
                    if deltas is None:
                        yield Output(live.request_id)  # nothing to send for a while: a sign of life
                        continue
                    live.account.record_delivery(deltas, self._clock.now_s())
                    yield Output(live.request_id, deltas, prompt=live.outbox.take_prompt())
                admitted = await serving
            ledger = live.account.final_ledger(self._clock.now_s())
            yield Output(live.request_id, summary=Summary(admitted.usage, ledger))

    async def _serve(self, live: LiveRequest) -> AdmittedRequest:
        """Serve a request from its arrival until its last token is in the outbox."""
        admitted = None
        try:
            timeout_s = self._checked(live)
            deadline_s = self._clock.now_s() + timeout_s
            async with asyncio.timeout(timeout_s):
                resolved, acceptance = await self._accept(live, timeout_s)
                admitted = self._admitted_request(live, resolved, acceptance, deadline_s)
                missed = await self._resume(admitted, live.request, acceptance)
                options = None
                if live.request.resume_from is None:
                    if live.reservation is not None:
                        live.reservation.reserve(_most_tokens(live.request, admitted), self._clock.now_s())
                    options = await self._worker_choice.refuse_early(admitted)
                with self._live_requests.streaming(live, acceptance.stream_id):
                    live.account.record_admission(len(resolved.prompt_token_ids))
                    token = self._signer.sign(live.request_id, acceptance)
                    live.accepted.set_result(resolved.accepted(live.request.sampling, token))
                    for delta in missed:
                        live.outbox.put(delta)
                    async with self._hedging.of_request(self._complete) as hedges:
                        await self._complete(hedges, admitted, admitted.choices, options)
                    for choice in admitted.choices:
                        self._outputs.record(choice.num_committed, resolved.stops.max_tokens)
                    return admitted
        except (TimeoutError, DeadlineExceeded) as error:
            if admitted is not None and admitted.shortage is not None:
                raise admitted.shortage from error
            raise DeadlineExceeded(
                f"the request's {timeout_s:g} s passed in phase {live.account.phase}; allow more time, or ask for "
                "fewer tokens"
            ) from error
        finally:
            live.account.end(self._clock.now_s())
            live.outbox.end()

    def _checked(self, live: LiveRequest) -> float:
        """Return the request's timeout in seconds. Raises TandemError before any work is spent on it."""
        if self._draining:
            raise Draining("this router is draining; try another")
        check(live.request, self._model)
        if live.reservation is not None:
            check_request(live.request.caller, live.request.n, live.request.priority)
        return live.request.timeout_s if live.request.timeout_s is not None else self.request_timeout_s

    async def _accept(self, live: LiveRequest, timeout_s: float) -> tuple[ResolvedRequest, Acceptance]:
        """Tokenize the prompt and resolve every default. A resumed request keeps the acceptance that its client sends.

        Raises TandemError."""
        request = live.request
        shown = self._signer.shown(request) if request.resume_from is not None else None
        rendered_at_us = shown.rendered_at_us if shown is not None else self._wall_us()
        prompt_token_ids = await self._prompts.token_ids(request, rendered_at_us)
        bad_words = await self._prompts.bad_words(request)
        live.account.enter(PhaseName.ADMIT, self._clock.now_s())
        if shown is not None:
            return self._isolated(request, shown.resolved(request, prompt_token_ids, self._model, bad_words)), shown
        if request.grammar is not None:
            await check_grammar_of(request, request.grammar, self._grammars)
        resolved = await self._resolved(request, prompt_token_ids, bad_words)
        stream_id = secrets.token_bytes(STREAM_ID_BYTES)
        return self._isolated(request, resolved), accept(
            request, resolved, self._model, stream_id=stream_id, rendered_at_us=rendered_at_us, timeout_s=timeout_s
        )

    def _isolated(self, request: GenerateRequest, resolved: ResolvedRequest) -> ResolvedRequest:
        """Return the request with a cache salt that no other tenant's requests have; acceptances have the client's."""
        salt = tenant_salt(self._salt_key, request.caller.tenant, request.cache_salt)
        return resolved if salt == resolved.cache_salt else replace(resolved, cache_salt=salt)

    async def _resolved(
        self, request: GenerateRequest, prompt_token_ids: tuple[int, ...], bad_words: Sequence[tuple[int, ...]]
    ) -> ResolvedRequest:
        """Resolve a new request.

        Where the client gives no max_tokens, it becomes the most that the largest decode worker can hold and that fits
        one message; this waits until a decode worker is known. Raises InvalidRequest."""
        if request.priority and self._fleet.ignores_priorities:
            raise InvalidRequest(
                f"priority is {request.priority}, but the workers schedule without priorities: leave it at 0, or have"
                f" them started with --scheduling-policy {PRIORITY_POLICY}",
                param="priority",
            )
        resolved = resolve(request, prompt_token_ids, self._model, bad_words)
        sizes = request.num_bytes, len(prompt_token_ids), request.n
        if request.stop.max_tokens is None:
            while not (capacities := self._fleet.capacities(Role.DECODE)) and not self._fleet.is_ready:
                await self._fleet.changed()
            most = most_output(capacities, len(prompt_token_ids))
            resolved = resolved.at_most(most).at_most(self._settings.messages.most_output(*sizes))
        self._settings.messages.check(*sizes, resolved.stops.max_tokens)
        return resolved

    def _admitted_request(
        self, live: LiveRequest, request: ResolvedRequest, acceptance: Acceptance, deadline_s: float
    ) -> AdmittedRequest:
        return AdmittedRequest(
            router=self._router,
            request_id=live.request_id,
            request=request,
            choices=[
                Choice(number, request, text_stream_of(request, self._tokenization))
                for number in range(len(request.seeds))
            ],
            deadline_s=deadline_s,
            account=live.account,
            outbox=live.outbox,
            clock=self._clock,
            expected_output=self._outputs.expected(request.stops.max_tokens),
            targets=SloTargets.of_request(live.request.slo_ttft_s, live.request.slo_tpot_s),
            tenant=tenant_share(self._salt_key, live.request.caller),
            keeps_queue_position=acceptance.is_recent(self._wall_us()),
            grammar_engine=self._grammars.engine_id if request.grammar is not None else "",
        )

    async def _resume(
        self, admitted: AdmittedRequest, request: GenerateRequest, acceptance: Acceptance
    ) -> list[ChoiceDelta]:
        """Replay the tokens that the client of a resumed request has, and end its earlier stream on this router.

        Returns the text and the ends that the client has missed. Raises InvalidRequest, ResumeSuperseded."""
        if (has := request.resume_from) is None:
            return []
        if sum(len(choice.token_ids) for choice in has) <= _INLINE_TOKENS:
            missed = admitted.resume(has)
        else:
            missed = await self._threads.run(admitted.resume, has)
        await self._live_requests.take_over(acceptance.stream_id, request.resume_number)
        return missed

    async def _complete(
        self, hedges: Hedges, admitted: AdmittedRequest, choices: Sequence[Choice], options: Options | None = None
    ) -> None:
        """Make attempt after attempt until every one of `choices` has ended. `options`: of the first attempt, where
        they are known. Raises TandemError when no attempt is left."""
        local_reason = ""  # why the next attempt does without a prefill worker; empty: it does not
        retry_budget = RetryBudget(
            admitted, max_attempts=self._settings.max_attempts, fleet=self._fleet, telemetry=self._telemetry
        )
        while choices := [choice for choice in choices if not choice.ended]:
            if len(groups := _by_committed(choices)) > 1:  # a prefill takes one prompt: each group continues alone
                await all_of(self._complete(hedges, admitted, group) for group in groups)
                return
            num_committed = sum(choice.num_committed for choice in choices)
            placement = await self._worker_choice.choose_pair(
                admitted, choices, options, without_prefill=bool(local_reason)
            )
            options = None  # another attempt comes later
            claim(choices, admitted.execution)
            attempt = Attempt(admitted, choices, retry_budget, hedges, self._attempt_context)
            try:
                with retry_budget.attempting(placement):
                    await self._run(attempt, admitted, choices, placement, local_reason)
            except Overtaken as overtaken:
                retry_budget.record_hedge(overtaken.name, overtaken.failure)
                await overtaken.end()
            except AttemptFailed as failure:
                num_gained = sum(choice.num_committed for choice in choices) - num_committed
                if num_gained > len(choices):  # more than the first tokens of prefill: decode worked
                    retry_budget.reset()
                retry_budget.record_failure(failure)
                if retry_budget.is_exhausted:
                    await retry_budget.renew(failure, choices)
                is_last_resort = retry_budget.has_one_attempt_left and _may_be_last_resort(failure, choices)
                local_reason = failure.name if is_last_resort else ""

    async def _run(
        self,
        attempt: Attempt,
        admitted: AdmittedRequest,
        choices: Sequence[Choice],
        placement: Placement,
        local_reason: str,
    ) -> None:
        """Run one attempt at both legs. Raises AttemptFailed; the tokens that the client has by then are committed."""
        if placement.prefill is None or local_reason:
            self._worker_choice.record_local_prefill(admitted, choices, placement, local_reason)
            # Log-probabilities of the prompt come with the answer of a prefill; the next attempt continues from it.
            run = attempt.first_token_only if admitted.lacks_prompt_logprobs else attempt.on_decode
            await run(placement.decode)
        elif choices[0].num_missing == 1:
            await attempt.first_token_only(placement.prefill)
        else:
            await attempt.hand_over(placement.prefill, placement.decode)

    def _takes_over(self, request: GenerateRequest) -> bool:
        """Return whether the request resumes a stream that is live here, with the right to end it."""
        if request.resume_from is None:
            return False
        try:
            return self._live_requests.may_take_over(self._signer.shown(request).stream_id, request.resume_number)
        except ResumeRefused:
            return False

    def _wall_us(self) -> int:
        return int(self._wall_clock() * 1e6)

    @property
    def live_requests(self) -> LiveRequests:
        return self._live_requests

    @property
    def is_ready(self) -> bool:
        """Return whether the router would serve a request that arrived now."""
        return self._fleet.is_ready and not self._draining

    def refuse_new(self) -> None:
        """Refuse new requests from now on; live requests continue."""
        self._draining = True

    async def drain(self) -> None:
        """Refuse new requests and return when all live requests have ended."""
        self.refuse_new()
        await self._live_requests.until_none_left()

    def end_all(self) -> None:
        """End all streams after the drain's grace; the error tells clients to resume at another router."""
        self._live_requests.end_streams(Draining("this router leaves before the request's end; resume it at another"))


async def _until_accepted(
    live: LiveRequest, serving: "asyncio.Task[AdmittedRequest]", keepalive_interval_s: float | None
) -> AsyncGenerator[Output, None]:
    """Yield keep-alive messages, then the acceptance. Without an acceptance, `serving` has failed."""
    while not (live.accepted.done() or serving.done()):
        await first_done(live.accepted, serving, timeout_s=keepalive_interval_s)
        if not (live.accepted.done() or serving.done()):
            yield Output(live.request_id)
    if live.accepted.done():
        yield Output(live.request_id, accepted=live.accepted.result())


def _most_tokens(request: GenerateRequest, admitted: AdmittedRequest) -> int:
    """Return the tokens that the request may use: all of its max_tokens, or as many as are expected without one."""
    most = admitted.request.stops.max_tokens
    if request.stop.max_tokens is None:
        most = min(most, math.ceil(admitted.expected_output))
    return len(admitted.request.prompt_token_ids) + most * len(admitted.choices)


def _may_be_last_resort(failure: AttemptFailed, choices: Sequence[Choice]) -> bool:
    """Return whether this may be the last attempt, which makes no hand-off, so that a broken prefill pool costs time
    and not the request. If queues are full and the client has no token yet, the request is refused instead, with a
    retry delay."""
    return not failure.is_full_queue or any(choice.num_committed for choice in choices)


def _by_committed(choices: Sequence[Choice]) -> list[list[Choice]]:
    groups: dict[tuple[int, ...], list[Choice]] = {}
    for choice in choices:
        groups.setdefault(choice.committed, []).append(choice)
    return list(groups.values())
