"""Real streams in the order in which they happened: flights, films, electricity prices, forest cover, baseball.

Each is a file that its user has (see `Data`), turned into columns: categorical features as whole numbers from 0,
numbers scaled by fixed constants, a label, a user that GAUC groups by, and a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cadam.ab import run_arm
from cadam.ab.results import Outcome, RunSpec
from cadam.ab.study import Study
from cadam.online.data.events import Array, Batch, Events
from cadam.online.data.sources import Source
from cadam.online.models import pairwise_interactions

from .harness.ab_experiments import comparison_experiment, rates_experiment
from .harness.experiment import Data, Experiment

NEEDS = "real streams are Parquet files, which need pyarrow: pip install pyarrow"


@dataclass(frozen=True)
class Stream:
    """All events of a stream, and what their features are."""

    events: Events
    fields: Mapping[str, int]
    """The categorical features, with how many values each has."""
    numbers: tuple[str, ...]
    """The numerical features."""


class Replay(Source):
    """A source that gives events held in memory, in batches of one size."""

    def __init__(self, events: Events, batch_size: int) -> None:
        self.events, self.batch_size, self.at = events, batch_size, 0

    def __iter__(self) -> Iterator[Batch]:
        while self.at < len(self.events):
            start, self.at = self.at, self.at + self.batch_size
            yield Batch(self.events.take(slice(start, self.at)))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = int(state["at"])


class StreamDeepFM(nn.Module):
    """A DeepFM over categorical features by name, all in one sparse table, and numbers for its deep part."""

    def __init__(
        self, fields: Mapping[str, int], numbers: tuple[str, ...] = (), width: int = 8, hidden: int = 32
    ) -> None:
        super().__init__()
        self.starts: Tensor
        self.fields, self.numbers = tuple(fields), tuple(numbers)
        rows = sum(fields.values())
        starts = np.cumsum([0, *fields.values()])[:-1]
        self.register_buffer("starts", torch.from_numpy(starts), persistent=False)
        self.table = nn.Embedding(rows, width, sparse=True)
        self.linear = nn.Embedding(rows, 1, sparse=True)
        inputs = len(fields) * width + len(numbers)
        self.deep = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        nn.init.normal_(self.table.weight, 0, 0.05)
        nn.init.zeros_(self.linear.weight)

    def forward(self, **features: Tensor) -> Tensor:
        ids = torch.stack([features[name] for name in self.fields], 1) + self.starts
        embedded = self.table(ids)
        numbers = [features[name].unsqueeze(1) for name in self.numbers]
        deep = self.deep(torch.cat([embedded.flatten(1), *numbers], 1)).squeeze(1)
        total: Tensor = pairwise_interactions(embedded) + self.linear(ids).sum((1, 2)) + deep
        return total


# The files -----------------------------------------------------------------------------------------------------


FLIGHTS_DATA = Data(
    "flights from New York in 2013",
    "nycflights13.parquet",
    "the R package nycflights13 (CC0), table flights written as Parquet",
    "4 MB",
)
MOVIELENS_DATA = Data(
    "MovieLens small",
    "ml_latest_small.parquet",
    "https://grouplens.org/datasets/movielens/latest (ml-latest-small), ratings.csv sorted by timestamp as Parquet",
    "0.6 MB",
)
ELECTRICITY_DATA = Data(
    "electricity prices in New South Wales (Elec2)",
    "elec2.parquet",
    "https://www.openml.org/d/151, without date and day as Parquet with columns feat_1 to feat_6 and target",
    "0.4 MB",
)
FOREST_DATA = Data(
    "forest cover",
    "covtype.parquet",
    "https://archive.ics.uci.edu/dataset/31/covertype, with the columns' names as Parquet",
    "6 MB",
)


@dataclass(frozen=True)
class NamedData(Data):
    """A file that its user may keep anywhere, named by an environment variable."""

    variable: str = ""

    def location(self) -> Path:
        named = os.environ.get(self.variable)
        return Path(named) if named else super().location()


MOVIELENS_1M_DATA = NamedData(
    "MovieLens-1M",
    "ml-1m/ratings.dat",
    "https://grouplens.org/datasets/movielens/1m (its terms forbid passing it on; $CADAM_ML_1M may name the file)",
    "25 MB",
    variable="CADAM_ML_1M",
)
RETROSHEET_DATA = Data(
    "plate appearances of major-league baseball, 2000 to 2024",
    "retrosheet-2000-2024.parquet",
    "https://www.retrosheet.org (event files), a row per plate appearance as Parquet with columns time, batter, "
    "pitcher, park, batting_team, fielding_team, inning, home, slot, daynight, temp and on_base",
    "22 MB",
)


def _columns(data: Data) -> dict[str, Any]:
    """The columns of a file: arrays, and text as places in the order of first appearance."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ModuleNotFoundError(NEEDS) from error
    if advice := data.missing():
        raise FileNotFoundError(advice)
    columns: dict[str, Any] = {}
    for name, column in zip((table := pq.read_table(data.location())).column_names, table.columns, strict=True):
        whole = column.combine_chunks()
        if pa.types.is_string(whole.type) or pa.types.is_large_string(whole.type):
            whole = whole.fill_null("").dictionary_encode().indices
        columns[name] = whole.to_numpy(zero_copy_only=False)
    return columns


