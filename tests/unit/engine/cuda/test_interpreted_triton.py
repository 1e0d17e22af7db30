"""The corrections of the interpreter, and the launches that the watch refuses: kernels that are wrong on purpose."""

# ruff: noqa: ANN001, ANN202  (a kernel's arguments have Triton's types)

from typing import Any

import pytest
import torch

from tests.unit.engine.rigs.interpreted_triton import needs_the_interpreter

triton: Any = pytest.importorskip("triton", reason="needs Triton, which comes with torch's CUDA wheels")
tl: Any = triton.language


@pytest.fixture(autouse=True)
def interpreted() -> None:
    needs_the_interpreter()


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(left, right, output, N: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    ours = tl.load(left + places)
    product = tl.dot(ours, tl.load(right + places).to(ours.dtype), input_precision="ieee")
    tl.store(output + places, product.to(output.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _double(states, N: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, N)
    tl.store(states + places, tl.load(states + places) + tl.load(states + places))


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, target, shift, N: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(target + places, tl.load(source + places + shift))


@triton.jit  # type: ignore[untyped-decorator]
def _number(target, N: tl.constexpr, DIFFER: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(target + tl.arange(0, N), tl.program_id(0) * DIFFER + tl.arange(0, N))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_products_of_narrow_numbers_are_exact_and_rounded_once_to_even(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(16, 16, generator=generator).bfloat16()
    right = (10 * torch.randn(16, 16, generator=generator)).to(dtype)
    output = torch.zeros(16, 16, dtype=torch.bfloat16)
    _multiply[(1,)](left, right, output, N=16)
    assert torch.equal(output, (left.double() @ right.double()).float().bfloat16())


def test_arithmetic_between_narrow_numbers_is_refused() -> None:
    with pytest.raises(Exception, match="add of bf16"):
        _double[(1,)](torch.ones(16, dtype=torch.bfloat16), N=16)
    _double[(1,)](torch.ones(16), N=16)


def test_an_address_outside_the_launchs_tensors_is_refused() -> None:
    whole = torch.zeros(64)
    _copy[(2,)](whole[:32], whole[32:], 0, N=16)
    for source, target in ((whole[:31], whole[32:]), (whole[:32], whole[33:])):
        with pytest.raises(Exception, match="1 places outside the tensors of the launch"):
            _copy[(2,)](source, target, 0, N=16)


def test_two_programs_may_write_the_same_address_only_with_the_same_bits() -> None:
    target = torch.zeros(16, dtype=torch.int32)
    _number[(2,)](target, N=16, DIFFER=0)
    with pytest.raises(AssertionError, match="16 places are written by two programs"):
        _number[(2,)](target, N=16, DIFFER=1)


def test_a_launch_whose_programs_read_the_writes_of_others_is_refused() -> None:
    states = torch.zeros(48)
    _copy[(2,)](states, states, 0, N=16)
    with pytest.raises(AssertionError, match="16 places are read by one program and written by another"):
        _copy[(2,)](states, states, 16, N=16)
