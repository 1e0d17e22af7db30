"""Measure gain and cost of speculative decoding on one core, in the engine alone.

    python -m benchmarks.speculation [FOLDER_OF_A_LARGER_MODEL]

Prints the tables of benchmarks/results/speculation.md. First the demo model continues files of the standard library,
with and without prompt look-up, in turns; the fastest sample counts. Then steps with draft tokens are timed for a
larger model with random weights, where every draft token costs its row.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.machine import about
from cluster.messages import Sampling
from cluster.request_size import blocks_for
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.speculation.drafter import Drafter, drafter_factory
from engine.timing.steps_at_load import fixed_rows

_DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
_TEXTS = Path(json.__file__).parents[1]  # the standard library's folder
_FILES = (
    *("argparse", "ast", "bisect", "calendar", "cmd", "configparser", "copy", "csv"),
    *("dis", "fractions", "gzip", "heapq", "imaplib", "locale", "queue", "shlex"),
)
_PROMPT_TOKENS, _NEW_TOKENS, _TURNS = 300, 200, 4
_COST_CONTEXT, _COST_STEPS = 300, 9


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence as the decode worker keeps it."""

    number: int
    token_ids: list[int]
    block_ids: tuple[int, ...]
    sampling: Sampling
    drafter: Drafter | None
    num_computed: int = 0
    num_draft_tokens: int = 0

    def chunk(self, most_tokens: int, block_size: int, num_sequences: int) -> Chunk:
        draft_tokens: tuple[int, ...] = ()
        if self.drafter is not None and self.num_computed:
            limit = most_tokens - len(self.token_ids) - 1
            draft_tokens = self.drafter.propose(self.token_ids, limit, num_sequences)
        end = len(self.token_ids)
        return Chunk(
            self.number,
            (*self.token_ids[self.num_computed :], *draft_tokens),
            self.num_computed,
            self.block_ids[: blocks_for(end + len(draft_tokens), block_size)],
            tuple(Sample(self.number, end + index, self.sampling) for index in range(len(draft_tokens) + 1)),
            num_draft_tokens=len(draft_tokens),
        )

    def grow(self, chunk: Chunk, drawn: Sequence[int]) -> None:
        self.num_computed = len(self.token_ids) + len(drawn) - 1
        self.token_ids += drawn
        self.num_draft_tokens += chunk.num_draft_tokens
        if self.drafter is not None and chunk.num_draft_tokens:
            self.drafter.judge(chunk.num_draft_tokens, len(drawn) - 1)


@dataclass(slots=True)
class _Run:
    """Decode steps only, without the step of the prompts."""

    seconds: float = 0.0
    tokens: int = 0
    sequence_steps: int = 0
    draft_tokens: int = 0
    text: list[list[int]] = field(default_factory=list)


def _prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(_DEMO / "tokenizer.json"))
    return [tokenizer.encode((_TEXTS / f"{name}.py").read_text()).ids[:_PROMPT_TOKENS] for name in _FILES]


def _continued(
    engine: Engine, make: Callable[[], Drafter] | None, prompts: list[list[int]], temperature: float
) -> _Run:
    most, block_size = _PROMPT_TOKENS + _NEW_TOKENS, engine.pool.layout.block_size
    width = blocks_for(most, block_size)
    sequences = [
        _Sequence(
            number,
            list(prompt),
            tuple(range(number * width, (number + 1) * width)),
            Sampling(temperature=temperature),
            make() if make is not None else None,
        )
        for number, prompt in enumerate(prompts)
    ]
    _step(engine, sequences, most, block_size)
    run = _Run()
    began_s = time.perf_counter()
    while going := [sequence for sequence in sequences if len(sequence.token_ids) < most]:
        _step(engine, going, most, block_size)
        run.sequence_steps += len(going)
    run.seconds = time.perf_counter() - began_s
    run.tokens = len(prompts) * (_NEW_TOKENS - 1)
    run.draft_tokens = sum(sequence.num_draft_tokens for sequence in sequences)
    run.text = [sequence.token_ids for sequence in sequences]
    return run


