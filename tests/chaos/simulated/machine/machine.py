"""Replacements for the real machine: clocks, random numbers, threads, sockets, Redis, a model.

Each is put in place by name around the modules that use it; the modules themselves are production code.
"""

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from cluster.auth.keys import ClusterKeys
from cluster.auth.sessions import Session
from cluster.clock import Clock
from cluster.member import from_json, to_json
from cluster.service_times import StepWork, TimedStep
from cluster.serving.frame_server import FrameServer
from cluster.settings.config import WorkerConfig
from engine.kv.host_blocks import SwappingRunner
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.transports.available import Available
from kvtransfer.transports.base import TransportSetup
from router.fleet.decode_events import Sequences
from router.overview.overview import Overview
from router.request.live_requests import LiveRequests
from router.text.tokenization import Tokenization
from tests.chaos.simulated.machine import frame_calls
from tests.chaos.simulated.machine.calls import Channel
from tests.chaos.simulated.machine.disk import SimulatedBlockFiles
from tests.chaos.simulated.machine.loop import Counted, Threads, current
from tests.chaos.simulated.machine.redis import RedisClient
from tests.chaos.simulated.machine.served_calls import Server
from tests.chaos.simulated.machine.steps import SimulatedStepLoop
from tests.chaos.simulated.machine.transport import Exports, Imports
from tests.chaos.simulated.members.engine import StandInEngine, stand_in_engine
from tests.chaos.simulated.members.grammars import AtOnce, Checked, compiled_grammars
from tests.chaos.simulated.members.tenants import StoredKeys
from tests.chaos.simulated.results.coverage import counted
from tests.chaos.simulated.schedules.schedule import MAX_MODEL_LEN
from tests.system.rigs.members.router_harness import DEMO_MODEL

_FIXED_ROWS = 16.0  # the fixed cost of a step, in rows
_STEPS_AT_LOAD = tuple(
    TimedStep(StepWork(num_new, attended, batch, context), 0.004 + 0.0005 * (num_new + batch))
    for num_new, attended, batch, context in ((16, 136, 0, 0), (64, 2080, 0, 0), (0, 0, 1, 16), (0, 0, 8, 128))
)
_MAC, _PROVE, _VERIFY = Session._mac, Session.prove, Session.verify
_BIND_FRAMES = FrameServer.bind
_COLLECTIONS = 3  # one collection frees objects that the next one collects
_WALL_S = 1_800_000_000.0


class SimulatedClock(Clock):
    def now_s(self) -> float:
        return float(world().loop.now_s)


class _HttpServer:
    """An HTTP server that receives no requests."""

    port = 1

    def __init__(self, **_: object) -> None:
        pass

    async def serve(self, app: object, *, stop: Any, **_: object) -> None:
        await stop.wait()


class _SilentPort:
    """A port for health checks or scrapes that receives none."""

    port = 1

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def end_within(self, timeout_s: float) -> None:
        pass


class _Dice(Random):
    """The random number generator of the running world."""

    def random(self) -> float:
        return float(world().ids.random())

    def getrandbits(self, k: int) -> int:
        return int(world().ids.getrandbits(k))


_worlds: list[Any] = []  # the one that is running


def world() -> Any:
    return _worlds[-1]


@contextmanager
def inside(running: Any) -> Iterator[None]:
    wires = running.connections.wires
    with frame_calls.bounds(wires.max_unsent_bytes, wires.max_unread_bytes, wires.max_request_bytes):
        _worlds.append(running)
        try:
            yield
        finally:
            _worlds.pop()


def vocab_size() -> int:
    return _tokenization().model_info.vocab_size


_loaded: list[Tokenization] = []


def _tokenization(*_: object, **__: object) -> Tokenization:
    if not _loaded:
        _loaded.append(_LOAD(str(DEMO_MODEL), max_model_len=MAX_MODEL_LEN))
    return _loaded[0]


_LOAD = Tokenization.load


