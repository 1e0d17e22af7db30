"""The ways of waiting that product code must not use."""

import ast
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


@pytest.mark.parametrize(
    ("module", "function", "instead"),
    [
        ("asyncio", "wait_for", "asyncio.timeout: wait_for drops a cancel that comes together with the answer (3.11)"),
        ("time", "sleep", "an event with a deadline"),
    ],
)
def test_product_code_uses_no_wait_that_cannot_be_cancelled(module: str, function: str, instead: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == function
        and isinstance(node.value, ast.Name)
        and node.value.id == module
    ]
    assert found == [], f"use {instead}"
