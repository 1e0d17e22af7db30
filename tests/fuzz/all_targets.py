"""All targets, and their corpora: inputs that reached new outcomes in earlier runs, and those that were once findings.

A corpus is a text file with a line per input: the target's name, and the bytes in base64.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.fuzz import call_targets, file_targets, frame_targets, http_targets, message_targets
from tests.fuzz.target import Target

GROUPS = {
    "http": http_targets,
    "messages": message_targets,
    "frames": frame_targets,
    "calls": call_targets,
    "files": file_targets,
}
_CORPUS = Path(__file__).parent / "corpus"


def all_targets(group: str = "") -> Iterator[Target]:
    for name, module in GROUPS.items():
        if group in ("", name):
            yield from module.targets()


def corpus() -> Mapping[str, Sequence[bytes]]:
    """Return the kept inputs by the name of their target."""
    kept: dict[str, list[bytes]] = {}
    for group in GROUPS:
        path = _CORPUS / f"{group}.txt"
        for line in path.read_text().splitlines() if path.exists() else ():
            name, _, data = line.rpartition(" ")
            kept.setdefault(name, []).append(base64.b64decode(data))
    return kept


def keep(target: str, inputs: Sequence[bytes]) -> None:
    """Add inputs to the corpus of a target."""
    group = next(name for name, module in GROUPS.items() if any(each.name == target for each in module.targets()))
    with (_CORPUS / f"{group}.txt").open("a") as file:
        file.writelines(f"{target} {base64.b64encode(data).decode()}\n" for data in inputs)
