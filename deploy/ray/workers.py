"""The workers of a cluster as Ray actors, kept running as `Supervisor` keeps processes.

Owns one task per actor, which follows the actor's state, and the watch for nodes that Ray drains: their workers count
as leaving, so the follower starts others, and they are drained as soon as those are ready. While Ray's head does not
answer, no worker starts or ends; requests do not need it. Calls that block run on one thread.
"""

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from cli.local.child import ChildSpec
from cli.local.layout import Slot, thread_environment
from cli.local.supervisor import KeptMembers
from cluster.errors import ConfigError
from cluster.messages import Role
from cluster.settings.config import WorkerConfig
from deploy.ray.member_host import HostView, MemberHost
from deploy.ray.placement import ActorPlacement, NodeNeeds

_VIEW_S = 30.0  # an unchanged view returns after this time
_LOOK_UP_AFTER_S = 2.0  # without an answer of an actor, the reason is looked up
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 15.0
_NODES_PERIOD_S = 1.0
_ANSWER_S = 10.0  # for an actor's answer, beyond the time that a drain may take
# A node has its own addresses, and a worker its own name.
_NOT_PASSED = frozenset({"host", "advertise_host", "member_id"})

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(slots=True)
class _Kept:
    """One worker from its start, or from the moment at which it was found, until it has left."""

    name: str
    ready: asyncio.Future[dict[str, str]]
    is_vital: bool  # all is ended if its settings are refused at the first start
    view: HostView | None = None
    task: asyncio.Task[None] | None = None
    is_leaving: bool = False
    is_retiring: bool = False
    problem: str = ""

    @property
    def is_up(self) -> bool:
        return self.view is not None and self.view.is_up

    @property
    def role(self) -> Role:
        return Slot.parse(self.name).role


