"""Find every failure reason in the production code, and whether the stored results reached it.

Reasons are the names of cluster/errors.py, and the words that are counted under a label of `_LABELS` or noted in a
request's ledger. They are found by reading the source: constants in the calls that count, and values of variables and
functions that hold or return a reason by their name. A reason that is built at run time consists of these.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from cluster.errors import HandOffReason
from kvtransfer.protocol.import_state import FallBackReason
from router.fleet.decode_events import MoveOutcome
from tests.chaos.simulated.results.coverage import LABELS, error_kinds
from worker import health

_ROOT = Path(__file__).parents[4]
_PACKAGES = ("cluster", "engine", "kvtransfer", "prefill_worker", "decode_worker", "worker", "router")
_CALLS = frozenset({"count", "_count", "add_reason", "AttemptFailed"})
_VARIABLES = re.compile(r"(^|_)(reason|outcome)$")
_WORD = re.compile(r"[a-z]+(_[a-z]+)*")
_ENUMS: tuple[type[StrEnum], ...] = (HandOffReason, FallBackReason, MoveOutcome, health.CanaryOutcome)
_UNSEEN = ("damaged", "unreadable", "unwritable", "step", "canary")  # of tier copies, and what finds a worker unhealthy
_NO_FAILURE = frozenset({"ok", "moved", "ended", "prefill", "decode", "handoff", "store", "fetch", "demote"})


def every_reason() -> frozenset[str]:
    reasons = {kind.reason for kind in error_kinds()} | {*_UNSEEN}
    reasons |= {str(reason) for kind in _ENUMS for reason in kind}
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            reasons |= set(_words_of(path))
    return frozenset(reasons - _NO_FAILURE)


def is_reached(reason: str, names: Iterable[str]) -> bool:
    """Return whether a result names the reason. `names` are those of coverage.py. A ledger's reasons begin with the leg
    that failed."""
    pattern = re.compile(rf"^(error|hand-off reason|ledger|counted): (.* )?((prefill|decode|handoff)_)?{reason}( |$)")
    return any(pattern.match(name) for name in names)


def _words_of(path: Path) -> Iterator[str]:
    tree = _tree(path)
    constants = _constants(tree)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in _PACKAGES:
            source = _ROOT / f"{node.module.replace('.', '/')}.py"
            if source.exists():
                constants = _constants(_tree(source)) | constants
    for each in ast.walk(tree):
        if isinstance(each, ast.Call) and _name_of(each.func) in _CALLS:
            named = [keyword.value for keyword in each.keywords if keyword.arg in LABELS]
            for value in (*each.args, *named):
                yield from _words(value, constants)
        elif isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            if any(_VARIABLES.search(_name_of(target)) for target in targets):
                yield from _words(each.value, constants)
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and _VARIABLES.search(each.name):
            for returned in (inner.value for inner in ast.walk(each) if isinstance(inner, ast.Return)):
                yield from _words(returned, constants) if returned else ()


@lru_cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the constants of a module by name, including several that one line assigns."""
    found = dict[str, ast.expr]()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                targets, values = [target], [node.value]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    targets, values = target.elts, node.value.elts
                named = zip(targets, values, strict=True)
                found.update({name.id: value for name, value in named if isinstance(name, ast.Name)})
    return found


def _words(node: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    """Return the words that an expression may evaluate to."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _WORD.fullmatch(node.value):
        if not node.value.startswith("tandem_"):  # the name of a metric
            yield node.value
    elif isinstance(node, ast.Name) and node.id in constants:
        yield from _words(constants[node.id], {})
    elif isinstance(node, ast.IfExp):
        yield from _words(node.body, constants)
        yield from _words(node.orelse, constants)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _words(value, constants)


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
