"""The packages that applications use: each program in `programs/` asserts what it receives."""

from pathlib import Path

import pytest

from tests.clients.conftest import Run

_PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("program", sorted(path.name for path in _PROGRAMS.glob("use_*.py")))
def test_an_unmodified_package_works_with_a_cluster(url: str, run_client: Run, program: str) -> None:
    run_client("python", str(_PROGRAMS / program), url)
