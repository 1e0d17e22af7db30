"""Print the dependencies of pyproject.toml and of the extras given as arguments, one per line, for a Docker layer."""

import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

_OURS = "tandem-serving["


def wanted(project: dict[str, object], extras: Sequence[str]) -> Iterator[str]:
    """Yield requirements. An extra may name others of ours: `tandem-serving[router,worker]`."""
    dependencies, optional = project["dependencies"], project["optional-dependencies"]
    assert isinstance(dependencies, list) and isinstance(optional, dict)
    lines = [*dependencies, *(line for extra in extras for line in optional[extra])]
    for line in lines:
        if line.startswith(_OURS):
            yield from wanted({**project, "dependencies": []}, line.removeprefix(_OURS).rstrip("]").split(","))
        else:
            yield line


if __name__ == "__main__":
    print("\n".join(dict.fromkeys(wanted(tomllib.loads(Path("pyproject.toml").read_text())["project"], sys.argv[1:]))))