def _first_seen(values: Array) -> Array:
    """Codes from 0 renumbered in the order of first appearance."""
    first = np.full(int(values.max()) + 1, len(values))
    first[values[::-1]] = np.arange(len(values))[::-1]  # of several writes to one place the last one stays
    return np.argsort(np.argsort(first))[values]


def _whole(values: Array) -> Array:
    return np.ascontiguousarray(values, dtype=np.int64)


def _stream(
    fields: Mapping[str, Array], numbers: Mapping[str, Array], labels: Array, users: Array, time: Array
) -> Stream:
    ids = {name: _whole(values) for name, values in fields.items()}
    scaled = {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in numbers.items()}
    events = Events({**ids, **scaled}, labels=labels, users=_whole(users), time=time)
    return Stream(events, {name: int(values.max()) + 1 for name, values in ids.items()}, tuple(scaled))


def flights() -> Stream:
    """Will the flight arrive more than 15 minutes late? Known before departure only; flights that never arrive are out.

    Users are aircraft. In the order of scheduled departure.
    """
    table = _columns(FLIGHTS_DATA)
    days = np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30])[table["month"] - 1] + table["day"] - 1
    scheduled = table["sched_dep_time"].astype(np.int64)
    minute = days * 1440 + scheduled // 100 * 60 + scheduled % 100
    arrived = ~np.isnan(table["arr_delay"].astype(np.float64))
    rows = np.flatnonzero(arrived)[np.argsort(minute[arrived], kind="stable")]
    t = {name: column[rows] for name, column in table.items()}
    fields = {
        "tailnum": t["tailnum"],
        "flight": t["flight"],
        "carrier": t["carrier"],
        "origin": t["origin"],
        "dest": t["dest"],
        "hour": t["sched_dep_time"] // 100,
        "weekday": (days[rows] + 1) % 7,  # 2013 began on a Tuesday
        "arrival": t["sched_arr_time"] // 100,
    }
    numbers = {"distance": t["distance"] / 1000}
    return _stream(fields, numbers, t["arr_delay"] > 15, t["tailnum"], 60.0 * minute[rows])


def movielens() -> Stream:
    """Will the user give the film four stars or more?"""
    t = _columns(MOVIELENS_DATA)
    seconds = t["timestamp"].astype(np.int64)
    fields = {
        "user": np.unique(t["userId"], return_inverse=True)[1],
        "movie": np.unique(t["movieId"], return_inverse=True)[1],
        "hour": seconds // 3600 % 24,
    }
    return _stream(fields, {}, t["rating"] >= 4, fields["user"], seconds.astype(np.float64))


