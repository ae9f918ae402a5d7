"""Many ranks that learn from shares of a stream are as one process that learns from all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from online_ranks import SIZES, learn_rounds
from worlds import run

from cadam.online import recompute


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert set(a) == set(b), set(a) ^ set(b)
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


@pytest.mark.parametrize("late", [False, True])
def test_two_ranks_equal_one_process_on_the_union(late: bool, tmp_path: Path) -> None:
    alone = learn_rounds("alone", late, tmp_path / "alone")
    two = run(2, tmp_path / "world", learn_rounds, "ddp", late, tmp_path / "two")
    same_as_one_process(two, alone, tmp_path / "two")


def same_as_one_process(two: dict[str, Any], alone: dict[str, Any], folder: Path) -> None:
    assert furthest(two["tensors"], alone["tensors"]) < 1e-5
    total = sum(map(sum, SIZES))
    assert two["metrics"]["events"] == two["metrics"]["labelled"] == two["metrics"]["learned"] == total
    assert two["events"] == sum(first for first, _ in SIZES)
    numbers = {name: value for name, value in two["metrics"].items() if not name.startswith("alignment")}
    of_one = {name: value for name, value in alone["metrics"].items() if not name.startswith("alignment")}
    assert numbers == pytest.approx(of_one, rel=1e-5, nan_ok=True)
    assert 0 < numbers["auc/window"] < 1
    of_log = recompute(folder / "log")
    assert numbers["log loss"] == pytest.approx(of_log["log loss"], rel=1e-9)
    assert numbers["calibration/total"] == pytest.approx(of_log["calibration"], rel=1e-9)
