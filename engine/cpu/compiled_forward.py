"""Computes a packed batch's logits in one call of the compiled kernels, for models that these cover.

This module owns the weights in the layout that the kernels read: one mapping, in huge pages where the system provides
them, because every step reads all of it from one end to the other. It also owns the scratch memory of its steps. Every
reason why a model is not computed by the kernels is a NotCompiled, which a worker prints at its start; it then uses the
plain forward.
"""

import contextlib
import ctypes
import itertools
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from cluster.errors import ModelRefused
from cluster.settings.worker_settings import EngineSettings
from engine.batch import PackedBatch
from engine.cpu.library import Kernels, Layer, Model, Product, Step, Written, load_kernels
from engine.decoders.layer_parts import LayerParts, NotCompiled, RmsNorm
from engine.decoders.recognise import Decoder, DecoderLayer, recognise
from engine.kv.pool import KvPool
from engine.model.load_check import check_equal, compute_own_logits, deviation, replaces_load_check
from engine.model.loaded import LoadedModel

_ALIGNMENT = 64  # bytes, of every packed weight and of the scratch memory
_ITEM_BYTES = 2
_SHARE_OF_AVAILABLE_MEMORY = 0.8
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of madvise(2)
_POPULATED_BYTES = 32 << 20  # at once


class PackedDecoder:
    """All weights of a decoder except its embedding, copied into the kernels' layout. The decoder itself is not
    changed. `panels`: the memory for them, from `panels_for`."""

    def __init__(self, kernels: Kernels, decoder: Decoder, panels: torch.Tensor) -> None:
        self.decoder = decoder
        self._kernels = kernels
        self._floats: list[torch.Tensor] = []  # biases and norms
        self._places = itertools.accumulate(_panel_elems(kernels, decoder), initial=0)
        self._panels = panels
        self._layers = [self._layer(layer) for layer in decoder.layers]
        self._head = self._product((decoder.head,))
        self._final_norm = self._norm(decoder.final_norm)

    def model(self, pool: KvPool) -> Model:
        """Return the C structs of the model over this pool. They point into this object and the pool."""
        decoder = self.decoder
        for layer, (keys, values) in zip(self._layers, pool.layers, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        heads = decoder.heads
        return Model(
            num_layers=len(self._layers),
            hidden=decoder.hidden,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.key_dim,
            intermediate=decoder.intermediate,
            rotary_dim=decoder.rotaries[0].dim,
            activation=decoder.activation,
            norms_whole_rows=decoder.layers[0].parts.norms_whole_rows,
            norm_eps=decoder.final_norm.eps,
            scaling=heads.options.scaling,
            softcap=heads.options.softcap or 0.0,
            block_size=pool.layout.block_size,
            block_elems=pool.layout.block_elems,
            layers=(Layer * len(self._layers))(*self._layers),  # a copy
            final_norm=self._final_norm,
            head=self._head,
        )

    def _layer(self, layer: DecoderLayer) -> Layer:
        parts = layer.parts
        return Layer(
            input_norm=self._norm(parts.input_norm),
            query_norm=self._norm(parts.query_norm),
            key_norm=self._norm(parts.key_norm),
            attention_out_norm=self._norm(parts.attention_out_norm),
            ffn_norm=self._norm(parts.ffn_norm),
            ffn_out_norm=self._norm(parts.ffn_out_norm),
            qkv=self._product(parts.qkv),
            out=self._product((parts.out,)),
            gate_up=self._gate_up(parts),
            down=self._product((parts.down,)),
            window=layer.window,
            rotary=layer.rotary,
        )

    def _product(self, linears: tuple[nn.Linear, ...]) -> Product:
        """Pack one weight, or several with the same input whose outputs follow one another, and return its C struct."""
        weight = torch.cat([linear.weight for linear in linears]) if len(linears) > 1 else linears[0].weight
        out_features, in_features = weight.shape
        panels = self._next_panels()
        self._kernels.td_pack(weight.data_ptr(), weight.stride(0), out_features, in_features, panels)
        return Product(panels, self._bias(linears), in_features, out_features)

    def _gate_up(self, parts: LayerParts) -> Product:
        linears = parts.gate_up
        gate, up = linears[0].weight.chunk(2) if len(linears) == 1 else (linear.weight for linear in linears)
        intermediate, in_features = gate.shape
        panels = self._next_panels()
        self._kernels.td_pack_gate_up(
            gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), intermediate, in_features, panels
        )
        return Product(panels, self._bias(linears), in_features, 2 * intermediate)

    def _bias(self, linears: tuple[nn.Linear, ...]) -> int | None:
        if all(linear.bias is None for linear in linears):
            return None
        biases = [torch.zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
        return self._kept(torch.cat([bias.float() for bias in biases]))

    def _norm(self, norm: RmsNorm | None) -> int | None:
        return None if norm is None else self._kept(norm.weight)

    def _kept(self, floats: torch.Tensor) -> int:
        self._floats.append(floats)
        return floats.data_ptr()

    def _next_panels(self) -> int:
        return self._panels.data_ptr() + next(self._places) * _ITEM_BYTES


def panels_for(kernels: Kernels, decoder: Decoder) -> torch.Tensor:
    """Return zeroed memory for the packed weights, bfloat16. Raises NotCompiled."""
    num_bytes = sum(_panel_elems(kernels, decoder)) * _ITEM_BYTES
    try:
        mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        raise NotCompiled(f"no memory to pack its weights into: {error}") from error
    return torch.frombuffer(mapping, dtype=torch.bfloat16)  # keeps the mapping


@contextlib.contextmanager
def populated(panels: torch.Tensor) -> Iterator[None]:
    """Let another thread allocate the pages of `panels`, in ascending order, while the caller packs weights into them.
    The kernel has to find and zero each page, and on a virtual machine the host as well, which takes longer than
    packing."""
    is_over = threading.Event()
    thread = threading.Thread(target=_populate, args=(panels, is_over), name="populate-panels", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _populate(panels: torch.Tensor, is_over: threading.Event) -> None:
    madvise = ctypes.CDLL(None).madvise  # that of `mmap` keeps the GIL
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin in range(0, panels.nbytes, _POPULATED_BYTES):
        length = min(_POPULATED_BYTES, panels.nbytes - begin)
        if is_over.is_set() or madvise(panels.data_ptr() + begin, length, _POPULATE_WRITE):
            return  # an older Linux refuses the call; packing then allocates the pages


def _panel_elems(kernels: Kernels, decoder: Decoder) -> list[int]:
    """Return the elements of each packed weight in packing order, with padding up to the next one's alignment."""
    step = _ALIGNMENT // _ITEM_BYTES
    sizes = (int(kernels.td_packed_elems(out_features, into)) for into, out_features in _widths(decoder))
    return [-(-size // step) * step for size in sizes]


def _widths(decoder: Decoder) -> list[tuple[int, int]]:
    """Return the widths in packing order."""
    head = (decoder.head.in_features, decoder.head.out_features)
    return [*(widths for layer in decoder.layers for widths in layer.parts.widths), head]


class CompiledForward:
    """A Forward over one pool in bfloat16 on the CPU. Each call releases the GIL for its whole length.

    The returned float32 logits are overwritten by the next call.
    """

    def __init__(self, kernels: Kernels, packed: PackedDecoder, pool: KvPool, max_model_len: int) -> None:
        decoder = packed.decoder
        self.instructions = kernels.instructions
        self._run, self._scratch_bytes = kernels.td_run, kernels.td_scratch_bytes
        self._packed, self._pool = packed, pool  # the model's structs point into both
        self._model = packed.model(pool)
        self._step = Step()
        self._embedding, self._rotaries = decoder.embedding, decoder.rotaries
        self._softcap = decoder.logit_softcap
        self._vocab_size = decoder.head.out_features
        self._longest = max_model_len
        self._max_tokens = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._logits = torch.empty(0, self._vocab_size)

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        token_ids, positions = batch.input_ids[0], batch.position_ids[0]
        num_tokens, num_rows = len(token_ids), len(batch.logit_rows)
        self._make_room(num_tokens, num_rows)
        hidden = self._embedding(token_ids).float()
        end = max(map(int.__add__, batch.starts, batch.query_lens))
        rotations = [rotary.rows(positions, end, self._longest) for rotary in self._rotaries]
        step, logits = self._step, self._logits[:num_rows]
        step.num_tokens, step.num_sequences, step.num_logit_rows = num_tokens, len(batch.starts), num_rows
        step.table_stride = batch.block_tables.stride(0)
        step.slot_blocks, step.slot_offsets = batch.slot_blocks.data_ptr(), batch.slot_offsets.data_ptr()
        step.block_tables, step.query_starts = batch.block_tables.data_ptr(), batch.query_starts.data_ptr()
        step.context_lens, step.logit_rows = batch.context_lens.data_ptr(), batch.logit_rows.data_ptr()
        for index, (cos, sin) in enumerate(rotations):
            step.cos[index], step.sin[index] = cos.data_ptr(), sin.data_ptr()
        step.hidden, step.logits = hidden.data_ptr(), logits.data_ptr()
        step.written = Written() if batch.written is None else Written(batch.written)
        self._run(self._model, step)
        return logits if not self._softcap else logits.div_(self._softcap).tanh_().mul_(self._softcap)

    def _make_room(self, num_tokens: int, num_rows: int) -> None:
        if num_tokens > self._max_tokens:
            num_bytes = self._scratch_bytes(self._model, num_tokens) + _ALIGNMENT
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
            self._max_tokens = num_tokens
            self._step.scratch = -(-self._scratch.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self._vocab_size)


def compiled_forward(settings: EngineSettings, loaded: LoadedModel, pool: KvPool) -> CompiledForward:
    """Return a compiled forward, checked against the model itself. It takes over the weights, so the model itself
    cannot be called any more. Raises NotCompiled and then leaves the model unchanged, unchecked. Raises ModelRefused
    if the load check, which runs unless the kernels' own logits make it needless, refuses the model."""
    _require_asked_for(settings, loaded, pool)
    kernels = load_kernels()
    decoder = recognise(loaded.model)
    _require_memory(decoder)
    panels = panels_for(kernels, decoder)
    with populated(panels):
        compute_own_logits(loaded, settings.max_prefill_tokens)
        packed = PackedDecoder(kernels, decoder, panels)

    def forward(pool: KvPool) -> CompiledForward:
        return CompiledForward(kernels, packed, pool, loaded.info.max_model_len)

    try:
        found = deviation(loaded, settings.max_prefill_tokens, forward)
    except ModelRefused as error:
        raise NotCompiled(f"compiled, {error.message}") from error
    if found.fault is not None:
        raise NotCompiled(f"compiled, {found.fault}")
    if not replaces_load_check(loaded, found):
        check_equal(loaded, settings.max_prefill_tokens)
    _release_weights(decoder)
    return forward(pool)


def _require_asked_for(settings: EngineSettings, loaded: LoadedModel, pool: KvPool) -> None:
    if settings.cpu_kernels == "off":
        raise NotCompiled("--cpu-kernels off")
    if loaded.device != "cpu":
        raise NotCompiled(f"the model is on {loaded.device}")
    if loaded.info.dtype != "bfloat16":
        raise NotCompiled(f"the model computes in {loaded.info.dtype}")
    if pool.tensor.dtype != torch.bfloat16:
        raise NotCompiled(f"the pool keeps KV in {pool.layout.dtype}")
    if settings.num_threads > 1:
        raise NotCompiled(f"the kernels run in one thread, not in {settings.num_threads}; --num-threads 1 enables them")
    if settings.cpu_kernels == "auto" and torch.cpu._is_amx_tile_supported():
        raise NotCompiled("this processor has AMX, which the kernels do not use; --cpu-kernels on selects them anyway")


def _require_memory(decoder: Decoder) -> None:
    """Require memory for the packed weights beside the plain ones, since both exist while they are compared. Raises
    NotCompiled."""
    needed = sum(linear.weight.nbytes for linear in decoder.linears())
    available = _available_bytes()
    if needed > _SHARE_OF_AVAILABLE_MEMORY * available:
        raise NotCompiled(f"packing takes {needed >> 20} MiB temporarily, and {available >> 20} MiB are available")


def _available_bytes() -> int:
    """Return the available memory, reclaimable page cache included: after a checkpoint was read, little memory is
    free."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].removesuffix("kB")) << 10


def _release_weights(decoder: Decoder) -> None:
    """Free all weights except the embedding's, which may also be the output head's."""
    embedded = next(decoder.embedding.parameters())
    for linear in decoder.linears():
        if linear.weight is not embedded:
            linear.weight.data = torch.empty(0, dtype=linear.weight.dtype)
