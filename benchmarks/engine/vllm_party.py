"""vLLM as an engine of the benchmark, run by the Python of vLLM's own environment. Imports nothing of Tandem.

    python vllm_party.py MODEL_FOLDER

Prints {"version", "flags"}, then answers each line {"prompts", "tokens_out"} with its seconds. The variable LOAD_FORMAT
is dummy or auto.
"""

import json
import os
import sys
import time

_FLAGS = {
    "load_format": os.environ.get("LOAD_FORMAT", "dummy"),
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "max_model_len": 2048,
    "max_num_seqs": 64,
}


def main(model: str) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what its processes print must not come between the answers
    import vllm
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, **_FLAGS)

    def seconds(prompts: list[list[int]], tokens_out: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens_out, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        began_s = time.perf_counter()
        outputs = engine.generate(inputs, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens_out for output in outputs)
        return time.perf_counter() - began_s

    def say(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"version": vllm.__version__, "flags": " ".join(f"{name}={value}" for name, value in _FLAGS.items())})
    for line in sys.stdin:
        load = json.loads(line)
        say(seconds(load["prompts"], load["tokens_out"]))


if __name__ == "__main__":
    main(sys.argv[1])
