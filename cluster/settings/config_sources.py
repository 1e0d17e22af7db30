"""Reads the settings of a process from flags, environment variables and a file, with one name for all three.

A field `max_model_len` is the flag `--max-model-len`, the variable `TANDEM_MAX_MODEL_LEN` and the key `max_model_len`
of the YAML file given by `--config`. Flags win over variables, variables over the file, the file over the default; an
unknown key is an error.
"""

import argparse
import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cluster.errors import ConfigError
from cluster.settings.config import ClusterSettings, RouterConfig, WorkerConfig
from cluster.settings.worker_settings import EngineSettings, TransferSettings, flag_of

_ENVIRONMENT_PREFIX = "TANDEM_"
# Variables that are not settings of a process: `config` names the file, and clients use the addresses.
_OTHER_VARIABLES = frozenset({"config", "address", "http_address"})
_GROUPS: dict[type, str] = {
    ClusterSettings: "cluster",
    EngineSettings: "model and engine",
    TransferSettings: "KV transfer",
}
_METAVARS: dict[type, str] = {int: "N", float: "X", str: "VALUE"}
_MOST = (1 << 31) - 1
_MODELS = {"model", "draft_model"}  # a folder, in which no shell has replaced ~ where it follows = or stands in a file
_NUMBERS = {"int": "a whole number", "float": "a number"}

Config = TypeVar("Config", bound=WorkerConfig | RouterConfig)


class LineParser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage. It raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{_plain(message)}; {self.prog} --help lists the arguments")


def _plain(message: str) -> str:
    """Say an error of argparse as errors of other settings are said."""
    name, _, problem = message.removeprefix("argument ").partition(": ")
    if wrong := re.fullmatch(r"invalid (\w+) value: (.+)", problem):
        return f"{name} must be {_NUMBERS.get(wrong[1], 'valid')}, not {wrong[2]}"
    if wrong := re.fullmatch(r"invalid choice: (.+) \(choose from (.+)\)", problem):
        return f"{name} must be one of {wrong[2].replace(chr(39), '')}, not {wrong[1]}"
    if problem == "expected one argument":
        return f"{name} needs a value; one that begins with - is given as {name}=VALUE"
    if problem.startswith("must be "):  # an ArgumentTypeError
        return f"{name} {problem}"
    return f"missing: {problem}" if name == "the following arguments are required" else f"{name}: {problem}"


def add_flags(
    parser: argparse.ArgumentParser, config_type: type[Config], *, without: frozenset[str] = frozenset()
) -> None:
    """Add `--config` and one flag per field. A flag that is not given sets no attribute."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same keys", default=argparse.SUPPRESS)
    for owner, items in _fields_by_owner(config_type).items():
        group = parser.add_argument_group(_GROUPS.get(owner, owner.__name__.removesuffix("Config").lower()))
        for item in items:
            if item.name in without:
                continue
            kind = _field_type(config_type, item.name)
            shown = f" (default: {item.default})" if item.default not in ("", 0) else ""
            is_switch = item.metadata["choices"] == ("on", "off")
            group.add_argument(
                flag_of(item.name),
                nargs="?" if is_switch else None,
                const="on" if is_switch else None,
                default=argparse.SUPPRESS,
                choices=item.metadata["choices"] or None,
                metavar=None if item.metadata["choices"] else _METAVARS[kind],
                type=kind,
                help=(item.metadata["help"] + shown).replace("%", "%%"),
            )


def load_config(
    config_type: type[Config], flags: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Config:
    """Merge file, environment (default: os.environ) and flags; later sources win. Raises ConfigError.

    All processes of a cluster may share the file and the environment: a key that only another kind of process supports
    is ignored, and a key that no process supports is an error.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, object] = {}
    config_file = flags.get("config") or environment.get(_ENVIRONMENT_PREFIX + "CONFIG")
    if config_file:
        values.update(_read_file(Path(str(config_file))))
    values.update(_read_environment(environment))
    names = _names(config_type)
    values = {name: _converted(config_type, name, value) for name, value in values.items() if name in names}
    values.update({name: value for name, value in flags.items() if name in names})
    values.update({name: os.path.expanduser(str(values[name])) for name in _MODELS & values.keys()})
    for item in dataclasses.fields(config_type):
        choices = item.metadata["choices"]
        if item.name in values and choices and values[item.name] not in choices:
            raise ConfigError(f"{item.name} must be one of {', '.join(choices)}, not {values[item.name]!r}")
        _require_bounded(item.name, values.get(item.name))
    return config_type(**typing.cast("dict[str, Any]", values))


