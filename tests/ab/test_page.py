"""The page of a study, and the colors of its figures."""

from __future__ import annotations

import re

from cadam.ab.report import palette
from cadam.ab.report.page import Section, render_page
from cadam.ab.study import Study
from cadam.ab.summary import Row, Summary
from cadam.ab.verdict import Recommendation, Verdict
from cadam.cli import ab_arguments
from cadam.online.monitoring import reject_limit

RECOMMENDATION = Recommendation(
    Verdict("better", "CAdam", "Adam"),
    "GAUC with <CAdam> is higher",
    ("A reason.",),
    {
        "intervals": {
            "seeds": {"low": 1.0, "high": 3.0},
            "users": {"low": -4.0, "high": 2.0},
            "time": {"low": -float("inf"), "high": float("inf")},
        }
    },
)


def page(summary: Summary) -> str:
    section = Section(
        "ab-made",
        "A study",
        "What it is.",
        "cadam ab",
        "2 runs.",
        "What GAUC is.",
        summary,
        figures={"A <caption>": "<svg/>"},
        notes=["A note."],
    )
    return render_page("A study", section)


def test_a_recommendation_comes_before_figures_and_numbers() -> None:
    row = Row(
        "as it is: GAUC", "", "CAdam 1", "+1", 3, 1.0, "better", values={"low": 1.0, "high": 3.0}, verdict_kind="better"
    )
    text = page(Summary("It is better.", [row], ["Take care."], {}, [RECOMMENDATION]))
    parts = [
        "Switch to CAdam",
        "A reason.",
        "Take care.",
        "<figure>",
        "All numbers",
        "It is better.",
        "as it is: GAUC",
        "A note.",
        "cadam ab",
        "2 runs.",
    ]
    positions = [text.index(part) for part in parts]
    assert positions == sorted(positions)
    assert "<nav>" not in text
    assert "<th>paper</th>" not in text


def test_texts_are_escaped_and_drawings_are_not() -> None:
    text = page(Summary("", [], [], {}, [RECOMMENDATION]))
    assert "GAUC with &lt;CAdam&gt; is higher" in text
    assert "A &lt;caption&gt;" in text
    assert "<svg/>" in text


def test_intervals_of_a_recommendation_are_drawn_on_one_scale() -> None:
    text = page(Summary("", [], [], {}, [RECOMMENDATION]))
    table = text.partition('<table class="overview">')[2].partition("</table>")[0]
    chips = re.findall(r'<span class="chip (\w+)">(\w+)</span>', table)
    assert chips == [("better", "ahead"), ("inconclusive", "inconclusive"), ("inconclusive", "unknown")]
    ends = re.findall(r'<line x1="([\d.]+)" x2="([\d.]+)" y1="6"', table)
    assert ends == [("123.8", "171.2"), ("5.0", "147.5")]


def test_colors_belong_to_optimizers() -> None:
    assert palette.arm_colors(["CAdam", "Adam"]) == {"CAdam": palette.CADAM, "Adam": palette.ADAM}
    colors = palette.arm_colors(["Adam", "CAdam:moments=int8", "CAdam", "SGDM"])
    assert (colors["Adam"], colors["CAdam:moments=int8"]) == (palette.ADAM, palette.CADAM)
    assert [colors["CAdam"], colors["SGDM"]] == list(palette.SERIES[2:4])
    many = palette.arm_colors([f"SGDM:momentum=0.{n}" for n in range(len(palette.SERIES))])
    assert set(many.values()) == set(palette.SERIES)


def test_defaults_of_options_are_those_of_the_implementation() -> None:
    assert Study.matters == ab_arguments.MATTERS
    assert ab_arguments.MAX_REJECTED == reject_limit.DEFAULT_MAX_REJECTED
