"""The back ends that call a library: their calls describe the step.

The libraries run on GPUs only. Stand-ins with the signatures of FlashInfer 0.6 and of torch's `varlen_attn` compute
plainly from their arguments, so every number that is handed over counts.
"""

import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from cluster.errors import ConfigError
from engine.attention.gather import attend_dense
from engine.attention.interface import AttentionOptions
from engine.attention.registry import AttentionBackend, choose
from engine.batch import PackedBatch
from tests.unit.engine.attention.test_attention import CUDA_NEEDS, OPTIONS, PLAIN, SHAPES, hold_equal, make_case


def attend_pages(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attend with one sequence `[queries, heads, dim]` to `[context, kv_heads, dim]`; its queries are the last
    positions.
    """
    num_queries, num_heads, dim = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    positions = torch.arange(num_keys - num_queries, num_keys)[:, None]
    columns = torch.arange(num_keys)[None]
    visible = columns <= positions
    if options.sliding_window is not None:
        visible &= columns > positions - options.sliding_window
    output = attend_dense(
        query.view(num_queries, num_kv_heads, -1, dim).permute(1, 2, 0, 3),
        keys.transpose(0, 1)[:, None],
        values.transpose(0, 1)[:, None],
        visible,
        None,
        options,
    )
    return output.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1)


class FlashInferWrapper:
    """A wrapper that computes from its plan: like that of the real wrapper, `run` receives only queries, K and V."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, *, use_cuda_graph: bool = False, **others: Any) -> None:
        assert kv_layout == "NHD" and not workspace.any()
        self.buffers = {name: others[name] for name in others if name.startswith("paged_kv_")}
        assert use_cuda_graph == bool(self.buffers)

    def run(self, query: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rows, page_starts, page_ids, last = self.query_starts, self.page_starts, self.page_ids, self.last_page_lens
        outputs = []
        for index in range(len(last)):
            pages = page_ids[page_starts[index] : page_starts[index + 1]]
            num_tokens = (len(pages) - 1) * kv[0].shape[1] + last[index]
            context = [view[pages].flatten(0, 1)[:num_tokens] for view in kv]
            outputs.append(attend_pages(query[rows[index] : rows[index + 1]], context[0], context[1], self.options))
        return torch.cat(outputs)

    def _take(
        self, table: tuple[torch.Tensor, ...], shape: tuple[int, ...], given: dict[str, Any], query_starts: torch.Tensor
    ) -> None:
        assert all(item.dtype == torch.int32 for item in table)
        assert shape == (6, 2, 16, 8) and given.pop("q_data_type") == given.pop("kv_data_type") == torch.float32
        assert given.pop("non_blocking") is True
        self.page_starts, self.page_ids, self.last_page_lens = table
        for (name, buffer), item in zip(self.buffers.items(), table, strict=False):
            assert len(item) == len(buffer) or (name == "paged_kv_indices_buffer" and len(item) <= len(buffer))
        self.query_starts = query_starts
        window = given.pop("window_left")
        softcap = given.pop("logits_soft_cap")
        scaling = given.pop("sm_scale")
        self.options = AttentionOptions(scaling, window + 1 if window >= 0 else None, softcap or None)
        assert not given


class DecodeWrapper(FlashInferWrapper):
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *shape: int, **given: Any
    ) -> None:
        self._take((indptr, indices, last_page_len), shape, given, torch.arange(len(indptr)))


class PrefillWrapper(FlashInferWrapper):
    def plan(self, qo_indptr: torch.Tensor, *given: Any, causal: bool, **options: Any) -> None:
        assert causal
        self._take(given[:3], given[3:], options, qo_indptr)


@pytest.fixture
def flashinfer_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[AttentionBackend]:
    library = ModuleType("flashinfer")
    library.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper  # type: ignore[attr-defined]
    library.BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.delitem(sys.modules, "engine.attention.flashinfer", raising=False)
    from engine.attention.flashinfer import FlashInferBackend

    yield FlashInferBackend()
    sys.modules.pop("engine.attention.flashinfer")


@pytest.mark.parametrize("options", ["plain", "window", "softcap"])
def test_flashinfer_receives_the_shape_of_the_step(flashinfer_backend: AttentionBackend, options: str) -> None:
    case = make_case(SHAPES["grouped"], OPTIONS[options], "float32", "cpu")
    hold_equal(flashinfer_backend, case, "float32")


def decodes_of(batch: PackedBatch) -> tuple[PackedBatch, torch.Tensor]:
    """Return the one-token chunks of a batch alone, and their rows in it."""
    members = [index for index, length in enumerate(batch.query_lens) if length == 1]
    rows = batch.query_starts[members]
    count = len(members)
    return dataclasses.replace(
        batch,
        block_tables=batch.block_tables[members],
        query_starts=torch.arange(count + 1),
        context_lens=batch.context_lens[members],
        rows=tuple(slice(index, index + 1) for index in range(count)),
        query_lens=(1,) * count,
        starts=tuple(batch.starts[index] for index in members),
    ), rows


def test_flashinfer_plans_a_graph_again_for_every_replay(flashinfer_backend: Any) -> None:
    """Kinds of layers met at the capture are planned by `prepare`; a replay calls no `attend`."""
    case = make_case(SHAPES["grouped"], PLAIN, "float32", "cpu")
    batch, rows = decodes_of(case.batch)
    expected = flashinfer_backend.attend(case.query, case.kv, case.batch, case.options)[rows]
    graphed = flashinfer_backend.for_graph(batch)
    graphed.prepare(batch)
    assert torch.allclose(graphed.attend(case.query[rows], case.kv, batch, case.options), expected)
    (wrapper,) = graphed._wrappers.values()

    order = torch.tensor([3, 1, 0, 2])
    shuffled = dataclasses.replace(
        batch,
        block_tables=batch.block_tables[order],
        context_lens=batch.context_lens[order],
        starts=tuple(batch.starts[index] for index in order),
    )
    graphed.prepare(shuffled)
    replayed = wrapper.run(case.query[rows[order]], (case.kv.keys, case.kv.values))
    assert torch.allclose(replayed, expected[order])


def varlen_stand_in(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    assert {cu_seq_q.dtype, cu_seq_k.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert enable_gqa and window_size[1] == 0
    assert max_q == int(cu_seq_q.diff().max()) and max_k >= int(seqused_k.max())
    assert torch.equal(cu_seq_k.diff(), seqused_k)
    options = AttentionOptions(scale, window_size[0] + 1 if window_size[0] >= 0 else None)
    outputs = []
    for index, length in enumerate(seqused_k.tolist()):
        keys, values = (view[block_table[index]].flatten(0, 1)[:length] for view in (key, value))
        outputs.append(attend_pages(query[cu_seq_q[index] : cu_seq_q[index + 1]], keys, values, options))
    return torch.cat(outputs)


@pytest.mark.parametrize("options", ["plain", "window"])
def test_varlen_receives_the_shape_of_the_step(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", varlen_stand_in)
    case = make_case(SHAPES["grouped"], OPTIONS[options], "float32", "cpu", block_size=256)
    hold_equal(varlen.VarlenBackend(), case, "float32")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("flashinfer", {}, "does not support sinks"),
        ("flashinfer", {"dtype": "float32", "sinks": False}, "does not support float32"),
        ("flashinfer", {"head_dims": frozenset({128, 64})}, r"needs K and V of one size among \[64, 128, 256\]"),
        ("varlen", {}, "needs a block size that is a multiple of 256 tokens, not 16"),
        ("varlen", {"block_size": 512}, "does not support softcap, does not support sinks"),
    ],
)
def test_the_missing_ability_of_a_library_is_named(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose(name, dataclasses.replace(CUDA_NEEDS, **changes))


def test_a_missing_wheel_is_a_named_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plain = dataclasses.replace(CUDA_NEEDS, sinks=False, softcap=False)
    with pytest.raises(ConfigError, match="needs the package flashinfer, which is not installed"):
        choose("flashinfer", plain)
