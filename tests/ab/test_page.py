"""The page, the sentences and the colors of an A/B."""

from __future__ import annotations

import math
import re

import pytest

from cadam.ab.report import palette
from cadam.ab.report.console import result_lines
from cadam.ab.report.page import interval_marks, render_page
from cadam.ab.result import Result, as_plain
from cadam.ab.study import Study
from cadam.ab.wording import action, headline, reasons, summary, warnings
from cadam.cli import ab_arguments
from cadam.online.monitoring import reject_limit
from cadam.statistics.intervals import Interval
from tests.ab.helpers import make_result

OPEN = Interval(-0.9, -2.0, 0.2, 200)
"""An interval that includes 0."""
STUDY = Study("csv:<a>.csv", ("Adam", "CAdam"), "deepfm", 256)


def first_headline(result: Result) -> str:
    return headline(result.pairs[0], result)


def test_the_page_has_the_verdict_before_figures_and_commands() -> None:
    result = make_result()
    page = render_page("CAdam <b> on csv:<a>.csv", STUDY, result, "cadam ab <a>.csv", "cadam run <a>.csv")
    assert page.index("Switch to CAdam") < page.index("<figure>") < page.index("Evidence")
    assert page.count("<figure>") == 5
    assert "<b> on" not in page
    assert "cadam run &lt;a&gt;.csv" in page
    assert re.search(r"var\(--c2a6f97\)", page), "CAdam has its color"


def test_the_table_has_a_column_per_arm_so_that_it_fits_on_a_phone() -> None:
    page = render_page("title", STUDY, make_result(), "cadam ab a.csv", "")
    head, row = re.findall("<tr><th>(?:</th>|rate to use).*?</tr>", page, re.DOTALL)
    assert [text for text in re.split(r"<.*?>|\s+", head) if text] == ["CAdam", "Adam"]
    assert re.sub("<.*?>", " ", row).split() == ["rate", "to", "use", "0.03", "0.03"]


def test_figures_can_be_read_on_a_phone_and_in_dark_mode() -> None:
    page = render_page("title", STUDY, make_result(), "cadam ab a.csv", "")
    figures = re.findall("<figure>.*?</figure>", page, re.DOTALL)
    for figure in figures:
        assert "--inches:" in figure
        [width] = re.findall(r'viewBox="0 0 ([\d.]+) ', figure)
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", figure)]
        assert sizes
        assert min(sizes) * 358 / float(width) > 11, "pixels on a page that is 390 pixels wide"
        opacities = [float(value) for value in re.findall(r"stroke-opacity: ([\d.]+)", figure)]
        assert all(value > 0.6 for value in opacities)
    assert "stroke-opacity" in figures[-1], "the lines of lower rates are paler"
    assert "max-width:calc(110px*var(--inches))" in page


def test_an_option_of_a_command_is_not_broken_after_its_hyphens() -> None:
    page = render_page("title", STUDY, make_result(), "cadam ab a.csv --lr 0.1", "cadam run a.csv --lr 0.1")
    assert '<pre><code>cadam run a.csv <span class="option">--lr</span> 0.1</code></pre>' in page
    assert ".option{white-space:nowrap}" in page


def test_an_undecided_summary_recommends_nothing_new() -> None:
    undecided, decided = make_result(kind="inconclusive"), make_result()
    assert summary(undecided.pairs[0], undecided).startswith("Keep Adam for now, at a learning rate of 0.03.")
    assert summary(decided.pairs[0], decided).startswith("Use CAdam, at a learning rate of 0.03.")


@pytest.mark.parametrize(
    ("fields", "text", "act"),
    [
        ({}, "Switch to CAdam: the log loss with CAdam is 1.00% lower than with Adam.", "switch"),
        ({"kind": "worse", "difference": 1.0, "in_hindsight": 1.0}, "Stay with Adam: the log loss", "stay"),
        ({"kind": "equivalent"}, "No practical difference:", "no practical difference"),
        (
            {"kind": "diverged"},
            "Not comparable: CAdam diverged at every learning rate under some seed. Compare again with lower rates",
            "not comparable",
        ),
        ({"warm_up": None}, "Undecided: no model is better than the best constant prediction.", "undecided"),
        ({"in_hindsight": 0.05}, "Undecided: the learning rates decide which arm is ahead.", "undecided"),
        (
            {"kind": "inconclusive", "over_time": Interval(-1.0, -2.5, 0.5, 400), "more_events": 70_000},
            "Undecided: the log loss with CAdam is 1.00% lower than with Adam, but the interval over time includes 0. "
            "About 70,000 more events would decide it.",
            "undecided",
        ),
        (
            {"kind": "inconclusive", "seeds": 1, "over_seeds": Interval(-1.0, math.nan, math.nan, 1)},
            "but the interval over seeds is unknown. Run more seeds (--seeds).",
            "undecided",
        ),
        (
            {"kind": "inconclusive", "over_time": Interval(-1.0, -math.inf, math.inf, 11), "more_events": 3_000},
            "but the interval over time is unknown (11 of the 20 batches that it needs were judged). At least 3,000 "
            "more events are needed before it can be decided.",
            "undecided",
        ),
        (
            {
                "kind": "inconclusive",
                "over_time": Interval(-1.0, -math.inf, math.inf, 300),
                "required_batches": 640,
                "lag": 16,
                "more_events": 90_000,
            },
            "(300 of the 640 batches that it needs were judged, because labels are up to 16 batches late).",
            "undecided",
        ),
        (
            {"warm_up": None, "lag": 300, "batches": 391},
            "Labels are up to 300 batches late in a stream of 391, so most events may have been predicted before",
            "undecided",
        ),
        (
            {"kind": "inconclusive", "is_reversing": True, "recent_over_time": Interval(0.3, 0.1, 0.5, 200)},
            "but it is +0.30% in the recent part, after 14,000 events.",
            "undecided",
        ),
        (
            {"kind": "inconclusive", "is_ending": True, "change": Interval(1.0, 0.2, 1.8, 200), "more_events": 50_000},
            "but it fades along the stream, from -1.90% to -0.90% in the recent part. About 50,000 more events",
            "undecided",
        ),
        (
            {"recent_over_time": OPEN},
            f"is 1.00% lower than with Adam, but {OPEN.mean:+.2f}% in the recent part, whose interval includes 0.",
            "switch",
        ),
        (
            {"change": Interval(0.4, 0.2, 0.6, 200)},
            "is 1.00% lower than with Adam, but -0.90% in the recent part.",
            "switch",
        ),
        ({"is_fading": True}, "is 1.00% lower than with Adam, but -0.90% in the recent part.", "switch"),
        ({"matters": 2.0}, "than with Adam, which is less than what matters (2%).", "switch"),
    ],
)
def test_the_headline_says_what_to_do(fields: dict[str, object], text: str, act: str) -> None:
    result = make_result(**fields)  # type: ignore[arg-type]
    assert text in first_headline(result)
    assert action(result.pairs[0], result) == act
    assert "\n".join(result_lines(result))
    assert summary(result.pairs[0], result)


