"""Tests that a test that waits too long reports what it waits for."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

_PLUGIN = """
    from tests.stacks_of_slow_tests import StacksOfSlowTests

    def pytest_configure(config):
        config.pluginmanager.register(StacksOfSlowTests(first_s=0.02, every_s=0.02, most=50, limit_s=120.0))
"""
_TESTS = """
    import asyncio
    import pytest

    async def a_wait_in_vain(deadline_s):
        async with asyncio.timeout(deadline_s):
            await asyncio.Event().wait()

    def test_that_fails():
        asyncio.run(a_wait_in_vain(1.0))

    def test_that_passes():
        with pytest.raises(TimeoutError):
            asyncio.run(a_wait_in_vain(0.2))
"""


def test_a_failed_test_reports_the_tasks_that_it_waited_for(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(_PLUGIN)
    pytester.makepyfile(_TESTS)
    pytester.syspathinsert(Path(__file__).parents[3])
    result = pytester.runpytest_inprocess("-o", "asyncio_default_fixture_loop_scope=function")
    result.assert_outcomes(passed=1, failed=1)
    assert str(result.stdout).count("Stacks while the test ran") == 1
    result.stdout.fnmatch_lines(["*task *a_wait_in_vain*", "*await asyncio.Event().wait()*"])


_HANGS = """
    import asyncio
    import pytest

    @pytest.mark.timeout(2, method="thread")
    def test_that_hangs():
        asyncio.run(a_wait_without_end())

    async def a_wait_without_end():
        await asyncio.Event().wait()
"""


def test_a_test_that_ends_its_process_shows_its_stacks_before(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(_PLUGIN.replace("most=50, limit_s=120.0", "limit_s=120.0, spare_s=0.6"))
    pytester.makepyfile(_HANGS)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    result = pytester.runpytest_subprocess(
        "-n", "1", "--max-worker-restart=0", "-o", "asyncio_default_fixture_loop_scope=function"
    )
    assert result.ret != 0
    result.stderr.fnmatch_lines(["*test_that_hangs is about to reach its time limit*", "*task *a_wait_without_end*"])