def _wall_s() -> float:
    return _WALL_S + float(world().loop.now_s) + current().clock_ahead_s


def _transports(settings: object, means: TransportSetup) -> Available:
    here, names = world(), ("shm", "tcp")
    return Available(
        tuple(Exports(name, means.memory, here.pools, here.owners) for name in names),
        tuple(
            Imports(name, means.memory, here.pools, here.owners, here.network, here.dice, here.odds) for name in names
        ),
    )


def _open_files(*about: Any) -> SimulatedBlockFiles:
    return SimulatedBlockFiles(world().disks[current().place], *about)


_block_files = partial(_open_files)
_block_files.file_bytes = SimulatedBlockFiles.file_bytes  # type: ignore[attr-defined]


def _engine(config: WorkerConfig, *_: object) -> StandInEngine:
    return stand_in_engine(config.num_blocks, config.block_size, vocab_size(), launches=world().launches)


def _live_requests(**about: Any) -> LiveRequests:
    """Return the live requests of a router, which the world checks."""
    live = world().live_requests[current()] = LiveRequests(**about)
    return live


def _bind_frames(server: FrameServer, host: str) -> None:
    """Take calls as frames, if the world has connections that carry them; else all calls use the simulated gRPC."""
    if world().schedule.mix.wires is not None:
        _BIND_FRAMES(server, host)


def _cluster_keys(_: object) -> ClusterKeys:
    keys: ClusterKeys = world().key_files.keys(current().place)
    return keys


def _copy_s(*_: object) -> float:
    return float(world().schedule.copy_s)


def _nothing() -> None:
    pass


@contextmanager
def _unheard_ends() -> Iterator[None]:
    """Ignore the complaints of objects of killed processes that are collected after their run. Collection is forced
    between runs only, because its time would otherwise depend on earlier runs."""
    was_enabled, hook = gc.isenabled(), sys.unraisablehook
    gc.disable()
    gc.freeze()  # collections between runs skip the present objects
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sys.unraisablehook = lambda _: None
            yield
            for _ in range(_COLLECTIONS):
                gc.collect()
    finally:
        sys.unraisablehook = hook
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _of_every_member(dice: _Dice) -> dict[str, object]:
    """Return the replacements, by name, in the code of every member."""
    return {
        "grpc.aio.insecure_channel": lambda address, options=(): Channel(world().network, address, world().watch),
        "grpc.aio.server": lambda interceptors=(), options=(), **_: Server(world().network, interceptors),
        # A faulty member proves what it sends.
        "cluster.auth.sessions.Session._mac": lambda session, counter, method, _: _MAC(session, counter, method, b""),
        "cluster.auth.sessions.Session.prove": lambda *about: world().proofs.prove(*about, _PROVE),
        "cluster.auth.sessions.Session.verify": lambda *about: world().proofs.verify(*about, _VERIFY),
        "cluster.serving.serving.refuse_taken": lambda host, port, flag: None,
        "cluster.serving.frame_server.FrameServer.bind": _bind_frames,
        "cluster.serving.frame_server.socket": frame_calls.sockets(
            lambda *about, **_: world().connections.listen(*about)
        ),
        "cluster.serving.serving.reflection.enable_server_reflection": lambda *_: None,
        "cluster.process.gc": SimpleNamespace(disable=_nothing, freeze=_nothing, enable=_nothing),
        "cluster.registry.registry.open_redis": lambda *_: RedisClient(world().redis),
        "cluster.registry.registry.random": dice,
        "cluster.registry.signed_records.to_json": lru_cache(256)(to_json),  # the same values repeatedly
        "cluster.registry.signed_records.from_json": lru_cache(256)(from_json),
        "cluster.registry.registry.MonotonicClock": SimulatedClock,
        "secrets.token_bytes": lambda num=16: world().ids.randbytes(num),
        "secrets.token_hex": lambda num=16: world().ids.randbytes(num).hex(),
        "secrets.randbits": lambda bits: world().ids.getrandbits(bits),
    }


