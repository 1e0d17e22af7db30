"""Every attention back end on a GPU against plain `transformers`: in float32 its tokens, in bfloat16 as near to the
model in float32 as `transformers` itself comes in bfloat16."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.attention.registry import CAPABILITIES
from engine.build import Engine
from tests.cuda.engines import WIDE, build, on_gpu
from tests.cuda.test_golden import forced, plans
from tests.golden.families import BLOCK_SIZE, FAMILIES
from tests.golden.forced import Reference, judge

pytestmark = [pytest.mark.cuda, on_gpu]

# By name, with the blocks that it takes. The libraries compute no float32.
BACK_ENDS = {"triton": BLOCK_SIZE, "gather": BLOCK_SIZE, "flashinfer": 16, "varlen": 256}
ALLOWED = 2.0  # times what transformers' own bfloat16 is off by: both round, in another order


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_the_fallback_back_end_equals_transformers_in_float32(name: str, tmp_path: Path) -> None:
    """The golden tests of all families compare Triton's back end with this one."""
    sequences = forced(build(tmp_path, FAMILIES[name], attention_backend="gather"))
    verdict = judge(Reference(reference(tmp_path, torch.float32)), sequences)
    assert verdict.wrong == 0 and verdict.worst < 1e-3


@pytest.mark.parametrize("name", list(BACK_ENDS))
def test_bfloat16_is_as_near_as_transformers_own(name: str, tmp_path: Path) -> None:
    if why := next(each for each in CAPABILITIES if each.name == name).lacks_here():
        pytest.skip(why)
    engine = build(tmp_path, WIDE, dtype="bfloat16", attention_backend=name, block_size=BACK_ENDS[name])
    ours, token_ids = observed(engine)
    model = reference(tmp_path, torch.bfloat16)
    rounded = torch.cat([said(model, ids) for ids in token_ids])
    widened: PreTrainedModel = model.float()  # type: ignore[no-untyped-call]
    exact = torch.cat([said(widened, ids) for ids in token_ids])  # of the same, already rounded, weights
    assert worst(ours, exact) <= ALLOWED * worst(rounded, exact)


def observed(engine: Engine) -> tuple[torch.Tensor, list[list[int]]]:
    """Return the logits in the order of steps, and for each of them the tokens so far."""
    rows: list[torch.Tensor] = []
    prefixes: list[list[int]] = []
    so_far: dict[int, list[int]] = {}
    for plan in plans(engine):
        rows.append(engine.runner.logits(plan).to(torch.float32, copy=True).cpu())
        for chunk in plan.chunks:
            so_far[chunk.sequence_id] = [*so_far.get(chunk.sequence_id, []), *chunk.token_ids]
            prefixes.append(so_far[chunk.sequence_id])
    engine.pool.close()
    return torch.cat(rows), prefixes


@torch.inference_mode()
def said(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return the last token's logits `[1, vocab]`, computed for the whole sequence at once."""
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[:, -1].float()
    return logits


def reference(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return attention computed on the CPU from its definition."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()  # type: ignore[no-untyped-call, no-any-return]


def worst(rows: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference in a row, relative to the row's own magnitude."""
    return float(((rows - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
