"""Tests of exported pages with the real cuda-bindings, between two processes over a driver that keeps its pages in host
memory: all calls, structures and answers.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs the extra `cuda`: cuda-bindings are not installed")
if torch.cuda.is_available():
    pytest.skip("is about a machine without a GPU", allow_module_level=True)
if shutil.which("cc") is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    source, library = ROOT / "tests" / "contract" / "rigs" / "processes" / "host_driver.c", folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    return folder


def start(role: str, driver_folder: Path, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.contract.rigs.processes.host_driver_process", role],
        cwd=ROOT,
        env=os.environ | {"LD_LIBRARY_PATH": str(driver_folder), "TMPDIR": str(driver_folder)} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(process: "subprocess.Popen[str]", line: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize("environment", [{}, {"HOST_DRIVER_WITHOUT_RDMA": "1"}])
def test_pages_are_exported_mapped_for_reading_and_outlive_their_owner(
    environment: dict[str, str], driver_folder: Path
) -> None:
    exporter, importer = start("export", driver_folder, **environment), start("import", driver_folder)
    try:
        assert exporter.stdout is not None
        endpoint = exporter.stdout.readline().strip()
        assert ask(importer, endpoint) == "r--s True"
        exporter.kill()
        exporter.wait()
        assert ask(importer, "") == "r--s True"
        assert ask(importer, "") == ""
        assert importer.wait(20) == 0
    finally:
        exporter.kill()
        importer.kill()
        for process in (exporter, importer):
            process.communicate()
