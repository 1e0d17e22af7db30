"""Measure what grammars add to steps of 64 sequences with a vocabulary of 131,072 tokens, in process.

`python -m benchmarks.structured_output` prints the table of benchmarks/results/structured_output.md. Each step is
computed twice, with its grammars and without them, in turns, on the same blocks; only the result with grammars advances
the sequences. The model is a random Llama whose last layer has the full vocabulary. Its tokenizer, of random words, is
made here: masks cost more with it than with a trained one. All sequences follow one schema, each at its own place.
"""

import json
import random
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.machine import about, version
from cluster.messages import DecodeJob, Grammar, GrammarKind, MemberId, Sampling, SequenceStart, TokenStops
from cluster.protocol.hashing import nameless_chains
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.grammar.compiled_grammars import CompiledGrammars, StepMasks
from engine.scheduling.commands import AdmitLocal
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import Chunk, StepPlan, StepResult

_DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
_VOCAB_SIZE = 131_072
_NUM_SEQUENCES = 64
_NUM_STEPS = 60
_NUM_WARM = 5
_BLOCK_SIZE, _NUM_BLOCKS = 16, 1024
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "value": {"type": "integer", "minimum": -9999, "maximum": 9999},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
    },
    "required": ["name", "value", "kind"],
    "additionalProperties": False,
}
_GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": _ITEM, "minItems": 100}))
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def main() -> None:
    print(", ".join([*about().values(), f"llguidance {version('llguidance')}"]), end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(Path(folder))
        print("; ".join(engine.report), end="\n\n")
        print("| sampling | step thread without, ms of CPU | with grammars | step thread | wall | process, CPU |")
        print("|---|---|---|---|---|---|")
        for name, sampling in (("greedy", Sampling()), ("temperature 1", Sampling(temperature=1.0))):
            print(f"| {name} | {_row(engine, sampling)} |", flush=True)


def _engine(folder: Path) -> Engine:
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    _write_tokenizer(folder / "tokenizer.json")
    settings = EngineSettings(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        block_size=_BLOCK_SIZE,
        num_blocks=_NUM_BLOCKS,
        max_model_len=512,
        max_num_seqs=_NUM_SEQUENCES,
    )
    engine = build_engine(settings)
    engine.runner.masks = StepMasks(CompiledGrammars(folder))
    return engine


def _write_tokenizer(path: Path) -> None:
    """Add random words of the demo model's tokens until the vocabulary is full."""
    tokenizer = json.loads((_DEMO / "tokenizer.json").read_text())
    vocab, merges, dice = tokenizer["model"]["vocab"], tokenizer["model"]["merges"], random.Random(0)
    parts = [token for token in vocab if token.isascii() and token.isalnum()]
    while len(vocab) < _VOCAB_SIZE:
        left, right = dice.choice(parts), dice.choice(parts)
        if len(left + right) <= 12 and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right] if isinstance(merges[0], list) else f"{left} {right}")
            parts += [left + right] if dice.random() < 0.3 else []
    Tokenizer.from_str(json.dumps(tokenizer)).save(str(path))


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds of one step."""

    wall: float
    step_thread: float  # its CPU time
    process: float  # CPU time, with that of the thread that computes masks

    def over(self, other: "Costs") -> tuple[float, float, float]:
        return self.wall / other.wall, self.step_thread / other.step_thread, self.process / other.process


def _row(engine: Engine, sampling: Sampling) -> str:
    scheduler = _decoding(engine, sampling)
    turns: list[tuple[Costs, Costs]] = []
    for number in range(_NUM_WARM + _NUM_STEPS):
        _, plan = scheduler.plan(0.0)
        assert plan is not None and len(plan.chunks) == _NUM_SEQUENCES
        plain = replace(plan, chunks=tuple(map(_without_grammar, plan.chunks)))
        if number % 2:
            _, before = _timed(engine, plain)
            result, after = _timed(engine, plan)
        else:
            result, after = _timed(engine, plan)
            _, before = _timed(engine, plain)
        scheduler.complete(plan, result, 0.0)
        turns += [(before, after)] if number >= _NUM_WARM else []
    threads_ms = [statistics.median(costs.step_thread for costs in side) * 1e3 for side in zip(*turns, strict=True)]
    ratios = zip(*(after.over(before) for before, after in turns), strict=True)
    wall, thread, process = (f"{statistics.median(ratio) - 1:+.1%}" for ratio in ratios)
    return f"{threads_ms[0]:.1f} | {threads_ms[1]:.1f} | {thread} | {wall} | {process}"


def _decoding(engine: Engine, sampling: Sampling) -> SequenceScheduler:
    """Return a scheduler whose 64 sequences decode, each at another place of the schema."""
    limits = SchedulerLimits(
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        max_model_len=512,
        max_num_seqs=_NUM_SEQUENCES,
        max_prefill_tokens=512,
        max_queue=_NUM_SEQUENCES,
    )
    scheduler = SequenceScheduler(limits, new_chain=nameless_chains())
    for number in range(_NUM_SEQUENCES):
        job = DecodeJob(
            request_id=f"r{number}",
            attempt=1,
            router=MemberId("router", "1"),
            prompt_token_ids=(5, 6, 7),
            sampling=sampling,
            stops=TokenStops(400, stop_token_ids=frozenset({0})),
            sequences=(SequenceStart(number, number),),
            signed_ticket=None,
            timeout_s=1e6,
            grammar=_GRAMMAR,
        )
        scheduler.apply(AdmitLocal(job), 0.0)
        _, plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.complete(plan, engine.runner.run(plan), 0.0)
    return scheduler


def _without_grammar(chunk: Chunk) -> Chunk:
    return replace(chunk, samples=tuple(replace(sample, grammar_state=None) for sample in chunk.samples))


def _timed(engine: Engine, plan: StepPlan) -> tuple[StepResult, Costs]:
    process_s, thread_s, start_s = _cpu_s(), time.thread_time(), time.perf_counter()
    result = engine.runner.run(plan)
    end_s = time.perf_counter()
    return result, Costs(end_s - start_s, time.thread_time() - thread_s, _cpu_s() - process_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
