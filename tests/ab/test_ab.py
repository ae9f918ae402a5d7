"""The A/B: paired on the same events, resumable by specs, and a verdict that says no more than its intervals."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cadam.ab import recommendation, runs, study
from cadam.ab.recommendation import recommend
from cadam.ab.results import Outcome, Provenance, Result, Results, RunSpec
from cadam.ab.summary import Summary
from cadam.ab.verdict import ACTIONS, Verdict
from cadam.cli.ab import add_study_arguments, experiment, to_learn
from cadam.cli.main import main
from cadam.online.metrics.stream import measure
from cadam.statistics.comparison import Comparison
from cadam.statistics.confidence_sequence import confidence_sequence, over_blocks
from cadam.statistics.intervals import Interval
from cadam_paper import catalog
from cadam_paper import real_streams as streams
from cadam_paper.demo import ITEMS, SETTINGS, USERS, ClickStream
from cadam_paper.harness import runner
from cadam_paper.harness.runner import Event
from cadam_paper.harness.scoreboard import Scoreboard

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(200, 4, sparse=True)
        self.items = nn.Embedding(100, 4, sparse=True)
        self.bias = nn.Embedding(100, 1, sparse=True)
        for table in (self.users, self.items, self.bias):
            nn.init.normal_(table.weight, 0, 0.1)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(1) + self.bias(item).squeeze(1)

def build():
    return Model()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a stream of clicks, its schema and a model."""
    made = ClickStream(np.random.default_rng(0), {**SETTINGS, "batch_size": 100, "mistakes": 0.0})
    parts = [made.batch() for _ in range(30)]
    ids, clicks = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    table = {
        "user": ids[:, 0],
        "item": ids[:, 1] - USERS,
        "click": clicks.astype(float),
        "at": np.arange(len(ids)) * 1.0,
    }
    pq.write_table(pa.table(table), tmp_path / "clicks.parquet")
    schema = {
        "features": {"user": f"category:{USERS}", "item": f"category:{ITEMS}"},
        "label": "click",
        "user": "user",
        "time": "at",
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def settings(place: Path, **more: Any) -> dict[str, Any]:
    schema = json.loads((place / "schema.json").read_text())
    common = {"events": 3000, "batch_size": 50, "tuning_share": 0.2, "blocks": 24, "tuning": False, "schema": schema}
    return {**common, **more}


def spec(place: Path, arm: str = "Adam", seed: int = 0, lr: float = 0.03, **more: Any) -> RunSpec:
    uri = f"parquet:{place / 'clicks.parquet'}"
    return RunSpec("ab", f"{place / 'model.py'}:build", uri, arm, lr, "", seed, settings(place, **more))


# A run ---------------------------------------------------------------------------------------------------------


def test_a_run_is_the_same_to_the_bit_and_measures_the_part_after_tuning(place: Path) -> None:
    first, second = runs.compute(spec(place)), runs.compute(spec(place))
    assert first.metrics == second.metrics
    assert all(first.curves[name].tobytes() == second.curves[name].tobytes() for name in first.curves)
    assert first.metrics["events"] == 2400
    assert first.metrics["auc"] > 0.55  # it learns
    assert len(first.curves["log_loss"]) == 24
    assert first.curves["log_loss"].mean() == pytest.approx(first.metrics["log_loss"])
    assert first.curves["user_impressions"].sum() <= 2400
    by_impressions = np.average(first.curves["user_auc"], weights=first.curves["user_impressions"])
    assert by_impressions == pytest.approx(first.metrics["gauc_by_impressions"])
    assert runs.compute(spec(place, seed=1)).metrics["auc"] != first.metrics["auc"]


def test_arms_start_alike_and_meet_the_same_events(place: Path) -> None:
    adam, other = (runs.compute(spec(place, arm, lr=1e-12)) for arm in ("Adam", "CAdam"))
    assert adam.metrics["auc"] == pytest.approx(other.metrics["auc"], abs=1e-6)
    assert np.array_equal(adam.curves["user_impressions"], other.curves["user_impressions"])


RANDOM = """
import random
import numpy as np
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(1000, 1)
        self.table.weight.data[:] = torch.from_numpy(np.random.normal(size=(1000, 1))) * random.random()

    def forward(self, user, item):
        return torch.nn.functional.dropout(self.table(item), 0.5, self.training).squeeze(1)

def build():
    return Model()
"""


def test_a_model_that_draws_from_any_generator_starts_and_learns_alike(place: Path) -> None:
    (place / "model.py").write_text(RANDOM)
    before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    first, second = runs.compute(spec(place)), runs.compute(spec(place))
    assert first.metrics == second.metrics
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before[1]
    assert runs.compute(spec(place, seed=1)).metrics != first.metrics


def test_labels_that_are_no_clicks_are_refused(place: Path) -> None:
    table = pq.read_table(place / "clicks.parquet").to_pydict()
    pq.write_table(pa.table({**table, "click": [0.5 * c for c in table["click"]]}), place / "clicks.parquet")
    with pytest.raises(ValueError, match=r"labels must be 0 or 1 for GAUC and AUC; there is 0\.5"):
        runs.compute(spec(place))


def test_arms_that_did_not_meet_the_same_events_are_no_comparison() -> None:
    def short(result: Result) -> Result:
        metrics = {**result.outcome.metrics, **({"events": 4799.0} if result.spec.optimizer == "CAdam" else {})}
        return replace(result, outcome=replace(result.outcome, metrics=metrics))

    assert kind(study.summary(STUDY, Results([short(r) for r in everything(0.02)]))) == "diverged"


def test_tuning_sees_nothing_of_what_is_measured(place: Path) -> None:
    tuned = runs.compute(spec(place, tuning=True))
    table = pq.read_table(place / "clicks.parquet")
    pq.write_table(table.slice(0, 600), place / "clicks.parquet")
    assert runs.compute(spec(place, tuning=True)).metrics == tuned.metrics


@pytest.mark.parametrize(
    "planted",
    [{"noise": 0.4}, {"change": {"feature": "item", "blocks": [8]}}, {"delay": 200.0}],
    ids=lambda p: next(iter(p)),
)
def test_what_is_planted_is_met(place: Path, planted: dict[str, Any]) -> None:
    plain, changed = runs.compute(spec(place)), runs.compute(spec(place, **planted))
    assert changed.metrics["log_loss"] > plain.metrics["log_loss"]
    if "change" in planted:  # not before the moment
        assert np.array_equal(plain.curves["log_loss"][:8], changed.curves["log_loss"][:8])
        assert (changed.curves["log_loss"][8:11] > plain.curves["log_loss"][8:11]).all()
    if "delay" in planted:
        assert 2200 < changed.metrics["events"] < 2400  # all but those whose labels are still under way at the end


@pytest.mark.parametrize("planted", [{"noise": 0.4}, {"delay": 200.0}], ids=lambda p: next(iter(p)))
def test_what_is_planted_is_met_by_labels_in_records_of_their_own(place: Path, planted: dict[str, Any]) -> None:
    rows, lines = pq.read_table(place / "clicks.parquet").to_pylist(), []
    for number, row in enumerate(rows):
        lines.append({"event": number, **{name: row[name] for name in ("user", "item", "at")}})
        if number >= 20:
            lines.append({"event": number - 20, "click": rows[number - 20]["click"]})
    (place / "clicks.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    schema = {**settings(place)["schema"], "id": "event"}

    def along(**more: Any) -> Outcome:
        return runs.compute(replace(spec(place, schema=schema, **more), data=f"jsonl:{place / 'clicks.jsonl'}"))

    plain, changed = along(), along(**planted)
    assert changed.metrics["log_loss"] > plain.metrics["log_loss"]
    assert (changed.metrics["events"] < plain.metrics["events"]) == ("delay" in planted)


def test_a_run_that_diverges_has_no_numbers(place: Path) -> None:
    assert math.isnan(runs.compute(spec(place, "SGDM", lr=1e38)).metrics["gauc_by_impressions"])


def test_too_few_events_are_refused(place: Path) -> None:
    with pytest.raises(ValueError, match="3000 events are too few for 2000 blocks"):
        runs.compute(spec(place, blocks=2000))


# The study -----------------------------------------------------------------------------------------------------

PLANTED = {"with a change": {"change": {"feature": "item", "blocks": [16]}}}
STUDY = study.Study("ab-made", "made", ("Adam", "CAdam"), 50, grid=(0.01, 0.1), blocks=48, planted=PLANTED)


def made(spec: RunSpec, gain: float, noise: float = 0.01, users: int = 60) -> Result:
    """An outcome as if CAdam were better by `gain`, in every block, user and seed alike but for noise."""
    random = np.random.default_rng([spec.seed, len(spec.condition), spec.optimizer == "CAdam"])
    better = gain * (spec.optimizer == "CAdam")
    gauc = 0.7 + better + noise * random.normal(size=48)
    loss = 0.5 - better + noise * random.normal(size=48)
    if "change" in spec.condition:
        loss[16:] += 0.3 * (0.3 if spec.optimizer == "CAdam" else 0.8) ** np.arange(32)
    curves = {"gauc_by_impressions": gauc, "auc": gauc, "log_loss": loss}
    within = {"user_auc": 0.7 + better + noise * random.normal(size=users), "user_impressions": np.arange(1, users + 1)}
    metrics = {
        name: 0.7 + better + noise / 7 * random.normal() for name in ("gauc_by_impressions", "gauc_by_user", "auc")
    }
    metrics |= {"log_loss": 0.5 - better + abs(spec.lr - 0.1) + noise / 7 * random.normal(), "events": 4800.0}
    metrics |= {"users_of_both_classes": float(users)}
    return Result(spec, Outcome(metrics, {**curves, **within}), Provenance(0.0, 0, "", {}))


def everything(gain: float, seeds: int = 4) -> Results:
    tuning = study.run_specs(STUDY, seeds, Results())
    found = Results([made(c, gain) for c in tuning])
    return Results([made(c, gain) for c in study.run_specs(STUDY, seeds, found)])


def kind(summary: Summary) -> str:
    return summary.verdicts["as it is"].kind


def test_cells_are_tuned_first_and_tested_on_other_seeds() -> None:
    tuning = study.run_specs(STUDY, 4, Results())
    assert all(c.settings["tuning"] and c.seed >= 10_000 for c in tuning)
    results = everything(0.0)
    tests = [r.spec for r in results.tests()]
    rates = [(c.seed, c.condition) for c in tests if c.lr != 0.1]  # the better of the two
    assert rates == [(0, "as it is")] * 2  # the other one is only looked back at
    assert {(c.optimizer, c.condition) for c in tests} == {
        (arm, condition) for arm in STUDY.arms for condition in ("as it is", "with a change")
    }
    assert {c.optimizer for c in (r.spec for r in results.repeats())} == {"Adam"}
    assert not any(c.settings["tuning"] for c in tests)


def test_a_planted_difference_is_found_and_none_is_not() -> None:
    better = study.summary(STUDY, everything(0.02))
    assert kind(better) == "better"
    assert re.search(r"As it is: CAdam better, known after block \d+ of 48 \(\+0\.01[89]", better.verdict)
    assert kind(study.summary(STUDY, everything(-0.02))) == "worse"
    assert kind(study.summary(STUDY, everything(0.0, seeds=6))) == "inconclusive"
    whats = [line.label for line in better.rows]
    for part in ("over users", "over blocks of time", "confidence sequence over blocks"):
        assert f"as it is: the same, {part}" in whats
    assert all(
        line.noise_floor for line in better.rows if line.label.startswith("as it is") and "hindsight" not in line.label
    )


def test_hindsight_shows_whether_the_choice_of_learning_rates_held() -> None:
    def turned(result: Result) -> Result:
        """On the measured part Adam's other learning rate has the better GAUC, which decides, at a worse log loss."""
        adam = result.spec.optimizer == "Adam" and result.spec.seed < 10_000 and result.spec.lr == 0.01
        metrics = {**result.outcome.metrics, **({"log_loss": 9.0, "gauc_by_impressions": 0.9} if adam else {})}
        return replace(result, outcome=replace(result.outcome, metrics=metrics))

    summary = study.summary(STUDY, Results([turned(r) for r in everything(0.02)]))
    assert kind(summary) == "better"  # by the rule that was set beforehand
    line = next(line for line in summary.rows if "hindsight" in line.label)
    assert line.label == "as it is: GAUC by impressions, best learning rates in hindsight"
    assert "Adam 0.9000 (at 0.01)" in line.measured
    assert line.values["difference"] < -0.15


def turned_by_rate(result: Result, at: float, gauc: float) -> Result:
    """Adam has another GAUC at a learning rate where it is measured; its log loss, by which rates are chosen, stays."""
    adam = result.spec.optimizer == "Adam" and result.spec.seed < 10_000 and result.spec.lr == at
    metrics = {**result.outcome.metrics, **({"gauc_by_impressions": gauc} if adam else {})}
    return replace(result, outcome=replace(result.outcome, metrics=metrics))


@pytest.mark.parametrize(
    ("gauc", "said", "unsaid"),
    [
        (0.9, ["in hindsight (CAdam 0.01, Adam 0.01)", "without 0.1 in the grid (CAdam 0.01, Adam 0.01)"], []),
        (0.5, [], ["decides which arm is ahead"]),
        (0.71, [], ["decides which arm is ahead"]),
    ],
)
def test_a_choice_of_learning_rates_that_decides_the_sign_is_warned_of(
    gauc: float, said: list[str], unsaid: list[str]
) -> None:
    """CAdam is ahead by 0.02 at the rates that were chosen; with Adam at 0.01, by 0.72 minus this."""
    told = " ".join(study.summary(STUDY, Results([turned_by_rate(r, 0.01, gauc) for r in everything(0.02)])).warnings)
    assert all(part in told for part in said)
    assert not any(part in told for part in unsaid)


def test_what_turns_the_sign_without_mattering_is_not_warned_of() -> None:
    results = Results([turned_by_rate(r, 0.01, 0.75) for r in everything(0.02)])
    assert study.rate_warnings(STUDY, results, "CAdam", 0.02)
    assert not study.rate_warnings(replace(STUDY, matters=0.1), results, "CAdam", 0.02)
    assert "+0.0200 at those chosen" in study.rate_warnings(STUDY, results, "CAdam", 0.02)[0]


def test_how_far_random_scores_put_gauc_is_what_they_do() -> None:
    random = np.random.default_rng(0)
    users = random.integers(0, 12, 400)
    labels = random.random(400) < 0.1
    drawn = [measure(random.random(400), labels, users)["gauc_by_impressions"] for _ in range(2000)]
    assert runs.by_chance(labels, users) == pytest.approx(1.96 * np.std(drawn), rel=0.05)
    assert np.mean(np.abs(np.array(drawn) - 0.5) < runs.by_chance(labels, users)) == pytest.approx(0.95, abs=0.02)
    assert math.isnan(runs.by_chance(np.zeros(9), np.arange(9)))


def test_rare_labels_put_gauc_further_from_a_half_by_chance(place: Path) -> None:
    reach = runs.compute(spec(place)).curves["gauc_by_chance"]
    table = pq.read_table(place / "clicks.parquet").to_pydict()
    rare = [c * (i % 4 == 0) for i, c in enumerate(table["click"])]
    pq.write_table(pa.table({**table, "click": rare}), place / "clicks.parquet")
    assert len(reach) == 24
    assert np.nanmean(runs.compute(spec(place)).curves["gauc_by_chance"]) > 1.2 * np.nanmean(reach)


def test_blocks_whose_gauc_cannot_be_told_from_guessing_are_warned_of() -> None:
    def guessed(result: Result) -> Result:
        curves = {**result.outcome.curves, "gauc_by_chance": np.where(np.arange(48) == 6, 0.4, 0.1)}
        return replace(result, outcome=replace(result.outcome, curves=curves))

    warnings = study.summary(STUDY, Results([guessed(r) for r in everything(0.02)])).warnings
    assert any("in 1 of 48 blocks the GAUC of Adam cannot be told from guessing" in text for text in warnings)
    assert any("(block 7)" in text for text in warnings)
    assert not any("guessing" in text for text in study.summary(STUDY, everything(0.02)).warnings), "not known"


def test_recovery_is_counted_from_the_gap_to_the_stream_without_the_change() -> None:
    results = everything(0.0, seeds=6)
    times = {arm: study.recovery_times(STUDY, results, arm, "with a change") for arm in STUDY.arms}
    assert 0 < np.mean(list(times["CAdam"].values())) < np.mean(list(times["Adam"].values())) < 32 * 100
    line = next(r for r in study.summary(STUDY, results).rows if "until recovered" in r.label)
    assert line.verdict_kind == "better"


def test_a_change_that_costs_nothing_leaves_nothing_to_recover_from() -> None:
    def unmoved(result: Result) -> Result:
        curves = {**result.outcome.curves, "log_loss": np.full(48, 0.5)}
        return replace(result, outcome=replace(result.outcome, curves=curves))

    summary = study.summary(STUDY, Results([unmoved(r) for r in everything(0.0)]))
    line = next(r for r in summary.rows if "until recovered" in r.label)
    assert (line.verdict, line.measured) == ("nothing to recover from", "the change adds 0.0% to the log loss")


def comparison(difference: Interval, noise: Interval | None = None) -> Comparison:
    return Comparison("CAdam", "Adam", "higher", 0.71, 0.7, difference, 0, 0, 5, True, noise)


def evidence(low: float, users: Interval | None) -> study.Evidence:
    by_block = np.full(30, low + 0.01)
    ends = np.where(np.arange(30) < 19, -np.inf, low)
    return study.Evidence(by_block, ends, np.full(30, low + 0.02), Interval(low + 0.01, low, low + 0.02, 30), users)


ABOVE, BELOW, AROUND = Interval(0.02, 0.01, 0.03, 5), Interval(-0.02, -0.03, -0.01, 5), Interval(0.0, -0.01, 0.01, 5)


@pytest.mark.parametrize(
    ("seeds", "users", "low", "kind", "conflicting"),
    [
        (ABOVE, ABOVE, 0.005, "better", False),
        (BELOW, BELOW, -0.03, "worse", False),
        (AROUND, AROUND, -0.01, "inconclusive", False),
        (ABOVE, AROUND, 0.005, "inconclusive", False),
        (ABOVE, ABOVE, -0.01, "inconclusive", False),
        (AROUND, ABOVE, -0.01, "inconclusive", False),
        (ABOVE, BELOW, 0.005, "inconclusive", True),
        (ABOVE, ABOVE, -0.03, "inconclusive", True),
        (BELOW, AROUND, 0.005, "inconclusive", True),
        (ABOVE, None, 0.005, "better", False),
        (Interval(0.02, math.nan, math.nan, 1), ABOVE, 0.005, "inconclusive", False),
    ],
)
def test_the_verdict_says_better_only_where_all_agree(
    seeds: Interval, users: Interval | None, low: float, kind: str, conflicting: bool
) -> None:
    found = study.verdict(comparison(seeds), evidence(low, users))
    assert (found.kind, found.conflicting) == (kind, conflicting)


def test_intervals_that_disagree_in_sign_are_said_to_conflict_and_where() -> None:
    found = study.verdict(comparison(ABOVE), evidence(-0.03, ABOVE))
    assert str(found) == "conflicting: CAdam ahead over seeds and users, CAdam behind over time"
    assert "which users and which time" in found.next_step


@pytest.mark.parametrize(
    ("seeds", "users", "matters", "kind"),
    [
        (AROUND, AROUND, 0.03, "equivalent"),
        (ABOVE, ABOVE, 0.03, "equivalent"),  # real, and of no use
        (ABOVE, ABOVE, 0.0299, "better"),
        (AROUND, AROUND, 0.0099, "inconclusive"),
        (AROUND, None, 0.03, "equivalent"),
    ],
)
def test_a_difference_within_what_matters_is_equivalent_whether_or_not_it_is_0(
    seeds: Interval, users: Interval | None, matters: float, kind: str
) -> None:
    found = study.verdict(comparison(seeds), evidence(0.005, users), matters)
    assert found.kind == kind
    wide = replace(evidence(0.005, users), low=np.full(30, -math.inf))
    assert study.verdict(comparison(seeds), wide, matters).kind == "inconclusive", "nothing is known over time"


def test_an_undecided_comparison_says_what_would_decide_it() -> None:
    """A mean of 0.01 known to 0.02 takes four times the blocks; one of 0.005 known to 0.02 sixteen times the seeds."""
    time = study.Evidence(np.full(30, 0.01), np.full(30, -0.01), np.full(30, 0.03), ABOVE, ABOVE)
    found = study.verdict(comparison(ABOVE), time, events=10_000)
    assert (found.action, found.more_events) == ("undecided", 30_000)
    assert found.next_step == "about 30,000 more events would decide"
    few = comparison(Interval(0.005, -0.015, 0.025, 5))
    assert study.verdict(few, time, events=10_000).next_step == "about 80 seeds would decide"
    hopeless = comparison(Interval(0.0001, -0.015, 0.015, 5))
    assert "more than 100 times as many seeds" in study.verdict(hopeless, time, events=10_000).next_step


@pytest.mark.parametrize(
    ("gain", "action", "begins"),
    [
        (0.02, "switch", "Switch to CAdam: GAUC with CAdam is "),
        (-0.02, "stay", "Stay with Adam: GAUC with CAdam is "),
        (0.0, "undecided", "Undecided: GAUC with CAdam is 0."),
    ],
)
def test_the_recommendation_says_what_to_do_and_by_how_much(gain: float, action: str, begins: str) -> None:
    (found,) = study.summary(STUDY, everything(gain, seeds=6)).recommendations
    assert found.verdict.action == action
    assert found.headline.startswith(begins)
    assert found.values["difference"] == pytest.approx(gain, abs=0.004)
    assert any("CAdam 0.1, Adam 0.1" in reason for reason in found.reasons if "Learning rates" in reason)


def test_the_recommendation_is_in_the_users_unit() -> None:
    named = replace(STUDY, more={"schema": {"label": "click"}})
    (found,) = study.summary(named, everything(0.02)).recommendations
    assert any("one with click and one without, CAdam ranks 18 more" in reason for reason in found.reasons)


def test_without_a_user_pairs_are_of_any_events() -> None:
    said = {}
    for user in ({}, {"user": "who"}):
        named = replace(STUDY, more={"schema": {"label": "click", **user}})
        (found,) = study.summary(named, everything(0.02)).recommendations
        said[bool(user)] = " ".join(found.reasons)
    assert "Of 1,000 pairs of events, one with click" in said[False]
    assert "Of 1,000 pairs of events of one user, one with click" in said[True]


@pytest.mark.parametrize(
    ("gaucs", "chance", "useless"),
    [((0.5, 0.48), 0.0, True), ((0.52, 0.5), 0.0, False), ((0.52, 0.5), 0.03, True), ((0.71, 0.7), 0.03, False)],
)
def test_where_neither_arm_ranks_better_than_chance_nothing_is_recommended(
    gaucs: tuple[float, float], chance: float, useless: bool
) -> None:
    gauc = replace(comparison(ABOVE), mean=gaucs[0], baseline_mean=gaucs[1])
    found = recommend(
        Verdict("better", "CAdam", "Adam"),
        gauc,
        comparison(BELOW),
        {"seeds": ABOVE},
        rates={"CAdam": 0.1},
        hindsight=({"CAdam": 0.1}, 0.02),
        matters=0.001,
        events=1000,
        chance=chance,
    )
    assert found.headline.startswith("Undecided: neither arm ranks better than chance") == useless
    assert found.as_json()["action"] == ("undecided" if useless else "switch")
    assert found.as_json()["verdict_kind"] == "better"


@pytest.mark.parametrize(
    ("lr", "there", "action"),
    [(0.01, -0.004, "undecided"), (0.01, -0.0005, "switch"), (0.01, 0.004, "switch"), (0.1, -0.004, "switch")],
    ids=["turns", "hardly", "holds", "the rates are those chosen"],
)
def test_where_the_best_rates_in_hindsight_turn_the_sign_nothing_is_recommended(
    lr: float, there: float, action: str
) -> None:
    gauc = replace(comparison(ABOVE), mean=0.71, baseline_mean=0.7)
    found = recommend(
        Verdict("better", "CAdam", "Adam"),
        gauc,
        comparison(BELOW),
        {"seeds": ABOVE},
        rates={"CAdam": 0.1, "Adam": 0.03},
        hindsight=({"CAdam": lr, "Adam": 0.3 * lr}, there),
        best={"CAdam": 0.01, "Adam": 0.01},
        matters=0.001,
        events=1000,
    )
    assert found.as_json()["action"] == action
    assert "Learning rates to use: CAdam 0.01, Adam 0.01." in found.reasons
    assert any(
        "ran at those that had the least on the first part: CAdam 0.1, Adam 0.03" in one for one in found.reasons
    )
    if action == "undecided":
        assert found.headline.startswith("Undecided: the learning rates decide which arm is ahead. GAUC with CAdam is ")
        assert "0.40 points lower at the best over the rest (CAdam 0.01, Adam 0.003)" in found.headline
        assert found.headline.endswith("Compare again at the latter: --lr 0.003,0.01.")


def test_a_run_says_how_far_chance_reaches_and_the_summary_uses_it(place: Path) -> None:
    reach = runs.compute(spec(place)).metrics[study.BY_CHANCE]
    assert 0.005 < reach < 0.1
    results = everything(0.02)
    for result in results:
        result.outcome.metrics[study.BY_CHANCE] = 0.3  # type: ignore[index]
    (found,) = study.summary(STUDY, results).recommendations
    assert found.headline.startswith("Undecided: neither arm")


def test_warnings_name_the_option_that_helps() -> None:
    warnings = study.summary(replace(STUDY, blocks=30), everything(0.02)).warnings
    ends = [warning for warning in warnings if "of its grid" in warning]
    assert ends
    assert all(warning.endswith("extend the grid (--lr)") for warning in ends)
    assert all("(--blocks 15)" in warning for warning in warnings if "longer blocks" in warning)


def test_arms_within_what_matters_need_no_switch() -> None:
    (found,) = study.summary(replace(STUDY, matters=0.5), everything(0.02)).recommendations
    assert found.verdict.action == "no practical difference"
    assert found.headline.startswith("No practical difference: GAUC with CAdam is within 50 points")


def test_a_difference_within_the_a_a_band_is_said_to_be() -> None:
    noisy = comparison(ABOVE, noise=Interval(0.0, -0.05, 0.05, 10))
    assert str(study.verdict(noisy, evidence(0.005, ABOVE))).endswith(", below the noise floor")


def test_without_users_the_other_intervals_decide() -> None:
    def alone(result: Result) -> Result:
        whole = {"user_auc": np.array([result.outcome.metrics["auc"]]), "user_impressions": np.array([4800])}
        return replace(result, outcome=replace(result.outcome, curves={**result.outcome.curves, **whole}))

    summary = study.summary(STUDY, Results([alone(r) for r in everything(0.02)]))
    assert kind(summary) == "better"
    assert not any("over users" in line.label for line in summary.rows)


def test_where_no_block_has_the_metric_nothing_is_claimed() -> None:
    def empty(result: Result) -> Result:
        curves = {**result.outcome.curves, "gauc_by_impressions": np.full(48, math.nan)}
        return replace(result, outcome=replace(result.outcome, curves=curves))

    summary = study.summary(STUDY, Results([empty(r) for r in everything(0.02)]))
    assert kind(summary) == "inconclusive"
    assert study.TOO_FEW in summary.verdict
    assert f"Not known over time: {study.TOO_FEW}." in summary.recommendations[0].reasons[0]


@pytest.mark.parametrize(
    ("by_block", "words"),
    [
        (np.zeros(48), study.SAME),
        (np.full(48, 0.01), study.ALIKE),
        (np.arange(10.0), study.TOO_FEW),
        (np.arange(48.0), study.TOO_FEW),
    ],
)
def test_why_nothing_is_said_of_another_time(by_block: np.ndarray, words: str) -> None:
    found = study.Evidence(by_block, *confidence_sequence(by_block), over_blocks(by_block), ABOVE)
    assert found.silent == words
    assert str(study.verdict(comparison(ABOVE), found)).endswith(f"ahead over seeds and users; {words}")
    assert study.verdict(comparison(AROUND), replace(found, users=AROUND)).kind == "inconclusive"


def test_an_arm_that_is_the_baseline_shows_no_difference() -> None:
    def same(result: Result) -> Result:
        return replace(result, outcome=replace(result.outcome, curves=everything(0.0)[0].outcome.curves))

    summary = study.summary(STUDY, Results([same(r) for r in everything(0.0, seeds=6)]))
    assert kind(summary) == "inconclusive", "seeds differ"
    line = next(line for line in summary.rows if line.label == "as it is: the same, confidence sequence over blocks")
    assert line.verdict == study.SAME


@pytest.mark.parametrize("more", [[], ["--seeds", "1"], ["--blocks", "5"]])
def test_arms_that_compute_the_same_make_no_practical_difference(
    more: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(place, "--arms", "cadam,cadam:track_alignment=False", "--lr", "0.03", "--json", *more)) == 0
    (found,) = json.loads(capsys.readouterr().out)["recommendations"]
    assert found["action"] == "no practical difference"
    assert found["difference"] == 0
    assert found["reasons"][0].endswith("both compute the same here, and an option that only one has does nothing.")


def test_arms_that_rank_alike_in_every_block_are_not_called_the_same() -> None:
    """As with one column of two values: every block's AUC may be the same, and the log loss is not."""

    def ranked(result: Result) -> Result:
        if result.spec.settings["tuning"]:
            return result
        metrics = {**result.outcome.metrics, "gauc_by_impressions": 0.6, "gauc_by_user": 0.6, "auc": 0.6}
        metrics["log_loss"] = 0.5 if result.spec.optimizer == "CAdam" else 0.6
        curves = {name: np.full(48, 0.6) for name in result.outcome.curves if name != "user_impressions"}
        curves |= {"user_auc": np.array([0.6]), "user_impressions": np.array([4800])}
        return replace(result, outcome=replace(result.outcome, metrics=metrics, curves=curves))

    summary = study.summary(STUDY, Results([ranked(r) for r in everything(0.0)]))
    assert kind(summary) == "inconclusive"
    assert "compute the same" not in " ".join(summary.recommendations[0].reasons)


@pytest.mark.parametrize(("gain", "kinds"), [(0.02, "better"), (0.0, "inconclusive")])
def test_seeds_that_change_nothing_are_no_evidence(gain: float, kinds: str) -> None:
    """As with a model whose weights all start at 0: users and time decide."""

    def same(result: Result) -> Result:
        return replace(result, outcome=made(replace(result.spec, seed=0), gain).outcome)

    summary = study.summary(STUDY, Results([same(result) for result in everything(gain)]))
    assert kind(summary) == kinds
    (found,) = summary.recommendations
    assert set(found.values["intervals"]) == {"users", "time"}
    assert any("Not known over seeds: every seed gives the same run" in reason for reason in found.reasons)
    said = " ".join([found.headline, *found.reasons])
    assert "log loss" not in said, "it has no other interval than that over seeds"
    assert "Noise floor" not in said
    loss = next(line for line in summary.rows if line.label == "as it is: log loss (lower is better)")
    assert (loss.verdict_kind, loss.noise_floor) == ("inconclusive", "")
    assert "every seed gives the same run" in loss.verdict
    assert not any("there is one seed; run more seeds" in line.verdict for line in summary.rows)


def test_what_no_interval_says_is_not_known_rather_than_not_decided() -> None:
    nowhere = Interval(0.01, -math.inf, math.inf, 5)
    undecided = partial(Verdict, "inconclusive", "CAdam", "Adam")
    for intervals, words in (
        ({"seeds": ABOVE, "time": nowhere}, ", but that is not known over time"),
        ({"seeds": AROUND, "time": nowhere}, ", but that is not decided over seeds and not known over time"),
        ({"seeds": AROUND, "users": AROUND, "time": ABOVE}, ", but that is not decided over seeds and users"),
    ):
        assert recommendation._but(undecided(), intervals, 0.0) == words


def test_an_interval_within_what_matters_is_not_what_is_open() -> None:
    """AROUND and ABOVE reach 0.03 from 0."""
    wide = Interval(0.0, -0.2, 0.2, 30)
    intervals = {"seeds": AROUND, "users": AROUND, "time": wide}
    verdict = Verdict("inconclusive", "CAdam", "Adam")
    assert recommendation._but(verdict, intervals, 0.03) == ", but that is not decided over time"
    said = recommendation._holds(verdict, intervals, 0.03)
    assert said.startswith("No practical difference over seeds (")
    assert "Not decided over time (-20.00 to +20.00)" in said
    found = study.Evidence(np.arange(30.0), np.full(30, -0.2), np.full(30, 0.2), AROUND, AROUND)
    assert str(study.verdict(comparison(AROUND), found, 0.03)).endswith(
        ": within 0.03 over seeds and users, open over time"
    )
    only = {"seeds": ABOVE, "time": AROUND}  # ahead, but by how much is open
    assert recommendation._but(verdict, only, 0.03) == ", but that is not decided over time"


def test_a_diverged_run_is_no_comparison() -> None:
    results = everything(0.02)
    lost = next(i for i, r in enumerate(results) if r.spec.seed == 0 and r.spec.optimizer == "CAdam")
    numbers = results[lost].outcome
    nothing = {name: np.full(48, math.nan) for name in runs.BY_BLOCK}
    outcome = Outcome(dict.fromkeys(numbers.metrics, math.nan), nothing)
    broken = Results([replace(r, outcome=outcome) if i == lost else r for i, r in enumerate(results)])
    assert kind(study.summary(STUDY, broken)) == "diverged"
    assert len(study.figures(STUDY, broken)) == 2


def test_figures_are_drawn_and_small() -> None:
    from cadam_paper.harness import report

    drawn = study.figures(STUDY, everything(0.01))
    assert len(drawn) == 2
    assert all(len(report.svg(figure, "x", "y").encode()) < 60_000 for figure in drawn.values())


# The command ---------------------------------------------------------------------------------------------------


def command(place: Path, *more: str) -> list[str]:
    return [
        "ab",
        *("--model", f"{place / 'model.py'}:build", "--data", f"parquet:{place / 'clicks.parquet'}"),
        *("--schema", str(place / "schema.json"), "--cache", str(place / "specs")),
        *("--output", str(place / "report.html"), "--batch-size", "50", "--blocks", "24", "--seeds", "2"),
        *more,
    ]


def test_the_time_left_goes_by_how_much_of_the_stream_a_run_meets() -> None:
    assert study.length(STUDY.spec("Adam", 0.1, 0, study.AS_IT_IS)) == 1
    assert study.length(STUDY.spec("Adam", 0.1, 0, study.AS_IT_IS, tuning=True)) == STUDY.tuning_share


def test_the_command_compares_resumes_and_reports(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(place, "--arms", "sgdm,adam", "--lr", "0.03", "--change", "item", "--events", "1500")
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    answer = printed.split("\n\n")[-2].splitlines()[0]
    assert re.match("Switch|Stay|Undecided|No practical difference", answer), "the answer begins what came out"
    output = " ".join(printed.split())
    assert "SGDM GAUC" in output
    assert re.search(r"(Switch to Adam|Stay with SGDM|Undecided|No practical difference): GAUC with Adam is", output)
    page = (place / "report.html").read_text()
    assert "with a change of item" in page
    assert "cadam ab --data" in page
    assert "cadam reproduce" not in page
    stored = {path: path.stat().st_mtime_ns for path in (place / "specs").rglob("*.json") if path.name != "plan.json"}
    assert len(stored) == 2 * 2 + 2 * 2 * 2 + 2  # tuning; arms, seeds and conditions; A/A; one rate: no looking back
    assert main(arguments) == 0
    again = {path: path.stat().st_mtime_ns for path in (place / "specs").rglob("*.json") if path.name != "plan.json"}
    assert again == stored
    (place / "model.py").write_text(MODEL.replace("4, sparse", "5, sparse"))
    assert main(arguments) == 2, "the report is that of another model"
    for made in ("report.html", "report.json"):
        (place / made).unlink()
    assert main(arguments) == 0
    assert len([p for p in (place / "specs").rglob("*.json") if p.name != "plan.json"]) == 2 * len(stored)


def test_each_comparison_has_a_folder_of_its_own_and_replaces_nothing_else(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    arguments = command(place, "--lr", "0.03", "--events", "1500")
    given = arguments.index("--output")
    del arguments[given : given + 2]
    for more in ([], [], ["--seeds", "3"]):  # the second is the first again
        assert main([*arguments, *more]) == 0
    folders = sorted((place / "ab").iterdir())
    assert [folder.name[:7] for folder in folders] == ["clicks-", "clicks-"]
    made = {"report.html", "report.json", "report.schema.json"}
    assert all({path.name for path in folder.iterdir()} == made for folder in folders)
    capsys.readouterr()
    (place / "mine.html").write_text("mine")
    assert main([*arguments, "--output", "mine.html"]) == 2
    assert "mine.html exists and is not a report of this comparison" in capsys.readouterr().err
    assert (place / "mine.html").read_text() == "mine"


@pytest.mark.parametrize("name", ["mine.html", "mine.json", "mine.schema.json"])
def test_none_of_the_files_beside_the_report_replaces_one_of_the_user(
    place: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (place / name).write_text('{"mine": 1}')
    assert main(command(place, "--output", str(place / "mine.html"))) == 2
    assert f"{place / name} exists and is not a report of this comparison" in capsys.readouterr().err
    assert (place / name).read_text() == '{"mine": 1}'
    assert not (place / "specs").exists(), "refused before any work"


def test_a_report_never_replaces_its_own_data(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pq.read_table(place / "clicks.parquet").to_pylist()
    content = "".join(json.dumps(row) + "\n" for row in rows)
    (place / "clicks.json").write_text(content)
    arguments = ["--data", f"jsonl:{place / 'clicks.json'}", "--output", str(place / "clicks.html")]
    assert main(command(place, *arguments)) == 2
    assert "clicks.json is the data, and would be replaced" in capsys.readouterr().err
    assert (place / "clicks.json").read_text() == content


@pytest.mark.parametrize("name", ["z.json", "z", "z.schema.json", ".html"])
def test_a_report_that_is_no_page_is_refused(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(command(place, "--output", str(place / name))) == 2
    assert "its name must end in .html" in capsys.readouterr().err
    assert not (place / name).exists()


def test_a_schema_beside_the_report_that_was_given_is_left_as_it_is(place: Path) -> None:
    given = {**json.loads((place / "schema.json").read_text()), "ignored": {"x": "why"}}
    (place / "report.schema.json").write_text(json.dumps(given))
    arguments = command(place, "--schema", str(place / "report.schema.json"), "--lr", "0.03", "--events", "1500")
    assert main(arguments) == 0
    assert json.loads((place / "report.schema.json").read_text()) == given


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_model_prints_is_not_among_the_json(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(runner, "jobs_for", lambda work: jobs)
    (place / "model.py").write_text(MODEL.replace("super().__init__()", "super().__init__(); print('building')"))
    assert main([*command(place, "--lr", "0.03", "--events", "1500"), "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["complete"]
    assert "building" in printed.err


def test_json_is_all_that_is_printed_and_has_the_recommendation_as_values(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(place, "--lr", "0.03", "--events", "1500"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((place / "report.json").read_text())
    (found,) = printed["recommendations"]
    assert ACTIONS[found["verdict_kind"]] == found["action"]
    assert (found["treatment"], found["baseline"]) == ("CAdam", "Adam")
    assert found["learning_rates"] == {"CAdam": 0.03, "Adam": 0.03}
    line = next(line for line in printed["rows"] if line["verdict_kind"])
    assert found["difference"] == line["values"]["difference"]
    assert set(found["intervals"]) == {"seeds", "users", "time"}


def test_a_learning_rate_that_is_given_twice_counts_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(place, "--lr", "0.03,0.030,0.03", "--events", "1500")) == 0
    assert "run at a learning rate of 0.03 on" in capsys.readouterr().out


def test_the_answer_ends_with_the_command_that_learns_by_it(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    rows = pq.read_table("clicks.parquet").to_pylist()
    Path("clicks.csv").write_text(
        "\n".join(["user,item,click", *(f"{r['user']},{r['item']},{r['click']:g}" for r in rows)])
    )
    arguments = ["ab", "clicks.csv", "--label", "click", "--batch-size", "50", "--blocks", "24", "--seeds", "1"]
    assert main([*arguments, "--lr", "0.03", "--output", "report.html", "--cache", "specs"]) == 0
    same = "cadam run clicks.csv --label click --batch-size 50"
    commands = {"CAdam": f"{same} --lr 0.03", "Adam": f"{same} --optimizer Adam --lr 0.03"}
    printed = capsys.readouterr().out
    found = json.loads(Path("report.json").read_text())
    assert found["run"].items() <= commands.items()
    told = "".join(f"\n  {line}" for line in found["run"].values())
    assert printed.endswith(f"to learn with {' or '.join(found['run'])} from here on, at that learning rate:{told}\n")
    last = list(found["run"].values())[-1]
    assert main([*last.split()[1:], "--quiet"]) == 0


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        (["better"], ["CAdam"]),
        (["worse"], ["Adam"]),
        (["equivalent"], ["CAdam", "Adam"]),
        (["inconclusive"], ["CAdam", "Adam"]),
        (["diverged"], []),
        (["better", "inconclusive"], ["CAdam"]),
        (["worse", "inconclusive"], ["CLion", "Adam"]),
    ],
)
def test_the_command_that_follows_is_that_of_what_is_recommended(kinds: list[Any], names: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_study_arguments(parser)
    options = parser.parse_args(["--data", "csv:a b.csv", "--label", "rating>=4", "--model", "m.py:build"])
    options.typed = None
    found = [
        {
            "verdict_kind": kind,
            "action": ACTIONS[kind],
            "treatment": arm,
            "learning_rates_to_use": {arm: 0.03, "Adam": 0.01},
        }
        for kind, arm in zip(kinds, ("CAdam", "CLion"), strict=False)
    ]
    learn = to_learn(options, STUDY, found)
    assert list(learn) == names
    if names[-1:] == ["Adam"]:
        assert learn["Adam"] == (
            "cadam run --data 'csv:a b.csv' --label 'rating>=4' --model m.py:build --batch-size 256 --optimizer Adam "
            "--lr 0.01"
        )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--arms", "adam"], "two or more optimizers, got 'adam'"),
        (["--arms", "adam,adan"], "no optimizer 'adan'; there are"),
        (["--arms", "adam,cadam,adamw,cadamw,lion,clion,sgdm,csgdm,radam"], "--arms takes up to 8 optimizers, got 9"),
        (["--arms", "adam,cadam:moments=int4"], "cadam:moments=int4: Invalid moments value: 'int4'"),
        (["--arms", "cadam:eps=1:amsgrad=True,cadam:amsgrad=True:eps=1"], "has CAdam:amsgrad=True:eps=1.0 more than"),
        (["--arms", "adam,,cadam"], "no optimizer ''; there are"),
        (["--lr", "0.1,-1"], "--lr: learning rates must be above 0 and finite, got '-1'"),
        (["--lr", "inf,0.01"], "--lr: learning rates must be above 0 and finite, got 'inf'"),
        (["--lr", "nan"], "--lr: learning rates must be above 0 and finite, got 'nan'"),
        (["--change", "price"], "--change needs a categorical feature, got 'price'; there are user, item"),
        (["--matters", "-1"], "--matters must be 0 or more, and finite, got -1"),
        (["--matters", "inf"], "--matters must be 0 or more, and finite, got inf"),
        (["--matters", "nan"], "--matters must be 0 or more, and finite, got nan"),
        (["--tuning-share", "2"], "--tuning-share must lie between 0 and 1, got 2"),
        (["--blocks", "5000"], "too few for 5000 blocks"),
        (["--model", "nowhere.py:build"], "nowhere.py does not exist"),
        (["--data", "carrier-pigeon:coop"], "carrier-pigeon:coop"),
    ],
)
def test_what_the_command_cannot_do_is_said(
    place: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(command(place, *more)) == 2
    assert message in capsys.readouterr().err
    assert not (place / "specs").exists()


def test_the_help_has_the_exit_codes_that_can_occur(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ab", "--help"])
    _, _, codes = capsys.readouterr().out.partition("exit codes:\n")
    assert re.findall(r"^  (\d+)", codes, re.MULTILINE) == ["0", "1", "2", "5", "130", "141"]
    assert "diverged at every learning rate" in codes
    assert "--max-rejected was rejected" in codes


@pytest.mark.parametrize("option", ["--blocks", "--events", "--batch-size", "--seeds"])
def test_numbers_below_1_are_refused(place: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command(place, option, "0"))
    assert ended.value.code == 2
    assert f"argument {option}: must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"features": {"user": "category:200", "itme": "category:100"}},
            "clicks.parquet has no column 'itme'",
        ),
        ({"label": "clicked"}, "clicks.parquet has no column 'clicked'"),
        ({"user": "person"}, "clicks.parquet has no column 'person'"),
        (
            {"features": {"item": "category:100"}},
            "model.py:build cannot be called with the features by name: its forward takes user, item; "
            "the schema has item (missing a required argument: 'user')",
        ),
        (
            {"features": {"user": "category:200", "item": "category:100", "at": "number"}},
            "its forward takes user, item; the schema has user, item, at (got an unexpected keyword argument 'at')",
        ),
        (
            {"features": {"user": "category:1", "item": "category:1"}},
            "events of parquet:PLACE/clicks.parquet can be used; the first, PLACE/clicks.parquet, row 0: user: ",
        ),
    ],
)
def test_names_that_do_not_fit_are_said_before_any_work(
    place: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    table = pq.read_table(place / "clicks.parquet").to_pydict()
    kept = {name: [v for v, user in zip(table[name], table["user"], strict=True) if user] for name in table}
    pq.write_table(pa.table(kept), place / "clicks.parquet")  # no user is 0
    schema = json.loads((place / "schema.json").read_text())
    (place / "schema.json").write_text(json.dumps({**schema, **change}))
    assert main(command(place)) == (1 if "can be used" in message else 2)
    error = capsys.readouterr().err
    assert message.replace("PLACE", str(place)) in error
    assert error.count("\n") == 1
    assert not (place / "specs").exists()


def test_labels_that_are_no_clicks_are_said_once_before_any_work(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(place / "clicks.parquet").to_pydict()
    pq.write_table(pa.table({**table, "click": [0.3, *table["click"][1:]]}), place / "clicks.parquet")
    assert main(command(place)) == 2
    error = capsys.readouterr().err
    assert "labels must be 0 or 1 for GAUC, which decides the A/B on parquet:" in error
    assert "there is 0.3" in error
    assert error.count("\n") == 1
    assert not (place / "specs").exists()
    schema = json.loads((place / "schema.json").read_text())
    (place / "schema.json").write_text(json.dumps({**schema, "binary": True}))
    main([*command(place), "--lr", "0.03", "--seeds", "1"])
    told = capsys.readouterr()
    assert "row 0: click: 0.3" in told.out
    assert "failed" not in told.out + told.err


def test_where_no_user_has_both_kinds_of_label_there_is_no_gauc(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pq.read_table(place / "clicks.parquet").to_pydict()
    alike = [
        (row < 300 and click) or float(user % 2)
        for row, (user, click) in enumerate(zip(table["user"], table["click"], strict=True))
    ]
    pq.write_table(pa.table({**table, "click": alike}), place / "clicks.parquet")
    said = (
        f"cadam ab: no user of parquet:{place / 'clicks.parquet'} has both kinds of label after its first part: GAUC, "
        "which decides the A/B, compares events of one user, by the column user. Name another column with --user"
    )
    assert main(command(place, "--lr", "0.03")) == 2
    assert capsys.readouterr().err.startswith(said)
    assert not (place / "specs").exists()
    monkeypatch.setattr("cadam.ab.labelled.Labelled.check", lambda *given: None)  # as where labels come on their own
    assert main(command(place, "--lr", "0.03")) == 1
    assert said in capsys.readouterr().err


def test_labels_that_begin_too_late_to_choose_learning_rates_are_said(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(place / "clicks.parquet").to_pydict()
    late = [None if row < 1500 else click for row, click in enumerate(table["click"])]
    pq.write_table(pa.table({**table, "click": late, "id": range(3000)}), place / "clicks.parquet")
    schema = json.loads((place / "schema.json").read_text())
    (place / "schema.json").write_text(json.dumps({**schema, "id": "id"}))
    assert main(command(place, "--lr", "0.03")) == 2
    assert "cadam ab: 0 of the first 600 events of parquet:" in (error := capsys.readouterr().err)
    assert "Leave out the events before labels begin" in error
    assert not (place / "specs").exists()


def test_events_that_cannot_be_used_are_said_once_with_the_first_reason(
    place: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    table = pq.read_table(place / "clicks.parquet").to_pydict()
    wrong = [900 if row in (5, 700) else user for row, user in enumerate(table["user"])]
    pq.write_table(pa.table({**table, "user": wrong}), place / "clicks.parquet")
    runs.compute(spec(place, events=2998))
    assert "rejected" not in caplog.text
    arguments = [*command(place), "--lr", "0.03", "--seeds", "1"]
    main(arguments)
    told = capfd.readouterr()
    first = f"the first, {place / 'clicks.parquet'}, row 5: user: 900 is not from 0 to {USERS - 1}"
    reason = f"2 x user: ... is not from 0 to {USERS - 1}"
    said = f"2 of 3,000 events (0.1%) of parquet:{place / 'clicks.parquet'} cannot be used and are left out: {reason}"
    assert f"{said}; {first}\n" in told.out
    assert "rejected" not in told.out + told.err


def test_a_study_that_failed_names_the_command_that_goes_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "model.py").write_text(MODEL.replace("(self.users(user)", "(self.nobody(user)"))
    arguments = command(place, "--lr", "0.03,0.01", "--events", "1500")
    assert main(arguments) == 1
    out = capsys.readouterr().out
    (line,) = [line.split() for line in out.splitlines() if line.startswith("  cadam ab ")]
    assert sorted(line) == sorted(["cadam", *arguments])
    assert "cadam reproduce" not in out


@pytest.mark.parametrize("option", ["--cache", "--output"])
def test_a_folder_that_cannot_be_written_to_is_said_before_any_work(
    place: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (place / "file").touch()
    arguments = command(place, option, str(place / "file" / "below"))
    assert main([*arguments, "--model", "nowhere.py:build"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cadam ab: {option}: {place / 'file'}")
    assert error.endswith(f"cannot be written to: {place / 'file'} is not a folder\n")


def test_without_pyarrow_the_command_says_what_to_install(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(command(place)) == 5
    assert capsys.readouterr().err.endswith("need pyarrow: pip install pyarrow\n")
    monkeypatch.setenv("CADAM_DATA", str(place))
    (place / "elec2.parquet").touch()
    assert main(["reproduce", "ab-electricity", "--cache", str(place / "specs")]) == 5
    assert capsys.readouterr().err == "cadam reproduce: pyarrow missing: pip install pyarrow\n"
    assert not (place / "specs").exists()


def test_a_number_of_events_is_said_as_whole_batches(place: Path) -> None:
    options = argparse.ArgumentParser()
    add_study_arguments(options)
    options.add_argument("--seeds", type=int, default=1)
    for name in ("--cache", "--output"):
        options.add_argument(name)
    study, _ = experiment(options.parse_args(command(place, "--events", "1480")[1:]))
    assert study.events == 1500
    outcome = runs.compute(study.spec("Adam", 0.03, 0, "as it is"))
    assert outcome.metrics["events"] == 1500 - 300


def test_the_schema_may_stand_in_the_file_of_the_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [a for a in command(place, "--lr", "0.03", "--seeds", "1") if not a.endswith("schema.json")]
    arguments.remove("--schema")
    assert main(arguments) == 2
    assert "has no SCHEMA, and --schema is not given" in capsys.readouterr().err
    schema = f"Schema({json.loads((place / 'schema.json').read_text())['features']}, label='click', user='user')"
    (place / "model.py").write_text(f"{MODEL}\nfrom cadam.online import Schema\nSCHEMA = {schema}\n")
    assert main(arguments) == 0
    assert "Run more seeds (--seeds)." in " ".join(capsys.readouterr().out.split())


def test_with_batches_of_one_a_ready_made_model_is_compiled_and_exact(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ab", str(place / "clicks.parquet"), "--label", "click", "--user", "user", "--model", "linear"]
    arguments += ["--batch-size", "1", "--lr", "0.03", "--seeds", "1", "--blocks", "20", "--events", "1999"]
    arguments += ["--cache", str(place / "specs"), "--output", str(place / "one.html"), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommendations"][0]["measured_events"] == 1999 - 399


def test_the_command_that_follows_has_the_options_of_the_arm() -> None:
    parser = argparse.ArgumentParser()
    add_study_arguments(parser)
    options = parser.parse_args(["--data", "csv:a.csv", "--label", "click"])
    options.typed = "a.csv"
    arm = "CAdam:betas=(0.9, 0.99):moments=int8"
    found = {"verdict_kind": "better", "action": ACTIONS["better"], "treatment": arm}
    learn = to_learn(options, STUDY, [{**found, "learning_rates_to_use": {arm: 0.03}}])
    assert learn == {arm: f"cadam run a.csv --label click --optimizer '{arm}' --lr 0.03"}


def test_with_one_learning_rate_none_is_said_to_decide() -> None:
    """What one seed says is not what their mean says."""

    def turned(result: Result) -> Result:
        first = result.spec.seed == 0 and result.spec.optimizer == "CAdam"
        metrics = {**result.outcome.metrics, **({"gauc_by_impressions": 0.1} if first else {})}
        return replace(result, outcome=replace(result.outcome, metrics=metrics))

    results = Results([turned(r) for r in everything(0.5) if r.spec.lr == STUDY.grid[0]])
    one = replace(STUDY, grid=STUDY.grid[:1])
    assert study.rate_warnings(one, results, "CAdam", 0.3) == []


def test_with_batches_of_one_it_is_said_which_arms_are_not_compiled(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = command(place, "--arms", "cadam,cadam:moments=int8", "--lr", "0.03", "--batch-size", "1", "--events", "400")
    arms[arms.index("--model") + 1] = "fm"
    assert main([*arms, "--blocks", "4"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "compiled" in line]
    assert said == [
        "CAdam:moments=int8 learns by torch: the optimizer has moments='int8'; that is hundreds of times slower than "
        "compiled code"
    ]


def test_arms_may_be_one_optimizer_with_different_options(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = "cadam, CAdam:moments=int8, cadam:second_moment=row:betas=(0.9,0.99)"
    assert main(command(place, "--arms", arms, "--lr", "0.03", "--events", "1500", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    other = ["CAdam:moments=int8", "CAdam:betas=(0.9, 0.99):second_moment=row"]
    assert [one["treatment"] for one in found["recommendations"]] == other
    assert {one["baseline"] for one in found["recommendations"]} == {"CAdam"}
    assert all(one["difference"] != 0 for one in found["recommendations"]), "the options did nothing"
    for name in other:
        assert name in (place / "report.html").read_text()


# Real streams --------------------------------------------------------------------------------------------------

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
def test_the_experiments_on_real_streams_are_listed_and_say_what_they_are(name: str, kind: str) -> None:
    experiment = catalog.find(f"{kind}-{name}")
    assert experiment.name == f"{kind}-{name}"
    assert experiment.data is DATA[name]
    assert any("stand-in" in note for note in experiment.notes)
    assert kind == "rates" or any(
        "85.34, 85.64 and +0.30" in note and "85.91, 86.17 and +0.26" in note for note in experiment.notes
    )


def test_missing_data_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CADAM_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"flights from New York.*set CADAM_DATA"):
        streams.flights()


def test_the_scoreboard_pairs_only_runs_at_the_chosen_learning_rates() -> None:
    board = Scoreboard("ab", "", ("Adam", "CAdam"), {"auc": "AUC"})

    def came(optimizer: str, lr: float, seed: int, auc: float) -> tuple[str, ...] | None:
        spec = RunSpec("ab", "model", "data", optimizer, lr, "as it is", seed)
        result = Result(spec, Outcome({"auc": auc}), Provenance(0.0, 0, "cpu", {}))
        return board.note(Event("computed", catalog.find("demo-stream"), spec, result))

    assert came("Adam", 0.1, 0, 0.70) is None
    assert came("CAdam", 0.1, 0, 0.75) == ("0", "0.7000", "0.7500", "+0.0500")
    assert came("Adam", 1.0, 0, 0.53) is None, "a look back at a rate that was not chosen"
    came("Adam", 0.1, 1, 0.71)
    assert came("CAdam", 0.1, 1, 0.74) == ("1", "0.7100", "0.7400", "+0.0300")


def test_the_head_of_a_scoreboard_is_broken_where_options_begin() -> None:
    board = Scoreboard("ab", "", ("Adam", "CAdam:moments=int8"), {"auc": "AUC"})
    first, second = board.text(board.head).splitlines()
    assert (first.split(), second.split()) == (["CAdam:"], ["seed", "Adam", "AUC", "moments=int8", "AUC", "difference"])
    line = board.text(["0", "0.7000", "0.7500", "+0.0500"])
    assert len(first) == len(second) == len(line)
    assert line.index("0.7500") + 6 == second.index("moments=int8 AUC") + 16
