"""Prints what pyproject.toml depends on, with the extras named as arguments, one per line: a layer of its own."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
wanted = list(project["dependencies"])
for extra in sys.argv[1:]:
    wanted += project["optional-dependencies"][extra]
print("\n".join(wanted))
