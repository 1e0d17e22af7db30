"""A model whose logits are a script: each token has one successor, whatever precedes it. Its tokens are whole pieces of
text, so that a test can give the model's answer as text.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

_HIDDEN = 64
_EOS = "<eos>"


def successor_model(folder: Path, scripts: Sequence[Sequence[str]], chat_template: str) -> Path:
    """Write the model. In each script every piece is followed by the next, and the last by the end. No piece occurs
    twice, and no text but these pieces has tokens of its own."""
    pieces = [piece for script in scripts for piece in script]
    assert len(set(pieces)) == len(pieces)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, _EOS: 1}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True), AddedToken(_EOS, special=True)])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {piece: int(tokenizer.token_to_id(piece) or 0) for piece in pieces}
    successors = {ids[a]: ids[b] for script in scripts for a, b in pairwise(script)}
    successors |= {ids[script[-1]]: 1 for script in scripts}
    _write_config(folder, chat_template)
    save_file(_weights(successors), str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def _write_config(folder: Path, chat_template: str) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _HIDDEN,
        "hidden_size": _HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "bos_token_id": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _EOS, "unk_token": "<unk>"}))
    (folder / "chat_template.jinja").write_text(chat_template)


def _weights(successors: dict[int, int]) -> dict[str, torch.Tensor]:
    """Return weights under which the layer adds nothing: the last hidden state is the token's own embedding, which the
    head maps to the successor.
    """
    head = torch.zeros(_HIDDEN, _HIDDEN)
    for token, successor in successors.items():
        head[successor, token] = 4.0
    generator = torch.Generator().manual_seed(0)
    layer = "model.layers.0"
    square = {name: torch.randn(_HIDDEN, _HIDDEN, generator=generator) * 0.1 for name in ("q_proj", "k_proj", "v_proj")}
    weights = {f"{layer}.self_attn.{name}.weight": value for name, value in square.items()}
    weights |= {
        f"{layer}.mlp.{n}.weight": torch.randn(32, _HIDDEN, generator=generator) for n in ("gate_proj", "up_proj")
    }
    weights |= {f"{layer}.{n}.weight": torch.ones(_HIDDEN) for n in ("input_layernorm", "post_attention_layernorm")}
    return weights | {
        f"{layer}.self_attn.o_proj.weight": torch.zeros(_HIDDEN, _HIDDEN),
        f"{layer}.mlp.down_proj.weight": torch.zeros(_HIDDEN, 32),
        "model.embed_tokens.weight": torch.eye(_HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": head,
    }
