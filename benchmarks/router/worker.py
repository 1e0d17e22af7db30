"""A prefill and a decode worker without a model, in one process, that speak the real protocol at a fixed pace.

    python -m benchmarks.router.worker --redis URL --cluster-name NAME --model FOLDER --steps FILE [--tls-cert ...]

A prefill gives its first tokens at once. Heartbeats report the speed, so that the router predicts its candidates as it
does those of real workers. Each step sends one message per router with one token for each of its
sequences, and has a fixed length, which a line `step_s=0.02` on stdin changes. The token is 1 plus the number of the
step modulo NUM_STEPS, and the file of steps has the time of each step, so a client that receives a token computes how
long it took to arrive.
"""

import asyncio
import itertools
import mmap
import struct
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.router.switchable import admit_unproved
from cluster.accounts.audit import Audit
from cluster.auth.gate import MemberGate
from cluster.auth.key_file import cluster_keys
from cluster.member import Capacity, Member, MemberState
from cluster.messages import FinishReason, LayoutFingerprint, Role
from cluster.observe.telemetry import Telemetry
from cluster.process import announce_ready, exit_process, run_process, stop_requested
from cluster.protocol import wire
from cluster.protocol.report_wire import service_times_to_wire
from cluster.registry.registration import Registration, advertised_host, new_member_id
from cluster.registry.registry import Registry
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes
from cluster.serving.serving import GrpcServer, join_address
from cluster.serving.tls import load_tls
from cluster.settings.config import WorkerConfig
from cluster.settings.config_sources import parse_arguments
from router.running import running
from tandem.enum_words import FINISH_REASONS
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

NUM_STEPS = 1000  # a token names the step that made it, modulo this
_HEARTBEAT_S = 1.0
_FIRST_STEP_S = 0.02
_FIRST_TOKEN = 1
_CAPACITY = Capacity(num_blocks=1 << 20, block_size=16, max_num_seqs=4096, max_model_len=1 << 20)
_LENGTH = FINISH_REASONS.number(FinishReason.LENGTH)


