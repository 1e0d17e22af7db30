"""Trains the demo model: a two-million-parameter Llama on the Python standard library, on one CPU core.

    python examples/train_demo_model.py --minutes 35 --out examples/demo_model

Owns the recipe and its report. The learning rate, the sequence length and the end all follow the share of the
time that has passed, so a busy machine trains a little less and still finishes a whole schedule.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from demo_corpus import CONTEXT, END_OF_TEXT_ID, VOCAB_SIZE, read_corpus, token_stream, train_tokenizer
from demo_evaluation import evaluate, ngram_loss, predict
from demo_report import CurvePoint, curve_row, draw_curve, evaluation_report
from muon import Muon
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

SEED = 17
BATCH_TOKENS = 2048
SHORT_SEQUENCE = 256
LONG_FROM = 0.70  # share of the time after which sequences fill the context: every position gets trained
DECAY_FROM = 0.45
WARMUP_STEPS = 40
MATRIX_LR = 0.02
VECTOR_LR = 4e-3
# Weighs the predicted distribution's own entropy into the loss once the sequences are long: sharper
# distributions, so greedy decoding meets fewer near-ties, for about a hundredth of a nat of held-out loss.
ENTROPY_WEIGHT = 0.1
CURVE_SECONDS = 60.0
CURVE_WINDOWS = 12

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Training:
    curve: tuple[CurvePoint, ...]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--minutes", type=float, default=35.0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out: Path = arguments.out
    torch.set_num_threads(1)
    torch.manual_seed(SEED)

    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus.train)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    train, held_out = (token_stream(tokenizer, texts) for texts in (corpus.train, corpus.held_out))
    print(f"{len(train)} tokens to train on, {len(held_out)} held out", flush=True)

    model = build_model()
    training = fit(model, train, held_out, seconds=arguments.minutes * 60, out=out)
    # What is judged is what is loaded later: the weights rounded to bfloat16, computed in float32.
    final = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    report = {
        "evaluation": evaluation_report(evaluate(final, held_out), ngram_loss(train, held_out)),
        "corpus": {
            "python": platform.python_version(),
            "train_files": len(corpus.train),
            "held_out_files": len(corpus.held_out),
            "train_tokens": len(train),
            "held_out_tokens": len(held_out),
            "train_bytes": sum(len(text.encode()) for text in corpus.train),
        },
        "training": {
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": training.curve[-1].step,
            "tokens": training.curve[-1].tokens,
            "seconds": round(training.seconds, 1),
            "tokens_per_second": round(training.curve[-1].tokens / training.seconds, 1),
        },
        "curve": [curve_row(point) for point in training.curve],
    }
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    draw_curve(out)
    print(json.dumps({key: report[key] for key in ("evaluation", "corpus", "training")}, indent=1))


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID
    )
    return model


def fit(model: LlamaForCausalLM, train: Ids, held_out: Ids, *, seconds: float, out: Path) -> Training:
    """Train until `seconds` have passed; every point of the curve leaves a loadable checkpoint in `out`."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    vectors = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.ndim == 1)]
    muon = Muon(matrices, momentum=0.95, weight_decay=0.1)
    adam = torch.optim.AdamW(vectors, lr=VECTOR_LR, betas=(0.9, 0.95), weight_decay=0.0)
    short, long = (batches(train, length) for length in (SHORT_SEQUENCE, CONTEXT))
    curve: list[CurvePoint] = []
    losses: list[float] = []
    started = time.monotonic()
    step, last_point = 0, started
    while (now := time.monotonic()) - started < seconds:
        passed = (now - started) / seconds
        is_long = passed >= LONG_FROM
        logits, targets = predict(model, next(long if is_long else short))
        cross_entropy = F.cross_entropy(logits, targets)
        loss = cross_entropy + ENTROPY_WEIGHT * mean_entropy(logits) if is_long else cross_entropy
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(vectors, 1.0)
        scale = min(1.0, (step + 1) / WARMUP_STEPS, (1 - passed) / (1 - DECAY_FROM))
        for group in adam.param_groups:
            group["lr"] = VECTOR_LR * scale
        adam.step()
        muon.step(MATRIX_LR * scale)
        losses.append(cross_entropy.item())
        step += 1
        if step == 1 or now - last_point >= CURVE_SECONDS:
            curve.append(curve_point(model, held_out, step, losses, now - started))
            save(model, out)
            losses, last_point = [], time.monotonic()
    trained_s = time.monotonic() - started
    if losses:
        curve.append(curve_point(model, held_out, step, losses, trained_s))
        save(model, out)
    return Training(curve=tuple(curve), seconds=trained_s)


def batches(tokens: Ids, length: int) -> Iterator[torch.Tensor]:
    """Yield windows for ever, each epoch at a fresh offset and in a fresh order: `[sequences, length + 1]`."""
    rng = np.random.default_rng(SEED + length)
    sequences = BATCH_TOKENS // length
    while True:
        starts = np.arange(rng.integers(length), len(tokens) - length - 1, length)
        rng.shuffle(starts)
        for chosen in starts[: len(starts) // sequences * sequences].reshape(-1, sequences):
            yield torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in chosen]))


def mean_entropy(logits: torch.Tensor) -> torch.Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean()


def curve_point(model: LlamaForCausalLM, held_out: Ids, step: int, losses: list[float], seconds: float) -> CurvePoint:
    loss = evaluate(model, held_out[: CURVE_WINDOWS * CONTEXT + 1]).loss
    point = CurvePoint(step, step * BATCH_TOKENS, seconds, float(np.mean(losses)), loss)
    print(curve_row(point), flush=True)
    return point


def save(model: LlamaForCausalLM, out: Path) -> None:
    rounded = LlamaForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = model.generation_config
    rounded.bfloat16().save_pretrained(out)


if __name__ == "__main__":
    main()
