"""The demo model's promises to its users: size, files, recorded figures, sensible output."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.examples import num_examples

EXAMPLES = Path(__file__).parents[4] / "examples"
MODEL = EXAMPLES / "demo_model"
MAX_BYTES = 5_000_000
REPORT = json.loads((MODEL / "training.json").read_text())
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

HEADERS = (
    "def read_file(path):\n    ",
    "class Server:\n    def __init__(self, host, port):\n        ",
)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return loaded


def test_whole_folder_fits_five_megabytes() -> None:
    assert sum(path.stat().st_size for path in MODEL.rglob("*")) <= MAX_BYTES


def test_shape_is_a_grouped_query_llama_of_context_1024(model: PreTrainedModel) -> None:
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.max_position_embeddings == 1024
    assert config.num_attention_heads == 3 * config.num_key_value_heads
    assert config.vocab_size == TOKENIZER.get_vocab_size()
    assert config.tie_word_embeddings
    assert sum(p.numel() for p in model.parameters()) == REPORT["training"]["parameters"]


def test_weights_are_stored_as_bfloat16() -> None:
    assert json.loads((MODEL / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(MODEL).dtype == torch.bfloat16


def test_generation_ends_at_the_end_of_text_token(model: PreTrainedModel) -> None:
    end_of_text = TOKENIZER.token_to_id("<|endoftext|>")
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == end_of_text
    assert AutoTokenizer.from_pretrained(MODEL).eos_token_id == end_of_text


def test_held_out_loss_is_below_the_five_gram() -> None:
    evaluation = REPORT["evaluation"]
    assert evaluation["ngram"].startswith("5-gram")
    assert 1.0 < evaluation["held_out_loss"] < evaluation["ngram_held_out_loss"] < np.log(1024)


def test_margin_is_recorded_and_clear_of_near_ties() -> None:
    evaluation = REPORT["evaluation"]
    assert evaluation["median_top1_margin"] > 1.0
    assert evaluation["near_tie_share"] < 0.1


def test_loss_curve_falls_and_ends_where_training_ended() -> None:
    curve = REPORT["curve"]
    assert len(curve) >= 10
    assert curve[-1]["step"] == REPORT["training"]["steps"]
    assert curve[-1]["held_out_loss"] < curve[0]["held_out_loss"] / 2
    assert (MODEL / "loss_curve.svg").stat().st_size < 100_000


def test_readme_quotes_the_recorded_figures() -> None:
    readme = (MODEL / "README.md").read_text()
    evaluation = REPORT["evaluation"]
    for name in ("held_out_loss", "ngram_held_out_loss", "median_top1_margin"):
        assert re.search(rf"\b{evaluation[name]:.3f}\b", readme), name


def test_loss_on_unseen_python_is_near_the_recorded_loss(model: PreTrainedModel) -> None:
    """The text is this file. The test fails for other weights than those of the report."""
    ids = torch.tensor([TOKENIZER.encode(Path(__file__).read_text()).ids[:1024]])
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < REPORT["evaluation"]["held_out_loss"] + 1.5


@settings(max_examples=num_examples(suite=17, search=50))
@given(st.text())
def test_decoding_the_demo_models_tokens_gives_the_text_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["é漢🎉\u200d\x00", "\r\n\t x  = 1 \n\n", "def f(a_b):\n    return __x__\n"])
def test_both_tokenizer_libraries_agree(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = TOKENIZER.encode(text).ids
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == text


def test_chat_template_renders_messages_as_comments() -> None:
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "x = 1"},
        {"role": "user", "content": "and y?"},
    ]
    template = ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    rendered = template.render(messages=messages, add_generation_prompt=True)
    assert rendered == (
        "<|endoftext|># system: Be brief.\n# user: one\n# two\n# assistant:\nx = 1\n# user: and y?\n# assistant:\n"
    )
    assert rendered == AutoTokenizer.from_pretrained(MODEL).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert template.render(messages=messages, add_generation_prompt=False).endswith("# user: and y?\n")


@pytest.mark.parametrize("header", HEADERS)
def test_a_function_header_is_continued_by_text_that_parses_as_python(model: PreTrainedModel, header: str) -> None:
    text = header + greedy(model, header, tokens=64)
    lines = text.splitlines()
    written = header.count("\n") + 1
    assert any(parses("\n".join(lines[:end])) for end in range(written, len(lines))), text


def test_every_position_of_the_context_is_trained(model: PreTrainedModel) -> None:
    """The last quarter of a full context is predicted no worse than its first quarter."""
    ids = torch.tensor([TOKENIZER.encode((EXAMPLES / "train_demo_model.py").read_text()).ids[:1024]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert len(losses) == 1023
    assert losses[768:].mean() < losses[:256].mean() + 0.3


def test_ngram_probabilities_sum_to_one_in_seen_and_unseen_contexts() -> None:
    vocab_size = 12
    tokens = np.random.default_rng(3).zipf(1.5, size=4000) % vocab_size
    model = load_example("ngram").KneserNey(tokens, order=3, vocab_size=vocab_size)
    for context in ([0, 0], [1, 2], [11, 10]):
        rows = [model.log_probs(np.array([*context, token])) for token in range(vocab_size)]
        assert np.exp(rows).sum() == pytest.approx(1.0)


def test_ngram_prefers_a_continuation_seen_before() -> None:
    model = load_example("ngram").KneserNey(np.array([1, 2, 3] * 50), order=3, vocab_size=5)
    likely, unlikely = model.log_probs(np.array([1, 2, 3])), model.log_probs(np.array([1, 2, 4]))
    assert likely[0] > np.log(0.9)
    assert unlikely[0] < np.log(0.05)


def greedy(model: PreTrainedModel, prompt: str, *, tokens: int) -> str:
    ids = torch.tensor([TOKENIZER.encode(prompt).ids])
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    text: str = TOKENIZER.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
    return text


def parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
