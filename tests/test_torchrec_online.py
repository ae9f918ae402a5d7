"""The learner on sharded tables: many ranks are as one process, and ranks that die change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

try:
    import cadam.torchrec  # noqa: F401
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from online_ranks import kill_and_compare, learn_rounds, shares, stop_and_go_on
from test_online_distributed import resumes_from_the_newest_good_checkpoint, same_as_one_process
from worlds import run

LATE = (False, True)
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def learn_all(folder: Path) -> dict[str, Any]:
    return {f"{kind} {late}": learn_rounds(kind, late, folder / f"{kind} {late}") for kind in KINDS for late in LATE}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("learnt")
    return run(2, folder / "world", learn_all, folder), folder


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_process_on_the_union(
    kind: str, late: bool, on_two_ranks: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    results, folder = on_two_ranks
    alone = learn_rounds("alone", late, tmp_path)
    same_as_one_process(results[f"{kind} {late}"], alone, folder / f"{kind} {late}")


@pytest.mark.parametrize("damage", ["", "__1_0.distcp"])
def test_resumed_from_the_newest_good_checkpoint(damage: str, tmp_path: Path) -> None:
    resumes_from_the_newest_good_checkpoint("row_wise", damage, tmp_path)


@pytest.mark.parametrize("kills", [pytest.param(2, id="2"), pytest.param(10, id="10", marks=pytest.mark.slow)])
def test_killed_at_random_moments_everything_is_as_if_it_had_not_been(kills: int, tmp_path: Path) -> None:
    kill_and_compare("row_wise", kills, shares(tmp_path / "data"), tmp_path)


def test_sigterm_stops_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    stop_and_go_on("row_wise", shares(tmp_path / "data"), tmp_path)
