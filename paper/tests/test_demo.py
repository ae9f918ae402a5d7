"""`cadam demo`: its simulated logs, and the page."""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

import numpy as np
import pytest

from cadam_paper import demo


def rows(log: demo.ClickLog) -> list[dict[str, str]]:
    return list(csv.DictReader(log.lines()))


def weights(events: list[dict[str, str]]) -> np.ndarray:
    """Estimate the taste by the mean of the numbers of clicks minus that of other events."""
    numbers = np.array([[float(event[name]) for name in demo.NUMBERS] for event in events])
    clicks = np.array([event["click"] == "1" for event in events])
    difference: np.ndarray = numbers[clicks].mean(0) - numbers[~clicks].mean(0)
    return difference


def test_the_taste_changes_exactly_at_the_shifts() -> None:
    events = rows(demo.ClickLog("log", "", 6_000, shift_interval=3_000))
    first, second, third = (weights(events[start : start + 1_500]) for start in (0, 1_500, 3_000))
    assert np.corrcoef(first, second)[0, 1] > 0.95
    assert np.corrcoef(second, third)[0, 1] < 0.9
    assert demo.ClickLog("log", "", 6_000).shifts == []


def test_label_noise_flips_the_stated_share() -> None:
    clean, noisy = (rows(demo.ClickLog("log", "", 4_000, flipped_labels=share)) for share in (0.0, 0.25))
    flipped = [a["click"] != b["click"] for a, b in zip(clean, noisy, strict=True)]
    assert np.mean(flipped) == pytest.approx(0.25, abs=0.02)


@pytest.mark.slow
def test_the_page_shows_the_mechanism_and_a_verdict_of_each_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = (demo.ClickLog("moving", "Shift", 3_000, shift_interval=1_000), demo.ClickLog("still", "No shift", 3_000))
    monkeypatch.setattr(demo, "LOGS", logs)
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    assert demo.run(parser.parse_args([])) == 0
    page = Path("results/demo.html").read_text("utf-8")
    assert page.count("<figure>") == 3
    assert page.count('<div class="card') == 2
    assert "simulated" in page
    assert "cadam ab results/demo/moving.csv --label click" in re.sub("<[^>]+>", "", page)
    assert "page: results/demo.html" in capsys.readouterr().out
    assert Path("results/demo/still.html").exists()
