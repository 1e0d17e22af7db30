"""The `tandem` command. Imports next to nothing: a Ctrl-C that meets the imports ends it as any other does."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    # Children are made by fork, so that they end with whoever made them. gRPC's own handlers of a fork, set up when it
    # is imported, may abort the child before it has become its program. No child of ours speaks gRPC before that.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    try:
        return int(import_module("cli.command").run(arguments))
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
