"""The `tandem` command. Imports almost nothing, so that a Ctrl-C during the imports ends it like any other."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    # Children are forked with a parent-death signal. gRPC's fork handlers, installed at its import, may abort a child
    # before exec. No child uses gRPC before exec, so they are switched off.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    try:
        return int(import_module("cli.command").run(arguments))
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
