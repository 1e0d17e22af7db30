"""Real redis-servers in the forms that operators run: with passwords, behind a socket, watched, clustered."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
_PORTS = 12000, 22000  # with those of the cluster bus, 10000 above, below what the kernel gives to connections
_BUS_OFFSET = 10000
_ATTEMPTS = 5


class RedisProcess:
    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self._log = log

    def client(self, **credentials: str | None) -> Redis:
        return Redis(host=HOST, port=self.port, decode_responses=True, **credentials)  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Ask repeatedly until the answer is right, because Redis publishes no event for it. Fails with the end of the
        server's log when Redis ends or the time is over."""
        ended = asyncio.create_task(self.process.wait())
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        while not await condition():
            await asyncio.wait([ended], timeout=0.02)
            if ended.done() or asyncio.get_running_loop().time() > deadline_s:
                state = f"has ended with status {ended.result()}" if ended.done() else f"runs after {DEADLINE_S:g} s"
                raise AssertionError(f"the server on port {self.port} {state}; its log ends with\n{self.log_end()}")
        ended.cancel()

    def log_end(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""


def _free_port() -> int:
    """Return a free port whose cluster bus port is free too. It does not use `random`, which pytest-randomly seeds
    equally in all processes of a run.
    """
    while True:
        port = _PORTS[0] + secrets.randbelow(_PORTS[1] - _PORTS[0])
        try:
            with socket.create_server((HOST, port)), socket.create_server((HOST, port + _BUS_OFFSET)):
                return port
        except OSError:
            continue


@asynccontextmanager
async def redis_process(folder: Path, *options: str, password: str = "", user: str = "") -> AsyncIterator[RedisProcess]:
    """Run Redis. It answers when the `with` block begins. `options`: an optional configuration file, then flags.
    `user`: one of the ACL file that the options name, who has this password; empty: the default user gets it.
    """
    server = await _started(folder, options, password, user)
    try:
        yield server
    finally:
        await _end(server.process)


async def _started(folder: Path, options: Sequence[str], password: str, user: str) -> RedisProcess:
    """Start Redis on a free port and wait until it answers. If another process has taken the port, try the next one."""
    for _ in range(_ATTEMPTS):
        port = _free_port()
        own = folder / str(port)
        own.mkdir()
        process = await asyncio.create_subprocess_exec(
            *(redis_program(), *options, "--bind", HOST, "--port", str(port), "--dir", str(own)),
            *("--logfile", "redis.log", "--save", "", *(("--requirepass", password) if password and not user else ())),
            preexec_fn=die_with_parent,
        )
        server = RedisProcess(process, port, own / "redis.log")
        try:
            async with server.client(password=password, username=user or None) as client:
                await server.until(partial(_answers, client))
            return server
        except AssertionError:
            await _end(process)
            if "Address already in use" not in server.log_end():
                raise
    raise AssertionError(f"of {_ATTEMPTS} free ports another process took each one")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


@asynccontextmanager
async def sentinel(
    folder: Path, master: RedisProcess, *lines: str, password: str = "", num_replicas: int = 0
) -> AsyncIterator[RedisProcess]:
    """Run a sentinel that watches `master` as "mymaster" with a quorum of one. It has found all replicas when the
    `with` block begins.
    """
    file = folder / f"sentinel-{master.port}.conf"
    settings = [f"monitor mymaster {HOST} {master.port} 1", *lines]
    settings += ["down-after-milliseconds mymaster 1000", "failover-timeout mymaster 3000"]
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
