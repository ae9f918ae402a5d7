"""The table of paired results that grows while runs are computed."""

from __future__ import annotations

from cadam_paper.harness.results import Outcome, Provenance, Result, RunSpec
from cadam_paper.harness.scoreboard import Scoreboard


def test_the_scoreboard_pairs_only_runs_at_the_chosen_learning_rates() -> None:
    board = Scoreboard("ab", "", ("Adam", "CAdam"), {"auc": "AUC"})

    def add(optimizer: str, lr: float, seed: int, auc: float) -> tuple[str, ...] | None:
        spec = RunSpec("ab", "model", "data", optimizer, lr, "as it is", seed)
        return board.add(Result(spec, Outcome({"auc": auc}), Provenance(0.0, 0, "cpu", {})))

    assert add("Adam", 0.1, 0, 0.70) is None
    assert add("CAdam", 0.1, 0, 0.75) == ("0", "0.7000", "0.7500", "+0.0500")
    assert add("Adam", 1.0, 0, 0.53) is None, "a run at a rate that was not chosen"
    add("Adam", 0.1, 1, 0.71)
    assert add("CAdam", 0.1, 1, 0.74) == ("1", "0.7100", "0.7400", "+0.0300")


def test_the_head_of_a_scoreboard_is_split_before_options() -> None:
    board = Scoreboard("ab", "", ("Adam", "CAdam:moments=int8"), {"auc": "AUC"})
    first, second = board.format(board.head).splitlines()
    assert (first.split(), second.split()) == (["CAdam:"], ["seed", "Adam", "AUC", "moments=int8", "AUC", "difference"])
    line = board.format(["0", "0.7000", "0.7500", "+0.0500"])
    assert len(first) == len(second) == len(line)
    assert line.index("0.7500") + 6 == second.index("moments=int8 AUC") + 16
