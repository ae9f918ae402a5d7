"""Error rates of the verdict: simulated comparisons of equal arms, and real ones with other seeds per arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import false_alarms

from cadam.ab.analysis import Analysis
from cadam.ab.comparison import compare
from cadam.ab.runner import RunFiles, StudyRunner, count_cores
from cadam.ab.study import Run
from tests.ab.helpers import encode, make_study


def test_equal_arms_rarely_get_a_verdict_after_any_batch_or_at_the_end() -> None:
    wrong = sum(false_alarms.count_wrong(name, 6, batches=300) for name in false_alarms.STREAMS)
    assert wrong <= 5, "of 54 comparisons; 5% would be 2.7"


@pytest.mark.slow
@pytest.mark.parametrize("name", false_alarms.STREAMS)
def test_the_error_rate_of_400_comparisons_is_at_most_5_percent(name: str) -> None:
    wrong = false_alarms.count_wrong(name, 400, processes=count_cores())
    assert false_alarms.upper_bound(wrong, 400) <= 0.08


def test_a_known_difference_is_found() -> None:
    random = np.random.default_rng(0)
    verdicts = [false_alarms.judge(false_alarms.simulate(random, batches=600) - 0.0068) for _ in range(10)]
    assert sum(each.first == "better" for each in verdicts) >= 9
    assert sum(each.at_end == "better" for each in verdicts) >= 9
    assert not any(each.includes("worse") for each in verdicts)


@pytest.mark.slow
def test_equal_arms_that_are_really_trained_get_no_verdict(folder: Path) -> None:
    """One optimizer under 40 seeds is divided into pairs of arms whose seeds differ, at random and repeatedly."""
    options: dict[str, Any] = {"grid": (0.01, 0.03), "batch_size": 10, "matters": 0.0}
    study = make_study(folder, arms=("Adam", "CAdam"), seeds=40, **options)
    stream, cache = encode(folder, study)
    compare(study, stream, StudyRunner(study, cache), full=True)
    random, wrong = np.random.default_rng(0), 0
    for trial in range(40):
        optimizer, seeds = study.arms[trial % 2], random.permutation(40).tolist()

        class Paired:
            """The scores of the optimizer, of which the second arm has other seeds."""

            def files(self, run: Run, optimizer: str = optimizer, seeds: list[int] = seeds) -> RunFiles:
                return cache.files(Run(optimizer, run.lr, seeds[run.seed + 5 * (run.arm == "second")]))

        pair_study = make_study(folder, arms=("first", "second"), seeds=5, **options)
        analysis = Analysis(pair_study, stream.judged, Paired())  # type: ignore[arg-type]
        analysis.update(stream.batches)
        assert analysis.warm_up is not None
        wrong += analysis.pairs["second"].first_decided_at is not None
    assert wrong <= 4, "of 40 comparisons; 5% would be 2"
