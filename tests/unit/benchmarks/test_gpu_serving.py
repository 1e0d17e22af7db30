"""The benchmark of a cluster on one GPU: the trace that `tandem bench` reads, and the model shape that the memory
holds.
"""

from pathlib import Path
from random import Random

import pytest

from benchmarks.gpu.memory import NoRoom, room, that_fit
from benchmarks.gpu.serving_load import conversations, described, write_trace
from benchmarks.gpu.serving_table import table
from benchmarks.gpu.shapes import Work, llama_8b
from cli.load import read_trace

H200, RTX_4090 = 149_000_000_000, 25_300_000_000


def test_tandem_bench_reads_the_drawn_conversations_unchanged(tmp_path: Path) -> None:
    drawn = conversations(50, rate_rps=12.0, length_scale=1.0)
    write_trace(drawn, tmp_path / "conversations.csv")
    read = read_trace(tmp_path / "conversations.csv", None, Random(0))
    assert [(each.prompt_tokens, each.output_tokens) for each in read] == [
        (each.prompt_tokens, each.output_tokens) for each in drawn
    ]
    gaps = [(each.at_s - drawn[0].at_s, other.at_s) for each, other in zip(drawn, read, strict=True)]
    assert all(wanted == pytest.approx(found, abs=1e-5) for wanted, found in gaps)


def test_every_cluster_gets_the_same_conversations_and_their_mean_lengths_are_reported() -> None:
    assert conversations(500, 12.0, 1.0) == conversations(500, 12.0, 1.0)
    load = described(conversations(500, 12.0, 1.0))
    assert load["rate_rps"] == pytest.approx(12.0, rel=0.15)
    assert load["mean_prompt_tokens"] == pytest.approx(1_155, rel=0.2)
    assert load["mean_output_tokens"] == pytest.approx(211, rel=0.1)


def test_the_largest_shape_that_fits_the_gpu_is_chosen_with_the_reason_for_a_smaller_one() -> None:
    large = room(H200, num_processes=2, least_kv_tokens=16_384)
    assert (large.shape, large.why_smaller) == ("8B", "")
    small = room(RTX_4090, num_processes=2, least_kv_tokens=16_384)
    assert small.shape == "3B" and "8B takes 2 x 21.4 GB of 25.3 GB free" in small.why_smaller
    alone = room(RTX_4090, num_processes=1, least_kv_tokens=8_192)
    assert alone.shape == "8B" and that_fit((1, 16, 64), 2_112, alone.kv_tokens) == (1, 16)
    with pytest.raises(NoRoom, match="1B takes 2 x"):
        room(8_000_000_000, num_processes=2, least_kv_tokens=16_384)


def test_all_workers_together_need_less_than_the_free_memory() -> None:
    weights = Work.of(llama_8b()).weight_bytes
    assert weights == pytest.approx(16.06e9, rel=0.01)
    for free in (H200, 85_000_000_000, 48_000_000_000):
        found = room(free, num_processes=2, least_kv_tokens=16_384)
        assert 2 * (weights + found.kv_bytes) < 0.94 * free


def test_the_table_shows_the_figures_known_so_far() -> None:
    figures = {"setting": {"Shape": "8B"}, "load": {}, "modes": {"colocated": {"up": True}}, "kills": [], "problem": ""}
    assert "Shape: 8B." in table(figures) and "| colocated |" not in table(figures)
