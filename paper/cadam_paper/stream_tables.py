"""Tables of docs/streams.md: what the A/B and the rate curves say of each real stream."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from cadam.ab.summary import Row
from cadam.ab.text import join_words
from cadam.ab.verdict import kind_names
from cadam.statistics.comparison import KINDS, sign

from .published import head, interval, is_archived, line, lines, request, row, summary

STREAMS = {
    "flights": "flights",
    "movielens": "100,000 film ratings",
    "movielens-1m": "a million film ratings",
    "electricity": "electricity prices",
    "forest": "forest cover",
    "retrosheet": "baseball",
}

MAIN = "GAUC by impressions"
OWN = "each at its own best rate"
AS_IT_IS = "as it is"
ARMS = ("Adam", "CAdam")


def answer() -> list[str]:
    """What the streams say, in a few sentences."""
    curves = dict(_archived("rates"))
    own = {label: row(name, f"{MAIN}: {OWN}") for label, name in curves.items()}
    high = {label: row(name, f"{MAIN}: both at three times that") for label, name in curves.items()}
    chosen = {label: row(name, f"{AS_IT_IS}: {MAIN} (") for label, name in _archived("ab")}
    times = times_adams()
    higher = [label for label in times if times[label] > 1]
    lower = [label for label in times if times[label] < 1]
    lines = [
        f"- **Each at its own best rate**: {_by_side(own)}.",
        f"- **Both at three times Adam's best rate**: {_by_side(high)}.",
        f"- **Rates chosen on the first fifth**: {_by_side(chosen)}.",
        f"- **All three intervals together**, best against best: {_by_kind(own)}.",
        f"- **All three intervals together**, rates chosen on the first fifth: {_by_kind(chosen)}.",
        f"- **CAdam's best rate** is higher than Adam's on {_named(higher)}, and lower on {_named(lower)}.",
    ]
    left_out = [label for label in STREAMS.values() if label not in curves]
    return lines + ([f"- Not run over learning rates: {join_words(left_out)}."] if left_out else [])


def times_adams() -> dict[str, float]:
    """By stream, how many times Adam's best rate CAdam's is."""
    return {label: _near(name, "CAdam")["best"] / _near(name, "Adam")["best"] for label, name in _archived("rates")}


def _by_side(found: Mapping[str, Row]) -> str:
    """On which streams the seeds put CAdam ahead, and by how many points."""
    sides = {1: "ahead", -1: "behind", 0: "open"}
    parts = []
    for side, word in sides.items():
        points = {
            label: 100 * each.values["difference"] for label, each in found.items() if sign(interval(each)) == side
        }
        if points:
            said = join_words(f"{label} ({point:+.2f})" for label, point in points.items())
            parts.append(f"over seeds CAdam is {word} on {said}" if side else f"the seeds leave open {said}")
    return "; ".join(parts) + ", in points of GAUC" if parts else "not run"


def _by_kind(found: Mapping[str, Row]) -> str:
    words = kind_names("CAdam better", "CAdam worse")
    kinds = {kind: [label for label, each in found.items() if each.verdict_kind == kind] for kind in KINDS}
    parts = [f"{words[kind]} on {join_words(labels)}" for kind, labels in kinds.items() if labels]
    return "; ".join(parts) or "not run"


def _named(labels: Sequence[str]) -> str:
    return join_words(labels) if labels else "none"


def comparisons() -> list[str]:
    """The A/B on each stream: the difference at rates chosen on the first fifth, in every condition."""
    table = head("stream", "measured events, users", AS_IT_IS, "verdict", "one feature changes", "a fifth wrong")
    for label, experiment in _archived("ab"):
        metrics = request(experiment).results.tests()[0].outcome.metrics
        counted = f"{metrics['events']:,.0f}, {metrics['users_of_both_classes']:,.0f}"
        found = [_brackets(each) for each in lines(experiment, end=f": {MAIN} (higher is better)")]
        table.append(line(label, counted, found[0], str(summary(experiment).verdicts[AS_IT_IS]), *found[1:]))
    return table


def rates() -> list[str]:
    """Both arms over learning rates: their best rates, and CAdam minus Adam there and at one rate for both."""
    table = head("stream", "seeds", "best rate: Adam, CAdam", OWN, "both at Adam's best", "both at three times that")
    for label, experiment in _archived("rates"):
        best = ", ".join(f"{_near(experiment, arm)['best']:g}" for arm in ARMS)
        starts = (OWN, "both at Adam's best rate", "both at three times that")
        found = [row(experiment, f"{MAIN}: {start}") for start in starts]
        table.append(line(label, str(found[0].seeds), best, *map(_brackets, found)))
    return table


def tolerances() -> list[str]:
    """Which rates cost an arm at most a point of GAUC; and best against best by log loss, where less is better."""
    table = head("stream", *(f"{arm} within 0.01 of its best" for arm in ARMS), f"log loss, {OWN}")
    for label, experiment in _archived("rates"):
        ranges = [f"{near['low']:g} to {near['high']:g}" for near in (_near(experiment, arm) for arm in ARMS)]
        table.append(line(label, *ranges, _brackets(row(experiment, f"log loss: {OWN}"))))
    return table


def intervals() -> list[str]:
    """The same difference as seeds, users and time show it: best against best, and in the A/B."""
    table = head("stream", "rates", "over seeds", "over users", "confidence sequence over time", "verdict")
    by_label: dict[str, list[str]] = {}
    for kind, what, start, words in (
        ("rates", OWN, f"{MAIN}: {OWN}", "each its own best"),
        ("ab", AS_IT_IS, f"{AS_IT_IS}: {MAIN} (", "chosen on the first fifth"),
    ):
        for label, experiment in _archived(kind):
            found = row(experiment, start)
            over = [lines(experiment, f"{what}: the same, {of}")[:1] for of in ("over users", "confidence sequence")]
            shown = [_brackets(each) for each in (found, *(each for rest in over for each in rest))]
            verdict = f"{found.verdict_kind}{', conflicting' if found.conflicting else ''}"
            by_label.setdefault(label, []).append(line(label, words, *shown, verdict))
    return [*table, *(each for label in STREAMS.values() for each in by_label.get(label, []))]


def _archived(kind: str) -> Iterable[tuple[str, str]]:
    """The streams of which the archive has everything, by label and name of the experiment."""
    return [(label, f"{kind}-{name}") for name, label in STREAMS.items() if is_archived(f"{kind}-{name}")]


def _near(experiment: str, arm: str) -> Mapping[str, float]:
    """The best rate of an arm, and the lowest and the highest within a point of it."""
    return row(experiment, f"{MAIN}: {arm} within").values


def _brackets(found: Row) -> str:
    """A difference of four digits and its interval, in bold where that excludes 0; in words where there is none."""
    difference = interval(found)
    if not math.isfinite(difference.low):
        return f"{difference.mean:+.4f}, {found.verdict}"
    text = f"{difference:+.4f}"
    return f"**{text}**" if sign(difference) else text
