"""A real cluster of real processes on loopback, for tests: redis-server, routers, prefill and decode workers.

Every process prints one line `ready ...` when it is; its whole output is kept for the report of a failing test. Only
processes started here are ended, by their id; where the test's own process is killed, the kernel ends them. Members are
forked from a process that has imported their code (`fork_server.py`), unless the cluster is made with `executed`.
"""

import asyncio
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from cluster.auth.key_file import load_keys
from cluster.auth.member_channel import MemberChannel
from cluster.process import die_with_parent
from cluster.serving.serving import open_channel
from cluster.serving.tls import ClusterTls
from tandem.enum_words import MEMBER_ROLES
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from tests.polling import until
from tests.system.rigs.processes.fork_server import ForkedProcess, router_forks, worker_forks

DEMO_MODEL = Path(__file__).parents[4] / "examples" / "demo_model"
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_CALL_TIMEOUT_S = 60.0
_PAUSE_S = 0.02  # between two looks for a state that lasts
_LAST_LINES = 30

Process = asyncio.subprocess.Process | ForkedProcess
# From a module, its arguments and its environment to the process that runs it.
Launch = Callable[[str, Sequence[str], Mapping[str, str]], Awaitable[Process]]


@dataclass(slots=True)
class Member:
    """A process of the cluster. `ready` has the words of its ready line as key=value."""

    name: str
    module: str
    flags: tuple[str, ...]
    process: Process
    launch: Launch
    output: list[str] = field(default_factory=list)
    ready: dict[str, str] = field(default_factory=dict)
    reader: asyncio.Task[None] | None = None
    is_killed: bool = False  # its end may not have been noticed yet

    @property
    def is_running(self) -> bool:
        return not self.is_killed and self.process.returncode is None

    @property
    def grpc_address(self) -> str:
        return self.ready["grpc"]

    @property
    def incarnation(self) -> str:
        return self.ready["member"].partition("@")[2]

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.is_killed |= number == signal.SIGKILL

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process while the block runs, as if its machine had frozen."""
        self.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            if self.is_running:
                self.send_signal(signal.SIGCONT)

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), _STOP_TIMEOUT_S)


async def forked(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], *, network: str = ""
) -> Process:
    """Start a member by forking a process that has imported its code. `network`: a namespace of `ip netns`, if not that
    of this process."""
    server = router_forks() if module.endswith("router") else worker_forks()
    return await server.spawn(module, arguments, environment, network=network)


async def executed(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], *, wrapper: Sequence[str] = ()
) -> Process:
    """Start a member as a new program, as a user does. `wrapper`: a command that runs it."""
    return await asyncio.create_subprocess_exec(
        *(*wrapper, sys.executable, "-m", module, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        preexec_fn=die_with_parent,
    )


class LocalCluster:
    """A cluster of members by name: router0, prefill0, prefill1, decode0, ..."""

    def __init__(
        self,
        redis_url: str,
        directory: Path,
        *,
        model: Path = DEMO_MODEL,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,  # of each member, beside that of the test
        tls: ClusterTls | None = None,  # to reach members with, where they use TLS
        launch: Launch = forked,
    ) -> None:
        self.redis_url = redis_url
        self.members: dict[str, Member] = {}
        self._directory = directory
        self._model = model
        self._flags = tuple(flags)
        self._environment = dict(environment or {}) | {"PYTHONUNBUFFERED": "1"}
        self._tls = tls
        self._launch = launch
        self.name = f"test-{os.urandom(4).hex()}"

    async def start(
        self, *, prefill: int = 1, decode: int = 1, routers: int = 1, router_flags: Sequence[str] = ()
    ) -> "LocalCluster":
        """Start all members. Returns when the first request would succeed.

        Routers place strictly by load unless `router_flags` says otherwise: with automatic placement, one worker may
        compute and decode an answer, as happens on a busy machine, and then no KV travels.
        """
        workers = [(f"prefill{i}", "prefill_worker") for i in range(prefill)]
        workers += [(f"decode{i}", "decode_worker") for i in range(decode)]
        await asyncio.gather(*(self.start_member(name, module, self._flags) for name, module in workers))
        ports = ("--port", "0", "--grpc-port", "0", "--placement", "least-loaded", *router_flags)
        await asyncio.gather(*(self.start_member(f"router{i}", "router", ports) for i in range(routers)))
        return self

    async def start_member(
        self, name: str, module: str, flags: Sequence[str] = (), *, launch: Launch | None = None
    ) -> Member:
        """Start a member and wait until it is ready. `launch`: how, if not as the others."""
        member = await self.spawn(name, module, flags, launch=launch)
        try:
            await asyncio.wait_for(self._until_ready(member), _START_TIMEOUT_S)
        except (TimeoutError, RuntimeError) as error:
            raise RuntimeError(f"{name} did not become ready ({error}); it said:\n" + "".join(member.output)) from None
        return member

    async def spawn(self, name: str, module: str, flags: Sequence[str] = (), *, launch: Launch | None = None) -> Member:
        """Start a member without waiting until it is ready."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")} | self._environment
        arguments = (*self._cluster_flags(), "--member-id", name, "--model", str(self._model), *flags)
        launch = launch or self._launch
        process = await launch(module, arguments, environment)
        member = self.members[name] = Member(name, module, tuple(flags), process, launch)
        return member

    def joining_flags(self) -> tuple[str, ...]:
        """Return the flags with which one more worker joins. It adds its own --model."""
        return (*self._cluster_flags(), *self._flags)

    async def mend(self) -> None:
        """Restart the members that have ended, as they were started. Returns when the router is connected to all
        workers."""
        dead = [member for member in self.members.values() if not member.is_running]
        for member in dead:
            await member.exit_code()
            if member.reader is not None:
                await member.reader
        await asyncio.gather(*(self.start_member(m.name, m.module, m.flags, launch=m.launch) for m in dead))
        await self.until_connected()

    async def until_connected(self) -> None:
        """Wait until the router is connected to all running workers."""
        running = {name: self.members[name].incarnation for name in self.workers()}
        await until(
            self._connected,
            lambda seen: running.items() <= seen.items(),
            what=f"the router is connected to {running}",
            deadline_s=_START_TIMEOUT_S,
            pause_s=_PAUSE_S,
        )

    async def _connected(self) -> dict[str, str]:
        """Return the incarnations of the workers that the router reaches, by name."""
        return {m.member_id: m.incarnation for m in (await self.status()).members if m.figures}

    async def stop(self) -> dict[str, int]:
        """Send SIGTERM to all members, and SIGKILL to those that do not end in time. Returns the exit codes."""
        codes = {}
        for member in self.members.values():
            if member.is_running:
                member.send_signal(signal.SIGTERM)
                member.send_signal(signal.SIGCONT)
        for name, member in self.members.items():
            try:
                codes[name] = await member.exit_code()
            except TimeoutError:
                member.process.kill()
                codes[name] = await member.process.wait()
            if member.reader is not None:
                await member.reader
        return codes

    @property
    def key_file(self) -> Path:
        return self._directory / "cluster.key"

    def output(self) -> str:
        return "".join(f"--- {m.name}\n{''.join(m.output)}" for m in self.members.values())

    def last_words(self) -> str:
        """Return each member's state and its last lines of output, for the report of a failed test."""
        return "".join(
            f"--- {m.name}, exit status {m.process.returncode}\n{''.join(m.output[-_LAST_LINES:])}"
            for m in self.members.values()
        )

    def channel(self, name: str = "router0") -> grpc.aio.Channel:
        """Return a channel to a router, or to a worker as another member uses it."""
        address = self.members[name].grpc_address
        channel = grpc.aio.insecure_channel(address) if self._tls is None else open_channel(address, self._tls)
        return channel if name.startswith("router") else MemberChannel(channel, load_keys(self.key_file), "test@0")

    def inference(self, channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(channel)

    async def status(self) -> admin_pb2.StatusResponse:
        async with self.channel() as channel:
            status: admin_pb2.StatusResponse = await admin_pb2_grpc.AdminStub(channel).Status(
                admin_pb2.StatusRequest(), timeout=_CALL_TIMEOUT_S
            )
        return status

    async def migrate(self, source: str, target: str = "") -> admin_pb2.MigrateResponse:
        request = admin_pb2.MigrateRequest(source=source, target=target)
        async with self.channel() as channel:
            count: admin_pb2.MigrateResponse = await admin_pb2_grpc.AdminStub(channel).Migrate(
                request, timeout=_CALL_TIMEOUT_S
            )
        return count

    async def set_role(self, name: str, role: str) -> None:
        """Change a worker's role and wait until the router uses it so."""
        number = MEMBER_ROLES.number(role)
        async with self.channel() as channel:
            await admin_pb2_grpc.AdminStub(channel).SetRole(
                admin_pb2.SetRoleRequest(member_id=name, role=number), timeout=_CALL_TIMEOUT_S
            )

        async def roles() -> list[int]:
            return [member.role for member in (await self.status()).members if member.member_id == name]

        await until(roles, [number].__eq__, what=f"{name} has the role {role}", pause_s=_PAUSE_S)

    async def inspect(self, name: str) -> worker_pb2.InspectResponse:
        """Return the worker's report about itself, after its check()."""
        async with self.channel(name) as channel:
            report: worker_pb2.InspectResponse = await worker_pb2_grpc.WorkerStub(channel).Inspect(
                worker_pb2.InspectRequest(), timeout=_CALL_TIMEOUT_S
            )
        return report

    async def busy_decode_worker(self) -> str:
        """Wait until a decode worker runs a sequence, and return its name."""

        async def running() -> list[str]:
            return [name for name in self.workers("decode") if (await self.inspect(name)).figures["running"]]

        return (await until(running, what="a decode worker runs a sequence"))[0]

    async def decode_worker(self) -> str | None:
        """Return the name of the decode worker of the router's latest live request; None if there is none."""
        async with self.channel() as channel:
            answer = await admin_pb2_grpc.AdminStub(channel).Requests(
                admin_pb2.RequestsRequest(), timeout=_CALL_TIMEOUT_S
            )
        latest = min(answer.requests, key=lambda live: live.age_s, default=None)
        return latest.decode_member.partition("@")[0] or None if latest is not None else None

    def workers(self, role: str = "") -> list[str]:
        """Return the names of the running workers, of all or of one role: prefill, decode."""
        living = [name for name, member in self.members.items() if member.is_running]
        return [name for name in living if name.startswith(role) and not name.startswith("router")]

    async def figures(self, role: str) -> dict[str, float]:
        """Return the figures of a role's workers, added up."""
        total: defaultdict[str, float] = defaultdict(float)
        for report in await asyncio.gather(*(self.inspect(name) for name in self.workers(role))):
            for name, value in report.figures.items():
                total[name] += value
        return total

    async def blocks_in_use(self, name: str) -> dict[str, int]:
        report = await self.inspect(name)
        assert report.violation == "", f"{name}: {report.violation}"
        return {state: count for state, count in report.blocks.items() if state not in ("free", "cached") and count}

    async def until_free(self) -> None:
        """Wait until no worker holds a block for any request. Fails at the deadline with the blocks that are still
        held."""
        for name in self.workers():
            await until(
                partial(self.blocks_in_use, name),
                lambda seen: not seen,
                what=f"{name} has no block in use",
                deadline_s=_STOP_TIMEOUT_S,
                pause_s=_PAUSE_S,
            )

    def _cluster_flags(self) -> tuple[str, ...]:
        return ("--redis", self.redis_url, "--cluster-name", self.name, "--cluster-key-file", str(self.key_file))

    async def _until_ready(self, member: Member) -> None:
        stdout = member.process.stdout
        assert stdout is not None
        while line := (await stdout.readline()).decode(errors="replace"):
            member.output.append(line)
            if line.startswith("ready"):
                member.ready = dict(word.split("=", 1) for word in line.split()[1:] if "=" in word)
                member.reader = asyncio.create_task(self._keep_reading(member, stdout))
                return
        raise RuntimeError(f"exit code {await member.process.wait()}")

    async def _keep_reading(self, member: Member, stdout: asyncio.StreamReader) -> None:
        async for line in stdout:
            member.output.append(line.decode(errors="replace"))
