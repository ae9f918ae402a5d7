"""The files of examples/production name metrics and options that exist."""

from __future__ import annotations

import argparse
import json
import re
import shlex

import pytest

from cadam.cli.serve_arguments import add_serve_arguments
from cadam.online.monitoring.prometheus_metrics import COUNTS, GAUGES
from tests.documented import ROOT

FOLDER = ROOT / "examples" / "production"
CODE = "".join(path.read_text() for path in (ROOT / "src" / "cadam" / "serving").glob("*.py"))


@pytest.mark.parametrize("name", ["alerts.yml", "grafana.json"])
def test_metrics_of_alerts_and_dashboard_exist(name: str) -> None:
    names = set(re.findall(r"cadam_([a-z_]+?)(?:_total|_bucket)?\b", (FOLDER / name).read_text()))
    assert len(names) > 5
    own = {found for found in names if f'"cadam_{found}"' in CODE or f'"{found}":' in CODE or f"cadam_{found} " in CODE}
    assert names - own - COUNTS.keys() - GAUGES.keys() == set()


def test_the_dashboard_has_queries_in_every_panel() -> None:
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    assert all(target["expr"] for panel in panels for target in panel["targets"])
    assert len({panel["id"] for panel in panels}) == len(panels) == 8


@pytest.mark.parametrize("name", ["cadam-serve.service", "compose.yaml"])
def test_commands_can_be_parsed(name: str) -> None:
    (line,) = re.findall(r"(?:ExecStart=\S+ serve|command:) (.*)", (FOLDER / name).read_text())
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    options = parser.parse_args(shlex.split(line))
    assert (options.horizon, options.unmatched, options.retain) == (86400, "drop", 7 * 86400)
    assert options.token_file is not None
