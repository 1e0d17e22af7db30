"""`python -m benchmarks.gpu_check.imported MODULE...`: report which modules cannot be imported, and which GPU torch
sees.

Prints one line of JSON at the end.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Sequence


def main() -> None:
    print(json.dumps({"broken": broken(sys.argv[1:]), "torch": _seen()}))


def broken(modules: Sequence[str]) -> list[str]:
    """Return the modules that cannot be imported, each with its error and traceback."""
    problems = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 -- whatever it is, it is what this asks for
            problems.append(f"{name}: {' | '.join(traceback.format_exc(limit=-3).splitlines()[1:])}")
    return problems


def _seen() -> str:
    try:
        import torch

        if not torch.cuda.is_available():
            return f"no GPU (CUDA {torch.version.cuda})"
        free, total = torch.cuda.mem_get_info()
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        memory = f"{free >> 20} of {total >> 20} MiB free"
        ones = int(torch.ones(8, device="cuda").sum())
        return f"{name}, capability {capability}, CUDA {torch.version.cuda}, {memory}; eight ones are {ones}"
    except Exception as error:  # noqa: BLE001 -- the same
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