def test_the_recommended_arm_is_the_best_that_is_better() -> None:
    assert make_result().recommended == "CAdam"
    assert make_result(kind="inconclusive").recommended == "Adam"
    assert make_result(in_hindsight=0.5).recommended == "Adam"
    assert make_result().ranking == ["CAdam", "Adam"]


def test_a_trend_is_named_where_the_intervals_exclude_that_there_is_none() -> None:
    periods = [-1.9] * 5 + [-0.7] * 5 + [-0.4] * 5 + [-0.2] * 5
    (pair,) = make_result(periods=periods, change=Interval(1.0, 0.2, 1.8, 200)).pairs
    assert pair.trend == "shrinks"
    text = " ".join(reasons(pair, make_result()))
    assert "The difference shrinks along the stream. By quarters of the judged events, the difference of " in text
    assert "the log loss is -1.90, -0.70, -0.40 and -0.20%." in text
    assert make_result(change=Interval(-0.5, -0.9, -0.1, 200)).pairs[0].trend == "grows"
    assert make_result().pairs[0].trend == ""


def test_a_difference_that_was_on_the_other_side_before_does_not_shrink() -> None:
    result = make_result(
        periods=[0.5] * 10 + [-1.0] * 10,
        recent_over_time=Interval(-1.0, -1.4, -0.6, 200),
        change=Interval(-1.5, -2.0, -1.0, 200),
    )
    (pair,) = result.pairs
    assert pair.trend == "changes its sign"
    assert "The difference changes its sign along the stream. By quarters" in " ".join(reasons(pair, result))
    assert headline(pair, result) == "Switch to CAdam: the log loss with CAdam is 1.00% lower than with Adam."


def test_periods_without_weight_do_not_count() -> None:
    (pair,) = make_result(periods=[-1.0, 2.0, math.nan, math.nan]).pairs
    assert pair.share_of_periods_ahead == 0.5
    assert pair.quarters == []
    assert "CAdam has the lower log loss in 50% of 2 periods." in reasons(pair, make_result())


def test_nothing_is_said_about_a_difference_that_was_not_judged() -> None:
    for fields in ({"warm_up": None}, {"warm_up": 30_000}):
        result = make_result(
            kind="inconclusive", difference=math.nan, over_time=Interval(math.nan, -math.inf, math.inf, 0), **fields
        )
        text = " ".join([first_headline(result), summary(result.pairs[0], result)])
        assert "nan" not in text
        assert "Nothing is recommended: " in text
        assert "Use Adam" not in text
    assert "no events could be compared after the warm-up, which took 30,000 of 30,000 events" in text
    untrained = make_result(warm_up=None)
    lines = reasons(untrained.pairs[0], untrained)
    assert lines[0].startswith("No events were judged. The log loss over all 30,000 events is 0.4950 with CAdam, ")


def test_equal_predictions_are_not_described_by_intervals() -> None:
    result = make_result(kind="equivalent", is_same=True, over_seeds=None)
    assert "to the last bit" in first_headline(result)
    assert not any("seed" in line or "periods" in line for line in reasons(result.pairs[0], result))


def test_limits_of_the_result_are_warnings() -> None:
    texts = " ".join(warnings(make_result(clipped_share=0.01)))
    assert "1.0% of the predictions was limited to 15" in texts


def test_intervals_are_drawn_on_one_scale() -> None:
    (pair,) = make_result(over_seeds=Interval(-1.0, math.nan, math.nan, 1)).pairs
    time, seeds, recent_time, recent_seeds, users = interval_marks(pair)
    assert (recent_time.source, recent_seeds.source) == ("over recent time", "over seeds in recent time")
    assert time.low == -95
    assert time.high == pytest.approx(-95 / 3)
    assert (time.kind, seeds.is_known, users.kind) == ("better", False, "better")


def test_numbers_that_are_not_finite_become_none() -> None:
    plain = as_plain(make_result())
    assert plain["pairs"][0]["curve"]["low"][0] is None
    assert plain["arms"][0]["loss_by_rate"] == {"0.01": 0.6, "0.03": 0.5, "0.1": None}


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
