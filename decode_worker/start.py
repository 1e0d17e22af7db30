"""A decode worker from its settings. What can be refused without a model is, before torch costs its seconds."""

import asyncio
from collections.abc import Callable
from functools import partial
from importlib import import_module

from cluster.messages import Role
from cluster.process import lasting
from cluster.settings.config import WorkerConfig
from cluster.worker_life import WorkerLife

_SERVICES = ("tandem.v1.DecodeWorker", "tandem.v1.KvTransfer", "tandem.v1.Worker")


async def run(config: WorkerConfig, *, stop: asyncio.Event, announce: Callable[..., None]) -> None:
    """Serves until `stop` is set, then drains. Raises ConfigError, ModelRefused, RegistryUnavailable, Fenced,
    DrainIncomplete."""
    life = WorkerLife(config, role=Role.DECODE, service_names=_SERVICES, stop=stop)
    await life.check_registry()
    with lasting():
        app = await life.unless_stopped(partial(import_module, "decode_worker.app"))
    if app is not None:
        await app.serve(life, announce=announce)
