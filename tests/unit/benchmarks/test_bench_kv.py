"""`make bench-kv` runs on small sizes: its figures come from the samples, and every column really moves the blocks."""

import json
from pathlib import Path

import pytest

from benchmarks.kv.__main__ import _in_turns, _offered, measure
from benchmarks.kv.digests import measure_digests
from benchmarks.kv.digests import table as cost_table
from benchmarks.kv.shapes import Shape
from benchmarks.kv.table import Cell, as_json, as_markdown

TINY = (Shape("64 KB", 1, False, 1), Shape("5 x 64 KB", 5, True, 1))
ABOUT = {"processor": "2 x none", "kernel": "Linux", "commit": "0000", "date": "today"}


def test_ratios_are_of_medians_to_the_fastest_limit() -> None:
    cell = Cell("tcp", "1 GB", 10**9, {"slow": [4.0, 4.0], "fast": [3.0, 1.0, 0.5]}, [2.0, 9.0, 1.0], [4.0], [8.0])
    figures = cell.figures()
    assert (figures["limit"], figures["limit_gb_per_s"]) == ("fast", 1.0)
    assert (figures["data_path_gb_per_s"], figures["data_path_ratio"]) == (0.5, 0.5)
    assert (figures["verified_ratio"], figures["hand_off_ratio"]) == (0.25, 0.125)
    assert (
        "| `tcp` | 1 GB | 1.00 | fast | 0.50 (0.50) | 0.25 (0.25) | 0.12 (0.12) | 2000.0 ms | 8000.0 ms |"
        in as_markdown([cell], ABOUT)
    )


@pytest.mark.parametrize("row", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
async def test_every_column_is_measured_between_two_processes_and_every_cell_is_saved_at_once(row: str) -> None:
    saved: list[int] = []
    cells = await measure([row], TINY, num_pool_blocks=16, keep=lambda cells: saved.append(len(cells)))
    assert saved == [1, 2]
    kept = json.loads(as_json(cells, ABOUT))
    assert [cell["shape"] for cell in kept["cells"]] == ["64 KB", "5 x 64 KB"]
    for cell in kept["cells"]:
        samples = [cell["data_path_s"], cell["verified_s"], cell["hand_off_s"], *cell["limits_s"].values()]
        assert all(len(each) == 1 and each[0] > 0 for each in samples)


async def test_a_cell_past_its_time_has_the_minimum_of_samples_in_every_column() -> None:
    async def move() -> float:
        return 1.0

    samples = await _in_turns({"ours": move, "limit": move}, num_samples=50, longest_s=0.0)
    assert samples == {"ours": [1.0] * 3, "limit": [1.0] * 3}


async def test_unavailable_transports_are_left_out_with_their_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await _offered(["shm", "cuda_ipc", "nccl", "tcp+tls"], "cpu") == ["shm", "tcp+tls"]
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" is left out: ")[0] for line in told] == ["cuda_ipc", "nccl"]
    assert all("not on a GPU" in line or "not exported GPU memory" in line for line in told)


def test_the_committed_table_is_computed_from_the_committed_samples() -> None:
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    kept = json.loads((results / "kv.json").read_text())
    cells = [Cell(**{name: value for name, value in cell.items() if name != "figures"}) for cell in kept["cells"]]
    assert as_markdown(cells, kept["about"]) == (results / "kv.md").read_text()
    assert json.loads(as_json(cells, kept["about"])) == kept


def test_cost_of_digests_is_reported_beside_a_copy() -> None:
    (cost,) = measure_digests([TINY[1]], num_blocks=16, device="cpu")
    assert all(min(samples) > 0 for samples in (cost.copy_s, cost.digest_s))
    assert len(cost_table([cost])) == 3
