"""Dispatches a `tandem` command to its verb and turns its end into an exit status. One file per verb."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from cluster.errors import ConfigError, TandemError
from cluster.process import ExitStatus
from cluster.settings.config_sources import refuse_unknown
from tandem.errors import TandemError as ClientError

# Each has HELP, add_arguments(parser) and run(arguments) -> exit status.
_VERBS = (
    "demo",
    "up",
    "status",
    "requests",
    "explain",
    "generate",
    "scale",
    "drain",
    "role",
    "migrate",
    "doctor",
    "certs",
    "estimate",
    "bench",
)


def run(arguments: Sequence[str] | None) -> int:
    """Run a command and return its exit status. An expected error is one line on stderr."""
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader of our output closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.OK
    except ConfigError as error:
        sys.stderr.write(f"tandem: {error.message}\n")
        return ExitStatus.CONFIG
    except (TandemError, ClientError) as error:
        sys.stderr.write(f"tandem: {error.reason}: {error.message}\n")
        return ExitStatus.CRASHED


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="tandem", description="LLM serving with prefill and decode on separate pools.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    modules: dict[str, ModuleType] = {}
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name in _VERBS:
        module = modules[name] = import_module(f"cli.verbs.{name}")
        parsers[name] = verbs.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(parsers[name])
    parsed, unknown = parser.parse_known_args(arguments)
    refuse_unknown(parsers[parsed.verb], unknown)
    return int(modules[parsed.verb].run(parsed))
