"""The `tandem` command. Imports next to nothing: a Ctrl-C that meets the imports ends it as any other does."""

import sys
from collections.abc import Sequence
from importlib import import_module

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return int(import_module("cli.command").run(arguments))
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
