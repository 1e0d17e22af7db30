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
    """What workers and routers ask about a model. `default_sampling`: what its generation_config.json proposes."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and continuation together
    eos_token_ids: frozenset[int]
    dtype: str
    default_sampling: Sampling


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """`model` has Tandem's attention set; it is called by nobody but the runner."""

    model: PreTrainedModel
    info: ModelInfo
    layout: BlockLayout
    attention: Capability
    device: str

    def forward(self, pool: KvPool) -> PlainForward:
        """Its own modules over this pool, with a back end of their own."""
        return PlainForward(self.model, pool, self.attention.build())
