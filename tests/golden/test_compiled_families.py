"""The compiled forward and the plain one, both in bfloat16, against float32 on the same weights.

Teacher forcing as in test_families.py: seventeen sequences join one by one, prompts in chunks and decodes together. The
reference is the model's own eager attention on each sequence alone, without a cache, its bfloat16 weights widened.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.settings.worker_settings import EngineSettings
from engine.build import build_engine
from engine.cpu.compiled_forward import compiled_forward
from engine.cpu.library import load_kernels
from engine.decoders.layer_parts import NotCompiled
from engine.kv.pool import KvPool
from engine.model.loading import load
from engine.steps.forward import Forward
from engine.steps.runner import ModelRunner
from tests.golden.families import BLOCK_SIZE, CHUNK_TOKENS, FAMILIES
from tests.golden.forced import Forced, make_sequences, num_blocks, run_step, staggered

COMPILED = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2"]
NOT_COMPILED = {
    "gpt2": "GPT2Model is not a list of layers and a norm",
    "gpt_neox": "GPTNeoXModel is not a list of layers and a norm",
    "mixtral": "MixtralDecoderLayer is made of MixtralAttention, MixtralSparseMoeBlock, MixtralRMSNorm, MixtralRMSNorm",
    "gpt_oss": "GptOssDecoderLayer is made of GptOssAttention, GptOssMLP, GptOssRMSNorm, GptOssRMSNorm",
}
DECISIVE = 0.15  # in standard deviations of a row's logits: the margin of the best over the second


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    try:
        load_kernels()
    except NotCompiled as why:
        if "no compiler" in str(why) or "no AVX2" in str(why):
            pytest.skip(str(why))
        raise


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """The logits `[positions, vocab]` of every sampled position in order: the reference's, and those of runs of the
    plain forward, of the compiled one, and of both in turns over the same KV.
    """

    truth: torch.Tensor
    plain: torch.Tensor
    compiled: torch.Tensor
    mixed: torch.Tensor

    def errors(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the error of each row, relative to the spread of the reference's logits."""
        spread = self.truth - self.truth.mean(dim=-1, keepdim=True)
        errors: torch.Tensor = (logits - self.truth).norm(dim=-1) / spread.norm(dim=-1)
        return errors


def logits_of(runner: ModelRunner, vocab_size: int, forward_of: Callable[[int], Forward]) -> torch.Tensor:
    """Return the logits of a run whose step i is computed by forward_of(i)."""
    sequences = make_sequences(seed=1, vocab_size=vocab_size)
    for step, members in enumerate(staggered(sequences)):
        runner.forward = forward_of(step)
        run_step(runner, members)
    return torch.stack([row for sequence in sequences for _, row in in_order(sequence)])


def in_order(sequence: Forced) -> list[tuple[int, torch.Tensor]]:
    return [(position, row) for position, (row, _) in sorted(sequence.observed.items())]


@pytest.fixture(scope="module", params=COMPILED)
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Paths:
    folder = saved(request.param, tmp_path_factory.mktemp(request.param))
    loaded = load(settings(folder))
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    pool = KvPool(loaded.layout, num_blocks())
    pool.tensor.fill_(7.0)  # what earlier sequences left behind
    other = load(settings(folder))
    compiled = compiled_forward(settings(folder), other, pool)
    plain = loaded.forward(pool)
    reference.to(torch.float32)  # type: ignore[arg-type]  # its decorator hides the signature
    runner, truth = ModelRunner(plain, pool), truth_of(reference)
    ways: tuple[Callable[[int], Forward], ...] = (
        lambda _: plain,
        lambda _: compiled,
        lambda step: (plain, compiled)[step % 2],
    )
    found = Paths(truth, *(logits_of(runner, truth.shape[1], way) for way in ways))
    pool.close()
    return found


@torch.inference_mode()
def truth_of(reference: PreTrainedModel) -> torch.Tensor:
    rows = []
    for sequence in make_sequences(seed=1, vocab_size=reference.config.vocab_size):
        logits = reference(input_ids=torch.tensor([sequence.token_ids]), use_cache=False).logits[0]
        rows.append(logits[sequence.prompt_len - 1 :])
    return torch.cat(rows)


def saved(name: str, folder: Path) -> Path:
    """Save the family's model in widths that the kernels support: heads of 16."""
    family = FAMILIES[name]
    width = {"n_embd": 64} if name == "gpt2" else {"hidden_size": 64}
    dataclasses.replace(family, settings={**family.settings, **width}).save(folder)
    return folder


def settings(folder: Path) -> EngineSettings:
    return EngineSettings(
        model=str(folder),
        dtype="bfloat16",
        device="cpu",
        block_size=BLOCK_SIZE,
        max_prefill_tokens=CHUNK_TOKENS,
        cpu_kernels="on",
        num_blocks=32,
    )


def test_compiled_logits_are_as_exact_as_plain_ones(paths: Paths) -> None:
    plain, compiled = paths.errors(paths.plain), paths.errors(paths.compiled)

    assert compiled.median() <= plain.median()
    assert compiled.max() <= 1.5 * plain.max()


def test_compiled_greedy_tokens_equal_the_references_where_its_margin_is_clear(paths: Paths) -> None:
    best = paths.truth.topk(2, dim=-1).values
    decisive = best[:, 0] - best[:, 1] > DECISIVE * paths.truth.std(dim=-1)

    tokens = paths.compiled.argmax(dim=-1)
    assert torch.equal(tokens[decisive], paths.truth.argmax(dim=-1)[decisive])
    assert decisive.float().mean() > 0.5


def test_plain_and_compiled_workers_continue_each_others_sequences(paths: Paths) -> None:
    """KV means the same to both forwards: a compiled worker may continue a plain worker's prompt."""
    plain, mixed = paths.errors(paths.plain), paths.errors(paths.mixed)

    assert mixed.median() <= plain.median()
    assert mixed.max() <= 1.5 * plain.max()


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_unsupported_families_use_the_plain_forward_with_a_reason(name: str, tmp_path: Path) -> None:
    engine = build_engine(settings(saved(name, tmp_path)))
    engine.pool.close()
    assert f"forward: plain ({NOT_COMPILED[name]})" in engine.report
