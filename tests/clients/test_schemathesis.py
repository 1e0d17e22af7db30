"""The OpenAPI document holds for every request that schemathesis derives from it. Each path has a run of its own, so
that a failure names it."""

import json
import os
import re
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.clients.conftest import Run

_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/models(/.*)?",
    "/(health|metrics|ping|ready|version)",
)
_TIMEOUT_S = 3000.0  # of a thousand examples on a busy machine
_FEWEST_CASES = 20  # of a path without a body


@pytest.mark.parametrize("path", _PATHS)
def test_schemathesis_finds_no_failure(brief_url: str, run_client: Run, path: str) -> None:
    """All phases. SCHEMATHESIS_EXAMPLES sets the number of examples per operation; `-rP` shows the number of cases."""
    output = run_client(
        "schemathesis",
        f"--config-file={Path(__file__).parent / 'schemathesis.toml'}",
        "run",
        f"{brief_url}/openapi.json",
        f"--include-path-regex=^{path}$",
        "--continue-on-failure",
        "--request-timeout=120",
        f"--max-examples={os.environ.get('SCHEMATHESIS_EXAMPLES', '1000')}",
        timeout_s=_TIMEOUT_S,
    )
    counts = re.search(r"(\d+) generated, \d+ passed", output)
    assert counts, output[-3000:]
    assert int(counts[1]) >= _FEWEST_CASES, "schemathesis could not generate what the document describes"
    assert "Unresolvable" not in output
    print(f"{path}: {counts[0]}")


def test_every_path_of_the_document_is_in_a_run(url: str) -> None:
    with urlopen(f"{url}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    assert [path for path in paths if not any(re.fullmatch(each, path) for each in _PATHS)] == []
