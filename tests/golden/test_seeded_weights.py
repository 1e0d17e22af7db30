"""The tiny models of the tests and the dummy weights of benchmarks are the same in every run and after any earlier
test.
"""

import hashlib
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from engine.attention.interface import ATTENTION_NAME, register
from engine.model.loading import dummy_model
from tests.golden.families import FAMILIES, Family

# Checksums of every parameter's name and bytes. The limits of the golden tests were set for these weights.
CHECKSUMS = {
    "llama": "51ecab0ffc900067",
    "qwen2": "4544859de88e0bbf",
    "qwen3": "88fe59ca67a1c14e",
    "mistral": "634c27154baff21b",
    "gemma2": "32e757540f69dfc9",
    "gemma3": "bb8f378b86b89c88",
    "phi3": "19d6ace9bbacee4e",
    "gpt2": "98a044f99bc32d99",
    "gpt_neox": "d6875a8eec50b074",
    "mixtral": "122664832de3cf30",
    "olmo2": "53b9e6adc7fad2b3",
    "gpt_oss": "da401b82901f06a9",
}


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(before)


def checksum(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def built_twice(build: Callable[[], PreTrainedModel]) -> tuple[PreTrainedModel, PreTrainedModel]:
    torch.manual_seed(1)
    first = build()
    torch.manual_seed(2)
    return first, build()


def has_nan(model: PreTrainedModel) -> list[str]:
    return [name for name, parameter in model.named_parameters() if bool(torch.isnan(parameter).any())]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_family_has_the_same_weights_in_every_run(family: Family) -> None:
    first, second = built_twice(family.build)
    assert has_nan(first) == []
    assert checksum(first) == checksum(second) == CHECKSUMS[family.name]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_dummy_weights_are_the_same_after_any_earlier_random_draws(family: Family) -> None:
    register()
    config = family.config_type(**family.settings)

    def dummy() -> PreTrainedModel:
        return dummy_model(config, torch.float32, ATTENTION_NAME, torch.device("cpu"))

    first, second = built_twice(dummy)
    assert has_nan(first) == []
    assert checksum(first) == checksum(second)
