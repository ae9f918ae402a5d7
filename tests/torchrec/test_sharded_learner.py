"""The learner on sharded tables: many ranks get the result of one process, also if ranks are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

try:
    import cadam.torchrec  # noqa: F401
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from cadam.online import Batch, Learner
from tests.online.ranks import kill_and_compare, learn_rounds, learner, shares, stop_and_go_on
from tests.online.streams import Replayed, events
from tests.online.test_distributed_learner import (
    learn_and_resume,
    resumed_from_the_newest_good_checkpoint,
    same_as_one_process,
)
from tests.process_groups import run

KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
DAMAGES = ("", "__1_0.distcp")


def learn_all(folder: Path) -> dict[str, Any]:
    return {kind: learn_and_resume(kind, folder / kind, DAMAGES) for kind in KINDS}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("learned")
    return run(2, folder / "world", learn_all, folder), folder


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_process_on_the_union(
    kind: str, late: bool, learned: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    results, folder = learned
    alone = learn_rounds("alone", late, tmp_path)
    same_as_one_process(results[kind][f"late {late}"], alone, folder / kind / f"late {late}")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_from_the_newest_good_checkpoint(kind: str, damage: str, learned: tuple[dict[str, Any], Path]) -> None:
    resumed_from_the_newest_good_checkpoint(learned[0][kind], damage)


def table_groups(ours: Learner) -> list[dict[str, Any]]:
    model: Any = ours.model
    return model.fused_optimizer.param_groups


def change_options_and_resume(folder: Path) -> list[Any]:
    ours = learner("row_wise", checkpoint=folder / "state")
    for group in table_groups(ours):
        group.update(lr=0.007, betas=(0.5, 0.9))
    ours.run(Replayed([Batch(events(8))]))
    ours.close()
    again = learner("row_wise", checkpoint=folder / "state")
    assert again.resume()
    again.close()
    return [(group["lr"], group["betas"]) for group in table_groups(again)]


def test_options_of_tables_are_resumed(tmp_path: Path) -> None:
    assert set(run(1, tmp_path / "world", change_options_and_resume, tmp_path)) == {(0.007, (0.5, 0.9))}


@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 2), *(pytest.param(seed, 5, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_a_job_killed_at_random_moments_ends_with_the_same_bits(seed: int, kills: int, tmp_path: Path) -> None:
    kill_and_compare("row_wise", kills, seed, shares(tmp_path / "data"), tmp_path)


def test_sigterm_stops_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    stop_and_go_on("row_wise", shares(tmp_path / "data"), tmp_path)
