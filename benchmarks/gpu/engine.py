"""Measure the engine on one GPU with the shape of an 8B Llama and random weights, beside the device's limits.

    python -m benchmarks.gpu.engine [--attention-backend NAME] [--cuda-graphs off] [--tiny] [--output FOLDER]

Prefill is one prompt alone, in chunks. Decode is whole greedy steps of a number of sequences, with sampling and the
read of the tokens. The limits are measured in the same run, before and after: the bandwidth of a copy (bytes read and
written) and the rate of a large bfloat16 product. A GPU with less memory gets a smaller shape or fewer sizes, with the
reason. `--tiny` runs everything in small, on a CPU too.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig

from benchmarks.gpu.memory import room, that_fit
from benchmarks.gpu.shapes import GPU_LOADS, TINY_LOADS, Loads, Work, tiny
from benchmarks.gpu.step_loop import MORE_TOKENS, Decodes, step_times_s
from benchmarks.machine import about
from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.attention import registry
from engine.attention.interface import ATTENTION_NAME, register
from engine.build import forwards, gpu_forward
from engine.kv.layout import lay_out
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel, ModelInfo
from engine.model.loading import dummy_model, trace
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.runner import LaunchingRunner, ModelRunner

_RESULTS = Path(__file__).parents[1] / "results" / "gpu"
_GREEDY = Sampling()
_LEAST_KV_TOKENS = 8_192 + 64


@dataclass(frozen=True, slots=True)
class Rates:
    """The device's best rates."""

    copy_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    what: str  # prefill, decode
    size: int  # tokens of the prompt, or sequences
    tokens_per_s: float
    samples_s: tuple[float, ...]  # of a prompt, or of a step
    limit_share: float
    launch_s: float = 0.0  # median of a step: until the host had asked the device for all of it


def main() -> None:
    arguments = _arguments()
    loads = TINY_LOADS if arguments.tiny else GPU_LOADS
    folder = arguments.output or (None if arguments.tiny else _RESULTS)
    print(table(run(arguments, loads, lambda result: _keep(folder, result) if folder is not None else None)))