def _step(engine: Engine, sequences: list[_Sequence], most: int, block_size: int) -> None:
    chunks = tuple(sequence.chunk(most, block_size, len(sequences)) for sequence in sequences)
    for sequence, chunk, drawn in zip(sequences, chunks, engine.runner.run(StepPlan(chunks)).tokens, strict=True):
        sequence.grow(chunk, [token.token_id for token in drawn])


def _demo_rows() -> Iterator[str]:
    settings = EngineSettings(model=str(_DEMO), device="cpu", num_blocks=1024, num_threads=1)
    engine, prompts = build_engine(settings), _prompts()
    fixed = fixed_rows(engine)
    ways = {"off": None, "prompt": drafter_factory(replace(settings, speculation="prompt"), lambda: fixed)}
    yield f"| a step's fixed part: {fixed:.1f} rows |"
    for count in (1, 4, 16):
        for temperature in (0.0, 0.8):
            groups = [prompts[begin : begin + count] for begin in range(0, 16, count)][:4]
            runs: dict[str, list[_Run]] = {name: [] for name in ways}
            for _ in range(_TURNS):
                for name, way in ways.items():
                    runs[name].append(_sum([_continued(engine, way, group, temperature) for group in groups]))
            equal = sum(a == b for a, b in zip(runs["off"][0].text, runs["prompt"][0].text, strict=True))
            speculating = runs["prompt"][0]
            steps, right = speculating.sequence_steps, speculating.tokens - speculating.sequence_steps
            rates = {name: max(run.tokens / run.seconds for run in taken) for name, taken in runs.items()}
            yield (
                f"| {count} | {temperature} | {right / max(1, speculating.draft_tokens):.0%} | "
                f"{speculating.tokens / steps:.2f} | "
                f"{rates['off']:,.0f} | {rates['prompt']:,.0f} | {rates['prompt'] / rates['off']:.2f} | "
                f"{equal} of {len(speculating.text)} |"
            )


def _sum(runs: list[_Run]) -> _Run:
    return _Run(
        sum(run.seconds for run in runs),
        sum(run.tokens for run in runs),
        sum(run.sequence_steps for run in runs),
        sum(run.draft_tokens for run in runs),
        [text for run in runs for text in run.text],
    )


def _cost_rows(folder: str) -> Iterator[str]:
    settings = EngineSettings(
        model=folder, load_format="dummy", dtype="bfloat16", device="cpu", kv_cache_memory="2GiB", num_threads=1
    )
    engine = build_engine(settings)
    fixed = fixed_rows(engine)
    yield f"| a step's fixed part: {fixed:.1f} rows |"
    for count in (1, 4, 16, 64):
        times = {number: _step_s(engine, count, number, settings.block_size) for number in (0, 1, 2, 4)}
        cells = " | ".join(f"{1e3 * seconds:.1f} ms" for seconds in times.values())
        yield f"| {count} | {cells} | {(times[4] / times[0] - 1) / 4:.2f} | {count / (count + fixed):.2f} |"


def _step_s(engine: Engine, count: int, num_draft_tokens: int, block_size: int) -> float:
    """Return the seconds of a step of sequences in the middle of their output, with arbitrary draft tokens."""
    width = blocks_for(_COST_CONTEXT + 1 + num_draft_tokens, block_size)
    end = _COST_CONTEXT + 1
    chunks = tuple(
        Chunk(
            number,
            tuple(range(5, 6 + num_draft_tokens)),
            _COST_CONTEXT,
            tuple(range(number * width, (number + 1) * width)),
            tuple(Sample(number, end + index, Sampling()) for index in range(num_draft_tokens + 1)),
            num_draft_tokens=num_draft_tokens,
        )
        for number in range(count)
    )
    taken = []
    for _ in range(_COST_STEPS):
        began_s = time.perf_counter()
        engine.runner.run(StepPlan(chunks))
        taken.append(time.perf_counter() - began_s)
    return min(taken)


def main(arguments: list[str]) -> None:
    print(about())
    print("\n| sequences | temperature | accepted | tokens per step | tok/s off | tok/s prompt | ratio | equal |")
    print("|---|---|---|---|---|---|---|---|")
    for row in _demo_rows():
        print(row, flush=True)
    if arguments:
        print("\n| sequences | no draft token | 1 draft token | 2 | 4 | measured | estimated |")
        print("|---|---|---|---|---|---|---|")
        for row in _cost_rows(arguments[0]):
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
