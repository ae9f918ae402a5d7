"""The report: one HTML file that holds everything, in the order a reader asks.

At the top a table of verdicts with a small picture of each; then for every experiment what to do, the first figure, the
verdict, the other figures, and, folded, all numbers and the choices made. Every number on it comes from the specs of a
cache or an archive.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from cadam.ab.report import palette
from cadam.ab.summary import Row, Summary
from cadam.ab.verdict import Recommendation, kind_names
from cadam.statistics.comparison import Kind

from .experiment import Experiment, Plan
from .runner import Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def command(experiment: Experiment, plan: Plan) -> str:
    """What to type to compute this."""
    if experiment.again:
        return experiment.again
    seeds = "" if plan.seeds == experiment.seeds[plan.scale] else f" --seeds {plan.seeds}"
    data = f" --data {shlex.quote(plan.data)}" if plan.data else ""
    rows = "" if plan.rows is None else f" --rows {plan.rows}"
    return f"cadam reproduce {experiment.name} --{plan.scale}{seeds}{data}{rows}"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def draw(experiment: Experiment, request: Request) -> Mapping[str, Figure]:
    """The figures of an experiment by caption."""
    try:
        import matplotlib
    except ImportError as error:
        raise ModuleNotFoundError(palette.NEEDS) from error
    with matplotlib.rc_context(palette.STYLE):
        return experiment.figures(request.results)


@dataclass(frozen=True)
class Heading:
    """What stands around a report: its title, and paragraphs at its beginning and its end."""

    title: str
    lead: Sequence[str] = ()
    foot: Sequence[str] = ()


def page(requests: Sequence[Request], heading: Heading) -> str:
    """The whole report."""
    found = [(one, one.experiment.summary(one.results) if one.complete else None) for one in requests]
    several = len(requests) > 1
    return _PAGE.format(
        title=escape(heading.title),
        lead=_paragraphs(heading.lead),
        foot=_paragraphs(heading.foot),
        colours=_colours(),
        navigation=_navigation(requests) if several else "",
        overview=_overview(found) if several else "",
        sections="\n".join(_section(request, summary, heading.title) for request, summary in found),
    )


def _paragraphs(texts: Sequence[str]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)


def _navigation(requests: Iterable[Request]) -> str:
    names = dict.fromkeys(escape(request.experiment.name) for request in requests)
    links = "".join(f'<a href="#{name}">{name}</a>' for name in names)
    return f'<nav><a href="#top">Overview</a>{links}</nav>'


def _overview(found: Iterable[tuple[Request, Summary | None]]) -> str:
    """A line for each experiment: its differences as a picture, and its verdicts as chips."""
    lines = []
    for request, summary in found:
        link = f'<a href="#{escape(request.experiment.name)}">{escape(request.experiment.title)}</a>'
        if summary is None:
            lines.append(f"<tr><td>{link}</td><td></td><td>{escape(_state(request))}</td></tr>")
            continue
        rows = _main_rows(summary.rows)
        said = " ".join(_advice(one) for one in summary.recommendations) or _chips(rows) or escape(summary.verdict)
        lines.append(f"<tr><td>{link}</td><td>{_forest(rows)}</td><td>{said}</td></tr>")
    head = "<th>experiment</th><th>difference, 95% interval</th><th>verdict by its main measure</th>"
    return f'<table class="overview"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _advice(recommendation: Recommendation) -> str:
    chip = _chip(recommendation.verdict.kind, recommendation.action)
    return f"{chip} {escape(recommendation.objection or recommendation.effect)}"


def _main_rows(rows: Sequence[Row]) -> list[Row]:
    """The comparisons by the first measure, if rows are labeled "condition: measure"; otherwise all comparisons."""
    compared = [row for row in rows if row.verdict_kind is not None]
    named = [row.label.partition(": ") for row in compared]
    measure = named[0][2] if named else ""
    alike = [row for row, (_, _, of) in zip(compared, named, strict=True) if of == measure]
    conditions = {condition for condition, _, of in named if of}
    has_all = {row.label.partition(": ")[0] for row in alike} == conditions
    return alike if measure and has_all else compared


_WORDS = kind_names("better", "worse")


def _chip(kind: Kind, text: str) -> str:
    return f'<span class="chip {kind}">{escape(text)}</span>'


def _chips(rows: Sequence[Row]) -> str:
    """How many comparisons came to what."""
    counts = Counter(row.verdict_kind for row in rows)
    return " ".join(_chip(kind, f"{counts[kind]} {word}") for kind, word in _WORDS.items() if counts[kind])


def _forest(rows: Sequence[Row]) -> str:
    """The intervals of some comparisons, one below the other, on a scale of their own with 0 in the middle."""
    ends = [(row, row.values["low"], row.values["high"]) for row in rows if {"low", "high"} <= row.values.keys()]
    ends = [(row, low, high) for row, low, high in ends if math.isfinite(low) and math.isfinite(high)]
    marks = [
        (
            str(row.verdict_kind),
            low,
            row.values.get("difference", (low + high) / 2),
            high,
            f"{row.label}: {row.interval}",
        )
        for row, low, high in ends
    ]
    return _picture(marks, max((max(abs(low), abs(high)) for _, low, high in ends), default=0.0))


def _picture(marks: Sequence[tuple[str, float, float, float, str]], farthest: float) -> str:
    """Intervals (kind, low, middle, high, what) one below the other, with 0 in the middle and `farthest` at the end."""
    if not farthest:
        return ""
    height, scale = 9 * len(marks) + 3, 95 / farthest
    drawn = [f'<line x1="100" x2="100" y1="0" y2="{height}" class="zero"/>']
    for place, (kind, low, middle, high, what) in enumerate(marks):
        y = 6 + 9 * place
        drawn.append(
            f'<g class="{kind}"><title>{escape(what)}</title>'
            f'<line x1="{100 + scale * low:.1f}" x2="{100 + scale * high:.1f}" y1="{y}" y2="{y}"/>'
            f'<circle cx="{100 + scale * middle:.1f}" cy="{y}" r="2.6"/></g>'
        )
    label = escape("; ".join(what for *_, what in marks))
    return f'<svg class="forest" role="img" aria-label="{label}" viewBox="0 0 200 {height}">{"".join(drawn)}</svg>'


def _measure(experiment: Experiment) -> str:
    return f'<p class="measure">{escape(experiment.measure)}</p>' if experiment.measure else ""


def _state(request: Request) -> str:
    if request.unknown:
        return f"Not known: {request.unknown}."
    done, missing = len(request.results), len(request.missing)
    return f"Not complete: {done} of at least {done + missing} specs are there, the others failed or were not run."


def _section(request: Request, summary: Summary | None, title: str) -> str:
    experiment = request.experiment
    parts = [
        f'<section id="{escape(experiment.name)}">',
        f"<h2>{escape(experiment.title)}</h2>" if experiment.title != title else "",
        f"<p>{escape(experiment.shows)}</p>",
    ]
    claim = f'<p class="claim"><b>The paper:</b> {escape(experiment.claim)}</p>' if experiment.claim else ""
    if summary is not None:
        verdict = f'<p class="verdict"><b>Measured:</b> {escape(summary.verdict)}</p>'
        warnings = [f'<p class="warning"><b>Beware:</b> {escape(text)}</p>' for text in summary.warnings]
        first, *others = (
            _figure(svg(figure, f"{experiment.name}-{number}", caption), caption)
            for number, (caption, figure) in enumerate(draw(experiment, request).items(), 1)
        )
        said = [_measure(experiment), claim, verdict]
        folded = "<details><summary>All numbers</summary>"
        if summary.recommendations:
            parts += [*map(_recommended, summary.recommendations), *warnings, first, *others]
            parts += [folded, *said, _table(summary.rows), "</details>"]
        else:
            chips = _chips(_main_rows(summary.rows))
            parts += [f'<p class="chips">{chips}</p>' if chips else "", first, *said, *warnings, *others]
            parts += [folded, _table(summary.rows), "</details>"]
    else:
        parts += [_measure(experiment), claim]
        parts.append(f'<p class="warning">{escape(_state(request))} The command below goes on from there.</p>')
    if experiment.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in experiment.notes)
        what = "Choices made here, and slips of the paper" if experiment.claim else "Notes"
        parts.append(f"<details class='notes'><summary>{what}</summary>")
        parts.append(f"<ul>{notes}</ul></details>")
    parts.append(f"<pre><code>{escape(command(experiment, request.plan))}</code></pre>")
    parts.append(f'<p class="facts">{escape(_facts(request))}</p></section>')
    return "\n".join(filter(None, parts))


def _recommended(recommendation: Recommendation) -> str:
    """What to do, with the reasons below."""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in recommendation.reasons)
    return (
        f'<div class="recommendation {recommendation.verdict.kind}"><p><strong>{escape(recommendation.headline)}'
        f"</strong></p>{_intervals(recommendation)}<ul>{reasons}</ul></div>"
    )


def _intervals(recommendation: Recommendation) -> str:
    """Over what the difference holds: a picture and a chip for each interval, all on one scale."""
    ends = recommendation.values.get("intervals", {})
    farthest = max((abs(end) for each in ends.values() for end in each.values() if math.isfinite(end)), default=0.0)
    lines = []
    for over, each in ends.items():
        low, high = each["low"], each["high"]
        known = math.isfinite(low) and math.isfinite(high)
        side = "ahead" if low > 0 else "behind" if high < 0 else "undecided" if known else "not known"
        kind: Kind = "better" if side == "ahead" else "worse" if side == "behind" else "inconclusive"
        picture = _picture([(kind, low, (low + high) / 2, high, over)], farthest) if known else ""
        lines.append(f"<tr><td>over {escape(over)}</td><td>{picture}</td><td>{_chip(kind, side)}</td></tr>")
    return f'<table class="overview">{"".join(lines)}</table>' if lines else ""


def _figure(drawing: str, caption: str) -> str:
    """A drawing that can be moved sideways where it is wider than the page, and says so there."""
    text = f'{escape(caption)} <span class="hint">Wider than this page: move it sideways.</span>'
    return f'<figure><div tabindex="0">{drawing}</div><figcaption>{text}</figcaption></figure>'


_COLUMNS = {
    "what": "",
    "paper": "paper",
    "measured": "measured",
    "difference [95% interval]": "difference",
    "A/A noise floor": "noise floor",
    "seeds": "seeds",
    "verdict": "verdict",
}
"""The head of each column, and the label that stands for it on a phone."""


def _table(rows: Sequence[Row]) -> str:
    """All rows; the column of the paper's numbers only where the paper has one."""
    columns = {name: label for name, label in _COLUMNS.items() if name != "paper" or any(row.reference for row in rows)}
    lines = []
    for row in rows:
        texts = dict(
            zip(
                _COLUMNS,
                (
                    row.label,
                    row.reference or "no number",
                    row.measured,
                    row.interval,
                    row.noise_floor,
                    str(row.seeds),
                    row.verdict,
                ),
                strict=True,
            )
        )
        specs = (
            f'<td data-label="{label}">{_dot(row.verdict_kind) if name == "verdict" else ""}{escape(texts[name])}</td>'
            if texts[name]
            else '<td class="empty"></td>'
            for name, label in columns.items()
        )
        lines.append(f"<tr>{''.join(specs)}</tr>")
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    wide = "" if "paper" in columns else " own"
    return (
        f"<div class='table{wide}'><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _dot(kind: Kind | None) -> str:
    """The colour of a verdict beside its words; none where a line compares nothing."""
    return "" if kind is None else f'<span class="dot {kind}"></span>'


def _facts(request: Request) -> str:
    """Where the numbers come from."""
    results = request.results
    if not results:
        return "Nothing computed yet."
    versions = _distinct(", ".join(f"{k} {v}" for k, v in r.provenance.versions.items()) for r in results)
    devices = _distinct(r.provenance.device for r in results)
    memory = max(r.provenance.peak_memory for r in results) / 1e6
    beside = request.experiment.side_by_side
    each = "at once" if beside is not None and any(beside(r.spec) for r in results) else "each"
    return (
        f"{len(results)} specs, {duration(results.seconds)} of computing in all, at most {memory:.0f} MB {each}; "
        f"{devices}; {versions}."
    )


def _distinct(texts: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(texts))


# Figures -------------------------------------------------------------------------------------------------------


def svg(figure: Figure, name: str, caption: str) -> str:
    """A figure as SVG for the page: colours of the palette follow the page, and ids are the page's only ones."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**palette.STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r' d="([^"]*)"', _shorter, text)
    for colour in palette.DARK:
        text = text.replace(colour, f"var({_variable(colour)})")
    text = re.sub(r'<svg (.*?)width="[^"]*"', r"<svg \1", text, count=1, flags=re.DOTALL)
    text = re.sub(r'<svg (.*?)height="[^"]*"', r"<svg \1", text, count=1, flags=re.DOTALL)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)


def _shorter(path: re.Match[str]) -> str:
    """The outline of a path, to a tenth of a point."""
    rounded = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), path[1])
    return f' d="{" ".join(rounded.split())}"'


def _variable(colour: str) -> str:
    return f"--c{colour[1:]}"


def _colours() -> str:
    light = "".join(f"{_variable(colour)}:{colour};" for colour in palette.DARK)
    dark = "".join(f"{_variable(colour)}:{other};" for colour, other in palette.DARK.items())
    names = f"--ink:var({_variable(palette.INK)});--muted:var({_variable(palette.MUTED)});"
    names += f"--line:var({_variable(palette.GRID)});--paper:var({_variable(palette.PAPER)});"
    names += f"--accent:var({_variable(palette.CADAM)});--warn:var({_variable(palette.ADAM)});"
    names += f"--good:var({_variable(palette.SERIES[2])});"
    return f":root{{{light}{names}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{colours}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:68rem;padding:1.5rem 1rem 4rem;background:var(--paper);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}}
h1{{font-size:1.6rem;line-height:1.2;margin:.5rem 0}}
h2{{font-size:1.25rem;margin:0 0 .5rem}}
a{{color:var(--accent)}}
p{{max-width:46rem;margin:.5rem 0}}
section{{border-top:1px solid var(--line);margin-top:2.5rem;padding-top:1.5rem}}
nav{{position:sticky;top:0;z-index:1;display:flex;gap:1rem;overflow-x:auto;white-space:nowrap;padding:.5rem 0;
 background:var(--paper);border-bottom:1px solid var(--line);font-size:.85rem}}
nav a{{text-decoration:none}}
section{{scroll-margin-top:2.5rem}}
.overview td{{vertical-align:middle;padding:.5rem 1rem .5rem 0}}
.recommendation .overview{{width:auto}} .recommendation .overview td{{border:0;padding:.1rem 1rem .1rem 0}}
.recommendation svg{{vertical-align:middle}}
h1+section{{border:0;margin-top:0;padding-top:0}}
.forest{{width:12.5rem;min-width:0}} .forest line{{stroke:var(--kind);stroke-width:1.6}}
.forest circle{{fill:var(--kind)}} .forest .zero{{stroke:var(--muted);stroke-width:.6}}
.chip{{display:inline-block;border-radius:1rem;padding:.05rem .7rem;font-size:.8rem;font-weight:600;white-space:nowrap;
 color:var(--paper);background:var(--kind)}}
.chips{{margin:.2rem 0}}
.claim,.notes,.facts,figcaption,.reading,.measure{{color:var(--muted)}}
.verdict{{border-left:4px solid var(--accent);padding-left:.8rem}}
.warning{{border-left:4px solid var(--warn);padding-left:.8rem}}
.better{{--kind:var(--good)}} .worse,.diverged{{--kind:var(--warn)}}
.equivalent{{--kind:var(--accent)}} .inconclusive{{--kind:var(--muted)}}
.recommendation{{border:1px solid var(--line);border-left:.5rem solid var(--kind);border-radius:.5rem;
 padding:.4rem 1rem;margin:1rem 0}}
.recommendation p{{font-size:1.15rem;max-width:none}} .recommendation li{{margin:.2rem 0}}
.dot{{display:inline-block;width:.6rem;height:.6rem;border-radius:50%;margin-right:.4rem;background:var(--kind)}}
.table{{overflow-x:auto;margin:1rem 0}}
table{{border-collapse:collapse;width:100%;font-size:.85rem;font-variant-numeric:tabular-nums}}
th{{text-align:left;font-weight:600;color:var(--muted);border-bottom:1px solid var(--muted);vertical-align:bottom}}
th,td{{padding:.35rem .6rem .35rem 0}}
td{{border-bottom:1px solid var(--line);vertical-align:top}}
td:nth-child(n+4):nth-child(-n+6),.own td:nth-child(3){{white-space:nowrap}}
.own td:nth-child(6){{white-space:normal}}
figure{{margin:1.5rem 0}} figure div{{overflow-x:auto}}
svg{{display:block;width:100%;min-width:38rem;height:auto}}
.hint{{display:none}}
figcaption{{font-size:.85rem;margin-top:.4rem;max-width:46rem}}
pre{{border:1px solid var(--line);border-radius:.3rem;padding:.6rem .8rem;overflow-x:auto;font-size:.85rem}}
.notes,.facts,.reading,.measure{{font-size:.85rem}} .notes{{max-width:46rem}} .notes ul{{padding-left:1.2rem}}
summary{{cursor:pointer}} footer{{margin-top:3rem;color:var(--muted);font-size:.85rem}}
@media (max-width:44rem){{
 table,tbody,tr,td{{display:block}} thead,td.empty{{display:none}}
 tr{{border-bottom:1px solid var(--line);padding:.6rem 0}}
 td{{border:0;padding:.1rem 0 .1rem 6rem;position:relative}}
 td:nth-child(n+3):nth-child(-n+6),.own td:nth-child(3){{white-space:normal}}
 td::before{{content:attr(data-label);position:absolute;left:0;color:var(--muted)}}
 td:first-child,.overview td{{font-weight:600;padding-left:0}} .overview td{{font-weight:inherit}}
 .recommendation .overview tr{{display:table-row}} .recommendation .overview td{{display:table-spec}}
 .recommendation .forest{{width:8rem}}
 figure svg{{min-width:52rem}} .hint{{display:block;color:var(--accent)}}
 figure div{{border-right:3px dotted var(--accent)}}
}}
</style>
</head>
<body id="top">
{navigation}
<h1>{title}</h1>
{lead}
{overview}
{sections}
<footer>
<details class="reading"><summary>How to read the tables</summary>
<p>Both optimizers run with the same seeds, that is the same starts, data and
noise, and the difference is taken seed by seed. In brackets is its 95% interval: where it holds 0, no difference was
seen. The A/A noise floor (A against A: the same against the same) is how far apart two means of the same optimizer were
when only the seeds differed, and ± how far that may be, 19 times in 20; its true value is 0. A difference below that
is one that other seeds make as well. Each interval stands for itself: of twenty rows without any difference, one will
seem to have one. What all of it cost, in computing time of one core or one GPU, stands below each experiment.</p>
</details>
{foot}
</footer>
</body>
</html>
"""
