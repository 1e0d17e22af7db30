"""The structs of kernels.h for ctypes. Field by field the same; the header says what each one means."""

import ctypes

_pointer, _integer, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


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
    )
