"""Tests that a test with a number of examples of its own follows the profile of the run."""

import pytest

from tests.examples import num_examples

_AT_IMPORT = num_examples(suite=40, search=120)


def test_the_profile_of_the_run_is_in_effect_when_test_modules_are_imported(pytestconfig: pytest.Config) -> None:
    is_search = pytestconfig.getoption("--hypothesis-profile") == "search"
    assert (120 if is_search else 40) == _AT_IMPORT
