"""Loads the C kernels of `kernels/`, which `cluster.compiled_library` builds once per machine.

Owns the declaration of every function and struct of kernels.h; independent of models. `python -m engine.cpu.library
FOLDER` builds the library into a folder instead; an image without a compiler finds it beside the sources.
"""

import ctypes
import sys
from pathlib import Path
from typing import Any

from cluster.compiled_library import CompiledLibrary, NotCompiled, Signature

VERSION = 3  # of the contract in kernels.h
_pointer, _integer, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_floats, _bf16s, _address = _pointer, _pointer, _pointer
Written = ctypes.CFUNCTYPE(None)


class Product(ctypes.Structure):
    _fields_ = (("panels", _pointer), ("bias", _pointer), ("in_features", _integer), ("out_features", _integer))


class Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", _pointer),
        ("query_norm", _pointer),
        ("key_norm", _pointer),
        ("attention_out_norm", _pointer),
        ("ffn_norm", _pointer),
        ("ffn_out_norm", _pointer),
        ("qkv", Product),
        ("out", Product),
        ("gate_up", Product),
        ("down", Product),
        ("keys", _pointer),
        ("values", _pointer),
        ("window", _integer),
        ("rotary", _integer),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("num_layers", _integer),
        ("hidden", _integer),
        ("num_heads", _integer),
        ("num_kv_heads", _integer),
        ("head_dim", _integer),
        ("intermediate", _integer),
        ("rotary_dim", _integer),
        ("activation", _integer),
        ("norms_whole_rows", _integer),
        ("norm_eps", _float),
        ("scaling", _float),
        ("softcap", _float),
        ("block_size", _integer),
        ("block_elems", _integer),
        ("layers", ctypes.POINTER(Layer)),
        ("final_norm", _pointer),
        ("head", Product),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("num_tokens", _integer),
        ("num_sequences", _integer),
        ("num_logit_rows", _integer),
        ("table_stride", _integer),
        ("slot_blocks", _pointer),
        ("slot_offsets", _pointer),
        ("block_tables", _pointer),
        ("query_starts", _pointer),
        ("context_lens", _pointer),
        ("logit_rows", _pointer),
        ("cos", _pointer * 2),
        ("sin", _pointer * 2),
        ("hidden", _pointer),
        ("logits", _pointer),
        ("scratch", _pointer),
        ("written", Written),
    )


_INSTRUCTIONS = {512: "AVX-512 BF16", 256: "AVX2"}  # by the width of their registers in bits
WIDTHS = tuple(_INSTRUCTIONS)

_FORWARD: dict[str, Signature] = {  # functions that exist once per width: td_run_512, td_run_256
    "td_packed_elems": (_integer, (_integer, _integer)),
    "td_pack": (None, (_bf16s, _integer, _integer, _integer, _bf16s)),
    "td_pack_gate_up": (None, (_bf16s, _integer, _bf16s, _integer, _integer, _integer, _bf16s)),
    "td_scratch_bytes": (_integer, (ctypes.POINTER(Model), _integer)),
    "td_run": (None, (ctypes.POINTER(Model), ctypes.POINTER(Step))),
    "td_linear_scratch_bytes": (_integer, (_integer,)),
    "td_linear": (None, (_bf16s, _integer, ctypes.POINTER(Product), _floats, _address)),
    "td_rms_norm": (None, (_floats, _integer, _integer, _floats, _float, _bf16s)),
    "td_attend": (None, (*(ctypes.POINTER(struct) for struct in (Model, Layer, Step)), _bf16s, _bf16s, _address)),
}
_SIGNATURES: dict[str, Signature] = {
    "td_supported": (_integer, ()),
    "td_draw_scratch_bytes": (_integer, (_integer,)),
    "td_draw": (None, (_address, _integer)),
    **{f"{name}_{width}": signature for width in WIDTHS for name, signature in _FORWARD.items()},
}
_LIBRARY = CompiledLibrary("kernels", folder=Path(__file__).parent / "kernels", signatures=_SIGNATURES, version=VERSION)


class Kernels:
    """The kernels of a forward for one width of registers. `td_run` is td_run_512 or td_run_256, and so on."""

    def __init__(self, library: ctypes.CDLL, width: int) -> None:
        self.width, self.instructions = width, _INSTRUCTIONS[width]  # width: in bits
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, f"{name}_{self.width}")


def load_kernels(widest: int = max(WIDTHS)) -> Kernels:
    """Load the forward for the widest registers of this processor, of up to `widest` bits. Raises NotCompiled."""
    library = load_library()
    supported = min(library.td_supported(), widest)
    if not supported:
        raise NotCompiled("this processor has no AVX2")
    return Kernels(library, supported)


def load_library() -> ctypes.CDLL:
    """Load the library. Its drawing functions run on any processor. Raises NotCompiled."""
    return _LIBRARY.load()


def main(folder: str) -> int:
    """Build a library that detects the processor when it runs. Returns the exit status."""
    return _LIBRARY.build_in(Path(folder))


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or [str(_LIBRARY.folder)])))
