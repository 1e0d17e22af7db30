"""Triton's interpreter with the arithmetic of a GPU in 16 and 8 bits, and the condition under which kernels can run on
this machine.

The interpreter keeps bfloat16 as its bits in uint16, and gets it wrong (Triton 3.6, `runtime/interpreter.py`): `tl.dot`
multiplies the bits as whole numbers; a whole number becomes the bits of that number; float32 is cut off where a GPU
rounds to even; sums, products and comparisons are of bits. Here torch computes products and conversions instead;
arithmetic between bfloat16 numbers is refused, because no kernel of ours has any. The interpreter also reads float8's
NaN as 480 and rounds half up instead of half to even; torch converts float8 too. Its scalars are arrays of one element,
which NumPy 2.5 no longer accepts as a bound of a loop; here they are converted to numbers.
"""

import importlib.util
import os
from typing import Any

import pytest
import torch

from tests.unit.engine.rigs.watched_launches import watch_launches

IS_INTERPRETED = bool(importlib.util.find_spec("triton")) and os.environ.get("TRITON_INTERPRET") == "1"


def kernel_device() -> str:
    """Return the device on which a Triton kernel can run: a GPU, or the CPU if TRITON_INTERPRET selects Triton's
    interpreter.
    """
    if torch.cuda.is_available():
        return "cuda"
    if IS_INTERPRETED:
        compute_as_a_gpu()
        watch_launches()
        return "cpu"
    pytest.skip("needs a GPU (or Triton and TRITON_INTERPRET=1): Triton's kernel is compiled for CUDA")


def needs_the_interpreter() -> None:
    """Skip a test of behaviour that no GPU shows, or that a GPU would compile again for every case."""
    if kernel_device() != "cpu":
        pytest.skip("runs in Triton's interpreter alone")


def compute_as_a_gpu() -> None:
    """Replace the interpreter's arithmetic. A repeated call has no effect."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    if hasattr(builder.cast_impl, "rounds"):
        return
    kept = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}  # as whole numbers of their size
    plain_cast, plain_dot, plain_binary = builder.cast_impl, builder.create_dot, builder.binary_op
    plain_patch = interpreter._patch_lang_tensor

    def widened(value: Any) -> Any:
        found = kept.get(value.dtype.scalar)
        if found is None:
            return value
        bits = torch.from_numpy(value.data.copy())
        return handle(bits.view(found).float().numpy(), tl.float32)

    def cast(self: Any, source: Any, target: Any) -> Any:
        wide, wanted = widened(source), kept.get(target.scalar)
        if wanted is None:
            return plain_cast(self, wide, target)
        single = torch.from_numpy(wide.data.astype("float32"))
        bits = torch.uint16 if wanted == torch.bfloat16 else torch.uint8
        return handle(single.to(wanted).view(bits).numpy(), target.scalar)

    def to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        return cast(self, source, target)

    def dot(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return plain_dot(self, widened(left), widened(right), *others)

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        for value in (left, right):
            assert value.dtype.scalar not in kept, f"{operation.__name__} of {value.dtype.scalar}"
        return plain_binary(self, left, right, operation)

    def patch(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    cast.rounds = True  # type: ignore[attr-defined]
    builder.cast_impl, builder.create_fp_to_fp = cast, to_fp
    builder.create_dot, builder.binary_op = dot, binary
    interpreter._patch_lang_tensor = patch