class StepTimes:
    """The time of each of the last NUM_STEPS steps on the machine's monotonic clock, in a file that the processes of
    one run share."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * NUM_STEPS))
        with path.open("r+b") as file:
            self._times = mmap.mmap(file.fileno(), 8 * NUM_STEPS)

    def record(self, step: int) -> None:
        struct.pack_into("<d", self._times, 8 * (step % NUM_STEPS), time.monotonic())

    def of_token(self, token_id: int) -> float:
        """Return when the step of this token was sent."""
        return float(struct.unpack_from("<d", self._times, 8 * (token_id - 1))[0])


@dataclass(slots=True)
class RouterSequences:
    """The stream of one router, and its running sequences: handle -> (index of the next token, number of tokens)."""

    outgoing: "asyncio.Queue[worker_pb2.WorkerMessage]" = field(default_factory=asyncio.Queue)
    running: dict[int, tuple[int, int]] = field(default_factory=dict)

    def step(self, number: int) -> None:
        """Send one token for each sequence."""
        if not self.running:
            return
        count = len(self.running)
        handles, indices, ends = tuple(self.running), [index for index, _ in self.running.values()], []
        for handle, (index, num_tokens) in list(self.running.items()):
            if index + 1 < num_tokens:
                self.running[handle] = index + 1, num_tokens
            else:
                del self.running[handle]
                ends.append(worker_pb2.SequenceEnd(handle=handle, finish_reason=_LENGTH))
        output = worker_pb2.StepOutput(
            step=number,
            handles=wire.pack_ids(handles),
            token_ids=wire.pack_ids([1 + number % NUM_STEPS] * count),
            indices=wire.pack_ids(indices),
            ends=ends,
        )
        self.outgoing.put_nowait(worker_pb2.WorkerMessage(step=output))


class PacedWorker(worker_pb2_grpc.PrefillWorkerServicer, worker_pb2_grpc.DecodeWorkerServicer):
    """The services of both roles."""

    def __init__(self, name: str, steps: StepTimes) -> None:
        self._name = name
        self._steps = steps
        self.step_s = _FIRST_STEP_S
        self._routers: dict[str, RouterSequences] = {}

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        ticket = b"ticket" if request.importer else b""
        yield worker_pb2.PrefillEvent(accepted=worker_pb2.PrefillAccepted(ticket=ticket))
        ends = FINISH_REASONS.number(FinishReason.LENGTH if request.stops.max_tokens == 1 else "")
        token = worker_pb2.SampledToken(token_id=_FIRST_TOKEN, finish_reason=ends)
        yield worker_pb2.PrefillEvent(first_tokens=worker_pb2.FirstTokens(tokens=[token] * len(request.seeds)))

    async def Abandon(self, request: worker_pb2.AbandonRequest, context: Any) -> worker_pb2.AbandonResponse:
        return worker_pb2.AbandonResponse()

    async def Start(self, request: worker_pb2.StartRequest, context: Any) -> worker_pb2.StartResponse:
        router = self._routers[request.router]
        handles = [sequence.handle for sequence in request.sequences]
        has_first = bool(request.ticket)
        started = worker_pb2.SequenceStarted(handles=handles, transport="tcp" if has_first else "local")
        if has_first:
            started.first_token_ids = wire.pack_ids([_FIRST_TOKEN] * len(handles))
        router.outgoing.put_nowait(worker_pb2.WorkerMessage(started=started))
        router.running.update(dict.fromkeys(handles, (int(has_first), request.stops.max_tokens)))
        return worker_pb2.StartResponse()

    async def Connect(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        hello = (await anext(aiter(request_iterator))).hello
        router = self._routers.setdefault(hello.router, RouterSequences())
        yield worker_pb2.WorkerMessage(hello=worker_pb2.WorkerHello(worker=self._name))
        async with running(self._read(request_iterator, router)), running(self._beat(router)):
            while True:
                yield await router.outgoing.get()

    async def run_steps(self) -> None:
        """Step at a fixed pace. A step that is late does not delay the next one."""
        at_s = time.monotonic()
        for number in itertools.count():
            at_s = max(at_s + self.step_s, time.monotonic() - self.step_s)
            await asyncio.sleep(at_s - time.monotonic())
            if any(router.running for router in self._routers.values()):
                self._steps.record(number)
            for router in self._routers.values():
                router.step(number)

    def _service_times(self) -> ServiceTimes:
        return ServiceTimes(PrefillTimes(1e-4, 1e-7, 0.0, 0.0), DecodeTimes(self.step_s, 0.0, 0.0, 0.0))

    async def _read(self, messages: AsyncIterator[Any], router: RouterSequences) -> None:
        async for message in messages:
            for handle in wire.unpack_ids(message.cancel.handles):
                router.running.pop(handle, None)

    async def _beat(self, router: RouterSequences) -> None:
        while True:
            heartbeat = worker_pb2.Heartbeat(free_blocks=1000, running=len(router.running))
            heartbeat.service_times.CopyFrom(service_times_to_wire(self._service_times()))
            router.outgoing.put_nowait(worker_pb2.WorkerMessage(heartbeat=heartbeat))
            await asyncio.sleep(_HEARTBEAT_S)


async def _serve_role(config: WorkerConfig, role: Role, steps: StepTimes, stop: asyncio.Event, started: Any) -> None:
    tls = load_tls(config, advertised_host(config))
    member_id, telemetry = new_member_id(config, role), Telemetry()
    gate = MemberGate(cluster_keys(config), member_id, telemetry, Audit(config.audit_file))
    server = GrpcServer(
        service_names=["tandem.internal.v1.Worker"],
        telemetry=telemetry,
        gate=gate,
        credentials=tls.member_credentials() if tls is not None else None,
    )
    gate.serve(server)
    worker = PacedWorker(str(member_id), steps)
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(worker, server.grpc)
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(worker, server.grpc)
    member = Member(
        id=member_id,
        role=role,
        address=join_address(advertised_host(config), server.bind(config.host, 0)),
        model=Path(config.model).name,
        state=MemberState.READY,
        fingerprint=LayoutFingerprint("weights", "config", "float32", "table"),
        transports=("tcp",),
        capacity=_CAPACITY,
    )
    registry = Registry(
        url=config.redis, cluster_name=config.cluster_name, ttl_s=config.registration_ttl_s, keys=cluster_keys(config)
    )
    registration = Registration(registry, member)
    await server.start()
    await server.set_ready(True)
    await registration.join()
    started(worker)
    async with running(registration.keep()), running(worker.run_steps()):
        await stop.wait()
    await server.stop(0)
    await registration.deregister()
    await registry.close()


async def _main(arguments: list[str]) -> None:
    at = arguments.index("--steps")
    steps = StepTimes(Path(arguments[at + 1]))
    del arguments[at : at + 2]
    workers: list[PacedWorker] = []
    stop = stop_requested()

    def started(worker: PacedWorker) -> None:
        workers.append(worker)
        if len(workers) == 2:
            announce_ready()

    def on_line() -> None:
        name, _, value = sys.stdin.readline().strip().partition("=")
        assert name in ("step_s", ""), name
        for worker in workers:
            worker.step_s = float(value or worker.step_s)

    asyncio.get_running_loop().add_reader(sys.stdin, on_line)
    admit_unproved()
    config = parse_arguments(WorkerConfig, "worker", arguments)
    async with asyncio.TaskGroup() as tasks:
        for role in (Role.PREFILL, Role.DECODE):
            tasks.create_task(_serve_role(config, role, steps, stop, started))


if __name__ == "__main__":
    exit_process(run_process("worker", partial(_main, sys.argv[1:])))
