"""A packed batch to logits in one call of the compiled kernels. Owns the scratch memory of its steps."""

import ctypes

import torch

from engine.batch import PackedBatch
from engine.cpu.packed_decoder import PackedDecoder
from engine.cpu.structs import Step
from engine.kv.pool import KvPool

_ALIGNMENT = 64


class CompiledForward:
    """A Forward over one pool in bfloat16 on the CPU. Each call releases the GIL for its whole length.

    The returned float32 logits are overwritten by the next call.
    """

    def __init__(self, kernels: ctypes.CDLL, packed: PackedDecoder, pool: KvPool, max_model_len: int) -> None:
        decoder = packed.decoder
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
