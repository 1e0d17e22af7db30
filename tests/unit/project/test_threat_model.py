"""The threats of docs/security.md: each line has the attacker, the attack, the defence, and the test that shows it."""

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_HEAD = ["who", "what", "stopped by", "test"]


def _rows() -> list[list[str]]:
    """Return the cells of each line of the first table under `## Threats`."""
    page = (_ROOT / "docs" / "security.md").read_text()
    section = page.partition("## Threats\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]


@pytest.fixture(scope="module")
def functions() -> frozenset[str]:
    """Return the names of all functions that pytest collects from tests/."""
    texts = (path.read_text() for path in (_ROOT / "tests").rglob("test_*.py"))
    return frozenset(name for text in texts for name in re.findall(r"^(?:async )?def (test_\w+)\(", text, re.MULTILINE))


def test_every_test_that_the_threat_model_names_exists(functions: frozenset[str]) -> None:
    head, _rule, *threats = _rows()
    assert head == _HEAD and len(threats) > 20
    for who, what, stopped_by, tests in threats:
        assert who and what and stopped_by
        names = re.findall(r"`(\w+)`", tests)
        assert names, f"no test shows how it is stopped that {who} {what}"
        assert set(names) <= functions, f"no such test: {set(names) - functions}"