def parse_arguments(config_type: type[Config], prog: str, arguments: Sequence[str]) -> Config:
    """Parse the arguments of a process started as `python -m prog ...`. Raises ConfigError."""
    parser = LineParser(prog=f"python -m {prog}", description=config_type.__doc__, allow_abbrev=False)
    add_flags(parser, config_type)
    parsed, unknown = parser.parse_known_args(arguments)
    refuse_unknown(parser, unknown)
    return load_config(config_type, vars(parsed))


def setting_outside_flags(name: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the value of a setting's variable, or else in the file of TANDEM_CONFIG; empty: in neither. Commands use
    it, so that in a member's container they find the member's files. Raises ConfigError for a file without settings.
    """
    environment = os.environ if environment is None else environment
    if value := environment.get(_ENVIRONMENT_PREFIX + name.upper()):
        return value
    config_file = environment.get(_ENVIRONMENT_PREFIX + "CONFIG")
    return str(_read_file(Path(config_file)).get(name, "")) if config_file else ""


def config_path(arguments: Sequence[str]) -> str:
    """Return the file of settings of a process with these arguments; empty: there is none."""
    parser = LineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=os.environ.get(_ENVIRONMENT_PREFIX + "CONFIG", ""))
    return str(parser.parse_known_args(arguments)[0].config)


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Refuse arguments that the parser did not recognise. Raises ConfigError, which names the nearest flag."""
    if not unknown:
        return
    name = unknown[0].partition("=")[0]
    if not name.startswith("-"):
        raise ConfigError(f"unexpected argument {name!r}; {parser.prog} --help lists the arguments")
    flags = frozenset(re.findall(r"--[a-z][a-z0-9-]*", parser.format_usage()))
    raise ConfigError(f"unknown flag {name}{_nearest(name, flags)}; {parser.prog} --help lists the flags")


def _fields_by_owner(config_type: type[Config]) -> dict[type, list[dataclasses.Field[object]]]:
    """Group the fields by the class that declares them, with the class of the configuration itself first."""
    owners: dict[type, list[dataclasses.Field[object]]] = {config_type: []}
    for item in dataclasses.fields(config_type):
        owner = next(
            base for base in reversed(config_type.__mro__) if item.name in vars(base).get("__annotations__", {})
        )
        owners.setdefault(owner, []).append(item)
    return owners


def _names(config_type: type[Config]) -> frozenset[str]:
    return frozenset(item.name for item in dataclasses.fields(config_type))


def _read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    known = _names(WorkerConfig) | _names(RouterConfig)
    values: dict[str, object] = {}
    for variable, text in environment.items():
        name = variable.removeprefix(_ENVIRONMENT_PREFIX).lower()
        if variable.startswith(_ENVIRONMENT_PREFIX) and name not in _OTHER_VARIABLES:
            if name not in known:
                raise ConfigError(f"unknown variable {variable}: no setting is called {name}{_nearest(name, known)}")
            values[name] = text
    return values


def _read_file(path: Path) -> dict[str, object]:
    import yaml  # imported here because all other imports are standard library

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError) as error:  # of values of a wrong form, too
        raise ConfigError(f"--config {path} is not YAML: {_yaml_problem(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold keys and values, such as `block_size: 16`")
    known = _names(WorkerConfig) | _names(RouterConfig)
    for name in content:
        if name not in known:
            raise ConfigError(f"--config {path}: unknown key {name!r}{_nearest(str(name), known)}")
    return content


def _yaml_problem(error: Exception) -> str:
    """Return the error in one line, with its place in the file."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return place + (str(problem or error).strip().partition("\n")[0] or type(error).__name__)


def _nearest(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _require_bounded(name: str, value: object) -> None:
    """Raise ConfigError for a number that no setting means: libraries and Redis hold smaller ones, and fail."""
    if isinstance(value, int | float) and not abs(value) <= _MOST:
        raise ConfigError(f"{flag_of(name)} must be a number of at most {_MOST:,}, not {value}")


def _field_type(config_type: type[Config], name: str) -> type[int] | type[float] | type[str]:
    hint = typing.get_type_hints(config_type)[name]
    assert hint in (int, float, str), f"{name}: {hint}"
    return typing.cast("type[int] | type[float] | type[str]", hint)


def _converted(config_type: type[Config], name: str, value: object) -> object:
    """Convert a variable's text or a YAML value to the field's type. Raises ConfigError."""
    kind = _field_type(config_type, name)
    fits = isinstance(value, str | int | float) and not isinstance(value, bool)
    if fits and kind is int and isinstance(value, float):
        fits = value.is_integer()
    try:
        if fits:
            return kind(typing.cast("str | int | float", value))
    except (ValueError, OverflowError):
        pass
    wanted = {int: "a whole number", float: "a number", str: "a text"}[kind]
    raise ConfigError(f"{name} must be {wanted}, not {value!r}")
