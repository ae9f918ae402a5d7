"""Adding a metric: a new metric is one object in a module and one entry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cadam import sources_and_metrics
from cadam.cli import main
from cadam.online.metrics import stream

BRIER = """
import numpy as np
from cadam.online.metrics.metric import WindowMetric

BRIER = WindowMetric(
    outputs={"brier_score": "mean squared error of the probabilities"},
    averaged=("brier_score",),
    compute=lambda scores, labels, users: {"brier_score": float(np.mean((1 / (1 + np.exp(-scores)) - labels) ** 2))},
)
"""
ENTRY = """
import sys
from cadam import sources_and_metrics

sources_and_metrics.METRICS["new_metric"] = "brier:BRIER"

from cadam.cli.main import main

sys.exit(main(sys.argv[1:]))
"""


def test_every_listed_metric_exists() -> None:
    assert list(stream.METRICS) == list(sources_and_metrics.METRICS)


def test_a_registered_metric_is_in_the_help_the_output_and_the_reports(tmp_path: Path) -> None:
    """The entry must exist before the other modules are imported."""
    (tmp_path / "brier.py").write_text(BRIER)
    (tmp_path / "entry.py").write_text(ENTRY)
    records = [{"item": row % 5, "click": int(row % 5 == 0)} for row in range(3000)]
    (tmp_path / "clicks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def run(*arguments: str) -> str:
        command = [sys.executable, "entry.py", "run", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "new_metric" in " ".join(run("--help").split())
    options = ["clicks.jsonl", "--label", "click", "--metrics", "new_metric", "--window", "1000"]
    output = run(*options, "--prometheus", "metrics.prom")
    assert "brier_score/window" in output
    families = (tmp_path / "metrics.prom").read_text()
    assert "# HELP cadam_brier_score mean squared error of the probabilities" in families
    assert 'cadam_brier_score{scope="mean_of_windows"}' in families


def test_a_metric_that_needs_users_is_refused_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "clicks.jsonl"
    path.write_text("".join(json.dumps({"item": row % 5, "click": row % 2}) + "\n" for row in range(100)))
    words = ["run", str(path), "--label", "click", "--metrics", "gauc", "--checkpoint", str(tmp_path / "run")]
    assert main.main(words) == 2
    assert "--metrics gauc" in capsys.readouterr().err
