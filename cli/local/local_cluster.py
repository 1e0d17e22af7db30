"""A cluster: starts and stops Redis and the routers on this machine, and the workers here or elsewhere.

Owns the order: Redis starts first and stops last; routers start after the workers and stop before them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.local.fork_server import Forks
from cli.local.layout import Layout, Pools, Ports, new_suffix, pool_plan, thread_environment, worker_slots
from cli.local.pool_follower import PoolFollower, Workers
from cli.local.supervisor import Supervisor
from cluster.errors import RegistryUnavailable, Unavailable
from cluster.messages import Role
from cluster.registry.redis_server import RedisServer
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import WorkerLoads
from cluster.serving.serving import open_channel
from cluster.serving.tls import ClusterTls

_LEAVE_S = 5.0  # in addition to the grace period of a drain


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a cluster. `flags` by field name. `redis`: its URL; empty: the cluster starts its own."""

    pools: Pools
    routers: Sequence[Ports]
    flags: Mapping[str, object]
    redis: str
    cluster_name: str
    key_file: str  # of all its processes; created by the first
    registration_ttl_s: float
    admin_key: str
    num_threads: int
    start_timeout_s: float
    drain_grace_s: float
    tls: ClusterTls | None = None  # the files that the processes get by their flags


class LocalCluster:
    """A cluster of processes. Call `start`, then `drain` to let running requests finish, and always `close` at the end.

    After `start`, `grpc` and `http` are the first router's addresses (host:port), `more_grpc` and `more_http` those of
    the others. `say` receives messages for the user, `echo(name, line)` the log lines of the processes.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        say: Callable[[str], None],
        echo: Callable[[str, str], None],
        workers: Workers | None = None,
    ) -> None:
        """`workers` runs the workers; without it they are processes of this machine."""
        self._plan = plan
        self._say = say
        self._forks = Forks(
            thread_environment(plan.num_threads)
        )  # their imports take longer than all that comes before a worker
        self._supervisor = Supervisor(say=say, echo=echo, launch=self._forks.launch)
        self._workers: Workers = workers or self._supervisor
        self._redis: RedisServer | None = None
        self._began_s = asyncio.get_running_loop().time()
        self._redis_url = ""
        self._layout = Layout(flags=plan.flags, num_threads=plan.num_threads, first=plan.pools)
        self.grpc = ""
        self.http = ""
        self.more_grpc: tuple[str, ...] = ()
        self.more_http: tuple[str, ...] = ()

    async def start(self) -> None:
        """Return when the cluster can serve a request.

        Raises ConfigError when a setting is refused, RegistryUnavailable when the Redis of --redis does not answer, and
        Unavailable when a process does not become ready.
        """
        self._redis_url = await self._find_redis()
        self._layout = Layout(
            flags={**self._plan.flags, "redis": self._redis_url},
            num_threads=self._plan.num_threads,
            first=self._plan.pools,
            suffix=new_suffix() if self._plan.redis and self._workers is self._supervisor else "",
            router_suffix=new_suffix() if self._plan.redis else "",
        )
        try:
            async with asyncio.timeout(self._plan.start_timeout_s):
                await self._start_workers()
                await self._start_routers()
        except TimeoutError:
            raise Unavailable(
                f"the cluster is not ready after {self._plan.start_timeout_s:g} s; a large model may need a longer "
                "--start-timeout-s"
            ) from None

    async def failed(self) -> None:
        """Wait for the error that ends the cluster, and raise it."""
        await first_of(self._supervisor.failed(), self._workers.failed())

    async def follow_target(self) -> None:
        """Keep the pools at the sizes that `tandem scale` sets, until cancelled."""
        plan = self._plan
        registry = Registry(url=self._redis_url, cluster_name=plan.cluster_name, ttl_s=plan.registration_ttl_s)
        follower = PoolFollower(
            workers=self._workers,
            registry=registry,
            layout=self._layout,
            first=plan.pools,
            loads=WorkerLoads([self.grpc, *self.more_grpc], plan.admin_key, plan.tls).ask,
            grace_s=self._grace_s,
            say=self._say,
        )
        try:
            await follower.run()
        finally:
            await registry.close()

    async def drain(self) -> None:
        """Let the running requests finish. Routers stop first, because their workers must still serve those
        requests."""
        routers = [name for name in self._supervisor.pids() if name.startswith(Role.ROUTER)]
        await self._supervisor.stop(routers, self._grace_s)
        await self._workers.stop([name for name in self._workers.pids() if name not in routers], self._grace_s)

    async def close(self) -> None:
        """Stop everything. No process is left when this returns."""
        await self._supervisor.close()
        await self._workers.close()
        self._forks.close()
        if self._redis is not None:
            await self._redis.stop()

    def pids(self) -> dict[str, int]:
        """Return the process ids of the routers and workers that run now."""
        return {**self._supervisor.pids(), **self._workers.pids()}

    @property
    def _grace_s(self) -> float:
        return self._plan.drain_grace_s + _LEAVE_S

    async def _find_redis(self) -> str:
        """Start a private Redis, or check the one of --redis now, before each worker has spent seconds to load
        torch."""
        if not self._plan.redis:
            self._redis = await RedisServer.start(cluster_name=self._plan.cluster_name)
            self._say(f"redis-server at 127.0.0.1:{self._redis.port}")
            return self._redis.url
        registry = Registry(url=self._plan.redis, cluster_name="ping", ttl_s=1.0)
        try:
            await registry.ping()
        except RegistryUnavailable as error:
            raise RegistryUnavailable(f"{error.message}; without --redis, `tandem up` starts its own") from error
        finally:
            await registry.close()
        return self._plan.redis

    async def _start_workers(self) -> None:
        plan = self._plan
        self._say(f"starting {plan.pools} on {plan.flags['model']}, {plan.num_threads} thread(s) per worker")
        present = {slot: slot.role for slot in worker_slots(self._workers.staying())}
        new = pool_plan(present, worker_slots(self._workers.leaving()), plan.pools.target, {}).starts
        self._workers.start([self._layout.worker(slot) for slot in new])
        await asyncio.gather(*(self._until_ready(self._workers, str(slot)) for slot in (*present, *new)))

    async def _start_routers(self) -> None:
        """Start the routers after the workers: a router connects to all registered workers before it is ready, so that
        its first request succeeds."""
        routers = [self._layout.router(number, ports) for number, ports in enumerate(self._plan.routers)]
        self._supervisor.start(routers)
        fields = await asyncio.gather(*(self._until_ready(self._supervisor, spec.name) for spec in routers))
        for spec, found in zip(routers, fields, strict=True):
            self._supervisor.restart_with(spec.name, _same_ports(found))
        (self.grpc, *more_grpc), (self.http, *more_http) = ([each[api] for each in fields] for api in ("grpc", "http"))
        self.more_grpc, self.more_http = tuple(more_grpc), tuple(more_http)
        await asyncio.gather(*(_until_serving(found["grpc"], self._plan.tls) for found in fields))

    async def _until_ready(self, started: Workers, name: str) -> dict[str, str]:
        fields = await started.ready(name)
        self._say(f"{name} is ready after {asyncio.get_running_loop().time() - self._began_s:.1f} s")
        return fields


async def first_of(*awaited: Coroutine[object, object, object]) -> None:
    """Run these coroutines together until one has ended, then cancel the others. Raises its exception."""
    tasks = [asyncio.ensure_future(each) for each in awaited]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _until_serving(address: str, tls: ClusterTls | None) -> None:
    """Wait until the router's health service reports that it can serve a request."""
    async with open_channel(address, tls) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        try:
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the router at {address} ended the health check: {error.details()}") from error
        finally:
            watch.cancel()
    raise Unavailable(f"the router at {address} ended the health check before it was ready")


def _same_ports(fields: Mapping[str, str]) -> list[str]:
    """Return flags with the router's present ports, so that it keeps them after a restart."""
    return [f"--port={fields['http'].rpartition(':')[2]}", f"--grpc-port={fields['grpc'].rpartition(':')[2]}"]
