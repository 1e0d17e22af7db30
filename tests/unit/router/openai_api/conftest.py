"""The demo model's tokenization, and an endpoint that the tests of a file share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.text.tokenization import Tokenization
from tests.unit.router.openai_api.endpoint import Endpoint, endpoint

DEMO_MODEL = Path(__file__).parents[4] / "examples" / "demo_model"


@pytest.fixture(scope="session")
def demo() -> Tokenization:
    return Tokenization.load(str(DEMO_MODEL))


@pytest.fixture(scope="module")
def shared(demo: Tokenization) -> Iterator[Endpoint]:
    """An endpoint for tests that neither fail, hold nor count."""
    with endpoint(demo) as running:
        yield running
