"""Tests that on a GPU every family gives the results of plain `transformers` on a CPU, with and without graphs, and
that the libraries' attention equals Tandem's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.messages import Sampling
from engine.attention.registry import CAPABILITIES
from engine.build import Engine
from engine.scheduling.step import Chunk, Sample, StepPlan
from tests.cuda.engines import WIDE, build, on_gpu
from tests.golden.families import BLOCK_SIZE, FAMILIES
from tests.golden.forced import Forced, Reference, judge, make_sequences, run_step, staggered

pytestmark = [pytest.mark.cuda, on_gpu]

MAX_LEN = 64
SAMPLE = (Sample(0, 0, Sampling()),)


def forced(engine: Engine) -> list[Forced]:
    """Compute the golden tests' sequences. The observed logits are on the host."""
    sequences = make_sequences(seed=1, vocab_size=engine.model_info.vocab_size)
    for members in staggered(sequences):
        run_step(engine.runner, members)
    for sequence in sequences:
        sequence.observed = {place: (row.cpu(), token) for place, (row, token) in sequence.observed.items()}
    engine.pool.close()
    return sequences


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_logits_and_greedy_tokens_are_the_models_own(name: str, graphs: str, tmp_path: Path) -> None:
    sequences = forced(build(tmp_path, FAMILIES[name], cuda_graphs=graphs))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    verdict = judge(Reference(reference.eval()), sequences)  # type: ignore[no-untyped-call]

    assert verdict.worst < 1e-3  # the sums of two devices' products
    assert verdict.wrong == 0


def plans(engine: Engine) -> Iterator[StepPlan]:
    """Return the steps of three sequences: their prompts in chunks, some together with decodes, then decodes alone."""
    blocks_each = engine.pool.layout.num_blocks_for(MAX_LEN)
    tables = [tuple(range(which * blocks_each, (which + 1) * blocks_each)) for which in range(3)]
    computed = [0, 0, 0]
    for lengths in ((20, 0, 0), (1, 19, 3), (1, 1, 17), (1, 1, 1), (1, 1, 1), (1, 1, 1)):
        chunks = []
        for which, length in enumerate(lengths):
            start = computed[which]
            token_ids = tuple(1 + (7 * place + which) % 97 for place in range(start, start + length))
            computed[which] += length
            if length:
                chunks.append(Chunk(which, token_ids, start, tables[which], SAMPLE))
        yield StepPlan(tuple(chunks))


def rows(engine: Engine) -> torch.Tensor:
    """Return the logits of every step, on the host."""
    found = torch.cat([engine.runner.logits(plan).float().cpu() for plan in plans(engine)])
    engine.pool.close()
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("backend", "block_size"), [("triton", BLOCK_SIZE), ("flashinfer", 16), ("varlen", 256)])
def test_attention_in_16_bits_is_near_that_written_out(
    backend: str, block_size: int, dtype: str, tmp_path: Path
) -> None:
    if why := next(each for each in CAPABILITIES if each.name == backend).lacks_here():
        pytest.skip(why)
    ours, plain = (
        rows(build(tmp_path / name, WIDE, dtype=dtype, attention_backend=name, block_size=block_size))
        for name in (backend, "gather")
    )
    worst = float(((ours - plain).norm(dim=-1) / plain.norm(dim=-1)).max())
    assert worst < (3e-2 if dtype == "bfloat16" else 4e-3)


def test_bfloat16_models_are_served_by_fused_kernels_and_graphs(tmp_path: Path) -> None:
    """Each of them falls back silently if it fails, so figures alone would not show it."""
    engine = build(tmp_path, WIDE, dtype="bfloat16")
    engine.pool.close()
    assert "forward: fused, 2 layers" in engine.report
    assert engine.report[-1].startswith("cuda graphs: 6 sizes"), engine.report
