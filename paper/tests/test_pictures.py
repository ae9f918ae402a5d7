"""The pictures of the documentation: their numbers, and colors that follow the dark mode."""

from __future__ import annotations

import pytest

from cadam.ab.report import palette
from cadam_paper import judged_streams, pictures
from cadam_paper.published import ROOT


@pytest.mark.parametrize("path", pictures.PICTURES)
def test_a_picture_has_colors_for_dark_mode(path: str) -> None:
    text = (ROOT / path).read_text("utf-8")
    assert "prefers-color-scheme: dark" in text
    assert f"var({palette.css_variable(palette.INK)})" in text


def test_the_speed_chart_has_the_numbers_of_the_page() -> None:
    ranges = pictures.speeds()
    assert len(ranges) == len(pictures.SPEED_ROWS)
    assert all(0 < low <= high for devices in ranges.values() for low, high in devices)


def test_gains_are_positive_where_cadam_has_the_lower_loss() -> None:
    *_, (_, by_unit) = pictures.switch_rows()
    (intervals,) = by_unit.values()
    means = sorted(-pair["difference"] for pair in judged_streams.first_pairs())
    assert sorted(each.mean for each in intervals) == pytest.approx(means)


def test_arrows_of_a_diagram_connect_its_boxes() -> None:
    boxes = {"left": pictures.Box(0, 0, 10, 10, "a"), "right": pictures.Box(20, 2, 10, 4, "b", "text")}
    figure = pictures.diagram(30, 10, boxes, [("left", "right", "to")])
    assert [text.get_text() for text in figure.axes[0].texts] == ["a", "b", "text", "", "to"]
