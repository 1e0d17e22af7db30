"""The `tandem` command: finds Tandem's own packages, then runs `cli`. Imports almost nothing (`cli/__main__.py`)."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    here = Path(__file__).parent
    if (here / "cli").is_dir():
        use_packages_in(str(here))
    return int(import_module("cli.__main__").main(arguments))


def use_packages_in(folder: str) -> None:
    """Let this process and its children import the packages in `folder`, before others of the same names."""
    sys.path.insert(0, folder)
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, others] if others else [folder])
    os.environ["PYTHONSAFEPATH"] = "1"  # a folder `router` in the caller's directory is no member of Tandem


if __name__ == "__main__":
    sys.exit(main())
