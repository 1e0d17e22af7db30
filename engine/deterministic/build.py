"""Makes a runner deterministic, and has it prove so. Says how, for the worker's report and its fingerprint."""

from dataclasses import dataclass, replace

from cluster.errors import ModelRefused
from cluster.messages import LayoutFingerprint
from engine.cpu.compiled_forward import CompiledForward
from engine.deterministic.check import check
from engine.deterministic.fixed_rows import fix_rows
from engine.deterministic.forward import FixedForward
from engine.deterministic.own_products import fix_own_products
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.steps.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Determinism:
    """How it was done, and the digest of what was computed to try it."""

    path: str
    digest: str
    report: str

    def marked(self, fingerprint: LayoutFingerprint) -> LayoutFingerprint:
        """Only workers that compute the same bits exchange KV."""
        mark = f"{fingerprint.dtype}, deterministic by {self.path} ({self.digest})"
        return replace(fingerprint, dtype=mark)


def make_deterministic(loaded: LoadedModel, runner: ModelRunner, pool: KvPool) -> Determinism:
    """The compiled kernels stay, any other forward makes room for the plain one with fixed shapes. Raises ModelRefused
    where bits differ all the same."""
    if isinstance(runner.forward, CompiledForward):
        digest = check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len)
        return Determinism("compiled kernels", digest, f"deterministic: the compiled kernels, tried ({digest})")
    counts = fix_rows(loaded.model)
    fix_own_products(loaded.model)
    digest, queries = _fixed(loaded, runner, pool)
    how = f"products of {'/'.join(map(str, counts))} rows, attention of {queries}"
    return Determinism("fixed shapes", digest, f"deterministic: {how}, tried ({digest})")


def _fixed(loaded: LoadedModel, runner: ModelRunner, pool: KvPool) -> tuple[str, str]:
    """Chunks many queries at once, where that gives the bits of one query at a time."""
    try:
        runner.forward = FixedForward(loaded.model, pool, wide=True)
        return check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len), "many queries"
    except ModelRefused:
        runner.forward = FixedForward(loaded.model, pool, wide=False)
        return check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len), "one query"
