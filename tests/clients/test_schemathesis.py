"""The OpenAPI document holds for every request that schemathesis derives from it."""

import os
import re
from pathlib import Path

from tests.clients.conftest import Run


def test_schemathesis_finds_no_failure(url: str, run_client: Run) -> None:
    """All phases. SCHEMATHESIS_EXAMPLES sets the number of examples per path."""
    output = run_client(
        "schemathesis",
        f"--config-file={Path(__file__).parent / 'schemathesis.toml'}",
        "run",
        f"{url}/openapi.json",
        "--continue-on-failure",
        "--request-timeout=120",
        f"--max-examples={os.environ.get('SCHEMATHESIS_EXAMPLES', '1000')}",
    )
    assert re.search(r"\d+ generated, \d+ passed", output), output[-3000:]
