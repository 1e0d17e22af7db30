"""Catch a victim while it holds a request in a given phase: find it, stop it, and verify the phase again.

A stopped process cannot advance, so the second look still holds when the fault is injected. Another member that could
advance the request in the meantime is stopped too, for tenths of a second, far below every timeout. Owns the requests
that make a phase long enough.
"""

import asyncio
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import grpc

from tests.chaos.asking import Asked, Way
from tests.chaos.load import Load
from tests.chaos.members import ChaosCluster
from tests.chaos.plan import Phase
from tests.chaos.questions import Question
from tests.chaos.views import Listed, Views

_TRIES = 6
_TRY_S = 5.0
_SETTLE_S = 0.04  # what a stopped process had sent arrives
_FINISHED_S = 0.12  # a prefill worker sends its last message after its first tokens
_NUM_LONG_TOKENS = 500
_MOST_TOKENS = 220  # of a long answer: it is not about to end
_WAYS = (Way.LIBRARY, Way.GRPC, Way.HTTP)


@dataclass(frozen=True, slots=True)
class Victim:
    role: str
    name: str


@dataclass(frozen=True, slots=True)
class Met:
    """The victim is stopped, and so are `helpers`."""

    in_phase: tuple[str, ...]  # request ids
    held: tuple[str, ...]  # all requests that the victim works on
    helpers: tuple[str, ...] = ()


