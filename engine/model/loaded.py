"""A model that may be served, and what the rest of Tandem needs to know of it."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from cluster.messages import Sampling
from engine.attention.registry import Capability
from engine.kv.layout import BlockLayout
from engine.kv.pool import KvPool
from engine.steps.forward import PlainForward


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What workers and routers need to know of a model. `default_sampling` comes from its generation_config.json."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and continuation together
    eos_token_ids: frozenset[int]
    dtype: str
    default_sampling: Sampling


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that may be served. `model` uses Tandem's attention; only the runner calls it."""

    model: PreTrainedModel
    info: ModelInfo
    layout: BlockLayout
    attention: Capability
    device: str

    def forward(self, pool: KvPool) -> PlainForward:
        """Return a forward by the model's own modules over this pool, with a new back end."""
        return PlainForward(self.model, pool, self.attention.build())
