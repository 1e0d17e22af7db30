"""vLLM as a party of the engine's benchmark, in an environment of its own; run by that environment's Python.

    python engine_vllm.py MODEL_FOLDER

Reads one JSON object per line ({"sequences", "tokens_in", "tokens_out"}), answers each with {"first_s", "all_s"}:
seconds for one token of every sequence, and for all. Imports nothing of Tandem.
"""

import json
import os
import sys
import time


def main(model: str) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what its processes print must not come between the answers
    import vllm
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=64,
    )

    def seconds(load: dict[str, int], tokens_out: int) -> float:
        prompts = [
            {"prompt_token_ids": [(7 * i + 13 * s) % 40000 + 10 for i in range(load["tokens_in"])]}
            for s in range(load["sequences"])
        ]
        params = SamplingParams(temperature=0.0, max_tokens=tokens_out, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens_out for output in outputs)
        return time.perf_counter() - began_s

    def say(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"version": vllm.__version__})
    for line in sys.stdin:
        load = json.loads(line)
        say({"first_s": seconds(load, 1), "all_s": seconds(load, load["tokens_out"])})


if __name__ == "__main__":
    main(sys.argv[1])