class Meeting:
    """The search for the victim of one round."""

    def __init__(self, chaos: ChaosCluster, load: Load, views: Views, victim: Victim) -> None:
        self._chaos, self._load, self._views, self._victim = chaos, load, views, victim
        self._stopped: list[str] = []
        self._driven: dict[str, Asked] = {}
        self.num_tries = 0

    async def meet(self, phase: Phase) -> Met | None:
        """Wait until a victim is in the phase. Return None, with nothing stopped or held, if there was none."""
        looks: dict[Phase, Callable[[], Awaitable[Met]]] = {
            Phase.QUEUED: self._queued,
            Phase.PREFILLING: self._prefilling,
            Phase.FIRST_TOKEN: self._first_token,
            Phase.PULLING: self._pulling,
            Phase.SETTLING: self._settling,
            Phase.DECODING: self._decoding,
        }
        for self.num_tries in range(1, _TRIES + 1):
            try:
                async with asyncio.timeout(_TRY_S):
                    return await looks[phase]()
            except (TimeoutError, grpc.RpcError):
                self.let_go()
                await self._load.until_ended(tuple(self._driven.values()))
                self._driven.clear()
        return None

    async def any_work(self) -> Met:
        """Wait until the victim has some request. No process is stopped. Raises TimeoutError."""
        questions = self._load.questions
        self._drive(questions.long_prompts if self._victim.role == "prefill" else questions.long_answers, 5)
        async with asyncio.timeout(_TRY_S):
            while True:
                listed = await self._views.listing()
                held = self._held(listed)
                if held or not self._victim.role:
                    return Met(held, held)

    def let_go(self) -> None:
        """Let every process that can continue do so."""
        for name in self._stopped:
            self._chaos.signal(name, signal.SIGCONT)
        self._stopped.clear()
        self._chaos.holds.let_go()

    def let_helpers_go(self) -> None:
        """Let the helpers continue, because the fault has been performed."""
        self._stopped = [name for name in self._stopped if name != self._victim.name]
        self.let_go()

    async def _queued(self) -> Met:
        """Queue long prompts at one prefill worker. A step computes a part of one, or the end of one and the beginning
        of the next, so the third one waits."""
        self._drive(self._load.questions.long_prompts, 10)
        while True:
            listed = await self._views.listing()
            for prefill in self._prefills():
                if not self._mine(_line(listed, prefill, self._driven)[2:]):
                    continue
                if not (await self._views.inspect(prefill)).figures["waiting"]:
                    continue
                self._stop(prefill)
                stopped = await self._look()
                mine = self._mine(_line(stopped, prefill, self._driven)[2:])
                if mine:
                    return await self._caught(mine, stopped)
                self.let_go()

    async def _prefilling(self) -> Met:
        """Find the oldest prompt of a prefill worker while the worker computes. The queue is first come, first
        served."""
        self._drive(self._load.questions.long_prompts, 4)
        while True:
            listed = await self._views.listing()
            for prefill in self._prefills():
                head = self._mine(_line(listed, prefill)[:1])
                if not head or head[0].request_id not in self._driven:
                    continue
                if not await self._is_computing(prefill):
                    continue
                self._stop(prefill)
                stopped = await self._look()
                mine = [one for one in _line(stopped, prefill)[:1] if one.request_id == head[0].request_id]
                if mine:
                    return await self._caught(mine, stopped)
                self.let_go()

    async def _is_computing(self, prefill: str) -> bool:
        """Return whether more tokens than one step's are computed in this time: the oldest prompt has then begun."""
        before = (await self._views.inspect(prefill)).figures["tokens_computed"]
        for _ in range(20):
            figures = (await self._views.inspect(prefill)).figures
            if not figures["running"]:
                return False
            if figures["tokens_computed"] >= before + 128:
                return True
        return False

    async def _first_token(self) -> Met:
        """Hold reads, so that the KV cannot arrive."""
        await self._hold()
        self._drive(self._load.questions.middling, 4)
        while True:
            mine = [one for one in self._mine(await self._views.listing()) if self._awaits_kv(one)]
            if mine:
                met = await self._stop_victim_if(self._awaits_kv)
                if met is not None:
                    return met

    async def _pulling(self) -> Met:
        """Wait until as many reads are held as there are hand-offs between the two workers: each one is then being
        read."""
        await self._hold()
        self._drive(self._load.questions.middling, 4)
        while True:
            listed = await self._views.listing()
            read = {one.request_id for one in listed if self._is_read(one, listed)}
            if self._mine(one for one in listed if one.request_id in read):
                met = await self._stop_victim_if(partial(self._is_still_read, read))
                if met is not None:
                    return met

    async def _settling(self) -> Met:
        """Hold the second read when it has read the rest, stop the prefill worker, and let the read end. Then only the
        settling is left, and the exporter does not answer it."""
        await self._hold()
        self._drive(self._load.questions.middling, 2)
        while True:
            listed = await self._views.listing()
            mine = [one for one in self._mine(listed) if self._awaits_kv(one) and self._num_held(one)]
            if not mine:
                continue
            one = mine[0]
            await asyncio.sleep(_FINISHED_S)
            worker = self._chaos.holds.workers[one.decode]
            num_held = worker.num_held
            await worker.ask("step")
            while worker.num_held == num_held:  # noqa: ASYNC110 -- at most until this try's deadline
                await asyncio.sleep(0.002)
            self._stop(one.prefill)
            await asyncio.sleep(_SETTLE_S)
            await worker.ask("go")
            await asyncio.sleep(_SETTLE_S)
            stopped = await self._look()
            mine = [other for other in stopped if other.request_id == one.request_id and other.phase == "transfer"]
            if mine:
                return await self._caught(mine, stopped)
            raise TimeoutError

    async def _decoding(self) -> Met:
        self._drive(self._load.questions.long_answers, 6)
        while True:
            if self._mine(one for one in await self._views.listing() if self._decodes(one)):
                met = await self._stop_victim_if(self._decodes)
                if met is not None:
                    return met

    async def _caught(self, mine: list[Listed], stopped: list[Listed]) -> Met:
        """Return the meeting. The prefill worker of these is stopped already; the victim may be another worker."""
        self._stop(self._victim.name)
        helpers = tuple(name for name in self._stopped if name != self._victim.name)
        return Met(_ids(mine), self._held(stopped), helpers)

    async def _stop_victim_if(self, is_so: Callable[[Listed], bool]) -> Met | None:
        """Stop the victim if no other process can continue these. A stopped router cannot be asked, so its last answer
        counts."""
        last_word = await self._views.listing()
        self._stop(self._victim.name)
        stopped = last_word if self._victim.role == "router" else await self._look()
        await asyncio.sleep(_SETTLE_S)
        mine = [one for one in self._mine(stopped) if is_so(one)]
        mine = [one for one in mine if one.request_id in self._load.asked]
        if mine:
            return Met(_ids(mine), self._held(stopped))
        for name in self._stopped:
            self._chaos.signal(name, signal.SIGCONT)
        self._stopped.clear()
        return None

    async def _look(self) -> list[Listed]:
        await asyncio.sleep(_SETTLE_S)
        return await self._views.listing()

    async def _hold(self) -> None:
        """Hold reads of the victim, or of every decode worker that works for it."""
        for name, worker in self._chaos.holds.workers.items():
            is_victims = name == self._victim.name if self._victim.role == "decode" else name.startswith("decode")
            if is_victims:
                await worker.ask("hold")

    def _awaits_kv(self, one: Listed) -> bool:
        return one.phase == "transfer" and one.num_tokens > 0 and one.request_id in self._driven

    def _is_still_read(self, read: set[str], one: Listed) -> bool:
        return one.request_id in read and not one.is_handed_over and self._num_held(one) > 0

    def _is_read(self, one: Listed, listed: list[Listed]) -> bool:
        pair = [other for other in listed if (other.prefill, other.decode) == (one.prefill, one.decode)]
        num_open = sum(not other.is_handed_over for other in pair)
        return not one.is_handed_over and one.request_id in self._driven and self._num_held(one) >= num_open > 0

    def _num_held(self, one: Listed) -> int:
        worker = self._chaos.holds.workers.get(one.decode)
        return worker.reading[one.prefill] if worker is not None else 0

    def _decodes(self, one: Listed) -> bool:
        return one.phase == "decode" and 2 < one.num_tokens < _MOST_TOKENS and one.request_id in self._driven

    def _mine(self, listed: Iterable[Listed]) -> list[Listed]:
        return [one for one in listed if one.is_with(self._victim.role, self._victim.name)]

    def _held(self, listed: list[Listed]) -> tuple[str, ...]:
        """Return everything that the victim works on."""
        if not self._victim.role:
            return _ids(listed)
        mine = self._mine(listed)
        return _ids([one for one in mine if self._victim.role != "prefill" or not one.is_handed_over])

    def _prefills(self) -> list[str]:
        return [self._victim.name] if self._victim.role == "prefill" else self._chaos.living("prefill")

    def _stop(self, name: str) -> None:
        if name not in self._stopped:
            self._stopped.append(name)
            self._chaos.signal(name, signal.SIGSTOP)

    def _drive(self, questions: Sequence[Question], times: int) -> None:
        """Send questions, each under a separate salt, so that none of its prefix is cached."""
        routers = [self._victim.name] if self._victim.role == "router" else self._chaos.living("router")
        for number in range(times):
            way = _WAYS[(number + self.num_tries) % len(_WAYS)]
            router = routers[number % len(routers)]
            asked = self._load.start(questions[number % len(questions)], way, router, salt=secrets.token_hex(8))
            self._driven[asked.request_id] = asked


def _line(listed: list[Listed], prefill: str, driven: dict[str, Asked] | None = None) -> list[Listed]:
    """Return the prompts that are not finished at one prefill worker, the oldest first: the long ones of those that
    were driven."""
    line = [one for one in listed if one.prefill == prefill and one.phase == "prefill_queue"]
    if driven is None:
        return line
    return [
        one
        for one in line
        if one.request_id in driven and len(driven[one.request_id].question.prompt) >= _NUM_LONG_TOKENS
    ]


def _ids(listed: list[Listed]) -> tuple[str, ...]:
    return tuple(one.request_id for one in listed)
