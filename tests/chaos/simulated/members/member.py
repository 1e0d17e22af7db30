"""A router or worker of a simulated cluster: production code that is started, observed, and restarted in its place."""

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

import router.app
import worker.life
from cluster.errors import DrainIncomplete, RegistryUnavailable
from cluster.messages import Role
from cluster.settings.config import RouterConfig, WorkerConfig
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.chaos.simulated.machine import redis
from tests.chaos.simulated.machine.disk import SimulatedBlockFiles
from tests.chaos.simulated.machine.loop import Process
from tests.chaos.simulated.members.engine import layout_of
from tests.chaos.simulated.members.tenants import settings_of
from tests.chaos.simulated.schedules.schedule import MAX_MODEL_LEN, Schedule

if TYPE_CHECKING:
    from tests.chaos.simulated.world import World

READ_TIMEOUT_S = 3.0
STREAM_GRACE_S = 1.0
_REQUEST_TIMEOUT_S = 90.0
_READY_S, _LOOK_S = 30.0, 5.0
UVLOOP_TICK_S = 0.001  # the loop of routers reads its clock in milliseconds


class Member:
    """A router or worker at one place, with all its incarnations."""

    def __init__(self, world: "World", role: str, index: int) -> None:
        self._world, self.role, self.place = world, role, f"{role}{index}"
        self.index = index
        self.has_left = False  # permanently
        self._port = 7_000 + 100 * len(world.members)
        self._number = 0
        self.process: Process
        self.main: asyncio.Task[None]
        self.stop: asyncio.Event
        self._ready: asyncio.Event

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def start(self, *, elsewhere: bool = False) -> None:
        """Start the member. `elsewhere`: at another address."""
        self._number += 1
        self._port += elsewhere
        self.process = Process(self.place, self._number)
        self.process.clock_tick_s = UVLOOP_TICK_S if self.role == "router" else 0.0
        self.process.step_s, self.process.token_s = self._world.schedule.step_s, self._world.schedule.token_s
        self.stop, self._ready = asyncio.Event(), asyncio.Event()
        self._world.say(self.process, "starts")
        self.main = self._world.loop.spawn(self.process, self._main(), f"main of {self.process}")

    async def until_ready(self) -> bool:
        """Wait until the present process is ready. Return False if Redis did not answer it."""
        process, main, stop, is_ready = self.process, self.main, self.stop, self._ready
        ready = asyncio.create_task(is_ready.wait())
        left_s = _READY_S  # while Redis can be reached: without it the member waits
        while left_s > 0 and not ready.done() and not main.done():
            await asyncio.wait([ready, main], timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            left_s -= 0.0 if self._world.network.is_cut(redis.PLACE, self.place) else _LOOK_S
        ready.cancel()
        reason = main.exception() if main.done() else "it is slow"
        if isinstance(reason, RegistryUnavailable):
            self._world.say(process, "finds no Redis, and ends")
            return False
        has_left_as_asked = main.done() and stop.is_set() and isinstance(reason, DrainIncomplete | None)
        if not is_ready.is_set() and process.runs and not has_left_as_asked:
            self._world.wrong(f"{process} does not become ready: {reason!r}")
        return True

    async def _main(self) -> None:
        announce = lambda **_: self._ready.set()  # noqa: E731
        config = self._config()
        if isinstance(config, RouterConfig):
            await router.app.run(config, stop=self.stop, announce=announce)
        else:
            await worker.life.run_worker(
                config,
                Role(self._world.schedule.mix.first_role(self.place, self.role)),
                stop=self.stop,
                announce=announce,
            )

    def _config(self) -> RouterConfig | WorkerConfig:
        schedule = self._world.schedule
        common: dict[str, Any] = {
            "redis": "redis://redis:6379",
            "member_id": self.place,
            "registration_ttl_s": 3.0,
            "model": "demo_model",
            "max_model_len": MAX_MODEL_LEN,
            "stream_grace_s": STREAM_GRACE_S,
            "drain_grace_s": schedule.drain_grace_s,
        }
        if self.role == "router":
            return RouterConfig(
                **common,
                port=1,
                grpc_port=self._port,
                request_timeout_s=_REQUEST_TIMEOUT_S,
                max_attempts=schedule.max_attempts,
                placement=schedule.mix.placement,
                slo_ttft_ms=schedule.mix.slo_ttft_ms,
                slo_tpot_ms=schedule.mix.slo_tpot_ms,
                **settings_of(schedule.tenants),
            )
        return WorkerConfig(
            **common,
            port=self._port,
            block_size=schedule.block_size,
            num_blocks=schedule.num_blocks(self.role, self.index),
            max_prefill_tokens=schedule.max_prefill_tokens,
            max_num_seqs=schedule.max_num_seqs,
            swap_space=str(schedule.swap_blocks * layout_of(schedule.block_size).block_bytes),
            speculation="prompt" if schedule.speculates else "off",
            kv_verify="keyed" if schedule.mix.is_keyed else "all",
            lease_s=1.5,
            max_lease_s=12.0,
            attach_timeout_s=5.0,
            read_timeout_s=READ_TIMEOUT_S,
            quarantine_s=1.5,
            heartbeat_s=1.0,
            step_timeout_s=1.5,
            stuck_exit_s=6.0,
            slo_tpot_ms=schedule.mix.slo_tpot_ms,
            **(_tiers(schedule) if self.role == "prefill" else {}),
        )

    async def left_over(self) -> list[str]:
        """Describe what the member still holds."""
        if self.main.done():
            return []
        if self.role == "router":
            return self._live_requests()
        channel = self._world.channel_to(self)
        try:
            answer = await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=5.0)
        except grpc.aio.AioRpcError as error:
            return [f"{self.process} does not answer: {error.details()}"]
        if answer.violation:
            self._world.wrong(f"{self.process}: {answer.violation}")
        busy = {name: number for name, number in answer.blocks.items() if number and name not in ("free", "cached")}
        names = (
            "waiting",
            "running",
            "leased_tickets",
            "pulls",
            "live_tickets",
            "imports",
            "reservations",
            "frozen",
            "outstanding_work",
        )
        busy |= {name: int(answer.figures[name]) for name in names if answer.figures.get(name)}
        return [f"{self.process} has {', '.join(f'{number} {name}' for name, number in busy.items())}"] if busy else []

    def _live_requests(self) -> list[str]:
        live = self._world.live_requests[self.process]
        try:
            live.check()  # the accounts of tenants too, if no request is live
        except AssertionError as error:
            self._world.wrong(f"{self.process}: {error}")
        return [f"{self.process} has {len(live)} live requests"] if len(live) else []


def _tiers(schedule: Schedule) -> dict[str, Any]:
    if not schedule.host_blocks:
        return {}
    block_bytes = layout_of(schedule.block_size).block_bytes
    tiers: dict[str, Any] = {"prefix_host_memory": str(schedule.host_blocks * block_bytes)}
    if schedule.disk_blocks:
        space = schedule.disk_blocks * SimulatedBlockFiles.file_bytes(block_bytes)
        tiers |= {"prefix_disk": "disk", "prefix_disk_space": str(space)}
    return tiers
