"""The counter of the modules that one request passes through."""

import pytest

from benchmarks.request_modules import __main__ as request_modules

# As many were counted, the same in each run: with the compiled forward, and where a processor has the model's own.
_MOST_MODULES, _MOST_PLAIN_MODULES = 125, 130


@pytest.mark.slow
async def test_counter_lists_the_modules_of_every_process_and_no_generated_stub() -> None:
    counted = await request_modules.count()
    assert {"router/pipeline/pipeline.py", "kvtransfer/importer/importer.py", "kvtransfer/exporter/exporter.py"} <= set(
        counted.modules
    )
    assert "engine/scheduling/scheduler.py" in counted.modules
    not_counted = ("tandem/v1/", "tandem/internal/v1/", "benchmarks/", "tests/")
    assert not [module for module in counted.modules if module.startswith(not_counted)]
    assert counted.num_lines > 1000
    is_compiled = "engine/cpu/compiled_forward.py" in counted.modules
    assert len(counted.modules) <= (_MOST_MODULES if is_compiled else _MOST_PLAIN_MODULES), counted.modules
