"""The table at the top of docs/evidence.md: what to do in the most common situations, and the rate to try first."""

from __future__ import annotations

from cadam.statistics.comparison import Comparison, sign

from .archive_names import LABEL_NOISE
from .evidence import FIRST_FIFTH, GAUC, adam_pairs, findings
from .judged_streams import verdicts
from .language_models import page as language_models
from .published import table_header, table_row

NOISY_IMAGES = "noise 40%"
"""The condition of the image study with label noise."""


def _gain(comparison: Comparison) -> str:
    """Format a difference, and whether its interval includes 0."""
    return f"{comparison.difference.mean:+.2f}{'' if sign(comparison.difference) else ' (undecided)'}"


def table() -> list[str]:
    """Return the advice by situation, with what CAdam gained there and the learning rate to try first."""
    changing, mixed, end = (
        _gain(language_models.comparisons(name, metric)["CAdamW"])
        for name, metric in (("lm-shift", "loss"), ("lm-mixed", "loss"), ("lm-mixed", "held_out"))
    )
    items = verdicts()["turnover"]["pairs"][0]
    noisy = [
        finding.difference.mean
        for finding in findings()
        if finding.unit == GAUC and finding.rates == FIRST_FIFTH and finding.condition == LABEL_NOISE
    ]
    images = [pair.at_own_rates.difference.mean for (_, label), pair in adam_pairs().items() if label == NOISY_IMAGES]
    triple = "Adam's, then three times that"
    return [
        *table_header("you train", "advice", "CAdam minus Adam", "learning rate to try first"),
        table_row(
            "a [language model](language_models.md)",
            "try CAdamW if the text changes, or if it matters how fast the loss falls",
            f"bits per byte over the pass (lower is better): {changing} if domains follow each other, {mixed} if they "
            f"are mixed; on held-out text after the mixed pass {end}",
            "AdamW's, then twice that",
        ),
        table_row(
            "a recommender with [new items every day](mechanism.md#when-masking-costs)",
            "run `cadam ab` on your events, also with [tables without confidence](swap.md#confidence-for-tables)",
            f"{items['difference']:+.2f}% log loss on generated clicks, {items['in_hindsight']:+.2f}% at the best "
            "rates in hindsight: too little to matter",
            triple,
        ),
        table_row(
            "on events with noisy labels",
            "run `cadam ab` on your events",
            f"{min(noisy):+.2f} to {max(noisy):+.2f} points of GAUC on {len(noisy)} real streams with 20% label noise",
            triple,
        ),
        table_row(
            "on images with noisy labels",
            "no need to switch",
            f"{min(images):+.2f} to {max(images):+.2f} points of accuracy with 40% label noise, which may be chance",
            triple,
        ),
    ]
