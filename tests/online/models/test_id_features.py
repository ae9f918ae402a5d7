"""The kind `id`: each id has a row, training and prediction agree, and damaged or odd values are refused or handled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cadam
from cadam.online import Events, Learner, Schema, models
from cadam.online.data.events import Array
from cadam.online.data.kind import MISSING_ID, Kind
from cadam.online.models import FM
from cadam.online.models.id_features import IdFeatures, expected_collisions
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.training_step import TrainingStep

FEATURES = {
    "user": "id:max=400,admit=2,expire=200s?",
    "seen": "id:max=100,evict=lfu[3]?",
    "page": "category:5",
    "price": "number?",
}


def schema(**kinds: str) -> Schema:
    return Schema({**FEATURES, **kinds}, label="click", time="at")


def batches(count: int, size: int = 64, **constant: Any) -> Iterator[Events]:
    random = np.random.default_rng(0)
    for number in range(count):
        user, seen = random.integers(0, 300, size) + 5 * number, random.integers(0, 200, (size, 3))
        user[random.random(size) < 0.1] = MISSING_ID
        seen[random.random((size, 3)) < 0.3] = MISSING_ID
        features = {"user": user, "seen": seen, "page": random.integers(0, 5, size), "price": random.normal(size=size)}
        labels = (random.random(size) < 0.3).astype(np.float32)
        yield Events({**features, **constant}, labels, None, None, np.full(size, 1e9 + 10.0 * number))


def new_learner(kind: str, generic: bool = False, **options: Any) -> Learner:
    torch.manual_seed(0)
    model = models.build(kind, schema())
    learner = Learner(model, cadam.CAdam(model.named_parameters(), lr=0.01), LOG_LOSS, **options)
    if generic:
        learner.training = TrainingStep(learner.model, learner.optimizer, LOG_LOSS)
    return learner


def id_features(learner: Learner) -> IdFeatures:
    (module,) = learner.training.id_features
    return module


def rows_of_users(learner: Learner, ids: Array) -> Array:
    features = {"user": torch.from_numpy(ids), "seen": torch.from_numpy(ids)}
    rows: Array = id_features(learner).eval()(features)["user"].numpy()
    return rows


@pytest.mark.parametrize("kind", ["linear", "fm", "mlp", "deepfm"])
def test_the_fused_step_equals_the_generic_step_to_the_bit(kind: str) -> None:
    fused, generic = new_learner(kind), new_learner(kind, generic=True)
    assert fused.training_mode == "in batches, with a fused training step"
    scores = [[learner.learn(events) for events in batches(25)] for learner in (fused, generic)]
    np.testing.assert_array_equal(np.concatenate(scores[0]), np.concatenate(scores[1]))
    for name, value in generic.model.state_dict().items():
        assert torch.equal(value, fused.model.state_dict()[name]), name
    counts = id_features(fused).counters()
    assert min(counts["user"].expired, counts["user"].refused, counts["seen"].evicted, counts["seen"].rows) > 0


def test_scores_before_training_are_those_of_the_training_pass() -> None:
    learner = new_learner("deepfm")
    twin = copy.deepcopy(learner.model)
    for events in batches(5):
        twin.load_state_dict(learner.model.state_dict())
        with torch.no_grad():
            tensors = {name: torch.from_numpy(values) for name, values in events.features.items()}
            expected = twin.eval()(**tensors).numpy()
        np.testing.assert_array_equal(learner.learn(events), expected)


def test_a_new_id_starts_like_an_unknown_one_and_then_has_its_own_row() -> None:
    learner = new_learner("fm")
    assert isinstance(learner.model, FM)
    layer = learner.model.inputs
    for events in batches(10):
        learner.learn(events)
    ids = np.array([10**12, 10**12 + 1])
    assert (rows_of_users(learner, ids) == 1).all()  # the shared row
    event = next(batches(1, size=2))
    event.features["user"][:] = ids
    learner.learn(event)
    learner.learn(event)  # the second sighting
    first, second = rows_of_users(learner, ids).tolist()
    assert first != second
    assert min(first, second) > 1
    assert layer.table is not None
    assert not torch.equal(layer.table.weight[first], layer.table.weight[second])


def test_moments_of_a_row_are_reset_when_another_id_gets_it() -> None:
    schema = Schema({"user": "id:max=2"}, label="click")
    model = models.build("linear", schema)
    learner = Learner(model, cadam.CAdam(model.named_parameters(), lr=0.01), LOG_LOSS)
    for start in range(0, 40, 2):
        learner.learn(Events({"user": np.array([start, start + 1])}, np.ones(2, np.float32)))
    assert model.inputs.linear is not None
    state = learner.optimizer.state[model.inputs.linear.weight]
    # One step after a reset, a moment is (1 - beta) * gradient; without the reset it would be several times as large.
    assert state["exp_avg"][2:].abs().max() <= 0.1 * 0.5 + 1e-6
    assert id_features(learner).counters()["user"].evicted == 38


@pytest.mark.parametrize("change", ["state", "options", "weight"])
def test_rows_are_started_in_the_present_memory_of_tables_and_optimizer(change: str) -> None:
    torch.manual_seed(0)
    model = models.build("fm", schema(user="id:max=50", seen="id:max=50[3]?"))
    optimizer = cadam.CYogi(model.parameters(), lr=0.01, initial_accumulator=0.5)
    learner = Learner(model, optimizer, LOG_LOSS)
    for events in batches(3, size=20, seen=np.full((20, 3), MISSING_ID)):
        learner.learn(events)
    if change == "state":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif change == "options":
        optimizer.param_groups[0]["initial_accumulator"] = 0.25
    else:
        layer = model.inputs.linear
        assert layer is not None
        layer.weight.data = layer.weight.data.clone()
    ids = np.arange(10**6, 10**6 + 20)
    rows = {}

    def record(*_: Any) -> None:
        for table in (model.inputs.table, model.inputs.linear):
            assert table is not None
            row = rows_of_users(learner, ids)
            state = optimizer.state[table.weight]
            rows[table] = table.weight[row].detach().clone(), state["exp_avg_sq"][row].clone()

    hook = optimizer.register_step_pre_hook(record)
    learner.learn(next(batches(1, size=20, user=ids, seen=np.full((20, 3), MISSING_ID))))
    hook.remove()
    expected = 0.25 if change == "options" else 0.5
    for table, (values, second_moments) in rows.items():
        assert torch.equal(values, table.weight[1].expand_as(values).detach())
        assert expected in second_moments  # rows that had no id before keep their first state
        assert set(second_moments.unique().tolist()) <= {0.5, expected}
    assert len(rows) == 2


def test_a_resumed_run_equals_one_without_interruption(tmp_path: Path) -> None:
    whole = new_learner("deepfm")
    events = list(batches(30))
    for each in events:
        whole.learn(each)
    state: dict[str, Any] = {}
    for start in range(0, 30, 7):
        learner = new_learner("deepfm")
        if state:
            learner.load_state_dict(state)
        for each in events[start : start + 7]:
            learner.learn(each)
        state = copy.deepcopy(learner.state_dict())
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, state["model"][name]), name


def test_learning_rates_are_tuned_with_ids() -> None:
    learner = new_learner("fm", tune_rate=True)
    for events in batches(8):
        learner.learn(events)
    assert learner.rate_tuning is not None
    assert learner.rate_tuning.candidates
    assert np.isfinite(learner.metrics()["log_loss"])
    counts = id_features(learner).counters()
    for candidate in learner.rate_tuning.candidates.values():
        (module,) = candidate.id_features
        assert module.counters() == counts


@pytest.mark.parametrize("field", ["id", "frequency", "numbers", "sketch", "last_seen"])
def test_damaged_rows_of_ids_are_refused_and_nothing_is_loaded(field: str) -> None:
    learner = new_learner("fm")
    for events in batches(10):
        learner.learn(events)
    before = copy.deepcopy(learner.model.state_dict())
    damaged = copy.deepcopy(before)
    damaged[f"inputs.ids.0.{field}"].view(-1)[2] += 1
    with pytest.raises(RuntimeError, match=r"the ids of 'user' cannot be loaded: .*(damaged|row)"):
        learner.model.load_state_dict(damaged)
    for name, value in learner.model.state_dict().items():
        assert torch.equal(value, before[name])
    del damaged[f"inputs.ids.0.{field}"]
    with pytest.raises(RuntimeError, match="Missing key"):
        learner.model.load_state_dict(damaged)


def test_ids_that_expire_by_time_need_a_time() -> None:
    with pytest.raises(ValueError, match="give the column of the time, or a number of events"):
        Schema({"user": "id:expire=1d"}, label="click").check_expiry()
    learner = new_learner("linear")
    events = next(batches(1))
    with pytest.raises(ValueError, match="the events have no time"):
        learner.learn(Events(events.features, events.labels))


def test_ids_expire_after_a_number_of_events_without_a_time() -> None:
    model = models.build("linear", Schema({"user": "id:expire=100"}, label="click"))
    learner = Learner(model, cadam.CAdam(model.named_parameters(), lr=0.01), LOG_LOSS)
    for number in range(30):
        learner.learn(Events({"user": np.arange(10) + 10 * number}, np.ones(10, np.float32)))
    assert id_features(learner).counters()["user"].rows == pytest.approx(110, abs=10)
    assert id_features(learner).counters()["user"].expired > 150


def test_per_event_training_works_and_says_why_it_is_not_compiled() -> None:
    learner = new_learner("fm", per_event=True)
    assert learner.training_mode == "one event at a time, with torch: the model has features of the kind id"
    for events in batches(2):
        assert np.isfinite(learner.learn(events)).all()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("id:max=0", "max must be an integer from 1"),
        ("id:max=3e9", "max must be an integer from 1"),
        ("id:size=5", "options of id are max=N"),
        ("id:max=5,max=6", "given twice"),
        ("id:expire=3x", "expire must be an integer"),
        ("id:evict=random", "evict must be lru, lfu or none"),
        ("id:expire=9e15w", "expire must be an integer from 1 to"),
        ("id:admit=1e9", "admit must be an integer from 1 to 65,535"),
        ("id[last 5]", "needs \\? at its end"),
    ],
)
def test_wrong_options_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Kind.parse(text)


@pytest.mark.parametrize("text", ["id", "id?", "id:max=5,expire=100,admit=3,evict=lfu", "id:expire=86400s[last 5]?"])
def test_a_kind_is_written_as_it_is_read(text: str) -> None:
    assert str(Kind.parse(text)) == text


def test_integers_and_texts_have_different_ids() -> None:
    values = ["5", 5, 2**64 - 1, "18446744073709551615", -1, "ann", "05", -(2**63), 2**63 - 1, "", None]
    batch = Schema({"user": "id?"}).convert_records([{"user": v, "label": 0} for v in values], ["" for _ in values])
    assert not batch.rejected
    assert batch.events is not None
    five, also_five, big, big_text, *others, missing = batch.events.features["user"].tolist()
    assert (five, big) == (also_five, big_text) == (5, big)
    assert missing == MISSING_ID
    assert len({five, big, missing, *others}) == 3 + len(others)
    too_long = Schema({"user": "id"}).convert_records([{"user": "x" * 10240, "label": 0}], [""])
    assert too_long.rejected[0].reason == "user: text of 10240 characters is longer than 1024"


def test_text_and_json_have_the_same_ids() -> None:
    values = ["ann", "17", "-3", "1.0", "true", "9223372036854775807", "9223372036854775808", "müller"]
    rows = [{"user": value, "label": "0"} for value in values]
    text = Schema({"user": "id"}).convert_records(rows, values, text=True)
    parsed: list[Any] = ["ann", 17, -3, 1, True, 2**63 - 1, 2**63, "müller"]
    json = Schema({"user": "id"}).convert_records([{"user": value, "label": 0} for value in parsed], values)
    assert text.events is not None
    assert json.events is not None
    np.testing.assert_array_equal(text.events.features["user"], json.events.features["user"])


def test_expected_collisions_are_those_of_a_simulation() -> None:
    random = np.random.default_rng(0)
    rows = random.integers(0, 1000, (200, 700))
    simulated = np.mean([(np.bincount(each, minlength=1000)[each] > 1).sum() for each in rows])
    assert expected_collisions(700, 1000) == pytest.approx(simulated, rel=0.02)
    assert expected_collisions(0, 1000) == expected_collisions(1, 1000) == 0
