"""Random weights from a configuration alone, made as fast as memory can be written: for benchmarks and load tests."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

# A prime, so that the rows of no matrix repeat with the tile.
_TILE_ELEMS = 1_000_003
_SEED = 20_240_611


def dummy_model(
    config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str, device: torch.device
) -> PreTrainedModel:
    """Made where it will run: what is large need not pass through the host. Two calls give equal weights, so that dummy
    workers may exchange KV.

    Matrices are cut from one tile of normal numbers (a tensor of billions costs one copy, not billions of draws);
    vectors get what the model's own initialisation gives them, which draws some of them (gpt-oss: sinks and the bias of
    the experts' router) from torch's global generator: it is seeded here and restored afterwards.
    """
    with no_init_weights(), device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attn_implementation
        )
    std = getattr(config.get_text_config(), "initializer_range", 0.02)
    tile = (torch.randn(_TILE_ELEMS, generator=torch.Generator().manual_seed(_SEED)) * std).to(device, dtype)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.dim() >= 2:
                _fill(parameter, tile, begin=index * 7919 % _TILE_ELEMS)
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # the model's own pass skips it
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model.init_weights()  # type: ignore[no-untyped-call]
    return model


def _fill(parameter: torch.Tensor, tile: torch.Tensor, begin: int) -> None:
    flat = parameter.view(-1)
    done = 0
    while done < len(flat):
        part = tile[begin : begin + len(flat) - done]
        flat[done : done + len(part)] = part
        done, begin = done + len(part), 0
