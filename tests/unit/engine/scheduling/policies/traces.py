"""Lengths of the public traces, which are not part of the project: tests that need them are skipped if they are
missing.
"""

import csv
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

_CONVERSATION = Path(__file__).parents[6] / "shared" / "traces" / "AzureLLMInferenceTrace_conv.full.csv"


@dataclass(frozen=True, slots=True)
class Row:
    num_prompt: int
    num_output: int


def conversation_rows(num_rows: int) -> list[Row]:
    """Return the first rows of Azure's conversation trace (Patel et al., Splitwise, 2024)."""
    if not _CONVERSATION.exists():
        pytest.skip(f"{_CONVERSATION} is not here")
    with _CONVERSATION.open(newline="") as file:
        rows = islice(csv.DictReader(file), num_rows)
        return [Row(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
