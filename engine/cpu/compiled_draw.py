"""Draws the tokens of a step in one call of the compiled library (`draw.c`).

The tokens equal those of `engine/steps/sampler.py`, which is the reference. Owns the call's scratch memory. These
functions need no special instructions: they run on any x86-64 processor.
"""

import ctypes
from array import array
from collections.abc import Sequence

import torch

from engine.cpu.library import load_library
from engine.sampling.adjustment import AdjustedRows, MaskedRows
from engine.scheduling.step import Sample
from engine.steps.sampler import noise_key


class _Sampling(ctypes.Structure):
    """The struct td_sampling of kernels.h."""

    _fields_ = (
        ("key", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("least_score", ctypes.c_double),
        ("num_banned", ctypes.c_int64),
        ("adjusted", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
    )


class _Draws(ctypes.Structure):
    """The struct td_draws of kernels.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("is_bf16", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("samplings", ctypes.POINTER(_Sampling)),
        ("banned", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("mask_words", ctypes.c_int64),
    )


def compiled_draw() -> "CompiledDraw":
    """Return the compiled RowDraw. Raises NotCompiled."""
    return CompiledDraw(load_library())


class CompiledDraw:
    """A RowDraw for logits on the CPU, called by one thread at a time. It releases the GIL during the call."""

    def __init__(self, library: ctypes.CDLL, widest: int = 512) -> None:
        """`widest` is the width in bits of the widest registers to use, if the processor has them."""
        self._draw, self._scratch_bytes = library.td_draw, library.td_draw_scratch_bytes
        self._widest = widest
        self._vocab_size = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __call__(
        self,
        logits: torch.Tensor,
        samples: Sequence[Sample],
        adjusted: AdjustedRows | None = None,
        masked: MaskedRows | None = None,
    ) -> torch.Tensor | None:
        """Return token ids `[rows]`, or None for logits that are float64, contain NaN or have no finite maximum."""
        if logits.device.type != "cpu" or logits.dtype == torch.float64:
            return None
        if logits.dtype not in (torch.float32, torch.bfloat16):
            logits = logits.float()
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, vocab_size = logits.shape
        if vocab_size != self._vocab_size:
            self._scratch = torch.empty(self._scratch_bytes(vocab_size), dtype=torch.uint8)
            self._vocab_size = vocab_size
        samplings = _samplings(samples)
        if adjusted is not None:
            _read_adjusted(samplings, adjusted)
        if masked is not None:
            _read_masks(samplings, masked)
        banned = array("q", [token_id for sample in samples for token_id in sample.banned_token_ids])
        token_ids = torch.empty(rows, dtype=torch.int64)
        draws = _Draws(
            logits.data_ptr(),
            logits.dtype == torch.bfloat16,
            logits.stride(0),
            rows,
            vocab_size,
            samplings,
            banned.buffer_info()[0],
            token_ids.data_ptr(),
            self._scratch.data_ptr(),
            masked.words[0].shape[0] if masked is not None else 0,
        )
        self._draw(ctypes.byref(draws), self._widest)
        return token_ids if bool((token_ids >= 0).all()) else None


def _samplings(samples: Sequence[Sample]) -> "ctypes.Array[_Sampling]":
    # torch's logarithm, so that both implementations keep a score that equals it to the last bit.
    least_scores = torch.tensor([sample.sampling.min_p for sample in samples], dtype=torch.float64).log().tolist()
    samplings = (_Sampling * len(samples))()
    for place, (sample, least_score) in enumerate(zip(samples, least_scores, strict=True)):
        sampling = sample.sampling
        samplings[place] = _Sampling(
            noise_key(sample.seed, sample.position),
            sampling.top_k,
            sampling.temperature,
            sampling.top_p,
            least_score,
            len(sample.banned_token_ids),
            None,
            None,
        )
    return samplings


def _read_adjusted(samplings: "ctypes.Array[_Sampling]", adjusted: AdjustedRows) -> None:
    """Let the rows that were adjusted be read from there. The pointers are valid while `adjusted` is."""
    first, row_bytes = adjusted.logits.data_ptr(), adjusted.logits.stride(0) * adjusted.logits.element_size()
    for place, row in enumerate(adjusted.rows):
        samplings[row].adjusted = first + place * row_bytes


def _read_masks(samplings: "ctypes.Array[_Sampling]", masked: MaskedRows) -> None:
    """Let the masks be read. The pointers are valid while `masked` is."""
    for row, words in zip(masked.rows, masked.words, strict=True):
        samplings[row].mask = words.data_ptr()
