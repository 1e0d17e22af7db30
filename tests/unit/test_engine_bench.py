"""The engine's benchmark: rates and ratios follow from its samples, and its limits from arithmetic."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine_limits import Limits
from benchmarks.engine_shapes import MODELS, Load, ModelShape
from benchmarks.engine_table import Row, Sample, as_markdown

_LOAD = Load(sequences=4, tokens_in=100, tokens_out=11)


def test_rates_are_medians_of_samples_and_shares_of_the_limit() -> None:
    samples = {
        "tandem": [Sample(0.5, 2.5), Sample(0.4, 1.4), Sample(0.4, 9.0)],  # steps of 0.2, 0.1 and 0.86 s
        "vllm": [Sample(0.8, 2.8)],
    }
    row = Row("tiny", _LOAD, Limits(prefill_s=0.2, step_s=0.05), samples)
    assert row.prefill_rate("tandem") == pytest.approx(1000)
    assert row.step_s("tandem") == pytest.approx(0.2)
    assert row.decode_rate("tandem") == pytest.approx(20)
    columns = [column.strip() for column in row.line().strip("|").split("|")]
    assert columns == ["tiny", "4 x 100/11", "1000", "0.50", "2.00", "20", "0.25", "1.00", "200.0"]
    about = dict.fromkeys(("processor", "kernel", "torch", "commit"), "x")
    assert as_markdown([row], about).splitlines()[-1] == row.line()
    assert json.loads(json.dumps(row.as_json()))["samples"]["vllm"] == [{"first_s": 0.8, "all_s": 2.8}]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_arithmetic_counts_what_the_model_has(model: ModelShape, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model.save(tmp_path / model.name))
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    matrices = sum(p.numel() for name, p in built.named_parameters() if p.ndim == 2 and "embed" not in name)
    assert matrices == model.layers * model.layer_params
    assert built.lm_head.weight.shape == (model.vocab, model.hidden)
