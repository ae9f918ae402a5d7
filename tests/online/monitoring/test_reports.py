"""Reports of a learner: the console, TensorBoard and the Prometheus file."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
import torch

import cadam
from cadam.online import Console, Learner, PrometheusFile, TensorBoard
from cadam.online.monitoring import prometheus_metrics
from cadam.online.monitoring.console import COLUMNS, RATE_COLUMN
from tests.online.streams import Replayed, build, events, learner


def stream(count: int) -> Replayed:
    return Replayed([events(20, seed=n, first=20 * n) for n in range(count)])


def test_the_console_has_a_line_at_each_doubling_with_the_best_constant_beside_the_loss() -> None:
    out = io.StringIO()
    ours = learner(reports=[Console(out)])
    ours.run(stream(100))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[0][:4] == ["events", "average", "recent", "average"]
    rows = [line for line in lines[2:] if line and re.fullmatch(r"[\d,]+", line[0])]
    assert [row[0] for row in rows] == ["80", "140", "260", "520", "1,040", "2,000"]
    numbers = ours.metrics()
    assert float(rows[-1][1]) == pytest.approx(numbers["log_loss"], abs=1e-4)
    assert float(rows[-1][3]) == pytest.approx(numbers["best_constant"], abs=1e-4)
    average = (520 * float(rows[3][1]) + 520 * float(rows[4][2])) / 1040
    assert float(rows[4][1]) == pytest.approx(average, abs=2e-4)
    assert lines[-1][0] == "total"
    assert {"users.weight", "items.weight", "out.1.bias"} <= {line[0] for line in lines if line}


def test_the_first_recent_loss_after_a_resume_covers_the_events_since_the_resume(tmp_path: Path) -> None:
    first = learner(checkpoint=tmp_path / "state")
    first.run(stream(50))
    first.close()
    out = io.StringIO()
    resumed = learner(checkpoint=tmp_path / "state", reports=[Console(out)])
    resumed.run(stream(100))
    resumed.close()
    events, average, recent, average_constant, recent_constant, *_ = out.getvalue().splitlines()[2].split()
    assert events == "1,040"
    since = resumed.log_loss_at_start
    assert since.count == 1000
    assert float(average) * 1040 == pytest.approx(since.loss + 40 * float(recent), abs=0.1)
    assert float(recent) != float(average)
    assert float(recent_constant) != float(average_constant)


def test_no_two_columns_of_the_console_have_the_same_heading() -> None:
    headings = [f"{first} {second}" for first, second, _ in (*COLUMNS, RATE_COLUMN)]
    assert len(set(headings)) == len(headings)


def test_a_console_on_a_full_disk_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    ours = learner(reports=[Console(Full())])
    ours.run(stream(10))
    assert ours.events == 200
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]


def test_an_optimizer_that_does_not_count_alignment_has_no_values_of_it() -> None:
    out = io.StringIO()
    ours = learner(storage={"track_alignment": False}, reports=[Console(out)])
    ours.run(stream(10))
    assert "nan" not in out.getvalue()
    assert [name for name in ours.metrics() if name.startswith("alignment")] == []


class Kept:
    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[float, int]]] = {}

    def add_scalar(self, tag: str, value: float, step: int | None = None) -> None:
        self.scalars.setdefault(tag, []).append((value, step or 0))


def test_scalars_go_to_any_writer() -> None:
    kept = Kept()
    ours = learner(reports=[TensorBoard(kept, every=500)])
    ours.run(stream(100))
    assert [step for _, step in kept.scalars["online/log_loss"]] == [500, 1000, 1500, 2000, 2000]
    assert kept.scalars["online/log_loss"][-1][0] == ours.metrics()["log_loss"]
    assert "online/events_a_second" in kept.scalars
    ratio = kept.scalars["alignment/touched/parameters/users.weight"]
    assert all(0 < value <= 1 for value, _ in ratio)
    assert all(math.isfinite(value) for values in kept.scalars.values() for value, _ in values)


def test_the_prometheus_file_is_whole_and_has_the_numbers(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    ours = learner(reports=[PrometheusFile(tmp_path / "cadam.prom", seconds=0)])
    ours.run(stream(10))
    text = (tmp_path / "cadam.prom").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["cadam.prom"]
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["cadam_events"]) == float(values["cadam_events_total"]) == 200
    assert values["cadam_rejected"] == "0.0"
    assert values["cadam_orphan_labels"] == "0.0"
    assert float(values["cadam_log_loss"]) == ours.metrics()["log_loss"]
    assert 0 < float(values['cadam_alignment_over_touched{parameter="users.weight"}']) <= 1
    names = [sample.name for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    assert len(names) == len(values)


def test_a_name_with_quotes_does_not_break_the_prometheus_file() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    model = build()
    names = ['say "so"', "back\\slash", "two\nlines"]
    optimizer = cadam.CAdam(zip(names, model.parameters(), strict=False))
    ours = Learner(model, optimizer, torch.nn.functional.binary_cross_entropy_with_logits)
    ours.learn(events(20))
    text = prometheus_metrics.to_text(prometheus_metrics.families(ours))
    for name in (r"say \"so\"", r"back\\slash", r"two\nlines"):
        assert f'cadam_alignment_over_all{{parameter="{name}"}} ' in text


def test_a_prometheus_file_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    (tmp_path / "cadam.prom").mkdir()
    ours = learner(reports=[PrometheusFile(tmp_path / "cadam.prom", seconds=0)])
    ours.run(stream(10))
    assert ours.events == 200
    assert caplog.text.count("cannot be written") == 1