def _of_workers(dice: _Dice) -> dict[str, object]:
    """Return the replacements, by name, in the code of workers."""
    clock = SimpleNamespace(perf_counter=lambda: world().loop.now_s, monotonic=lambda: world().loop.now_s)
    return {
        "worker.life.configure_logs": lambda *_: None,
        "worker.life.MonotonicClock": SimulatedClock,
        "worker.life.process_age_s": lambda: 0.0,
        "worker.life.HealthPort": _SilentPort,
        "worker.life.MetricsPort": _SilentPort,
        "worker.life.cluster_keys": _cluster_keys,
        "kvtransfer.importer.importer.ThreadPoolExecutor": Threads,
        "kvtransfer.exporter.exporter.ThreadPoolExecutor": Threads,
        "kvtransfer.importer.handoff_driver._DICE": dice,
        "kvtransfer.importer.reads.time": clock,
        "engine.kv.host_blocks.HostBlocks.copy_s_per_block": _copy_s,
        "prefill_worker.prefixes.tiers.ThreadPoolExecutor": Threads,
        "prefill_worker.prefixes.tier_storage.time": clock,
        "prefill_worker.prefixes.tiers.BlockFiles": _block_files,
        "worker.transfer.available_transports": _transports,
        "worker.app.build_engine": _engine,
        "worker.app.worker_grammars": lambda *_: compiled_grammars(),
        "engine.grammar.compiled_grammars.ThreadPoolExecutor": AtOnce,
        "worker.app.StepLoop": SimulatedStepLoop,
        "worker.app.MonotonicClock": SimulatedClock,
        "worker.app.fixed_rows": lambda _: _FIXED_ROWS,
        "worker.app.max_scored_tokens": lambda _: world().schedule.max_scored_tokens,
        "worker.app.time_steps": lambda *_: _STEPS_AT_LOAD,
    }


def _of_routers(dice: _Dice) -> dict[str, object]:
    """Return the replacements, by name, in the code of routers."""
    return {
        "router.pipeline.worker_choice.random": dice,
        "router.fleet.decode_events.Sequences": type("Sequences", (Counted, Sequences), {}),
        "router.fleet.worker_stream.Sequences": type("Sequences", (Counted, Sequences), {}),
        "router.app.configure_logs": lambda *_: None,
        "router.app.cluster_keys": _cluster_keys,
        "router.ports.HttpServer": _HttpServer,
        "router.app.random": dice,
        "router.app.LiveRequests": _live_requests,
        "router.accounts.FileKeyStore": StoredKeys,
        "router.accounts.MonotonicClock": SimulatedClock,
        "router.ports.HealthPort": _SilentPort,
        "router.ports.MetricsPort": _SilentPort,
        "router.app.build_app": lambda **_: None,
        "router.app.add_page": lambda *_: None,
        "router.app.MonotonicClock": SimulatedClock,
        "router.app.Tokenization": SimpleNamespace(load=_tokenization),
        "router.app.grammar_checker": lambda *_: Checked(),
    }


@contextmanager
def simulated_machine() -> Iterator[None]:
    """Replace the real machine for any number of runs."""
    dice = _Dice()
    with ExitStack() as stack:
        vocab_size()
        for name, value in (_of_every_member(dice) | _of_workers(dice) | _of_routers(dice)).items():
            stack.enter_context(mock.patch(name, value))
        now_s = (lambda: float(world().loop.now_s),)
        stack.enter_context(mock.patch.object(SwappingRunner.__init__, "__defaults__", now_s))
        stack.enter_context(mock.patch.dict(Exporter.__init__.__kwdefaults__, wall_clock=_wall_s))
        stack.enter_context(mock.patch.dict(Overview.__init__.__kwdefaults__, wall_clock=_wall_s))
        stack.enter_context(frame_calls.watched(lambda *about: world().watch(*about)))
        stack.enter_context(counted(lambda: _worlds[-1].reached if _worlds else None))
        stack.enter_context(_unheard_ends())
        yield
