"""Every name in the documentation exists: links, paths, flags, metrics, commands, modules, reasons, classes."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest

from cli.command import _VERBS, PROGRAMS, _parser, verb_module
from cluster.errors import _STATUS, ConfigError, HandOffReason
from cluster.observe.metrics import METRICS, VLLM_NAMES

ROOT = Path(__file__).parents[3]
_SKIPPED = {".git", ".venv", "build", ".whl", ".wheels", ".pytest_cache", "node_modules", "shared"}
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md"))
    if not _SKIPPED & set(page.relative_to(ROOT).parts) and page != ROOT / "benchmarks/results/chaos_simulated.md"
)
_SOURCES = ("*.py", "*.c", "*.h", "*.proto", "*.yaml", "*.toml")
_FOLDERS = tuple(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in _SKIPPED))
# Flags of commands that are not ours: pip, docker, kubectl, openssl, nvcc.
_FOREIGN_FLAGS = {"--extra-index-url", "--build-arg", "--replicas", "--from-literal", "--no-deps", "--no-index"}
_FOREIGN_FLAGS |= {"--no-compile", "--upgrade", "--target", "--cacert", "--scale", "--build"}
# Names of libraries, protocols and other programs that no source of ours contains.
_FOREIGN_NAMES = {"pidfd_getfd", "GRPC_EXPERIMENTS", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME"}
_FOREIGN_NAMES |= {"COMPOSE_PROFILES"}
_FOREIGN_NAMES |= {"terminationGracePeriodSeconds", "test_expired_lease_frees_its_blocks"}  # the last one is an example
_MOST_LINES = 2_060  # of docs/ without the decisions
_WRITTEN_PATHS = {"benchmarks/results/test_repeat.jsonl", "tandem/kernels/"}  # written when they are first needed


@cache
def _text(page: Path) -> str:
    return page.read_text()


def _words(page: Path) -> Iterator[str]:
    """Return the texts between backticks outside code blocks."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", _text(page), flags=re.DOTALL))


def _commands(page: Path) -> Iterator[str]:
    """Return the shell commands in code blocks, with continued lines joined, and those in backticks."""
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", _text(page), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.removeprefix("$ ").strip()
    yield from _words(page)


@cache
def _sources() -> dict[str, str]:
    """Return the path and text of every source file but this one."""
    folders = (path for pattern in _SOURCES for name in _FOLDERS for path in (ROOT / name).rglob(pattern))
    paths = (*folders, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "setup.py")
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths if path != Path(__file__)}


@cache
def _identifiers() -> frozenset[str]:
    found = {part for path in _sources() for part in Path(path).with_suffix("").parts}
    return frozenset(found.union(*(re.findall(r"\w+", text) for text in _sources().values())))


@cache
def _flags_in_source() -> frozenset[str]:
    """Return the flags of every parser: literals, and settings, whose flags are the names of their fields."""
    text = "".join(text for path, text in _sources().items() if path.endswith(".py"))
    literals = set(re.findall(r"[\"'](--[a-z][a-z0-9-]*)", text))
    fields = re.findall(r"^    (\w+): [^=\n]+ = setting\(", text, flags=re.MULTILINE)
    return frozenset(literals | {"--" + field.replace("_", "-") for field in fields} | _FOREIGN_FLAGS)


@cache
def _flags_of(verb: str) -> frozenset[str]:
    module = verb_module(verb)
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    nested = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parsers = [parser, *(each for choices in nested for each in choices.values())]
    return frozenset(flag for each in parsers for action in each._actions for flag in action.option_strings)


def _slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name)


def broken_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", _text(page), flags=re.DOTALL)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield link
        elif anchor and anchor not in map(_slug, re.findall(r"^#+ (.*)$", _text(target), re.MULTILINE)):
            yield f"{link}: no such heading"


def missing_paths(page: Path) -> Iterator[str]:
    for word in _words(page):
        if re.fullmatch(rf"(?:{'|'.join(_FOLDERS)})/[\w./-]*", word):
            is_there = (ROOT / word).exists() or (page.parent / word).exists() or word in _WRITTEN_PATHS
        elif re.fullmatch(r"[\w/]+\.(?:py|c|proto)", word):
            is_there = (page.parent / word).exists() or any(f"/{path}".endswith(f"/{word}") for path in _sources())
        else:
            continue
        if not is_there:
            yield word


def unknown_flags(page: Path) -> Iterator[str]:
    for command in _commands(page):
        verb = re.match(r"(?:\.venv/bin/)?tandem (\w+)(.*)", command)
        flags = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]*)", command.partition("#")[0]))
        known = _flags_of(verb[1]) if verb and verb[1] in _VERBS else _flags_in_source()
        yield from (f"{flag} in {command}" for flag in flags - known)


