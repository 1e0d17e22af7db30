"""A real engine of the demo model for simulated workers, whose blocks are as small as those of the stand-in."""

from contextlib import suppress
from functools import cache

from cluster.messages import LayoutFingerprint
from cluster.settings.config import WorkerConfig
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine
from engine.cpu.compiled_draw import compiled_draw
from engine.decoders.layer_parts import NotCompiled
from engine.kv.capacity import NATIVE
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.model.loading import load
from engine.steps.runner import ModelRunner
from tests.chaos.simulated.schedules.schedule import MAX_MODEL_LEN
from tests.system.rigs.members.router_harness import DEMO_MODEL

BLOCK_SIZE = 4


@cache
def tiny_model() -> LoadedModel:
    settings = EngineSettings(
        model=str(DEMO_MODEL), dtype="float32", device="cpu", block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN
    )
    return load(settings, NATIVE)


def tiny_runner(pool: KvPool) -> ModelRunner:
    runner = ModelRunner(tiny_model().forward(pool), pool)
    with suppress(NotCompiled):  # without it the same tokens are drawn
        runner.compiled_draw = compiled_draw()
    return runner


def tiny_engine(config: WorkerConfig, *_: object) -> Engine:
    """Return the engine of a worker, with a pool of its own. All workers share one model."""
    layout = tiny_model().layout
    pool = KvPool(layout, config.num_blocks)
    fingerprint = LayoutFingerprint("demo", "demo", "float32", layout.digest())
    return Engine(tiny_model().info, pool, tiny_runner(pool), fingerprint, ())
