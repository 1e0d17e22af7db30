"""An engine over a tiny random Llama on the CPU in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from tests.golden.families import FAMILIES

BLOCK_SIZE = 8


@contextmanager
def tiny_engine(folder: Path) -> Iterator[Engine]:
    """Save the model in `folder` and build its engine with 24 blocks of `BLOCK_SIZE` tokens and sequences of at most 64
    tokens; close the pool at the end.
    """
    FAMILIES["llama"].save(folder)
    settings = EngineSettings(
        model=str(folder), dtype="float32", device="cpu", block_size=BLOCK_SIZE, num_blocks=24, max_model_len=64
    )
    engine = build_engine(settings)
    try:
        yield engine
    finally:
        engine.pool.close()