def unknown_commands(page: Path) -> Iterator[str]:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for command in _commands(page):
        verb = re.match(r"(?:\.venv/bin/)?tandem ([a-z-]+)", command)
        if verb and verb[1] not in (*_VERBS, *PROGRAMS):
            yield f"tandem {verb[1]}"
        module = re.search(r"python3? -m ([\w.]+)", command)
        if module and module[1] not in ("pip", "venv", "pytest") and find_spec(module[1]) is None:
            yield f"python -m {module[1]}"
        target = re.match(r"make ([a-z-]+)", command)
        if target and target[1] not in targets:
            yield f"make {target[1]}"


def refused_commands(page: Path) -> Iterator[str]:
    """Return the commands in code blocks that the parser of `tandem` refuses, with their arguments."""
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", _text(page), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ |\w+=\S* |docker compose exec (?:-T )?router |\S*/)*tandem (.*)", line)
            if found is None or found[1].startswith((*PROGRAMS,)):
                continue
            words = shlex.split(re.split(r" [|>&;]", found[1])[0], comments=True)
            try:
                with redirect_stderr(StringIO()):
                    unknown = _tandem_parser().parse_known_args(words)[1]
            except (ConfigError, SystemExit):
                unknown = words
            if unknown:
                yield line


@cache
def _tandem_parser() -> argparse.ArgumentParser:
    return _parser()[0]


def unknown_metrics(page: Path) -> Iterator[str]:
    for word in _words(page):
        metric = re.fullmatch(r"(tandem_[a-z_]+)(?:\{([\w, =\"]+)\})?", word)
        if metric is None or metric[1] in _FOLDERS:
            continue
        labels = {label.partition("=")[0].strip() for label in (metric[2] or "").split(",") if label}
        if metric[1] not in METRICS or not labels <= set(METRICS[metric[1]].labels):
            yield word


def unknown_names(page: Path) -> Iterator[str]:
    """Return the unknown words with an underscore or an inner capital: reasons, settings, figures, messages,
    classes.
    """
    for word in _words(page):
        for name in re.findall(r"(?<![\w/.-])[A-Za-z]\w*(?![\w/.])", word):
            is_name = "_" in name or re.search(r"[a-z][A-Z]", name)
            if is_name and name not in _identifiers() | _FOREIGN_NAMES:
                yield f"{name} in {word}"


CHECKS = (
    broken_links,
    missing_paths,
    unknown_flags,
    unknown_commands,
    refused_commands,
    unknown_metrics,
    unknown_names,
)


@pytest.mark.parametrize("check", CHECKS)
def test_every_name_in_the_documentation_exists(check: Callable[[Path], Iterator[str]]) -> None:
    problems = [f"{_name(page)}: {problem}" for page in PAGES for problem in check(page)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (broken_links, "[page](nowhere.md)"),
        (broken_links, "[heading](#nowhere)"),
        (missing_paths, "`router/nowhere.py`"),
        (unknown_flags, "`--flag-of-no-command`"),
        (unknown_flags, "`tandem scale --decode 2`"),
        (unknown_commands, "`tandem fly`"),
        (unknown_commands, "`make coffee`"),
        (unknown_commands, "`python -m benchmarks.nowhere`"),
        (refused_commands, "```sh\ntandem migrate decode-0 --max many\n```"),
        (refused_commands, "```sh\nKEY=$K tandem keys add --tenant\n```"),
        (unknown_metrics, "`tandem_nowhere_total`"),
        (unknown_metrics, "`tandem_requests_total{reason}`"),
        (unknown_names, "`no_such_reason_anywhere`"),
        (unknown_names, "`NoSuchMessage`"),
    ],
)
def test_a_name_that_does_not_exist_is_found(check: Callable[[Path], Iterator[str]], text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text}\n")
    assert list(check(page))


def test_the_documentation_has_a_bounded_number_of_lines() -> None:
    """History, measured figures and repetitions do not belong there; decisions and results have folders of their
    own.
    """
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page.parent.name != "decisions"]
    assert sum(len(_text(page).splitlines()) for page in pages) <= _MOST_LINES


def test_the_hand_off_page_names_every_reason_of_a_failed_hand_off() -> None:
    words = set(_words(ROOT / "docs" / "handoff.md"))
    assert not {str(reason) for reason in HandOffReason} - words


def test_the_page_about_metrics_lists_each_with_its_labels() -> None:
    section = _text(ROOT / "docs" / "observe.md").partition("## Metrics")[2].partition("\nAlert")[0]
    listed = dict(re.findall(r"`((?:tandem_|vllm:)\w+)(?:\{([\w,]+)\})?`", section))
    aliases = dict.fromkeys(VLLM_NAMES, "")
    assert listed == {name: ",".join(metric.labels) for name, metric in METRICS.items()} | aliases


def test_the_errors_of_the_api_page_equal_those_of_the_source() -> None:
    section = _text(ROOT / "docs" / "api.md").partition("## Errors")[2].partition("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    found = {(grpc, int(status), kind) for status, grpc, kind, _ in rows[2:] if grpc}
    known = {(grpc, int(status), kind) for grpc, status, kind in _STATUS.values()}
    assert found and found <= known, found - known