class RayWorkers(KeptMembers[_Kept]):
    """`needs` of a worker's node by role. `arguments`: more for each worker. `num_threads` of each worker; 0: by its
    CPUs. `grace_s`: the time that a worker on a draining node has to leave. With `keep_at_stop` the workers go on when
    this process ends, and another one may find them again."""

    def __init__(
        self,
        placement: ActorPlacement,
        *,
        needs: Mapping[Role, NodeNeeds],
        arguments: Sequence[str],
        num_threads: int,
        grace_s: float,
        keep_at_stop: bool,
        say: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._placement = placement
        self._needs = dict(needs)
        self._arguments = tuple(arguments)
        self._num_threads = num_threads
        self._grace_s = grace_s
        self._keeps_at_stop = keep_at_stop
        self._say = say
        self._thread = ThreadPoolExecutor(1, "ray")
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._watch_nodes(), "watch Ray's nodes")

    async def adopt(self) -> list[str]:
        """Find the workers that an earlier process has started, and return their names."""
        names = await self._call(self._placement.names)
        for name in names:
            self._begin(name, None)
        return names

    def start(self, specs: Sequence[ChildSpec]) -> None:
        for spec in specs:
            self._begin(spec.name, spec, is_vital=True)

    def add(self, spec: ChildSpec) -> None:
        self._begin(spec.name, spec)

    def retire(self, name: str, grace_s: float) -> None:
        kept = self._kept[name]
        kept.is_leaving = kept.is_retiring = True
        self._spawn(self._retire(kept, grace_s), f"retire {name}")

    def pids(self) -> dict[str, int]:
        """Return the process ids on their nodes."""
        return {name: kept.view.pid for name, kept in self._kept.items() if kept.view is not None and kept.view.pid}

    def nodes(self) -> dict[str, str]:
        """Return the id of each worker's node, where it is known."""
        return {name: kept.view.node for name, kept in self._kept.items() if kept.view is not None}

    async def stop(self, names: Sequence[str], grace_s: float) -> None:
        if self._keeps_at_stop:
            self._say("the workers on Ray go on; `tandem up --ray` finds them again")
            return
        for name in names:
            if name in self._kept and not self._kept[name].is_retiring:
                self.retire(name, grace_s)
        while self._kept.keys() & set(names):
            await self.changed()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._keeps_at_stop:
            for name in self._kept:
                with suppress(RayError):
                    await self._call(self._placement.remove, name)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end_failures()

    def _begin(self, name: str, spec: ChildSpec | None, *, is_vital: bool = False) -> None:
        kept = _Kept(name, asyncio.get_running_loop().create_future(), is_vital)
        self._kept[name] = kept
        kept.task = self._spawn(self._keep(kept, spec), f"keep {name}")

    async def _keep(self, kept: _Kept, spec: ChildSpec | None) -> None:
        """Start the actor, unless it is there, and follow its state until it is gone for good."""
        if spec is not None:
            await self._start(kept, spec)
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                actor = await self._call(self._placement.actor, kept.name)
                await self._follow(kept, actor)
            except ValueError:  # an operator has killed it: the follower starts another one
                self._forget(kept, f"{kept.name} is not on Ray any more")
                return
            except RayActorError:
                self._set(kept, None, f"{kept.name} was on a node that Ray has lost; Ray starts it elsewhere")
            except RayError as error:
                self._set(kept, kept.view, f"{kept.name}: Ray does not answer ({type(error).__name__})")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S) if kept.view is None else _FIRST_BACKOFF_S

    async def _start(self, kept: _Kept, spec: ChildSpec) -> None:
        needs = self._needs.get(kept.role, NodeNeeds())
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await self._call(self._placement.start, self._for_node(spec, needs), needs)
                return
            except (RayError, ValueError) as error:  # no head, or the name's last actor has not ended
                self._set(kept, None, f"{kept.name} cannot be started on Ray: {error}")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _follow(self, kept: _Kept, actor: "ActorHandle[MemberHost]") -> None:
        """Raises RayError if the actor, its node or Ray is lost."""
        seen: HostView | None = None
        while True:
            asked: asyncio.Future[HostView] = _answer(actor.view.remote(seen, _VIEW_S))
            if kept.view is None and not (await asyncio.wait({asked}, timeout=_LOOK_UP_AFTER_S))[0]:
                await self._say_why_waiting(kept)
            seen = await asked
            self._set(kept, seen, seen.refusal or seen.problem)

    async def _say_why_waiting(self, kept: _Kept) -> None:
        if not await self._call(self._placement.is_placed, kept.name):
            needs = self._needs.get(kept.role, NodeNeeds())
            self._set(kept, None, f"{kept.name} waits for a node of Ray with {needs} free")

    def _set(self, kept: _Kept, view: HostView | None, problem: str) -> None:
        if problem and problem != kept.problem and not kept.is_retiring:
            self._say(problem)
        kept.view, kept.problem = view, problem
        if view is not None and view.refusal and kept.is_vital and not kept.ready.done():
            self._fail(ConfigError(view.refusal))
        if view is not None and view.is_up and not kept.ready.done():
            kept.ready.set_result(dict(view.fields))
        self._notify()

    async def _retire(self, kept: _Kept, grace_s: float) -> None:
        became = "was drained"
        try:
            if kept.view is None and not await self._call(self._placement.is_placed, kept.name):
                raise TimeoutError  # it has never been anywhere
            actor = await self._call(self._placement.actor, kept.name)
            drained: asyncio.Future[None] = _answer(actor.drain.remote(grace_s))
            async with asyncio.timeout(grace_s + _ANSWER_S if kept.view is not None else _ANSWER_S):
                await drained
        except (RayError, ValueError, TimeoutError) as error:
            became = f"was ended without a drain ({type(error).__name__})"
        while True:
            try:
                await self._call(self._placement.remove, kept.name)
                break
            except RayError:
                await asyncio.sleep(_MAX_BACKOFF_S)
        self._forget(kept, f"{kept.name} {became}")

    def _forget(self, kept: _Kept, why: str) -> None:
        if self._kept.get(kept.name) is not kept:
            return
        del self._kept[kept.name]
        if kept.task is not None and kept.task is not asyncio.current_task():
            kept.task.cancel()
        self._say(why)
        self._notify()

    async def _watch_nodes(self) -> None:
        """Drain the workers of nodes that Ray drains, each once its successor is ready, or half of the time is over.
        The ready workers of all pools are counted: a worker's role may have changed, and then its successor has another
        name."""
        begun: dict[str, float] = {}  # draining nodes, and when each was seen first
        needed = 0
        while True:
            with suppress(RayError):
                ends = await self._call(self._placement.draining_nodes)
                now = time.time()
                begun = {node: begun.get(node, now) for node in ends}
                found = [each for each in self._kept.values() if each.view and each.view.node in ends]
                if not all(kept.is_leaving for kept in found):
                    needed = sum(not kept.is_leaving for kept in self._kept.values())
                for kept in found:
                    if not kept.is_leaving:
                        kept.is_leaving = True
                        self._say(f"{kept.name} is on a node that Ray drains")
                        self._notify()
                    if not kept.is_retiring:
                        self._retire_in_time(kept, needed, begun, ends, now)
            await asyncio.sleep(_NODES_PERIOD_S)

    def _retire_in_time(
        self, kept: _Kept, needed: int, begun: Mapping[str, float], ends: Mapping[str, float], now: float
    ) -> None:
        assert kept.view is not None
        end, began = ends[kept.view.node], begun[kept.view.node]
        left_s = end - now if end else self._grace_s
        num_up = sum(each.is_up and not each.is_leaving for each in self._kept.values())
        if num_up >= needed or (end and now >= began + (end - began) / 2):
            self.retire(kept.name, min(self._grace_s, max(0.0, left_s)))

    def _for_node(self, spec: ChildSpec, needs: NodeNeeds) -> ChildSpec:
        """Add what a process of this machine would inherit from this process, and the threads of its node."""
        known = {item.name for item in dataclasses.fields(WorkerConfig)} - _NOT_PASSED
        names = [f"TANDEM_{name.upper()}" for name in (*sorted(known), "config")]
        inherited = {name: os.environ[name] for name in names if name in os.environ}
        num_threads = self._num_threads or needs.num_threads
        environment = {**inherited, **spec.environment, **thread_environment(num_threads)}
        return ChildSpec(spec.name, (*spec.arguments, *self._arguments, f"--num-threads={num_threads}"), environment)

    async def _call(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))

    def _spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


def _answer(reference: "ray.ObjectRef[Result]") -> asyncio.Future[Result]:
    """Return the answer of an actor. No task has to wait for it."""
    answer = asyncio.wrap_future(reference.future())
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    return answer
