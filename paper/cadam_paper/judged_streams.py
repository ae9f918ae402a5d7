"""The verdicts of `cadam ab` about real and generated streams, as tables of the documentation.

`benchmarks/evidence_streams.py` computes them and writes results/evidence_streams.json. With --full it reads on after
the verdict, for results/evidence_streams_full.json. Each stream names the commit of the protocol, which was made before
the streams were judged.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from cadam.ab.study import Study

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

ACTIONS = {
    "switch": "switch to CAdam",
    "stay": "keep Adam",
    "no practical difference": "no practical difference",
}
"""The decided actions of a verdict, in words."""
COLUMNS = (
    *("stream", "events used", "log loss", "over time", "over seeds", "recent part, over time", "hindsight"),
    "verdict",
)
"""The columns that the tables of verdicts share."""


@cache
def verdicts(file: str = "evidence_streams.json") -> dict[str, dict[str, Any]]:
    """Return the results by stream."""
    results: dict[str, dict[str, Any]] = json.loads((ROOT / "results" / file).read_text("utf-8"))
    return {name: results[name] for name in LABELS if name in results}


def longest_comparisons() -> dict[str, dict[str, Any]]:
    """Return the result over the largest part of each stream: where --full read on after the verdict, that result.

    The difference at an early stop is not typical of the stream: on forest cover CAdam's lead halves afterwards.
    """
    return {**verdicts(), **verdicts("evidence_streams_full.json")}


def first_pairs() -> list[dict[str, Any]]:
    """Return the comparison of CAdam with Adam on the largest part of each stream."""
    return [result["pairs"][0] for result in longest_comparisons().values()]


def count_decided() -> tuple[int, int, int, int]:
    """Return for how many streams the verdict is CAdam, Adam and no practical difference, and the number of streams."""
    actions = [result["verdicts"][0]["action"] for result in longest_comparisons().values()]
    switch, stay, equal = (actions.count(action) for action in ("switch", "stay", "no practical difference"))
    return switch, stay, equal, len(actions)


def count_small() -> int:
    """Return for how many streams the verdict is CAdam, although the difference is smaller than what matters."""
    actions = [result["verdicts"][0]["action"] for result in longest_comparisons().values()]
    return sum(
        action == "switch" and abs(difference) < Study.matters
        for action, difference in zip(actions, differences(), strict=True)
    )


def differences() -> list[float]:
    """Return the difference of the log loss, CAdam minus Adam in percent of Adam's, by stream."""
    return [pair["difference"] for pair in first_pairs()]


def verdict_table() -> list[str]:
    """Return the table of all verdicts, with the intervals that they need and the verdicts by earlier protocols."""
    table = table_header(*COLUMNS, "before")
    for name, result in verdicts().items():
        earlier = "; ".join(_earlier(each) for each in result["earlier"]) or "not judged"
        table.append(table_row(*_cells(name, result), earlier))
    return table


def full_table() -> list[str]:
    """Return the table of the streams that were read on after the verdict."""
    results = verdicts("evidence_streams_full.json")
    return [*table_header(*COLUMNS), *(table_row(*_cells(name, result)) for name, result in results.items())]


def _cells(name: str, result: dict[str, Any]) -> list[str]:
    """Return the cells of `COLUMNS` for one stream."""
    (pair,), (verdict,) = result["pairs"], result["verdicts"]
    return [
        LABELS[name],
        f"{result['processed_events']:,} of {result['events']:,}",
        f"{pair['difference']:+.2f}%",
        *(_interval(pair[key]) for key in ("over_time", "over_seeds", "recent_over_time")),
        f"{pair['in_hindsight']:+.2f}%",
        _verdict(pair, verdict["action"]),
    ]


def _interval(interval: dict[str, float] | None) -> str:
    if interval is None:
        return "none yet"
    text = f"{interval['low']:+.2f} to {interval['high']:+.2f}"
    return f"**{text}**" if interval["low"] * interval["high"] > 0 else text


def _verdict(pair: dict[str, Any], action: str) -> str:
    if action != "undecided":
        return ACTIONS[action]
    more = [f"{pair['more_events']:,} more events"] if pair["more_events"] else []
    more += [f"{pair['more_seeds']} seeds"] if pair["more_seeds"] else []
    return "undecided" + (f"; about {' and '.join(more)} would decide it" if more else "")


def _earlier(verdict: dict[str, Any]) -> str:
    return f"{ACTIONS.get(verdict['action'], verdict['action'])} ({verdict['difference']:+.2f}%, {verdict['commit']})"
