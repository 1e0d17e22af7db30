"""The ways of waiting that product code must not use."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = [
    "tandem",
    "cluster",
    "engine",
    "kvtransfer",
    "prefill_worker",
    "decode_worker",
    "worker",
    "router",
    "cli",
    "deploy",
]


_INSTEAD = {
    ("asyncio", "wait_for"): "asyncio.timeout: wait_for drops a cancel that comes together with the answer (3.11)",
    ("time", "sleep"): "an event with a deadline",
}


@cache
def _uses() -> list[tuple[tuple[str, str], str]]:
    """Return each use of a function of `_INSTEAD` in product code, with its place."""
    return [
        ((node.value.id, node.attr), f"{path.relative_to(ROOT)}:{node.lineno}")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in _INSTEAD
    ]


@pytest.mark.parametrize(("module", "function"), _INSTEAD)
def test_product_code_uses_no_wait_that_cannot_be_cancelled(module: str, function: str) -> None:
    found = [place for used, place in _uses() if used == (module, function)]
    assert found == [], f"use {_INSTEAD[module, function]}"
