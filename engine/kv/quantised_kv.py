"""Quantises K and V of a token to 8-bit codes with a scale, and restores them. Arithmetic only.

Each token and KV head has one scale for K and one for V. So a step quantises what it writes without reading what a
block already holds, and a block that is filled in one step or in sixteen has the same bytes.

A scale is the largest element's magnitude divided by the largest code, in bfloat16. Its range is float32's, so every
vector has a scale; its rounding error, at most 2^-9, moves the largest element by less than half a step beyond the
largest code. A vector that contains an infinity or NaN is restored without any finite element, so that an error stays
visible.
"""

import torch

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LEAST_SCALE = 2.0**-126  # below it a reciprocal would be infinite


def quantise(states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise floats `[..., dim]` to codes of the same shape and bfloat16 scales `[...]`. Zeros give zeros."""
    largest = _LARGEST[dtype]
    wide = states.float()
    scales = wide.abs().amax(dim=-1).mul_(1 / largest).bfloat16()
    steps = wide * scales.float().clamp_(min=_LEAST_SCALE).reciprocal_().unsqueeze(-1)
    if dtype == torch.int8:
        steps.round_()  # half to even, as the conversion to fp8 does
    return steps.to(dtype), scales


def restore(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Restore codes `[..., dim]` with their scales `[...]` as `dtype`: the exact product, rounded once."""
    wide = torch.float32 if dtype == torch.float16 else dtype  # half's range is less than a scale's
    elements = codes.to(wide) if codes.dtype == torch.int8 else _from_fp8(codes, wide)
    return elements.mul_(scales.to(wide).unsqueeze(-1)).to(dtype)


def _from_fp8(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if codes.device.type != "cpu":
        return codes.to(dtype)
    # The bits moved to their places in a bfloat16, whose exponent's bias is larger by 120: ten times as fast on a CPU
    # as its own conversion. The code for 480 is e4m3's NaN, and its scale is NaN too.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x7810)
    return bits.view(torch.bfloat16).mul_(2.0**120).to(dtype)
