"""Real redis-servers in the forms that operators run: with passwords, behind a socket, watched, clustered."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cluster.process import die_with_parent
from cluster.registry.redis_server import redis_program

HOST = "127.0.0.1"
DEADLINE_S = 20.0
_SLOTS = 16384


class RedisProcess:
    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    def client(self, **credentials: str) -> Redis:
        return Redis(host=HOST, port=self.port, decode_responses=True, **credentials)  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Ask repeatedly until the answer is right, because Redis publishes no event for it. Fails when Redis ends or
        the time is over."""
        ended = asyncio.create_task(self.process.wait())
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        while not await condition():
            await asyncio.wait([ended], timeout=0.02)
            assert not ended.done() and asyncio.get_running_loop().time() < deadline_s
        ended.cancel()


def free_port() -> int:
    """Return a free port whose cluster bus port is free too."""
    while True:
        port = random.randint(20000, 50000)
        try:
            with socket.create_server((HOST, port)), socket.create_server((HOST, port + 10000)):
                return port
        except OSError:
            continue


@asynccontextmanager
async def redis_process(folder: Path, *options: str, password: str = "") -> AsyncIterator[RedisProcess]:
    """Run Redis. It answers when the block is entered. `options`: an optional configuration file, then flags."""
    port = free_port()
    own = folder / str(port)
    own.mkdir()
    process = await asyncio.create_subprocess_exec(
        *(redis_program(), *options, "--bind", HOST, "--port", str(port), "--dir", str(own)),
        *("--logfile", "redis.log", "--save", "", *(("--requirepass", password) if password else ())),
        preexec_fn=die_with_parent,
    )
    server = RedisProcess(process, port)
    try:
        async with server.client(password=password) as client:
            await server.until(lambda: _answers(client))
        yield server
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def sentinel(
    folder: Path, master: RedisProcess, *lines: str, password: str = "", num_replicas: int = 0
) -> AsyncIterator[RedisProcess]:
    """Run a sentinel that watches `master` as "mymaster" with a quorum of one. It knows all replicas when the block is
    entered."""
    file = folder / f"sentinel-{master.port}.conf"
    settings = [f"monitor mymaster {HOST} {master.port} 1", *lines]
    settings += ["down-after-milliseconds mymaster 300", "failover-timeout mymaster 3000"]
    file.write_text("".join(f"sentinel {line}\n" for line in settings))
    async with redis_process(folder, str(file), "--sentinel", password=password) as process:
        async with process.client(password=password) as client:
            await process.until(lambda: _knows(client, num_replicas))
        yield process


@asynccontextmanager
async def redis_cluster(folder: Path, num_nodes: int, password: str = "") -> AsyncIterator[list[RedisProcess]]:
    """Run a Redis cluster in which every slot has a node and the nodes agree."""
    options = ("--cluster-enabled", "yes", *(("--masterauth", password) if password else ()))
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(redis_process(folder, *options, password=password))
            for _ in range(num_nodes)
        ]
        clients = [await stack.enter_async_context(node.client(password=password)) for node in nodes]
        for number, client in enumerate(clients):
            first, end = (_SLOTS * i // num_nodes for i in (number, number + 1))
            await client.execute_command("CLUSTER ADDSLOTS", *range(first, end))  # type: ignore[no-untyped-call]
            await client.execute_command("CLUSTER MEET", HOST, nodes[0].port)  # type: ignore[no-untyped-call]
        for node, client in zip(nodes, clients, strict=True):
            await node.until(partial(_is_whole, client))
        yield nodes


async def _knows(client: Redis, num_replicas: int) -> bool:
    return len(await client.sentinel_slaves("mymaster")) >= num_replicas


async def _is_whole(client: Redis) -> bool:
    info: dict[str, str] = await client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
    return info["cluster_state"] == "ok"


async def _answers(client: Redis) -> bool:
    try:
        await client.ping()
    except (RedisError, OSError):
        return False
    return True
