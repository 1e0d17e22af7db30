"""The check of a GPU: what it takes for a failure, and that a run that is cut or crashes still tells what it has."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from benchmarks.conversation_lengths import draw_lengths
from benchmarks.gpu_check.__main__ import _run
from benchmarks.gpu_check.inventory import Inventory, take_inventory
from benchmarks.gpu_check.report import Outcome, Report, Verdict
from benchmarks.gpu_check.sections import Means, Section, sections
from benchmarks.gpu_check.tests_run import read_account

FOREVER_S = 1e12


def junit(folder: Path, *cases: str) -> Path:
    path = folder / "account.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def case(name: str, inside: str = "") -> str:
    return f'<testcase classname="tests.cuda.test_golden" name="{name}">{inside}</testcase>'


def skip(reason: str) -> str:
    return f'<skipped type="pytest.skip" message="{reason}"/>'


@pytest.mark.parametrize(
    "reason",
    [
        "could not import 'flashinfer': No module named 'flashinfer'",
        "needs the extra `cuda`: cupy with NCCL cannot be imported (No module named 'cupy')",
        "two ranks on one GPU need NCCL 2.30, this is 22809",
    ],
)
def test_a_test_may_skip_for_want_of_a_wheel(reason: str, tmp_path: Path) -> None:
    account = read_account(junit(tmp_path, case("a"), case("b", skip(reason))))
    outcome = account.outcome("golden")
    assert outcome.verdict is Verdict.PASSED
    assert f"- left out: cuda.test_golden::b: {reason}" in outcome.lines


def test_a_test_that_skips_for_anything_else_is_a_failure(tmp_path: Path) -> None:
    outcome = read_account(junit(tmp_path, case("a"), case("b", skip("needs a GPU")))).outcome("golden")
    assert outcome.verdict is Verdict.FAILED
    assert "- **skipped** cuda.test_golden::b: needs a GPU" in outcome.lines


def test_failures_and_errors_are_told_by_their_first_line_and_nothing_run_is_no_success(tmp_path: Path) -> None:
    bad = case("a", '<failure message="assert 1 == 2&#10;more"/>') + case("b", '<error message="RuntimeError: CUDA"/>')
    account = read_account(junit(tmp_path, bad))
    assert account.failed == ("cuda.test_golden::a: assert 1 == 2", "cuda.test_golden::b: RuntimeError: CUDA")
    assert account.outcome("x").verdict is Verdict.FAILED
    assert read_account(junit(tmp_path)).outcome("x").verdict is Verdict.FAILED


def test_a_needed_package_a_stub_or_the_gpu_that_is_missing_is_a_failure_and_an_optional_one_is_told() -> None:
    whole = take_inventory()
    assert whole.broken_stubs == ()
    versions = dict.fromkeys(whole.versions, "1.0")
    good = Inventory(versions, "a GPU", ())
    assert good.outcome(needs_gpu=True).verdict is Verdict.PASSED
    without = Inventory(versions | {"nixl-cu13": ""}, "a GPU", ()).outcome(needs_gpu=True)
    assert without.verdict is Verdict.PASSED and "Missing, and so left out: nixl-cu13." in without.lines
    for broken in (
        Inventory(versions | {"redis": ""}, "a GPU", ()),
        Inventory(versions, "", ()),
        Inventory(versions, "a GPU", ("worker_pb2: newer",)),
    ):
        assert broken.outcome(needs_gpu=True).verdict is Verdict.FAILED


def told(folder: Path, said: str) -> Outcome:
    return Outcome("told", Verdict.PASSED, (said.strip(),), {"read": (folder / "kept").read_text()})


def program(source: str, budget_s: float = 60.0) -> Section:
    return Section("told", (sys.executable, "-c", source), budget_s, told)


def test_a_section_that_hangs_is_cut_and_one_that_crashes_says_how(tmp_path: Path) -> None:
    pausing = "print('so far', flush=True); import signal; signal.pause()"
    hanging = _run(program(pausing, budget_s=1.0), tmp_path, FOREVER_S)
    assert (hanging.verdict, "so far" in hanging.lines) == (Verdict.CUT, True)
    crashed = _run(program("print('about to'); import os; os.abort()"), tmp_path, FOREVER_S)
    assert crashed.verdict is Verdict.FAILED
    assert "about to" not in crashed.lines[0] and "status -6" in crashed.lines[0]
    assert _run(program("1"), tmp_path, 0.0).verdict is Verdict.CUT
    (tmp_path / "kept").write_text("figures")
    assert _run(program("print('done')"), tmp_path, FOREVER_S).lines == ("done",)


def test_what_was_found_is_on_disk_after_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path, {"commit": "0000"})
    for number, verdict in enumerate((Verdict.PASSED, Verdict.MISSED, Verdict.CUT)):
        report.add(Outcome(f"section {number}", verdict, ("a line",), {"figure": number}))
        kept = json.loads((tmp_path / "gpu_check.json").read_text())
        assert [section["figures"]["figure"] for section in kept["sections"]] == list(range(number + 1))
        assert f"| section {number} | {verdict} |" in (tmp_path / "gpu_check.md").read_text()
        assert f"## section {number}: {verdict}" in capsys.readouterr().out
        assert report.has_failed == (verdict is Verdict.CUT)


def test_every_file_that_has_a_cuda_test_is_in_a_section(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    commands = [word for section in sections(Means("python", tmp_path, False)) for word in section.command]
    marked = {
        str(path.relative_to(root))
        for path in (root / "tests").rglob("test_*.py")
        if "pytest.mark.cuda" in path.read_text() and path.name != "test_gpu_check.py"
    }
    assert marked <= set(commands)


def test_lengths_are_those_of_conversations() -> None:
    dice = Random(3)
    drawn = [draw_lengths(dice) for _ in range(20_000)]
    assert sum(prompt for prompt, _ in drawn) / len(drawn) == pytest.approx(1_155, rel=0.2)
    assert sum(output for _, output in drawn) / len(drawn) == pytest.approx(211, rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_check_runs_in_small(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "benchmarks.gpu_check", "--tiny", "--output", str(tmp_path))
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kept = json.loads((tmp_path / "gpu_check.json").read_text())
    verdicts = {section["name"]: section["verdict"] for section in kept["sections"]}
    assert len(verdicts) == 8, verdicts
    assert set(verdicts.values()) <= {"passed", "missed its goal"}
    serving = kept["sections"][-1]["figures"]
    assert [kill["lost"] for kill in serving["kills"]] == [0, 0]
