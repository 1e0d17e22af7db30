"""Codecs, which quantise a group of KV elements to few bits with a scale, and restore them. Pure arithmetic.

All of it is in float32 with scales of few bits, rounds half to even, and reduces with min and max only. So the same
elements give the same bytes on every run and every device.

A group that holds an infinity or NaN has the scale `NOT_FINITE` and is restored as NaN: an error stays visible, as it
would without quantising.
"""

from typing import Protocol

import torch

NOT_FINITE = 255

_MANTISSA_BITS = 23  # of float32
_ONE_EXPONENT = 127


class Codec(Protocol):
    @property
    def code_bits(self) -> int: ...
    @property
    def code_dtype(self) -> torch.dtype:
        """Return the dtype of one byte. The upper half of a 4-bit code is 0."""
        ...

    @property
    def param_bytes(self) -> int:
        """Return the number of bytes per group for its scale and other parameters."""
        ...

    def quantise(self, elements: torch.Tensor, axis: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Quantise float32 elements, which it overwrites.

        Returns values that become codes when stored as `code_dtype`, and `param_bytes` uint8 tensors of length 1 along
        `axis`."""
        ...

    def restore(self, codes: torch.Tensor, params: list[torch.Tensor]) -> torch.Tensor:
        """Return float32 elements for uint8 codes. Any bytes are accepted, because unverified bytes may be anything."""
        ...


class Int8Codec:
    """Stores an element as a whole number from -127 to 127, with bias 127 in one byte, times a power of two.

    This is the arithmetic of MXINT8 (OCP Microscaling Formats 1.0) without clipping. A restored element is exact in
    bfloat16, so a second hand-off changes nothing.
    """

    code_bits = 8
    code_dtype = torch.int8
    param_bytes = 1

    def quantise(self, elements: torch.Tensor, axis: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        scale, inverse = _power_of_two(elements, axis, mantissa_limit=0x7E0000, exponent_limit=6)  # 127
        return elements.mul_(inverse).round_(), [scale]

    def restore(self, codes: torch.Tensor, params: list[torch.Tensor]) -> torch.Tensor:
        return codes.view(torch.int8).float().mul_(_from_exponent(params[0]))


class Fp8Codec:
    """Stores an element as float8 e4m3 times a power of two: the arithmetic of MXFP8 without clipping.

    A restored element is exact in bfloat16.
    """

    code_bits = 8
    code_dtype = torch.float8_e4m3fn
    param_bytes = 1

    def quantise(self, elements: torch.Tensor, axis: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        scale, inverse = _power_of_two(elements, axis, mantissa_limit=0x600000, exponent_limit=8)  # 448
        return elements.mul_(inverse), [scale]

    def restore(self, codes: torch.Tensor, params: list[torch.Tensor]) -> torch.Tensor:
        # The bits moved to their places in a float32, whose exponent's bias is larger by 120: many times faster on a
        # CPU than its own conversion. Its 480 for e4m3's NaN is never made.
        bits = codes.view(torch.int8).int().bitwise_left_shift_(20).bitwise_and_(-0x78100000)
        return bits.view(torch.float32).mul_(2.0**120).mul_(_from_exponent(params[0]))


class Int4Codec:
    """Stores an element as `(code + zero) * scale`, with codes from 0 to 15, a signed byte as zero, and a scale of one
    byte with 3 bits of mantissa.

    The scale is wide enough for a zero of at most 120 steps, so a channel far from 0 keeps 0.4 % of its distance.
    """

    code_bits = 4
    code_dtype = torch.uint8
    param_bytes = 2

    _MOST_STEPS = 120
    _BIAS = (_ONE_EXPONENT - 20) << 3  # scales from 2^-20 to 3,584; elements beyond 430,080 saturate

    def quantise(self, elements: torch.Tensor, axis: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        low, high = elements.amin(axis, keepdim=True), elements.amax(axis, keepdim=True)
        wanted = torch.maximum((high - low).mul_(1 / 15), torch.maximum(high, -low).mul_(1 / self._MOST_STEPS))
        dropped = _MANTISSA_BITS - 3
        rounded_up = (wanted.view(torch.int32) + ((1 << dropped) - 1)).bitwise_right_shift_(dropped)
        code = rounded_up.sub_(self._BIAS).clamp_(0, NOT_FINITE - 1)
        finite = low.isfinite() & high.isfinite()
        _set_aside(elements, finite)
        inverse = self._scale(code).reciprocal_()
        zero = torch.where(finite, low * inverse, 0).round_().clamp_(-self._MOST_STEPS, self._MOST_STEPS - 15)
        codes = elements.mul_(inverse).round_().sub_(zero).clamp_(0, 15)
        scale = torch.where(finite, code, NOT_FINITE).to(torch.uint8)
        return codes, [scale, zero.to(torch.int8).view(torch.uint8)]

    def restore(self, codes: torch.Tensor, params: list[torch.Tensor]) -> torch.Tensor:
        code, zero = params[0].int(), params[1].view(torch.int8)
        scale = torch.where(code == NOT_FINITE, torch.nan, self._scale(code))
        return codes.float().add_(zero).mul_(scale)

    def _scale(self, code: torch.Tensor) -> torch.Tensor:
        return (code + self._BIAS).bitwise_left_shift_(_MANTISSA_BITS - 3).view(torch.float32)


def _power_of_two(
    elements: torch.Tensor, axis: int, *, mantissa_limit: int, exponent_limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each group, the smallest power of two of which no element is more than `limit` times, and its
    inverse.

    The power is given as its biased exponent. The limit is given as the mantissa and exponent of a float32. Elements
    smaller than 2^-126 become 0."""
    largest = torch.maximum(elements.amax(axis, keepdim=True), elements.amin(axis, keepdim=True).neg_())
    finite = largest.isfinite()
    bits = largest.view(torch.int32).clamp_(max=0x7F7FFFFF)
    carry = (1 << _MANTISSA_BITS) - 1 - mantissa_limit
    exponent = (bits + carry).bitwise_right_shift_(_MANTISSA_BITS).sub_(exponent_limit).clamp_(min=1)
    _set_aside(elements, finite)
    inverse = (2 * _ONE_EXPONENT - exponent).bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32)
    return torch.where(finite, exponent, NOT_FINITE).to(torch.uint8), inverse


def _from_exponent(scale: torch.Tensor) -> torch.Tensor:
    """Return the scale as float32. NOT_FINITE gives infinity, which times the group's zeros is NaN."""
    return scale.int().bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32)


def _set_aside(elements: torch.Tensor, finite: torch.Tensor) -> None:
    if not bool(finite.all()):
        elements.masked_fill_(~finite, 0)
