"""`make bench-placement`: when do separate pools win, when colocated workers, and does `auto` find out?

    python -m benchmarks.placement [--only TEXT] [--requests N] [--note TEXT] [--quick] [--output FOLDER]

Every arm serves the same model by two workers of one thread each and gets the same requests, in turns of one run. Each
finished point is appended to placement.jsonl; a restarted command measures the points that it lacks for the present
code. placement.md is rewritten after each point. The whole plan takes hours.
"""

import os
import sys
from importlib import import_module

if __name__ == "__main__":
    # gRPC's fork handlers are installed at its import and may abort a child before exec; no child uses gRPC before.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    sys.exit(import_module("benchmarks.placement.command").main())
