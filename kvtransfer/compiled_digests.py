"""Computes digests, alone or together with a copy, in one pass of compiled code (`digests.c`).

The digests equal those of `kvtransfer/digests.py`, which has the definition and the reference. Owns the coefficients as
the compiled code reads them. `python -m kvtransfer.compiled_digests FOLDER` builds the library into a folder; an image
without a compiler finds it beside the sources.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from cluster.compiled_library import CompiledLibrary, NotCompiled
from kvtransfer.thread_work import submit

_SPLIT_BYTES = 2 << 20  # more than this is worth another thread
_MAX_SEEDS = 4  # the public coefficients, and those of the secrets of one rotation
_pointer, _integer = ctypes.c_void_p, ctypes.c_int64


class _Digests(ctypes.Structure):
    """The struct td_digests of digests.c."""

    _fields_ = (
        ("source", _pointer),
        ("source_rows", _pointer),
        ("target", _pointer),
        ("target_rows", _pointer),
        ("num_rows", _integer),
        ("row_bytes", _integer),
        ("coefficients", _pointer),
        ("sums", _pointer),
        ("digests", _pointer),
    )


_LIBRARY = CompiledLibrary(
    "digests",
    folder=Path(__file__).parent,
    signatures={
        "td_digest_width": (_integer, (_integer,)),
        "td_digest_rows": (None, (ctypes.POINTER(_Digests), _integer)),
    },
    version=2,
)


@dataclass(frozen=True, slots=True)
class DigestForm:
    """The parameters of the definition that the compiled code implements."""

    piece_bytes: int
    num_sums: int
    digest_bytes: int
    max_hashed_pieces: int
    coefficients: Callable[[int, bytes], torch.Tensor]  # of a fold and a seed: torch.int8, [piece_bytes, num_sums]


class CompiledDigests:
    """The compiled implementation of digests. Any thread may call it. Calls release the GIL."""

    def __init__(self, form: DigestForm, widest: int = 512) -> None:
        """Load or build the library. `widest` is the width in bits of the widest registers to use, if the processor has
        them. Raises NotCompiled."""
        library = _LIBRARY.load()
        self.width = int(library.td_digest_width(widest))  # 512: AVX-512 VNNI, 256: AVX2
        if not self.width:
            raise NotCompiled("this processor has no AVX2")
        self._digest_rows = library.td_digest_rows
        self._form = form
        self._coefficients: dict[bytes, torch.Tensor] = {}  # by seed
        self._helpers: ThreadPoolExecutor | None = None

    def digest(self, rows: npt.NDArray[np.uint8], row_ids: Sequence[int], seed: bytes = b"") -> tuple[bytes, ...]:
        """Return the digests of these rows of an array `[num_rows, row_bytes]`. `seed`: of the coefficients."""
        return self._run(rows, row_ids, None, (), seed)

    def copy(
        self,
        source: npt.NDArray[np.uint8],
        source_ids: Sequence[int],
        target: npt.NDArray[np.uint8],
        target_ids: Sequence[int],
        seed: bytes = b"",
    ) -> tuple[bytes, ...]:
        """Copy rows of one array to rows of another with rows of the same length, and return the digests of the bytes
        that were written, even if another process changes the source at the same time."""
        assert len(source_ids) == len(target_ids) and source.shape[1] == target.shape[1]
        assert target.flags.c_contiguous and target.flags.writeable
        assert not target_ids or 0 <= min(target_ids) <= max(target_ids) < len(target), "a row outside the target"
        return self._run(source, source_ids, target, target_ids, seed)

    def _run(
        self,
        source: npt.NDArray[np.uint8],
        source_ids: Sequence[int],
        target: npt.NDArray[np.uint8] | None,
        target_ids: Sequence[int],
        seed: bytes,
    ) -> tuple[bytes, ...]:
        assert source.dtype == np.uint8 and source.flags.c_contiguous
        assert not source_ids or 0 <= min(source_ids) <= max(source_ids) < len(source), "a row outside the source"
        num_rows, row_bytes = len(source_ids), source.shape[1]
        sources, targets = np.array(source_ids, dtype=np.int64), np.array(target_ids, dtype=np.int64)
        digests = np.empty((num_rows, self._form.digest_bytes), dtype=np.uint8)
        pieces_per_row, num_folds = self._pieces(row_bytes)
        coefficients = self._coefficients_of(seed, num_folds + 1)

        def run(first: int, last: int) -> None:
            sums = np.empty((last - first) * pieces_per_row * self._form.num_sums, dtype=np.int32)
            self._digest_rows(
                _Digests(
                    source.ctypes.data,
                    sources[first:].ctypes.data,
                    None if target is None else target.ctypes.data,
                    None if target is None else targets[first:].ctypes.data,
                    last - first,
                    row_bytes,
                    coefficients.data_ptr(),
                    sums.ctypes.data,
                    digests[first:].ctypes.data,
                ),
                self.width,
            )

        self._split(num_rows, row_bytes, run)
        packed = digests.tobytes()
        width = self._form.digest_bytes
        return tuple([packed[start : start + width] for start in range(0, len(packed), width)])

    def _split(self, num_rows: int, row_bytes: int, run: Callable[[int, int], None]) -> None:
        """Run over all rows, by as many threads as torch computes with where there are enough bytes for them."""
        num_parts = max(1, min(torch.get_num_threads(), num_rows, num_rows * row_bytes // _SPLIT_BYTES))
        if num_parts == 1:
            return run(0, num_rows)
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(torch.get_num_threads(), "kv-digests")
        bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
        helping: list[Future[None]] = []
        try:
            for part in range(1, num_parts):
                helping.append(submit(self._helpers, run, *bounds[part : part + 2]))
            run(*bounds[:2])
        finally:
            wait(helping)  # after an error too: no part may write to rows that the caller has returned
        for ended in helping:
            ended.result()

    def _pieces(self, row_bytes: int) -> tuple[int, int]:
        """Return the pieces of a row with those of its folds, and the number of folds."""
        form = self._form
        total = left = -(-row_bytes // form.piece_bytes)
        num_folds = 0
        while left > form.max_hashed_pieces:
            left = -(-left * form.num_sums * 4 // form.piece_bytes)
            total += left
            num_folds += 1
        return total, num_folds

    def _coefficients_of(self, seed: bytes, num_matrices: int) -> torch.Tensor:
        """Return at least the first matrices of a seed, flat, in the layout of the kernel: torch.uint8, [num_matrices,
        piece_bytes / 4, num_sums, 4] with 128 added, or torch.int16, [num_matrices, piece_bytes / 2, num_sums, 2].
        They are aligned as torch aligns: to 64 bytes."""
        form = self._form
        known = self._coefficients.get(seed)
        if known is None or len(known) < num_matrices * form.piece_bytes * form.num_sums:
            together = 4 if self.width == 512 else 2
            shape = (form.piece_bytes // together, together, form.num_sums)
            matrices = [form.coefficients(fold, seed).reshape(shape).transpose(1, 2) for fold in range(num_matrices)]
            wide = torch.stack(matrices).to(torch.int16).flatten()
            known = (wide + 128).to(torch.uint8) if self.width == 512 else wide
            kept = list(self._coefficients.items())[1 - _MAX_SEEDS :]
            self._coefficients = {**dict(kept), seed: known}
        return known


def main(folder: str) -> int:
    """Build a library that detects the processor when it runs. Returns the exit status."""
    return _LIBRARY.build_in(Path(folder))


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or [str(_LIBRARY.folder)])))
