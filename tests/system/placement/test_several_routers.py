"""Several routers over the real workers: each has the work of the others in its view, and a restarted router restores
its view.

A view is the fleet and the prefix locator of a router, as its process has them, in the process of the test.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from cluster.auth.key_file import load_keys
from cluster.auth.member_channel import open_member_channel
from cluster.clock import MonotonicClock
from cluster.member import Member
from cluster.messages import MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.protocol.hashing import pack_ids
from cluster.registry.registry import Registry
from router.fleet.fleet import Fleet
from router.fleet.prefix_locator import CacheEventFollower, PrefixLocator, RequestChains
from router.fleet.supervision import WorkerTimeouts
from router.policies.candidates import WorkerLoad
from router.policies.prefix_index import PrefixIndex
from router.running import running
from tandem.client import AsyncClient, AsyncGeneration
from tests.polling import until
from tests.system.rigs.members.router_harness import DEMO_MODEL
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")
DEADLINE_S = 60.0
PROMPT = tuple(range(30, 130))
MAX_TOKENS = 900


@dataclass(frozen=True, slots=True)
class View:
    fleet: Fleet
    locator: PrefixLocator

    def loads(self) -> dict[MemberId, WorkerLoad]:
        return {load.member: load for load in (*self.fleet.prefill_loads(), *self.fleet.decode_loads())}

    def work(self) -> dict[str, tuple[int, float]]:
        """Return, by worker, the sequences there and the tokens of prompts that are not computed, of all routers."""
        loads = self.loads().values()
        return {load.member.id: (load.depth, load.work.prompts.work.num_new) for load in loads if load.work is not None}

    def num_running(self) -> dict[str, int]:
        """Return the number of sequences by worker whose prompts are computed."""
        loads = self.loads().values()
        return {load.member.id: load.work.batch.num_running for load in loads if load.work is not None}

    def cached(self) -> dict[str, int]:
        """Return the number of cached tokens of the prompt by worker."""
        packed = pack_ids((*PROMPT, 1))
        cached = self.locator.cached_tokens(packed, RequestChains(packed, ""))
        return {member.id: number for member, number in cached.items()}

    async def until(self, num_sequences: int) -> None:
        """Wait until this view has `num_sequences` sequences at the workers, and no prompt."""
        await until(
            self._work_now,
            lambda seen: list(map(sum, zip(*seen.values(), strict=True))) == [num_sequences, 0],
            what=f"{num_sequences} sequences and no prompt",
        )

    async def until_like(self, other: "View") -> None:
        """Wait until this view equals the other one."""
        await until(
            self._work_now,
            lambda seen: (
                (seen, self.cached(), self.num_running()) == (other.work(), other.cached(), other.num_running())
            ),
            what="the view of the router that stayed",
        )

    async def _work_now(self) -> dict[str, tuple[int, float]]:
        await self._receive()
        return self.work()

    async def _receive(self) -> None:
        """Call every worker once. Reports and cache events arrive meanwhile."""
        peers = [peer for peer in map(self.fleet.peer, self.fleet.connected()) if peer is not None]
        for peer in peers:
            await peer.inspect()
        if not peers:
            await self.fleet.changed()


@asynccontextmanager
async def view(cluster: LocalCluster, incarnation: str) -> AsyncIterator[View]:
    """Connect to the cluster as a router does that starts now."""
    index, keys = PrefixIndex(), load_keys(cluster.key_file)
    registry = Registry(url=cluster.redis_url, cluster_name=cluster.name, ttl_s=5.0, keys=keys)
    fleet = Fleet(
        router=Member(id=MemberId("observer", incarnation), role=Role.ROUTER, address="", model=DEMO_MODEL.name),
        membership=registry,
        connect=partial(open_member_channel, keys=keys, caller=f"router@{incarnation}"),
        timeouts=WorkerTimeouts(heartbeat_timeout_s=DEADLINE_S, recovery_timeout_s=DEADLINE_S),
        clock=MonotonicClock(),
        telemetry=Telemetry(),
        follow_cache_events=CacheEventFollower(index).follow,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(registry.close)
        await stack.enter_async_context(running(fleet.run()))
        yield View(fleet, PrefixLocator(fleet, index, keys.hash_key))


@asynccontextmanager
async def streams(cluster: LocalCluster, number: int) -> AsyncIterator[None]:
    """Run `number` requests through the router process of the cluster. Each has its first tokens when the `with` block
    begins.
    """
    async with AsyncExitStack() as stack, AsyncClient(cluster.members["router0"].grpc_address) as client:
        for _ in range(number):
            generation = client.generate(token_ids=PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True)
            stack.callback(generation.close)
            await _second_token(generation)
        yield


async def _second_token(generation: AsyncGeneration) -> None:
    """Wait until the decode worker has generated a token."""
    while (delta := await anext(generation)).first_index + len(delta.token_ids) < 2:
        pass


async def test_a_router_sees_the_work_of_another_one_begin_and_end(cluster: LocalCluster) -> None:
    async with view(cluster, "1") as other:
        await other.until(0)
        async with streams(cluster, 3):
            await other.until(3)
        await other.until(0)
    await cluster.until_free()


async def test_a_restarted_router_has_the_view_of_one_that_stayed(cluster: LocalCluster) -> None:
    async with view(cluster, "1") as staying:
        await staying.until(0)
        for incarnation in ("2", "3"):
            async with streams(cluster, 3):
                await staying.until(3)
                async with view(cluster, incarnation) as restarted:
                    await restarted.until_like(staying)
                    assert restarted.cached() and restarted.work().keys() == set(cluster.workers())
    await cluster.until_free()
