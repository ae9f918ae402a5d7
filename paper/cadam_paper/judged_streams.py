"""The verdicts of `cadam ab` about real and generated streams, as tables of the documentation.

`benchmarks/evidence_streams.py` computes them and writes results/evidence_streams.json. Each stream names the commit of
the protocol, which was made before the streams were judged.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from .published import ROOT, table_header, table_row

LABELS = {
    "electricity": "electricity prices",
    "weather": "weather",
    "movielens": "100,000 film ratings",
    "flights": "flights",
    "forest": "forest cover",
    "baseball": "baseball",
    "flights-3m": "3 million flights",
    "retail": "online retail",
    "turnover": "generated clicks, new items all the time",
}


@cache
def verdicts() -> dict[str, dict[str, Any]]:
    """Return the results by stream."""
    results: dict[str, dict[str, Any]] = json.loads((ROOT / "results" / "evidence_streams.json").read_text())
    return {name: results[name] for name in LABELS if name in results}


def count_decided() -> tuple[int, int, int]:
    """Return for how many streams the verdict is CAdam, for how many it is Adam, and the number of streams."""
    kinds = [result["pairs"][0]["kind"] for result in verdicts().values()]
    return kinds.count("better"), kinds.count("worse"), len(kinds)


def differences() -> list[float]:
    """Return the difference of the log loss, CAdam minus Adam in percent of Adam's, by stream."""
    return [result["pairs"][0]["difference"] for result in verdicts().values()]


def verdict_table() -> list[str]:
    """Return the table of all verdicts, with the intervals that they need."""
    table = table_header(
        "stream", "events used", "log loss", "over time", "over seeds", "recent part, over time", "hindsight", "verdict"
    )
    for name, result in verdicts().items():
        pair = result["pairs"][0]
        table.append(
            table_row(
                LABELS[name],
                f"{result['processed_events']:,} of {result['events']:,}",
                f"{pair['difference']:+.2f}%",
                *(_interval(pair[key]) for key in ("over_time", "over_seeds", "recent_over_time")),
                f"{pair['in_hindsight']:+.2f}%",
                _verdict(pair),
            )
        )
    return table


def _interval(interval: dict[str, float] | None) -> str:
    if interval is None:
        return "none yet"
    text = f"{interval['low']:+.2f} to {interval['high']:+.2f}"
    return f"**{text}**" if interval["low"] * interval["high"] > 0 else text


def _verdict(pair: dict[str, Any]) -> str:
    if pair["kind"] in ("better", "worse"):
        return "switch to CAdam" if pair["kind"] == "better" else "keep Adam"
    more = [f"{pair['more_events']:,} more events"] if pair["more_events"] else []
    more += [f"{pair['more_seeds']} seeds"] if pair["more_seeds"] else []
    return "undecided" + (f"; about {' and '.join(more)} would decide it" if more else "")
