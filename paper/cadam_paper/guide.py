"""The table at the top of docs/evidence.md: what to do in the most common situations, and the rate to try first."""

from __future__ import annotations

from cadam.statistics.comparison import Comparison, sign

from .archive_names import LABEL_NOISE
from .continual import page as continual
from .continual.study import BASELINE
from .evidence import FIRST_FIFTH, GAUC, adam_pairs, findings
from .judged_streams import verdicts
from .language_models import page as language_models
from .published import table_header, table_row

NOISY_IMAGES = "noise 40%"
"""The condition of the image study with label noise."""


def _gain(comparison: Comparison) -> str:
    """Format a difference, and whether its interval includes 0."""
    return f"{comparison.difference.mean:+.2f}{'' if sign(comparison.difference) else ' (undecided)'}"


def _continual_gains(arm: str, other: str) -> str:
    """Format the differences of two arms under all conditions, and whether they are clear after correction."""
    differences = continual.differences(arm, other)
    clear = continual.clear_names(differences)
    verdict = {len(differences): "clear", 0: "not clear"}.get(len(clear), f"clear with {' and '.join(clear)}")
    shown = " and ".join(f"{difference.mean:+.2f}" for difference in differences.values())
    return f"{shown} points of accuracy ({verdict} after correction)"


def table() -> list[str]:
    """Return the advice by situation, with what CAdam gained there and the learning rate to try first."""
    changing, mixed = (_gain(language_models.comparisons(name, "loss")["CAdamW"]) for name in ("lm-shift", "lm-mixed"))
    items = verdicts()["turnover"]["pairs"][0]
    noisy = [
        finding
        for finding in findings()
        if finding.unit == GAUC and finding.rates == FIRST_FIFTH and finding.condition == LABEL_NOISE
    ]
    gains = [finding.difference.mean for finding in noisy]
    images = [pair.at_own_rates.difference.mean for (_, label), pair in adam_pairs().items() if label == NOISY_IMAGES]
    triple = "Adam's, then three times that"
    return [
        *table_header("you train", "advice", "CAdam minus Adam", "learning rate to try first"),
        table_row(
            "a [language model](language_models.md)",
            "try CAdamW if the text changes and the loss during training counts; otherwise no gain is clear",
            f"loss during training in bits per byte (lower is better): {changing} if one kind of text follows another, "
            f"{mixed} if they are mixed",
            "AdamW's, then twice that",
        ),
        table_row(
            "a recommender with [new items every day](mechanism.md#when-masking-costs)",
            "run `cadam ab` on your events, and keep the mask on tables",
            f"{items['difference']:+.2f}% log loss on generated clicks, which is too little to matter",
            triple,
        ),
        table_row(
            "a model on events with noisy labels",
            "run `cadam ab` on your events",
            f"{min(gains):+.2f} to {max(gains):+.2f} points of GAUC on {len(noisy)} real streams with 20% label noise, "
            f"clear over seeds, users and time on {sum(finding.kind == 'better' for finding in noisy)}",
            triple,
        ),
        table_row(
            "a model on images with noisy labels",
            "no need to switch",
            f"{min(images):+.2f} to {max(images):+.2f} points of accuracy with 40% label noise, which may be due to "
            "chance",
            triple,
        ),
        table_row(
            "one network on [many tasks in turn](continual.md)",
            "use L2 toward the initial weights first, which gains more; then try CAdam with it",
            f"on two sequences of 100 tasks {_continual_gains(continual.TREATMENT, BASELINE)}; if both optimizers use "
            f"L2, {_continual_gains(continual.PENALIZED_TREATMENT, continual.PENALIZED)}",
            "Adam's, then two and four times that",
        ),
    ]
