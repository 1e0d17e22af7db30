"""The wheel, built once, and every test of this folder marked as slow."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package.installed import ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the checkout's files, because a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    listing = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "source" / name)
    command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, folder / "source")
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))