def movielens_1m() -> Stream:
    """Will the user give the film four stars or more? From lines "user::film::stars::seconds", or with tabs."""
    if advice := MOVIELENS_1M_DATA.missing():
        raise FileNotFoundError(advice)
    path = MOVIELENS_1M_DATA.location()
    try:
        numbers = np.array(path.read_bytes().replace(b"::", b" ").split(), dtype=np.int64)
        table = numbers.reshape(-1, 4)
    except ValueError as error:
        raise ValueError(f"{path}: a line must have four whole numbers, as in 1::1193::5::978300760: {error}") from None
    user, movie, stars, seconds = table[np.argsort(table[:, 3], kind="stable")].T
    if len(table) == 0 or stars.min() < 1 or stars.max() > 5:
        raise ValueError(f"{path}: the third number of a line must be 1 to 5 stars, as in 1::1193::5::978300760")
    fields = {
        "user": np.unique(user, return_inverse=True)[1],
        "movie": np.unique(movie, return_inverse=True)[1],
        "hour": seconds // 3600 % 24,
    }
    return _stream(fields, {}, stars >= 4, fields["user"], seconds.astype(np.float64))


def retrosheet() -> Stream:
    """Will the batter reach base? Users are batters. Known before the first pitch of the plate appearance only.

    The information used here was obtained free of charge from and is copyrighted by Retrosheet. Interested parties may
    contact Retrosheet at "www.retrosheet.org".
    """
    table = _columns(RETROSHEET_DATA)
    order = np.argsort(table["time"], kind="stable")
    t = {name: column[order] for name, column in table.items()}
    named = ("batter", "pitcher", "park", "batting_team", "fielding_team", "daynight")
    fields = {name: _first_seen(t[name]) for name in named}
    fields |= {"inning": np.clip(t["inning"], 0, 12), "slot": t["slot"], "home": t["home"]}
    numbers = {"temp": t["temp"] / 100}
    return _stream(fields, numbers, t["on_base"] == 1, fields["batter"], t["time"].astype(np.float64))


