"""The tables and figures of the page on the mechanism, from the published results of the experiment `masking`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .masking import COUNTS, NETWORK_CONDITIONS, NOISY, RARE, RATES, REFERENCE_RATE, SHIFTED, count_names, mean_of
from .published import format_rate, load, table_header, table_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAYS, COSTS = 0, 1
"""The numbers of the two figures of the experiment."""


def figure(number: int) -> Figure:
    """Draw one of the figures of the experiment."""
    request = load("masking")
    return list(request.experiment.figures(request.results).values())[number]


def harm_table() -> list[str]:
    """Return the table of the harmful shares of the kept and of the masked update, by task and learning rate."""
    results = load("masking").results
    lines = table_header("task", "part of the update", *(f"rate {format_rate(rate)}" for rate in RATES))
    for condition in (*NETWORK_CONDITIONS, RARE):
        for part in ("masked", "kept"):
            shares = [mean_of(results, condition, rate, f"harmful_{part}").mean for rate in RATES]
            lines.append(table_row(condition, part, *(f"{share:.0%}" for share in shares)))
    for part in ("masked", "kept"):
        shares = [mean_of(results, SHIFTED, rate, f"first_{part}").mean for rate in RATES]
        lines.append(table_row(f"{SHIFTED}, its first step", part, *(f"{share:.0%}" for share in shares)))
    return lines


def row_table() -> list[str]:
    """Return the table of the harmful share of the masked update of embedding rows, by the number of their updates."""
    results = load("masking").results
    lines = table_header("learning rate", *(f"{name} updates" for name in count_names()[1:]))
    for rate in RATES:
        shares = results.where(condition=RARE, lr=rate).curve("harmful_masked").mean(0)
        lines.append(table_row(format_rate(rate), *(f"{share:.0%}" for share in shares[1 : len(COUNTS)])))
    return lines


def answer() -> list[str]:
    """Return the answer of the page in a few sentences."""
    results = load("masking").results

    def percent(condition: str, rate: float, metric: str) -> str:
        return f"{mean_of(results, condition, rate, metric).mean:.0%}"

    low, high = RATES[0], RATES[-1]
    clean, corrupted = (mean_of(results, NOISY, REFERENCE_RATE, name).mean for name in ("clean", "corrupted"))
    rare = results.where(condition=RARE, lr=REFERENCE_RATE).curve("harmful_masked").mean(0)
    return [
        f"- **It pays in the first step after a sudden shift:** {percent(SHIFTED, REFERENCE_RATE, 'first_masked')} of "
        f"the masked update would have increased the loss on the new data, and "
        f"{percent(SHIFTED, REFERENCE_RATE, 'first_kept')} of the kept one (learning rate "
        f"{format_rate(REFERENCE_RATE)}).",
        f"- **It pays at high learning rates:** without any change, "
        f"{percent(NETWORK_CONDITIONS[0], high, 'harmful_masked')} of the masked update is harmful at "
        f"{format_rate(high)}.",
        f"- **It costs at low learning rates:** only {percent(NETWORK_CONDITIONS[0], low, 'harmful_masked')} is "
        f"harmful at {format_rate(low)}, so nearly all of the masked update was progress.",
        f"- **It costs on rare rows of a table:** of the masked update of rows with 11 to 100 updates, "
        f"{rare[3]:.0%} to {rare[4]:.0%} is harmful (learning rate {format_rate(REFERENCE_RATE)}). So the mask makes "
        "the model learn new items more slowly.",
        f"- **It hardly separates corrupted labels from clean ones:** over the run, gradients of clean examples agree "
        f"with the momentum in {clean:.1%} of the elements, those of corrupted examples in {corrupted:.1%}. The "
        "difference is clear only in the first hundred steps.",
    ]
