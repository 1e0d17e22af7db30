"""The model's own `generate` as an engine of the benchmark: one static batch with the KV cache of `transformers`.

    python transformers_party.py MODEL_FOLDER

Uses the same messages as vllm_party.py.
"""

import json
import sys
import time

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM


def main(model: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()  # type: ignore[no-untyped-call]

    def seconds(prompts: list[list[int]], tokens_out: int) -> float:
        ids = torch.tensor(prompts)
        began_s = time.perf_counter()
        with torch.inference_mode():
            output = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens_out,
                min_new_tokens=tokens_out,
                pad_token_id=0,
            )
        assert output.shape[1] == ids.shape[1] + tokens_out
        return time.perf_counter() - began_s

    print(json.dumps({"version": transformers.__version__, "flags": "generate, bfloat16, sdpa"}), flush=True)
    for line in sys.stdin:
        load = json.loads(line)
        print(seconds(load["prompts"], load["tokens_out"]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
