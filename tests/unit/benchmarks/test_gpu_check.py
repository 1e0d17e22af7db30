"""The check of a GPU: which outcomes are failures; a run that is cut or crashes still reports its results."""

import importlib.metadata
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.gpu.conversation_lengths import draw_lengths
from benchmarks.gpu_check import imported, inventory, tests_run
from benchmarks.gpu_check.__main__ import _ended, _run, _started
from benchmarks.gpu_check.inventory import NEEDED, OPTIONAL, Inventory, broken_stubs
from benchmarks.gpu_check.kept_reports import Kept
from benchmarks.gpu_check.report import Outcome, Report, Verdict
from benchmarks.gpu_check.said import condensed
from benchmarks.gpu_check.sections import SECONDS_LEFT, CheckSetup, Section, sections
from benchmarks.gpu_check.slimmed import slim
from benchmarks.gpu_check.tests_run import read_account

FOREVER_S = 1e12
ROOT = Path(__file__).parents[3]
# The packages that a GPU machine has (docs/gpu.md) and that our wheels need.
COMES_WITH_TORCH = {"anyio", "click", "grpcio", "h11", "httpx", "idna", "protobuf", "psutil", "pytest", "setuptools"}


def kept(folder: Path, *reports: Kept) -> Path:
    path = folder / "account.jsonl"
    path.write_text("".join(json.dumps(asdict(report)) + "\n" for report in reports))
    return path


def passed(name: str) -> Kept:
    return Kept(f"tests/cuda/test_golden.py::{name}", "passed", 0.5, "")


def skipped(name: str, reason: str) -> Kept:
    return Kept(f"tests/cuda/test_golden.py::{name}", "skipped", 0.0, reason)


@pytest.mark.parametrize(
    "reason",
    [
        "could not import 'flashinfer': No module named 'flashinfer'",
        "needs the extra `cuda`: cupy with NCCL cannot be imported (No module named 'cupy')",
        "two ranks on one GPU need NCCL 2.30, this is 22809",
        "runs in Triton's interpreter alone",
    ],
)
def test_a_test_may_skip_when_a_wheel_is_missing(reason: str, tmp_path: Path) -> None:
    outcome = read_account(kept(tmp_path, passed("a"), skipped("b", reason))).outcome("golden")
    assert outcome.verdict is Verdict.PASSED
    assert f"- left out: cuda/test_golden.py::b: {reason}" in outcome.lines


def test_a_skip_without_a_missing_wheel_and_an_empty_test_run_are_failures(tmp_path: Path) -> None:
    outcome = read_account(kept(tmp_path, passed("a"), skipped("b", "needs a GPU"))).outcome("golden")
    assert outcome.verdict is Verdict.FAILED
    assert "- **skipped** cuda/test_golden.py::b: needs a GPU" in outcome.lines
    assert read_account(kept(tmp_path)).outcome("x").verdict is Verdict.FAILED


TESTS = """
import os, signal, sys
import pytest

def test_good(): pass

def test_bad():
    print("what it printed")
    rows = [1, 2]
    assert rows == [1, 3]

def test_left_out():
    pytest.importorskip("no_such_wheel")

def test_hangs():
    os.kill(os.getpid(), signal.SIGABRT)  # as of a section whose time is up
"""


