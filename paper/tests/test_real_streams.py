"""Reading the real streams from files, and the experiments over learning rates on simulated results."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cadam_paper import catalog
from cadam_paper import real_streams as streams
from cadam_paper.harness.results import Outcome, Provenance, Result, Results, RunSpec

# Files ---------------------------------------------------------------------------------------------------------

RATINGS = [(7, 1193, 5, 30), (7, 661, 3, 10), (2, 914, 4, 20), (2, 661, 1, 10)]


def write_ratings(path: Path, separator: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(separator.join(map(str, row)) + "\n" for row in RATINGS))


@pytest.mark.parametrize("separator", ["::", "\t"])
def test_ratings_are_read_in_the_order_of_time_from_the_path_in_the_environment(
    separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CADAM_ML_1M", str(tmp_path / "any.name"))
    write_ratings(tmp_path / "any.name", separator)
    events = streams.movielens_1m().events
    assert events.features["user"].tolist() == [1, 0, 0, 1]
    assert events.features["movie"].tolist() == [0, 0, 1, 2]
    assert np.asarray(events.labels).tolist() == [False, False, True, True]
    assert np.asarray(events.time).tolist() == [10, 10, 20, 30]


def test_the_official_file_is_found_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CADAM_ML_1M", raising=False)
    monkeypatch.setenv("CADAM_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"ratings\.dat.*CADAM_ML_1M"):
        streams.movielens_1m()
    write_ratings(tmp_path / "ml-1m" / "ratings.dat", "::")
    assert len(streams.movielens_1m().events) == len(RATINGS)


@pytest.mark.parametrize("text", ["", "1::2::3\n", "1::2::six::4\n", "1::2::9::4\n"])
def test_an_invalid_ratings_file_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ratings.dat"
    path.write_text(text)
    monkeypatch.setenv("CADAM_ML_1M", str(path))
    with pytest.raises(ValueError, match=r"ratings\.dat"):
        streams.movielens_1m()


def plate_appearances(rows: list[int]) -> pa.Table:
    """Return plate appearances of two simultaneous games, as rows in this order."""
    time = np.repeat(np.arange(10) * 135, 2)
    game = np.tile([0, 1], 10)
    table = {
        "time": time,
        "batter": [f"b{(3 * g + t // 135) % 7}" for g, t in zip(game, time, strict=True)],
        "pitcher": [f"p{g}" for g in game],
        "park": [f"park{1 - g}" for g in game],
        "batting_team": [f"t{g}" for g in game],
        "fielding_team": [f"t{1 - g}" for g in game],
        "inning": (time // 135 + 9).astype(np.int8),
        "home": game.astype(np.int8),
        "slot": (time // 135 % 9 + 1).astype(np.int8),
        "daynight": ["night"] * 20,
        "temp": np.full(20, 72, dtype=np.int8),
        "on_base": (np.arange(20) % 3 == 0).astype(np.int8),
    }
    return pa.table(table).take(pa.array(rows))


def test_the_stream_of_plate_appearances_does_not_depend_on_the_order_of_games(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CADAM_DATA", str(tmp_path))
    simulated = []
    for rows in ([*range(20)], [*range(0, 20, 2), *range(1, 20, 2)]):
        pq.write_table(plate_appearances(rows), tmp_path / streams.RETROSHEET_DATA.path)
        simulated.append(streams.retrosheet())
    by_time, by_game = simulated
    assert by_time.fields == by_game.fields == {
        "batter": 7, "pitcher": 2, "park": 2, "batting_team": 2, "fielding_team": 2, "daynight": 1, "inning": 13,
        "slot": 10, "home": 2,
    }  # fmt: skip
    for name, values in by_time.events.features.items():
        assert np.array_equal(values, by_game.events.features[name]), name
    assert by_time.events.features["batter"][:4].tolist() == [0, 1, 2, 3], "numbered as they first come to bat"
    assert np.array_equal(np.asarray(by_time.events.labels), np.arange(20) % 3 == 0)
    assert np.array_equal(np.asarray(by_time.events.users), by_time.events.features["batter"])


# Learning rates ------------------------------------------------------------------------------------------------

EXPERIMENT = catalog.find("rates-retrosheet")
BLOCKS, USERS = 50, 40


def outcome(spec: RunSpec, best: dict[str, float], ahead: float) -> Outcome:
    """Return an outcome whose GAUC peaks at the arm's best rate, with noise over seeds, blocks and users."""
    random = np.random.default_rng([spec.seed, int(1e9 * spec.lr)])  # equal for both arms
    value = 0.7 - 0.015 * abs(math.log10(spec.lr / best[spec.optimizer])) + 1e-5 * random.normal()
    value += ahead if spec.optimizer == "CAdam" else 0.0
    apart = np.random.default_rng(spec.seed + (100 if spec.optimizer == "CAdam" else 0))
    return Outcome(
        {"gauc_by_impressions": value, "log_loss": 1 - value, "events": 1000.0},
        {
            "gauc_by_impressions": value + 1e-4 * apart.normal(size=BLOCKS),
            "user_auc": value + 1e-4 * apart.normal(size=USERS),
            "user_impressions": np.full(USERS, 25),
        },
    )


