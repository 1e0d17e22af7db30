"""A cluster of real processes whose KV travels in 8 bits."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.kv.layout import LayerShape, lay_out
from kvtransfer.wire.wire_format import WireDtype
from tests.system.rigs.members.asking import ask, question
from tests.system.rigs.processes.local_cluster import DEMO_MODEL, LocalCluster

_PROMPT = tuple(range(100, 140))  # two full blocks and a tail
_LAYOUT = lay_out([LayerShape(2, 32, 32)] * 4, 16, "bfloat16")


@pytest.mark.slow
async def test_a_cluster_with_8_bits_on_the_wire_answers(redis_url: str, tmp_path: Path) -> None:
    cluster = LocalCluster(redis_url, tmp_path, flags=("--kv-wire-dtype", "int8", "--num-blocks", "64"))
    try:
        await cluster.start()
        answer = await ask(cluster, question(_PROMPT, max_tokens=8, ignore_eos=True))
        figures = await cluster.figures("decode")
        await cluster.until_free()
    finally:
        codes = await cluster.stop()

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    logits = model(input_ids=torch.tensor([_PROMPT])).logits[0, -1]
    wire_block_bytes = WireDtype("int8").copy_bytes(_LAYOUT)
    assert len(answer.token_ids) == 8
    assert logits[answer.token_ids[0]] > logits.max() - 0.1  # drawn at prefill, before anything was quantised
    assert answer.ledger.kv_bytes == figures["kv_bytes"] == 3 * wire_block_bytes < 0.53 * 3 * _LAYOUT.block_bytes
    assert figures["handoffs_ok"] == 1 and figures["local_prefills"] == 0
    assert f"KV is transferred as int8: {wire_block_bytes} bytes per block" in cluster.output()
    assert set(codes.values()) == {0}, cluster.output()[-4000:]