def test_an_aborted_test_run_reports_ended_tests_with_tracebacks_and_the_stack_of_the_hanging_test(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    reports = tmp_path / "kept.jsonl"
    command = tests_run.command(sys.executable, [str(tmp_path / "test_some.py")], reports, marker="", num_processes=1)
    section = Section(
        "some", (*command, "--rootdir", str(tmp_path)), 60.0, lambda *_: read_account(reports).outcome("")
    )
    outcome = _run(section, tmp_path, FOREVER_S)

    assert outcome.verdict is Verdict.FAILED and "status -6" in outcome.lines[0]
    assert [name.rpartition("::")[2] for name in outcome.figures["passed"]] == ["test_good"]
    (text,) = outcome.figures["failed"].values()
    assert "assert [1, 2] == [1, 3]" in text and "test_some.py:10" in text and "what it printed" in text
    assert any("**failed**" in line and "assert [1, 2] == [1, 3]" in line for line in outcome.lines)
    assert any("no_such_wheel" in line for line in outcome.figures["left_out"])
    assert any("in test_hangs" in line for line in outcome.figures["last_lines"]["output"])


LOST = """
import pathlib, sys, types
import pytest

lost = []

def synchronize():
    if lost: raise RuntimeError("CUDA error: an illegal memory access was encountered")

sys.modules["torch"] = types.SimpleNamespace(
    cuda=types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize, empty_cache=lambda: None)
)

@pytest.mark.parametrize("number", range(8))
def test_kernel(number):
    if number == 1: lost.append(number)
    assert not lost
"""


WHOLE = """
import os, pathlib
import pytest

@pytest.mark.whole_gpu
@pytest.mark.parametrize("number", range(4))
def test_large(number, tmp_path):
    mark = tmp_path.parents[2] / "is_here"  # of all processes
    mark.mkdir()
    for _ in range(200_000): os.getpid()
    mark.rmdir()
"""


@pytest.mark.slow
def test_tests_that_need_the_whole_gpu_wait_for_each_other(tmp_path: Path) -> None:
    (tmp_path / "test_whole.py").write_text(WHOLE)
    reports = tmp_path / "kept.jsonl"
    command = tests_run.command(sys.executable, [str(tmp_path / "test_whole.py")], reports, marker="", num_processes=2)
    folder = ("--rootdir", str(tmp_path), "--basetemp", str(tmp_path / "base"))
    subprocess.run((*command, *folder), capture_output=True, check=False, cwd=ROOT)
    account = read_account(reports)
    assert (len(account.passed), account.failed) == (4, ())


@pytest.mark.slow
def test_tests_of_a_process_with_a_broken_gpu_context_run_in_another_process(tmp_path: Path) -> None:
    """A context that a kernel broke fails every later test in the process and so hides the test that broke it."""
    (tmp_path / "test_lost.py").write_text(LOST)
    reports = tmp_path / "kept.jsonl"
    command = tests_run.command(sys.executable, [str(tmp_path / "test_lost.py")], reports, marker="", num_processes=2)
    subprocess.run((*command, "--rootdir", str(tmp_path)), capture_output=True, check=False, cwd=ROOT)
    account = read_account(reports)

    assert {report.name.rpartition("::")[2] for report in account.failed} == {"test_kernel[1]"}
    assert len(account.passed) == 7


def test_missing_requirements_fail_the_check_and_a_missing_optional_package_is_reported() -> None:
    assert broken_stubs() == []
    versions = dict.fromkeys((*NEEDED, *OPTIONAL), "1.0")
    good = Inventory(versions, "a GPU", ())
    assert good.outcome(needs_gpu=True).verdict is Verdict.PASSED
    without = Inventory(versions | {"nixl-cu13": ""}, "a GPU", ()).outcome(needs_gpu=True)
    assert without.verdict is Verdict.PASSED and "Missing, and so left out: nixl-cu13." in without.lines
    for broken, can_begin in (
        (Inventory(versions | {"redis": ""}, "a GPU", ()), True),
        (Inventory(versions | {"torch": ""}, "a GPU", ()), False),
        (Inventory(versions, "", ()), False),
        (Inventory(versions, "a GPU", ("worker_pb2: newer",)), True),
        (Inventory(versions, "a GPU", (), ("router.app: ModuleNotFoundError: No module named 'httpx2'",)), True),
    ):
        assert broken.outcome(needs_gpu=True).verdict is Verdict.FAILED
        assert broken.can_begin(needs_gpu=True) is can_begin


def test_a_module_that_cannot_be_imported_is_reported_with_its_error() -> None:
    (problem,) = imported.broken(["json", "no_such_module"])
    assert problem.startswith("no_such_module: ") and "No module named 'no_such_module'" in problem


def test_copied_wheels_depend_only_on_copied_wheels_and_packages_that_come_with_torch() -> None:
    """A new dependency of a wheel would otherwise be noticed only on the GPU's machine."""
    names = re.search(r"^WHEEL_NAMES \?= ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert names is not None
    travelling = {word.partition("==")[0] for word in names[1].replace("\\", " ").split()}
    for name in travelling:
        needs = {
            re.split(r"[^\w.-]", need)[0].lower().replace("_", "-")
            for need in importlib.metadata.requires(name) or []
            if "extra ==" not in need and "python_" not in need.partition(";")[2]
        }
        assert needs <= travelling | COMES_WITH_TORCH, name


def test_a_slimmed_wheel_lacks_unused_files_and_its_record_does_not_list_them(tmp_path: Path) -> None:
    wheel = tmp_path / "nixl_cu13-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as whole:
        whole.writestr("nixl_cu13/__init__.py", "used = True\n")
        whole.writestr("nixl_ep_cu13/large.so", "0" * 1000)
        whole.writestr("nixl_cu13-1.0.dist-info/RECORD", "nixl_cu13/__init__.py,,\nnixl_ep_cu13/large.so,,\n")
    assert slim(wheel, ("nixl_ep_cu13/",)) and not slim(wheel, ("nixl_ep_cu13/",))
    with zipfile.ZipFile(wheel) as kept_files:
        assert kept_files.read("nixl_cu13/__init__.py") == b"used = True\n"
        assert kept_files.read("nixl_cu13-1.0.dist-info/RECORD") == b"nixl_cu13/__init__.py,,\n"
    assert list(tmp_path.iterdir()) == [wheel]


def told(folder: Path, said: str) -> Outcome:
    return Outcome("told", Verdict.PASSED, (said.strip(),), {"read": (folder / "kept").read_text()})


def program(source: str, budget_s: float = 60.0) -> Section:
    return Section("told", (sys.executable, "-c", source), budget_s, told)


def test_a_hanging_section_is_cut_and_a_crashed_section_reports_status_and_last_lines(tmp_path: Path) -> None:
    pausing = "print('so far', flush=True); import signal; signal.pause()"
    hanging = _run(program(pausing, budget_s=1.0), tmp_path, FOREVER_S)
    assert (hanging.verdict, "so far" in hanging.lines) == (Verdict.CUT, True)
    crashed = _run(program("print('about to'); import os; os.abort()"), tmp_path, FOREVER_S)
    assert crashed.verdict is Verdict.FAILED
    assert "about to" not in crashed.lines[0] and "status -6" in crashed.lines[0]
    assert "about to" in crashed.figures["last_lines"]["output"]
    (tmp_path / "decode-0.log").write_text("loading\nRuntimeError: CUDA error\n")
    worker = _run(program("raise SystemExit(1)"), tmp_path, FOREVER_S)
    assert worker.figures["last_lines"]["decode-0.log"] == ["loading", "RuntimeError: CUDA error"]
    assert "RuntimeError: CUDA error" in worker.lines
    assert _run(program("1"), tmp_path, 0.0).verdict is Verdict.CUT
    assert _run(replace(program("1"), is_extra=True), tmp_path, 0.0).verdict is Verdict.ABSENT
    absent = _run(replace(program("raise SystemExit(9)"), absent="no wheel"), tmp_path, FOREVER_S)
    assert (absent.verdict, absent.lines) == (Verdict.ABSENT, ("no wheel",))
    (tmp_path / "kept").write_text("figures")
    assert _run(program("print('done')"), tmp_path, FOREVER_S).lines == ("done",)


WORKER = """
import threading
def waits_for_the_device():
    print("up", flush=True)
    threading.Event().wait()
waits_for_the_device()
"""
WITH_A_WORKER = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    text=True, start_new_session=True)
print(worker.pid, worker.stdout.readline(), flush=True)
print(worker.stderr.read(), flush=True)
import signal; signal.pause()
"""


def test_child_processes_of_a_cut_section_report_their_stacks() -> None:
    """A worker hangs and its parent waits; as under `tandem up`, each process has a separate session."""
    section = Section("told", (sys.executable, "-c", WITH_A_WORKER, WORKER), 60.0, told)
    process = _started(section, 60.0)
    assert process.stdout is not None and "up" in process.stdout.readline()
    assert "in waits_for_the_device" in _ended(process)


def test_a_section_receives_the_seconds_it_has_left(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    section = Section("told", (sys.executable, "-c", "import sys; print(sys.argv[1])", SECONDS_LEFT), 60.0, told)
    assert 0 < float(_run(section, tmp_path, FOREVER_S).lines[0]) < 60


def test_a_package_for_another_cuda_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "version", lambda name: {"cupy-cuda12x": "14.2.0", "nixl-cu13": "1.5"}.get(name, ""))
    found = [inventory.found_version(name) for name in ("cupy-cuda13x", "nixl-cu13", "nvidia-nccl-cu13")]
    assert found == ["14.2.0 (cupy-cuda12x)", "1.5", ""]


def test_a_gpu_that_torch_sees_is_there_also_without_the_drivers_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert inventory.device("NVIDIA H200, capability (9, 0), CUDA 13.0").startswith("NVIDIA H200")
    assert inventory.device("no GPU (CUDA 13.0)") == ""


def test_results_are_on_disk_after_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path, {"commit": "0000"})
    for number, verdict in enumerate((Verdict.PASSED, Verdict.MISSED, Verdict.CUT)):
        report.add(Outcome(f"section {number}", verdict, ("a line",), {"figure": number}))
        found = json.loads((tmp_path / "gpu_check.json").read_text())
        assert [section["figures"]["figure"] for section in found["sections"]] == list(range(number + 1))
        assert f"| section {number} | {verdict} |" in (tmp_path / "gpu_check.md").read_text()
        assert f"## section {number}: {verdict}" in capsys.readouterr().out
        assert report.has_failed == (verdict is Verdict.CUT)


def test_every_file_that_has_a_cuda_test_is_in_a_section(tmp_path: Path) -> None:
    commands = [word for section in sections(CheckSetup("python", tmp_path, False)) for word in section.command]
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.cuda" in path.read_text() and path.name != "test_gpu_check.py"
    }
    assert marked <= set(commands)


def test_drawn_lengths_have_the_means_of_the_conversation_trace() -> None:
    dice = Random(3)
    drawn = [draw_lengths(dice) for _ in range(20_000)]
    assert sum(prompt for prompt, _ in drawn) / len(drawn) == pytest.approx(1_155, rel=0.2)
    assert sum(output for _, output in drawn) / len(drawn) == pytest.approx(211, rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_gpu_check_runs_with_a_small_model(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "benchmarks.gpu_check", "--tiny", "--minutes", "24", "--output", str(tmp_path))
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    verdicts = {section["name"]: section["verdict"] for section in found["sections"]}
    assert len(verdicts) == 8, verdicts
    assert set(verdicts.values()) <= {"passed", "missed its goal"}
    (serving,) = (each["figures"] for each in found["sections"] if each["name"] == "A whole cluster, and kill -9")
    assert [kill["lost"] for kill in serving["kills"]] == [0, 0]


@pytest.mark.parametrize(("hand_off", "verdict"), [(0.81, Verdict.PASSED), (0.79, Verdict.MISSED)])
def test_the_copy_has_the_same_goal_as_whole_hand_offs(hand_off: float, verdict: Verdict, tmp_path: Path) -> None:
    (section,) = (
        each for each in sections(CheckSetup("python3", tmp_path, is_tiny=False)) if "cuda_ipc" in each.command
    )
    (tmp_path / "cuda_ipc").mkdir()
    figures = {"data_path_ratio": 0.95, "hand_off_ratio": hand_off}
    cells = [
        {"num_bytes": 64 << 20, "figures": figures},
        {"num_bytes": 1 << 20, "figures": dict.fromkeys(figures, 0.1)},
    ]
    (tmp_path / "cuda_ipc" / "kv.json").write_text(json.dumps({"cells": cells}))
    (tmp_path / "cuda_ipc" / "kv.md").write_text("")
    outcome = section.read(tmp_path, "")
    assert outcome.verdict is verdict
    assert any("95%" in line for line in outcome.lines)


STACKS = """loading the weights
Fatal Python error: Aborted

Thread 0x00007f6 (most recent call first):
  File "/lib/python3.12/concurrent/futures/thread.py", line 89 in _worker
  File "/lib/python3.12/threading.py", line 1010 in run

Current thread 0x00007f4 (most recent call first):
  File "/lib/python3.12/threading.py", line 355 in wait
  File "/here/engine/build.py", line 53 in build_engine

Extension modules: numpy, torch
RuntimeError: the exporter's process ended""".splitlines()


def test_condensed_stacks_keep_threads_in_our_code_and_the_lines_around_them() -> None:
    said = [line for line in condensed(STACKS, "/here") if line]
    assert said[:2] == ["loading the weights", "Fatal Python error: Aborted"]
    assert '  File "/here/engine/build.py", line 53 in build_engine' in said
    assert said[-1] == "RuntimeError: the exporter's process ended"
    assert not any("_worker" in line or "Extension modules" in line for line in said)
