"""The learner on sharded tables: many ranks are as one process, and ranks that die change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

try:
    import cadam.torchrec  # noqa: F401
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from online_ranks import learn_rounds
from test_online_distributed import same_as_one_process
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