def _keep(folder: Path, result: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"engine-{result['attention']}"
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{name}.md").write_text(table(result))


def run(
    arguments: argparse.Namespace, loads: Loads, keep: Callable[[dict[str, Any]], object] = lambda result: None
) -> dict[str, Any]:
    """Measure every row. `keep` receives the results so far after each row."""
    device = torch.device(arguments.device)
    before = _rates(device, arguments.tiny)
    shape, config, loads, left_out = fitting(loads, device, is_tiny=arguments.tiny)
    settings = EngineSettings(
        model="random",
        attention_backend=arguments.attention_backend,
        cuda_graphs=arguments.cuda_graphs,
        block_size=arguments.block_size,
        max_num_seqs=max(loads.batch_sizes),
        max_model_len=max(loads.prompt_tokens),
    )
    loaded = loaded_engine(config, settings, device)
    bench = Bench(loaded, settings, loads)
    work = Work.of(config)
    result: dict[str, Any] = {
        "about": about() | {"device": _name(device)},
        "shape": shape,
        "attention": loaded.attention.name,
        "report": bench.report,
        "loads": dataclasses.asdict(loads),
        "left_out": left_out,
        "rates": [dataclasses.asdict(before)],
        "rows": [],
    }
    keep(result)
    measured = [("prefill", tokens, partial(bench.prefill, tokens)) for tokens in loads.prompt_tokens]
    for sequences in loads.batch_sizes:
        measured.append(("decode", sequences, partial(bench.decode, sequences)))
        for what, ahead in _LOOPS.items():
            measured.append((what, sequences, partial(bench.loop, what, sequences, ahead)))
    for what, size, measure in measured:
        try:
            result["rows"].append(dataclasses.asdict(measure(work, before)))
        except torch.OutOfMemoryError as error:
            left_out.append(f"{what} of {size}: {str(error).partition('. ')[0]}")
            torch.cuda.empty_cache()
        keep(result)
    bench.close()
    result["rates"].append(dataclasses.asdict(_rates(device, arguments.tiny)))
    keep(result)
    return result


def fitting(loads: Loads, device: torch.device, *, is_tiny: bool) -> tuple[str, LlamaConfig, Loads, list[str]]:
    """Return the shape's name, the shape, the loads whose KV fits, and the omitted loads with reasons."""
    if device.type != "cuda" or is_tiny:
        return "tiny", tiny(), loads, []
    found = room(torch.cuda.mem_get_info(device)[0], num_processes=1, least_kv_tokens=_LEAST_KV_TOKENS)
    fitting_loads = dataclasses.replace(
        loads,
        prompt_tokens=that_fit(loads.prompt_tokens, 1, found.kv_tokens),
        batch_sizes=that_fit(loads.batch_sizes, loads.context + loads.steps + MORE_TOKENS, found.kv_tokens),
    )
    why = f"there is memory for KV of {found.kv_tokens:,} tokens"
    left_out = [f"prefill of {size}: {why}" for size in loads.prompt_tokens if size not in fitting_loads.prompt_tokens]
    left_out += [f"decode of {size}: {why}" for size in loads.batch_sizes if size not in fitting_loads.batch_sizes]
    return found.shape, found.config, fitting_loads, [*([found.why_smaller] if found.why_smaller else []), *left_out]


class Bench:
    """One model over one pool that holds the largest load."""

    def __init__(self, loaded: LoadedModel, settings: EngineSettings, loads: Loads) -> None:
        self._loads = loads
        self._per_sequence = loaded.layout.num_blocks_for(loads.context + loads.steps + MORE_TOKENS)
        longest = loaded.layout.num_blocks_for(max(loads.prompt_tokens))
        num_blocks = max(longest, max(loads.batch_sizes) * self._per_sequence)
        self._pool = KvPool(loaded.layout, num_blocks, loaded.device, num_spare=1)
        on_gpu = self._pool.device.type == "cuda"
        self._runner = (LaunchingRunner if on_gpu else ModelRunner)(loaded.forward(self._pool), self._pool)
        self.report: tuple[str, ...] = ()
        if on_gpu:
            self._runner.forward, self.report = gpu_forward(settings, loaded, self._pool, forwards(settings, loaded))

    def prefill(self, tokens: int, work: Work, rates: Rates) -> Row:
        most = self._loads.chunk_tokens

        def prompt() -> float:
            return sum(
                self.launch(self.chunk(min(most, tokens - start), start, tokens)) for start in range(0, tokens, most)
            )

        samples_s, launch_s = _samples_s(prompt, repeats=5)
        taken_s = statistics.median(samples_s)
        share = work.prefill_flops(tokens) / taken_s / rates.flops_per_s
        return Row("prefill", tokens, tokens / taken_s, samples_s, share, launch_s)

    def decode(self, sequences: int, work: Work, rates: Rates) -> Row:
        """Measure decode steps alone; contexts grow by one token per step."""
        first = self._loads.context - self._loads.steps // 2
        positions = iter(range(first - _NUM_WARM, first + self._loads.steps))

        def step() -> float:
            return self.launch(self.decodes(sequences, next(positions)))

        samples_s, launch_s = _samples_s(step, repeats=self._loads.steps)
        taken_s = statistics.median(samples_s)
        share = work.decode_bytes(sequences, self._loads.context) / taken_s / rates.copy_bytes_per_s
        return Row("decode", sequences, sequences / taken_s, samples_s, share, launch_s)

    def loop(self, what: str, sequences: int, ahead: bool, work: Work, rates: Rates) -> Row:
        """Measure decode steps as a worker computes them, including the scheduler's time that no step hides."""
        loads, block_size = self._loads, self._pool.layout.block_size
        decodes = Decodes(sequences, loads.context, loads.steps, self._pool.num_blocks, block_size)
        samples_s = step_times_s(self._runner, decodes, ahead=ahead)
        taken_s = statistics.median(samples_s)
        share = work.decode_bytes(sequences, loads.context) / taken_s / rates.copy_bytes_per_s
        return Row(what, sequences, sequences / taken_s, samples_s, share)

    def close(self) -> None:
        self._pool.close()

    def launch(self, plan: StepPlan, profiler: AbstractContextManager[object] | None = None) -> float:
        """Return the seconds until a step was launched, after its tokens have arrived. `profiler` sees the launch."""
        began_s = time.perf_counter()
        with profiler or nullcontext():
            started = self._runner.start(plan)
        launched_s = time.perf_counter()
        started.result()
        return launched_s - began_s

    def chunk(self, tokens: int, start: int, prompt_tokens: int = 0) -> StepPlan:
        """Return a step with a chunk of a prompt; the last chunk draws a token. By default it is the last one."""
        end = start + tokens
        block_ids = tuple(range(-(-max(end, prompt_tokens) // self._pool.layout.block_size)))
        samples = (Sample(0, end, _GREEDY),) if end >= prompt_tokens else ()
        return StepPlan((Chunk(0, (7,) * tokens, start, block_ids, samples),))

    def decodes(self, sequences: int, position: int) -> StepPlan:
        """Return a step that decodes the token at `position` of each sequence."""
        return StepPlan(tuple(self._decode(number, position) for number in range(sequences)))

    def _decode(self, number: int, position: int) -> Chunk:
        begin = number * self._per_sequence
        block_ids = tuple(range(begin, begin + position // self._pool.layout.block_size + 1))
        return Chunk(number, (7,), position, block_ids, (Sample(0, position + 1, _GREEDY),))


# Of a whole worker's loop: whether the next step is planned and launched while one runs (--async-scheduling).
_LOOPS = {"decode, worker's loop": True, "decode, worker's loop, nothing ahead": False}
_NUM_WARM = 2  # runs that are not counted


def _samples_s(work: Callable[[], float], repeats: int) -> tuple[tuple[float, ...], float]:
    """Time runs that each end with their tokens on the host; also return the median of the runs' own results."""
    samples, answers = [], []
    for _ in range(_NUM_WARM + repeats):
        started_s = time.perf_counter()
        answers.append(work())
        samples.append(time.perf_counter() - started_s)
    return tuple(samples[_NUM_WARM:]), statistics.median(answers[_NUM_WARM:])


def loaded_engine(config: PreTrainedConfig, settings: EngineSettings, device: torch.device) -> LoadedModel:
    """Build the engine without the load check; the golden tests verify the model."""
    register()
    model = dummy_model(config, torch.bfloat16, ATTENTION_NAME, device).eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    traces = trace(model)
    dtype = traces[0].dtype
    layout = lay_out([layer.shape for layer in traces], settings.block_size, dtype)
    needs = registry.Needs(
        device=device.type,
        dtype=dtype,
        kv_dtype=dtype,
        head_dims=frozenset({config.head_dim}),
        block_size=settings.block_size,
        window=False,
        softcap=False,
        sinks=False,
    )
    info = ModelInfo("random", "Llama", config.vocab_size, settings.max_model_len, frozenset(), dtype, _GREEDY)
    return LoadedModel(model, info, layout, registry.choose(settings.attention_backend, needs), str(device))


def _rates(device: torch.device, is_tiny: bool) -> Rates:
    num_bytes, side = (1 << 20, 128) if is_tiny else (4 << 30, 8_192)
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    copy_s = _device_s(lambda: target.copy_(source), device)
    product_s = _device_s(lambda: left @ right, device)
    return Rates(2 * num_bytes / copy_s, 2.0 * side**3 / product_s)


def _device_s(work: Callable[[], object], device: torch.device, launches: int = 10) -> float:
    """Return the device's seconds per launch, the best of five, without the host's part."""
    best = float("inf")
    for _ in range(5):
        _wait(device)
        started_s = time.perf_counter()
        for _ in range(launches):
            work()
        _wait(device)
        best = min(best, (time.perf_counter() - started_s) / launches)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def table(result: dict[str, Any]) -> str:
    rates = result["rates"][0]
    lines = [
        f"# {result['about']['device']}, a Llama of {result['shape']}, attention by {result['attention']}",
        "",
        f"Commit {result['about']['commit']}, {result['about']['date']}, torch {result['about']['torch']}. "
        f"A copy moves {rates['copy_bytes_per_s'] / 1e9:.0f} GB/s (read and written), a product of bfloat16 "
        f"computes {rates['flops_per_s'] / 1e12:.1f} TFLOP/s.",
        *result["report"],
        "",
        "| | size | tokens/s | median | of it until launched | share of the limit |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        median_ms = statistics.median(row["samples_s"]) * 1e3
        lines.append(
            f"| {row['what']} | {row['size']:,} | {row['tokens_per_s']:,.0f} | {median_ms:.2f} ms | "
            f"{_ms(row['launch_s'])} | {row['limit_share']:.1%} |"
        )
    lines += ["", *(f"Left out: {each}." for each in result["left_out"])]
    return "\n".join(lines) + "\n"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds else ""


def _arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.engine")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--cuda-graphs", default="auto", choices=("auto", "off"))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any machine; stored only with --output")
    parser.add_argument("--output", type=Path, help="folder for the result; default: benchmarks/results/gpu")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
