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
    """How determinism was reached, and the digest of the check's results."""

    path: str
    digest: str
    report: str

    def marked(self, fingerprint: LayoutFingerprint) -> LayoutFingerprint:
        """Return the fingerprint extended by the digest, so that only workers that compute the same bits exchange
        KV."""
        mark = f"{fingerprint.dtype}, deterministic by {self.path} ({self.digest})"
        return replace(fingerprint, dtype=mark)


def make_deterministic(loaded: LoadedModel, runner: ModelRunner, pool: KvPool) -> Determinism:
    """Make the engine deterministic: keep the compiled kernels, or replace any other forward by the plain one with
    fixed shapes. Raises ModelRefused if results still depend on the batch."""
    if isinstance(runner.forward, CompiledForward):
        digest = check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len)
        return Determinism("compiled kernels", digest, f"deterministic: the compiled kernels, tried ({digest})")
    counts = fix_rows(loaded.model)
    fix_own_products(loaded.model)
    digest, queries = _fixed(loaded, runner, pool)
    how = f"products of {'/'.join(map(str, counts))} rows, attention of {queries}"
    return Determinism("fixed shapes", digest, f"deterministic: {how}, tried ({digest})")


def _fixed(loaded: LoadedModel, runner: ModelRunner, pool: KvPool) -> tuple[str, str]:
    """Compute many queries of a chunk at once if that yields the same bits as one query at a time."""
    try:
        runner.forward = FixedForward(loaded.model, pool, wide=True)
        return check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len), "many queries"
    except ModelRefused:
        runner.forward = FixedForward(loaded.model, pool, wide=False)
        return check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len), "one query"
