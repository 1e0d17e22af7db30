"""Show where a step on a GPU spends its time: the host's functions while it launches, the device's kernels, and the
speed of attention by the size of its tiles.

    python -m benchmarks.gpu.profile [--only host,device,tiles] [--tiny]

Prints tables and keeps nothing: it is read before and after a change. `--tiny`: the host's part in small, on a CPU too.
"""

import argparse
import cProfile
import io
import itertools
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine import Bench, fitting, loaded_engine
from benchmarks.gpu.shapes import GPU_LOADS, TINY_LOADS, Loads
from cluster.settings.worker_settings import EngineSettings
from engine.attention.interface import AttentionOptions, LayerKv
from engine.batch import pack
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.scheduling.step import Chunk, StepPlan

_SHOWN = 24  # functions or kernels of each table
_NUM_STEPS = 20
_BLOCK_SIZE = 16
_TILE_CHUNK, _TILE_CONTEXT = 4_096, 32_768  # tokens
_TILES = tuple(itertools.product((64, 128), (64, 128), (2, 3)))  # rows, columns, stages


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.profile")
    parser.add_argument("--only", default="host,device,tiles", help="parts, comma-separated (default: all)")
    parser.add_argument("--tiny", action="store_true", help="the host's part in small, on a CPU too")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, config, loads, _ = fitting(
        TINY_LOADS if arguments.tiny else replace(GPU_LOADS, batch_sizes=(1, 64, 256)), device, is_tiny=arguments.tiny
    )
    # Without graphs every launch is seen.
    settings = EngineSettings(
        model="random",
        cuda_graphs="off",
        block_size=_BLOCK_SIZE,
        max_num_seqs=max(loads.batch_sizes),
        max_model_len=max(loads.prompt_tokens),
    )
    loaded = loaded_engine(config, settings, device)
    bench = Bench(loaded, settings, loads)
    parts = arguments.only.split(",")
    if "host" in parts:
        for name, plans in _steps(bench, loads):
            _print_host(name, bench, plans)
    if "device" in parts and device.type == "cuda":
        for name, plans in _steps(bench, loads):
            _print_device(name, bench, plans)
    bench.close()
    if "tiles" in parts and device.type == "cuda":
        _print_tiles(loaded)


def _steps(bench: Bench, loads: Loads) -> Iterator[tuple[str, list[StepPlan]]]:
    shortest, longest = min(loads.prompt_tokens), max(loads.prompt_tokens)
    chunk = min(longest, 4_096)
    yield f"a prompt of {shortest}", [bench.chunk(shortest, 0)] * _NUM_STEPS
    yield f"a chunk of {chunk} at the end of {longest}", [bench.chunk(chunk, longest - chunk)] * 3
    for sequences in loads.batch_sizes[1:]:
        yield f"{sequences} decodes", [bench.decodes(sequences, loads.context + i) for i in range(loads.steps)]


def _print_host(name: str, bench: Bench, plans: Sequence[StepPlan]) -> None:
    bench.launch(plans[0])
    seconds = [bench.launch(plan) for plan in plans]
    print(f"\n== {name}: launched in {statistics.median(seconds) * 1e3:.2f} ms (median); the functions of the host:")
    profiler = cProfile.Profile()
    for plan in plans:
        bench.launch(plan, profiler)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(_SHOWN)
    print("\n".join(line[:150] for line in text.getvalue().splitlines()[4:] if line.strip()), flush=True)


def _print_device(name: str, bench: Bench, plans: Sequence[StepPlan]) -> None:
    bench.launch(plans[0])
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for plan in plans:
            bench.launch(plan)
        torch.cuda.synchronize()
    rows = sorted(
        ((event.self_device_time_total, event.count, event.key) for event in found.key_averages()), reverse=True
    )
    total_us = sum(taken_us for taken_us, _, _ in rows)
    print(f"\n== {name}: {total_us / len(plans) / 1e3:.2f} ms of kernels per step")
    for taken_us, count, kernel in rows[:_SHOWN]:
        print(f"{taken_us / total_us:6.1%} {count:6d} x {taken_us / count:9.1f} us  {kernel[:100]}", flush=True)


def _print_tiles(loaded: LoadedModel) -> None:
    """Time a chunk's attention at the end of a long context for each size of tiles."""
    from engine.attention import triton_paged

    pool = KvPool(loaded.layout, _TILE_CONTEXT // _BLOCK_SIZE, loaded.device)
    pool.tensor.normal_()
    keys, values = pool.layers[0]
    heads, dim = 4 * keys.shape[2], keys.shape[3]
    blocks = tuple(range(_TILE_CONTEXT // _BLOCK_SIZE))
    chunk = Chunk(0, (7,) * _TILE_CHUNK, _TILE_CONTEXT - _TILE_CHUNK, blocks, ())
    batch = pack((chunk,), _BLOCK_SIZE, torch.device(loaded.device))
    query = torch.randn(_TILE_CHUNK, heads, dim, device=loaded.device, dtype=torch.bfloat16)
    kv = LayerKv(query, query, keys, values)
    options = AttentionOptions(dim**-0.5, None, None)
    num_flops = 4 * heads * dim * _TILE_CHUNK * (_TILE_CONTEXT - _TILE_CHUNK / 2)
    print(f"\n== attention of {_TILE_CHUNK} tokens at the end of {_TILE_CONTEXT}, {heads} heads of {dim}")
    for rows, columns, stages in _TILES:
        with _tiles(rows, columns, stages):
            backend = triton_paged.TritonBackend()
            try:
                seconds = _device_s(lambda: backend.attend(query, kv, batch, options))  # noqa: B023
                print(f"{rows} x {columns}, {stages} stages: {num_flops / seconds / 1e12:.0f} TFLOP/s", flush=True)
            except Exception as error:  # noqa: BLE001 -- tiles that need too much memory of a processor
                print(f"{rows} x {columns}, {stages} stages: {str(error)[:80]}", flush=True)
    pool.close()


@contextmanager
def _tiles(rows: int, columns: int, stages: int) -> Iterator[None]:
    """Replace the size of the tiles that the back end chooses for the shape of a layer."""
    from engine.attention import triton_paged

    chosen = triton_paged._geometry

    def geometry(*shape: int) -> object:
        return replace(chosen(*shape), chunk_rows=rows, columns=columns, num_stages=stages)

    triton_paged._geometry = geometry  # type: ignore[assignment]
    try:
        yield
    finally:
        triton_paged._geometry = chosen


def _device_s(work: Callable[[], object]) -> float:
    """Return the device's seconds for one launch, the median of five after a first one that compiles."""
    work()
    samples = []
    for _ in range(5):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - began_s)
    return statistics.median(samples)


if __name__ == "__main__":
    main()
