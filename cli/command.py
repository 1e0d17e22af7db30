"""Dispatches a `tandem` command to its verb and converts the result to an exit status."""

import argparse
import codecs
import os
import platform
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from types import ModuleType
from typing import NoReturn

from cluster.errors import ConfigError, TandemError
from cluster.process import ExitStatus, full_disk, installed_version
from cluster.settings.config_sources import LineParser, refuse_unknown
from tandem.channel import REFUSED
from tandem.errors import TandemError as ClientError

# Verb -> its folder below `cli/verbs`, in the order of `tandem --help`.
# A verb's module has HELP, add_arguments(parser) and run(arguments) -> exit status.
_VERBS = {
    "demo": "clusters",
    "up": "clusters",
    "status": "observation",
    "top": "observation",
    "ui": "observation",
    "requests": "observation",
    "explain": "observation",
    "profile": "observation",
    "generate": "generation",
    "chat": "generation",
    "batch": "generation",
    "scale": "clusters",
    "drain": "clusters",
    "role": "clusters",
    "migrate": "clusters",
    "doctor": "preparation",
    "certs": "access",
    "keys": "access",
    "usage": "observation",
    "estimate": "preparation",
    "bench": "generation",
    "completion": "preparation",
}
# What `tandem NAME` becomes: the module that runs one member, and the extra that it needs.
PROGRAMS = {
    "router": ("router", "router"),
    "prefill-worker": ("prefill_worker", "worker"),
    "decode-worker": ("decode_worker", "worker"),
}
_START = "; start the cluster, for example with `tandem up`, or give the address of a running router with --address"
_SHOWN = 80  # characters
_EXTRAS = {"up": "local", "demo": "local"}  # of verbs that start members


def run(arguments: Sequence[str] | None) -> int:
    """Run a command and return its exit status. An expected error is one line on stderr."""
    _open_missing_files()
    _show_all_characters()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output closed the pipe
        _discard_output()
        return ExitStatus.OK
    except OSError as error:
        if not (line := full_disk(error)):
            raise
        _discard_output()
        sys.stderr.write(f"tandem: {line}\n")
        return ExitStatus.CRASHED
    except ConfigError as error:
        sys.stderr.write(f"tandem: {error.message}\n")
        return ExitStatus.CONFIG
    except (TandemError, ClientError) as error:
        hint = _START if error.message.startswith(REFUSED) else ""
        sys.stderr.write(f"tandem: {error.reason}: {error.message}{hint}\n")
        return ExitStatus.CRASHED
    except UnicodeEncodeError as error:
        sys.stderr.write(f"tandem: not UTF-8 text: {error.object[:_SHOWN]!r}\n")
        return ExitStatus.CONFIG
    except ModuleNotFoundError as error:
        if not (line := missing_module(error)):
            raise
        sys.stderr.write(f"tandem: {line}\n")
        return ExitStatus.CONFIG


def _open_missing_files() -> None:
    """Open an empty file as stdin, stdout and stderr where the caller has closed them (`tandem status >&-`)."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 -- until the process ends
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- as above
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- as above


def _show_all_characters() -> None:
    """Print a question mark for each character that the encoding of stdout lacks, instead of failing. In UTF-8 that is
    a byte of a file's name, which is printed as it is."""
    if isinstance(sys.stdout, TextIOWrapper):
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "replace")


def _discard_output() -> None:
    """Send what is left of the output nowhere: Python would try to write it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    arguments = (sys.argv[1:] if arguments is None else arguments) or ("--help",)
    if arguments and arguments[0] in PROGRAMS:
        _become(*arguments)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _VERBS:
        nearest = get_close_matches(arguments[0], (*_VERBS, *PROGRAMS), n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "`tandem --help` lists the commands"
        raise ConfigError(f"unknown command {arguments[0]!r}; {hint}")
    parser, parsers, modules = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    refuse_unknown(parsers[parsed.verb], unknown)
    parsed.parser = parser
    if extra := _EXTRAS.get(parsed.verb):
        require(extra, f"tandem {parsed.verb}")
    return int(modules[parsed.verb].run(parsed))


def _become(program: str, *flags: str) -> NoReturn:
    """Replace this process by a member, which receives the signals of its supervisor itself."""
    module, extra = PROGRAMS[program]
    require(extra, f"tandem {program}")
    os.execv(sys.executable, (sys.executable, "-m", module, *flags))


def verb_module(verb: str) -> ModuleType:
    return import_module(f"cli.verbs.{_VERBS[verb]}.{verb}")


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser], dict[str, ModuleType]]:
    """Return the parser of all commands, and the parser and the module of each verb."""
    parser = LineParser(
        prog="tandem",
        description="LLM serving with prefill and decode on separate pools.",
        epilog=f"To run one member of a cluster: tandem {'|'.join(PROGRAMS)} FLAGS (--help lists them).",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tandem {installed_version()}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    modules: dict[str, ModuleType] = {}
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name in _VERBS:
        module = modules[name] = verb_module(name)
        parsers[name] = verbs.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(parsers[name])
    return parser, parsers, modules


# An extra -> modules that its packages bring. pyproject.toml has the packages.
_ROUTER = ("fastapi", "uvicorn", "httptools", "uvloop", "jinja2", "tokenizers", "llguidance")
_WORKER = ("torch", "transformers", "tokenizers", "llguidance")
_MODULES = {"router": _ROUTER, "worker": _WORKER, "local": (*_ROUTER, "torch", "transformers"), "ray": ("ray",)}


def require(extra: str, command: str) -> None:
    """Raise ConfigError if this machine or this installation cannot run `command`, which starts members."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ConfigError(
            f"`{command}` needs Linux on x86-64; this is {platform.system()} {platform.machine()}, where only "
            "the client library and the commands that talk to a running cluster work"
        )
    if missing := [name for name in _MODULES[extra] if find_spec(name) is None]:
        raise ConfigError(f"`{command}` needs {', '.join(missing)}; {_install(extra)}")


def missing_module(error: ModuleNotFoundError) -> str:
    """Return the line for an import that failed in a command, or an empty string if no extra brings the module."""
    root = (error.name or "").partition(".")[0]
    extra = next((extra for extra, names in _MODULES.items() if root in names), "")
    return f"this command needs {root}; {_install(extra)}" if extra else ""


def _install(extra: str) -> str:
    return f"run: pip install 'tandem-serving[{extra}]'"