def electricity() -> Stream:
    """Will the price be above its mean of the last day? Users are the half-hours of the day: there are no people."""
    t = _columns(ELECTRICITY_DATA)
    row = np.arange(len(t["target"]))
    numbers = {name: t[name] for name in (f"feat_{n}" for n in range(2, 7))}
    bins = {f"{name}_bin": np.clip(values * 100, 0, 99) for name, values in numbers.items()}
    fields = {"period": row % 48, "weekday": row // 48 % 7, **bins}
    return _stream(fields, numbers, t["target"] == 1, row % 48, 1800.0 * row)


FOREST_RANGES = {
    "Elevation": (1859, 3858),
    "Aspect": (0, 360),
    "Slope": (0, 66),
    "Horizontal_Distance_To_Hydrology": (0, 1397),
    "Vertical_Distance_To_Hydrology": (-173, 601),
    "Horizontal_Distance_To_Roadways": (0, 7117),
    "Hillshade_9am": (0, 254),
    "Hillshade_Noon": (0, 254),
    "Hillshade_3pm": (0, 254),
    "Horizontal_Distance_To_Fire_Points": (0, 7173),
}
"""As the documentation of the data gives them."""


def forest() -> Stream:
    """Is the patch of forest lodgepole pine? Users are kinds of soil: there are no people, and the time is the row."""
    t = _columns(FOREST_DATA)
    soil = np.stack([t[f"Soil_Type{n}"] for n in range(1, 41)], 1).argmax(1)
    area = np.stack([t[f"Wilderness_Area{n}"] for n in range(1, 5)], 1).argmax(1)
    numbers = {name: (t[name] - low) / (high - low) for name, (low, high) in FOREST_RANGES.items()}
    bins = {f"{name}_bin": np.clip(values * 32, 0, 31) for name, values in numbers.items()}
    time = np.arange(len(soil), dtype=np.float64)
    return _stream({"soil": soil, "area": area, **bins}, numbers, t["Cover_Type"] == 2, soil, time)


LOADERS: Mapping[str, Callable[[], Stream]] = {
    "flights": flights,
    "movielens": movielens,
    "electricity": electricity,
    "forest": forest,
    "movielens-1m": movielens_1m,
    "retrosheet": retrosheet,
}


@lru_cache(maxsize=1)
def load(name: str) -> Stream:
    """A stream by name; the last one is kept, for specs that follow each other."""
    return LOADERS[name]()


# Experiments ---------------------------------------------------------------------------------------------------

CLAIM = "In production, CAdam raises GAUC over Adam by 0.26 points on average (table 3, private data and models)."
NOTES = (
    "A stand-in for the paper's table 3, whose data and models are private: another stream and a small model. It says "
    "nothing about the paper's own.",
    "The paper prints averages of 85.34, 85.64 and +0.30 GAUC for its production runs; the means of the columns it "
    "prints are 85.91, 86.17 and +0.26.",
    "Runs meet the whole stream and are measured after its first fifth, on which learning rates were chosen with other "
    "seeds. Seeds change the initial weights; the events are the same.",
    "The verdict goes by GAUC by impressions alone; other rows are there to be looked at, and of twenty without any "
    "difference one will seem to have one.",
    "The confidence sequence is about the mean over blocks of the GAUC within each block, which is another number than "
    "the GAUC of the whole.",
)


def compute(spec: RunSpec) -> Outcome:
    """Run an arm along a real stream."""
    stream = load(spec.data)
    source = Replay(stream.events, spec.settings["batch_size"])
    events = min(spec.settings["events"] or len(stream.events), len(stream.events))
    build = partial(StreamDeepFM, stream.fields, stream.numbers)
    return run_arm.run_arm(spec, run_arm.Task(source, events, stream.fields, build))


RATE_NOTES = (
    *NOTES[:1],
    "Best against best, the rate of each seed is chosen on the other seeds, by what is measured: it says what an arm "
    "can reach, not what one gets who has to choose beforehand. The A/B of the same stream says that.",
    "Runs meet the whole stream and are measured after its first fifth. Seeds change the initial weights; the events "
    "are the same.",
)


def _real(
    name: str, title: str, question: str, data: Data, feature: str, batch_size: int, quick: int, full: float
) -> tuple[Experiment, Experiment]:
    """The A/B on a stream, and its arms over learning rates; `full` is the seconds that the A/B takes on two cores."""
    simulated: dict[str, Mapping[str, Any]] = {
        f"with a change of {feature}": {"change": {"feature": feature, "blocks": [17, 34]}},
        "with a fifth of the labels wrong": {"noise": 0.2},
    }
    arms, paper = ("Adam", "CAdam"), "+0.0026, other data"
    study = Study(f"ab-{name}", name, arms, batch_size, simulated=simulated, reference=paper)
    shared: dict[str, Any] = {
        "seeds": {"quick": 3, "full": 6},
        "claim": CLAIM,
        "compute": compute,
        "data": data,
        "packages": ["pyarrow"],
    }
    comparison = comparison_experiment(
        study,
        quick,
        f"A/B on {title}",
        f"{question} Adam and CAdam predict each event and then learn from it, on the stream as it is, with the values "
        f"of {feature} changing places twice, and with wrong labels.",
        {"quick": 60, "full": full},
        notes=NOTES,
        **shared,
    )
    curves = rates_experiment(
        study,
        quick,
        f"Learning rates on {title}",
        f"{question} Adam and CAdam on the stream as it is, at six learning rates, and more where the best is an end.",
        {"quick": 60, "full": full},
        notes=RATE_NOTES,
        **shared,
    )
    return comparison, curves


FLIGHTS, FLIGHTS_RATES = _real(
    "flights", "a year of flights", "Will a flight arrive late?", FLIGHTS_DATA, "dest", 256, 60_000, 240
)
MOVIELENS, MOVIELENS_RATES = _real(
    "movielens", "ratings of films", "Will a user like a film?", MOVIELENS_DATA, "movie", 64, 30_000, 240
)
ELECTRICITY, ELECTRICITY_RATES = _real(
    "electricity",
    "electricity prices",
    "Will the price be above that of the last day?",
    ELECTRICITY_DATA,
    "period",
    32,
    15_000,
    240,
)
FOREST, FOREST_RATES = _real(
    "forest", "forest cover", "Is a patch of forest lodgepole pine?", FOREST_DATA, "soil", 512, 60_000, 240
)
MOVIELENS_1M, MOVIELENS_1M_RATES = _real(
    "movielens-1m",
    "a million ratings of films",
    "Will a user like a film?",
    MOVIELENS_1M_DATA,
    "movie",
    256,
    60_000,
    500,
)
RETROSHEET, RETROSHEET_RATES = _real(
    "retrosheet",
    "25 years of baseball",
    "Will a batter reach base?",
    RETROSHEET_DATA,
    "pitcher",
    1024,
    100_000,
    1500,
)