def results(best: dict[str, float], ahead: float = 0.0, seeds: int = 4) -> Results:
    """Return simulated results of all runs of the experiment, phase by phase."""
    plan, by_spec = EXPERIMENT.plan("full", seeds), dict[RunSpec, Result]()
    while new := [c for c in EXPERIMENT.run_specs(plan, Results(list(by_spec.values()))) if c not in by_spec]:
        by_spec |= {c: Result(c, outcome(c, best, ahead), Provenance(1.0, 1, "none", {})) for c in new}
    return Results(list(by_spec.values()))


def test_both_optimizers_run_at_every_rate_and_seed_and_share_runs_with_the_ab() -> None:
    specs = EXPERIMENT.run_specs(EXPERIMENT.plan("full"), Results())
    assert len(specs) == len(set(specs)) == 2 * 6 * 6
    assert {(spec.experiment, spec.condition) for spec in specs} == {("ab-retrosheet", "as it is")}


def test_the_grid_is_extended_until_the_best_rate_of_each_optimizer_is_inside() -> None:
    rates = sorted({result.spec.lr for result in results({"Adam": 1e-4, "CAdam": 0.3})})
    assert rates == [3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0]
    assert not EXPERIMENT.summary(results({"Adam": 1e-4, "CAdam": 0.3})).warnings


def test_own_best_rates_and_a_common_rate_have_separate_verdicts() -> None:
    simulated = results({"Adam": 3e-3, "CAdam": 1e-2})
    kinds = {name: verdict.kind for name, verdict in EXPERIMENT.summary(simulated).verdicts.items()}
    assert kinds == {
        "each at its own best rate": "equivalent",
        "both at Adam's best rate, 0.003": "worse",
        "both at three times that, 0.01": "better",
    }
    ahead = EXPERIMENT.summary(results({"Adam": 3e-3, "CAdam": 1e-2}, ahead=0.005)).verdicts
    assert ahead["each at its own best rate"].kind == "better"
    rows = {row.label: row for row in EXPERIMENT.summary(simulated).rows}
    assert rows["log loss: each at its own best rate"].values["difference"] == pytest.approx(0, abs=1e-4)
    assert rows["GAUC by impressions: CAdam within 0.01 of its best"].values == {
        "low": 3e-3,
        "high": 3e-2,
        "best": 1e-2,
    }
    assert "each at its own best rate: difference over users" in rows
    assert len(EXPERIMENT.figures(simulated)) == 1


# The real files ---------------------------------------------------------------------------------------------

DATA = {
    "flights": streams.FLIGHTS_DATA,
    "movielens": streams.MOVIELENS_DATA,
    "electricity": streams.ELECTRICITY_DATA,
    "forest": streams.FOREST_DATA,
    "movielens-1m": streams.MOVIELENS_1M_DATA,
    "retrosheet": streams.RETROSHEET_DATA,
}


@pytest.mark.parametrize(
    ("name", "events", "users", "rate"),
    [
        ("flights", 327_346, 4037, 0.2371),
        ("movielens", 100_836, 610, 0.4818),
        ("electricity", 45_312, 48, 0.4245),
        ("forest", 581_012, 40, 0.4876),
        ("movielens-1m", 1_000_209, 6040, 0.5752),
        ("retrosheet", 4_523_403, 5306, 0.3230),
    ],
)
def test_real_streams_are_in_order_and_complete(name: str, events: int, users: int, rate: float) -> None:
    if advice := DATA[name].missing():
        pytest.skip(advice)
    stream = streams.load(name)
    labels = stream.events.labels
    assert labels is not None
    assert stream.events.time is not None
    assert stream.events.users is not None
    assert (len(stream.events), len(np.unique(stream.events.users))) == (events, users)
    assert labels.mean() == pytest.approx(rate, abs=1e-4)
    assert np.all(np.diff(stream.events.time) >= 0)
    for field, count in stream.fields.items():
        values = stream.events.features[field]
        assert values.min() >= 0
        assert values.max() == count - 1
    leaks = {"dep_delay", "dep_time", "arr_time", "air_time", "arr_delay", "rating", "on_base"}
    assert not leaks & set(stream.events.features)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("kind", ["ab", "rates"])
def test_the_experiments_on_real_streams_name_their_data_and_limits(name: str, kind: str) -> None:
    experiment = catalog.find(f"{kind}-{name}")
    assert experiment.name == f"{kind}-{name}"
    assert experiment.data is DATA[name]
    assert any("table 3 are private" in note for note in experiment.notes)
    assert kind == "rates" or any(
        "85.34, 85.64 and +0.30" in note and "85.91, 86.17 and +0.26" in note for note in experiment.notes
    )


def test_missing_data_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CADAM_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"flights from New York.*set CADAM_DATA"):
        streams.flights()
