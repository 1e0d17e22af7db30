"""Writes the report of a training of the demo model: `training.json` and a plot of its loss."""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from demo_evaluation import NEAR_TIE, NGRAM_ORDER, Evaluation


@dataclass(frozen=True, slots=True)
class CurvePoint:
    step: int
    tokens: int
    seconds: float
    train_loss: float  # mean since the point before
    held_out_loss: float  # over the first windows of the held-out stream only


def curve_row(point: CurvePoint) -> dict[str, float]:
    return {
        "step": point.step,
        "tokens": point.tokens,
        "seconds": round(point.seconds, 1),
        "train_loss": round(point.train_loss, 4),
        "held_out_loss": round(point.held_out_loss, 4),
    }


def evaluation_report(evaluation: Evaluation, ngram: float) -> dict[str, float | str]:
    return {
        "held_out_loss": round(evaluation.loss, 4),
        "ngram_held_out_loss": round(ngram, 4),
        "ngram": f"{NGRAM_ORDER}-gram, interpolated modified Kneser-Ney",
        "unit": "nats per token",
        "median_top1_margin": round(evaluation.median_margin, 4),
        "near_tie_share": round(evaluation.near_ties, 4),
        "near_tie_below": NEAR_TIE,
        "top1_accuracy": round(evaluation.accuracy, 4),
    }


def draw_curve(folder: Path) -> None:
    """Draw `loss_curve.svg` from the folder's `training.json`."""
    report = json.loads((folder / "training.json").read_text())
    curve, evaluation = report["curve"], report["evaluation"]
    tokens = [point["tokens"] / 1e6 for point in curve]
    # A fixed salt and no date: the same training draws the same bytes.
    plt.rcParams["svg.hashsalt"] = "demo"
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot(tokens, [point["train_loss"] for point in curve], color="C0", alpha=0.5, label="train")
    axes.plot(tokens, [point["held_out_loss"] for point in curve], color="C0", label="held out, first part")
    axes.plot(tokens[-1], evaluation["held_out_loss"], "o", color="C3", label="held out, all of it")
    axes.axhline(evaluation["ngram_held_out_loss"], color="C7", ls="--", label="5-gram, held out, all of it")
    axes.set(xlabel="million tokens trained on", ylabel="nats per token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "loss_curve.svg", metadata={"Date": None})
    plt.close(figure)
