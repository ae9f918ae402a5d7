"""Per-event training: compiled code gives the same result as torch with batches of one, for any rule and chunk size."""

from __future__ import annotations

import functools
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import cadam
from cadam.online import Batch, Events, Labels, Learner, Schema, models
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.per_event import PerEventTraining
from cadam.online.training_step import TrainingStep
from tests.online.streams import grouped

SCHEMA = Schema(
    {
        "user": "hash:50?",
        "item": "category:20",
        "tags": "hash:9[3]?",
        "at": "clock?",
        "price": "number?",
        "xy": "number[2]",
    },
    label="click",
)
RULES = ("Adam", "AdamW", "AmsGrad", "SGDM", "Lion", "RAdam", "AdaBelief", "Yogi")
OPTIMIZERS = [*RULES, *(f"C{name}" for name in RULES)]


@functools.lru_cache
def cached(count: int) -> Events:
    return events(count)


def events(count: int, seed: int = 0) -> Events:
    """Events with repeated tags and missing prices. Clicks depend on the item and the price."""
    draw = np.random.default_rng(seed)
    item = draw.integers(0, 20, count)
    price = draw.lognormal(size=count)
    clicks = draw.random(count) < 1 / (1 + np.exp(-(item - 10) / 5 + price / 4))
    records = [
        {
            "user": int(draw.integers(100)),
            "item": int(item[row]),
            "tags": draw.choice(["a", "b", "c"], draw.integers(0, 4)).tolist(),
            "at": 1_700_000_000.0 + 1800 * row,
            "price": None if row % 7 == 0 else float(price[row]),
            "xy": draw.normal(size=2).tolist(),
            "click": int(clicks[row]),
        }
        for row in range(count)
    ]
    batch = SCHEMA.convert_records(records, [""] * count)
    assert batch.events is not None
    assert not batch.rejected
    return batch.events


def started(model: str, optimizer: str, **options: Any) -> tuple[nn.Module, cadam.Optimizer]:
    torch.manual_seed(0)
    built = models.build(model, SCHEMA)
    made = getattr(cadam, optimizer)(built.parameters(), **{"lr": 0.01, **options})
    return built, made


def by_torch(model: nn.Module, optimizer: cadam.Optimizer, given: Events) -> np.ndarray:
    """Return the scores before learning, with autograd on one event at a time."""
    training, scores = TrainingStep(model, optimizer, LOG_LOSS), np.empty(len(given), np.float32)
    for row in range(len(given)):
        one = given.take(slice(row, row + 1))
        scores[row] = training.predict(one.features, 1)[0]
        training.train(one.columns())
    return scores


def compiled(model: nn.Module, optimizer: cadam.Optimizer) -> PerEventTraining:
    made = PerEventTraining.create(model, optimizer, LOG_LOSS)
    assert isinstance(made, PerEventTraining), made
    return made


def state(model: nn.Module, optimizer: cadam.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, statistics, moments and step counts by name."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        found |= {f"{key} of {name}": value.clone() for key, value in optimizer.state[param].items()}
    return found


def chances(scores: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-scores.astype(float))))


def check_same_as_torch(model: str, optimizer: str, count: int, **options: Any) -> None:
    given, ours, torchs = cached(count), started(model, optimizer, **options), started(model, optimizer, **options)
    assert given.labels is not None
    scores, learned = compiled(*ours).train(given.features, given.labels)
    assert learned == count
    expected = by_torch(*torchs, given)
    apart, chances_apart = np.abs(scores - expected).max(), np.abs(chances(scores) - chances(expected)).max()
    print(f"{model:7}{optimizer:11}{count:7,} events, largest difference {chances_apart:8.1e}, of logits {apart:8.1e}")
    assert chances_apart < 1e-5
    assert apart < 1e-5 * max(1, count / 2000)  # roundings accumulate
    theirs = state(*torchs)
    for name, value in state(*ours).items():
        assert torch.allclose(value.double(), theirs[name].double(), rtol=1e-4, atol=1e-5), name
    mine, other = ours[1].alignment().total, torchs[1].alignment().total
    assert (mine.touched, mine.seen) == (other.touched, other.seen)
    assert abs(mine.aligned - other.aligned) <= 1e-5 * other.aligned  # the sign of a number near 0 depends on rounding


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["linear", "fm"])
def test_scores_weights_and_moments_equal_those_of_torch_with_batches_of_one(model: str, optimizer: str) -> None:
    check_same_as_torch(model, optimizer, 120)


@pytest.mark.parametrize("optimizer", ["CAdam", "CSGDM"])
@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"maximize": True}],
    ids=["l2", "decoupled", "maximize"],
)
def test_options_have_the_same_effect_as_with_torch(optimizer: str, options: dict[str, Any]) -> None:
    check_same_as_torch("fm", optimizer, 60, **options)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["linear", "fm"])
def test_twenty_thousand_events_are_learned_as_with_torch(model: str, optimizer: str) -> None:
    """At the default learning rate. At ten times this rate, rounding decides signs, with torch too."""
    check_same_as_torch(model, optimizer, 20_000, lr=0.001)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_chunk_size_does_not_change_any_bit(size: int) -> None:
    given, whole, cut = events(300), started("fm", "CAdam"), started("fm", "CAdam")
    assert given.labels is not None
    scores, _ = compiled(*whole).train(given.features, given.labels)
    parts = [given.take(slice(start, start + size)) for start in range(0, 300, size)]
    engine = compiled(*cut)
    again = np.concatenate([engine.train(part.features, part.labels)[0] for part in parts if part.labels is not None])
    assert np.array_equal(again, scores)
    mine, other = state(*whole), state(*cut)
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def learner(model: str = "fm", *, own_path: bool = False, **options: Any) -> Learner:
    built, optimizer = started(model, "CAdam")
    made = Learner(built, optimizer, LOG_LOSS, per_event=True, **grouped(options))
    if own_path:
        made.per_event = "with torch: requested by the test"
    return made


def test_a_learner_counts_logs_and_measures_as_with_torch(tmp_path: Path) -> None:
    given, found = events(200), []
    for own_path in (False, True):
        one = learner(own_path=own_path, log=tmp_path / str(own_path), log_rows=50)
        for start in range(0, 200, 30):
            one.process(given.take(slice(start, start + 30)))
        one.finish()
        assert one.log is not None
        one.log.flush()
        logged = pq.read_table(tmp_path / str(own_path)).to_pydict()
        found.append((one.metrics(), logged))
    (ours, log), (theirs, their_log) = found
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6, nan_ok=True)
    assert log["id"] == their_log["id"]
    assert np.allclose(log["score"], their_log["score"], atol=1e-5)


def test_events_that_compiled_code_does_not_support_are_processed_by_torch() -> None:
    """Events with missing and infinite labels, a huge number, and an id beyond the table."""
    given = events(90)
    assert given.labels is not None
    given.labels[10], given.labels[20] = math.nan, math.inf
    given.features["xy"][30] = 3e38
    given.features["item"][40] = 99
    found = []
    for own_path in (False, True):
        one = learner(own_path=own_path)
        for start in range(0, 90, 45):
            one.process(given.take(slice(start, start + 45)))
        found.append(one)
    ours, theirs = found
    assert (ours.rejected, ours.learned, len(ours.pending)) == (theirs.rejected, theirs.learned, len(theirs.pending))
    assert ours.rejections.reasons == theirs.rejections.reasons
    assert (ours.rejected, len(ours.pending)) == (2, 1)
    assert ours.log_loss.mean == pytest.approx(theirs.log_loss.mean, rel=1e-5)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_number_is_rejected_as_with_torch(value: float) -> None:
    outcomes = []
    for own_path in (False, True):
        given, one = events(60), learner(own_path=own_path)
        given.features["xy"][10, 0] = value
        one.process(given)
        outcomes.append((one.rejections.reasons, one.learned, one.rejected))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1:] == (59, 1)


def test_compiled_samples_of_numbers_are_those_of_torch() -> None:
    draw, schema = np.random.default_rng(0), Schema({"x": "number?"}, label="click")
    numbers = draw.lognormal(size=3_000)
    numbers[::5] = np.nan
    learners = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        built = models.build("linear", schema)
        one = Learner(built, cadam.CAdam(built.parameters(), lr=0.01), LOG_LOSS, per_event=True)
        if not is_compiled:
            one.per_event = "with torch"
        one.process(Events({"x": numbers}, labels=np.zeros(3_000)))
        learners.append(one.model.state_dict())
    for name in ("inputs.normalizer.count", "inputs.normalizer.sample"):
        assert torch.equal(learners[0][name], learners[1][name])
    assert torch.isfinite(learners[0]["inputs.normalizer.sample"]).all()


def test_compiled_code_and_torch_can_alternate_at_any_event() -> None:
    given, mixed, whole = events(200), learner(), learner()
    mixed.process(given.take(slice(0, 100)))
    mixed.per_event = "with torch: from here on"
    mixed.process(given.take(slice(100, 150)))
    mixed.per_event = whole.per_event and compiled(mixed.model, mixed.optimizer)  # type: ignore[arg-type]
    mixed.process(given.take(slice(150, 200)))
    whole.process(given)
    assert mixed.log_loss.mean == pytest.approx(whole.log_loss.mean, rel=1e-6)
    for one, other in zip(mixed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("first", ["compiled", "torch"])
def test_compiled_code_and_torch_resume_from_checkpoints_of_each_other(first: str, tmp_path: Path) -> None:
    given, parts = cached(240), [slice(0, 80), slice(80, 160), slice(160, 240)]
    for number, part in enumerate(parts):
        one = learner(own_path=(first == "torch") == (number != 1), checkpoint=tmp_path / "state")
        assert one.resume() is (number > 0)
        one.process(given.take(part))
        one.save()
        one.close()
    whole = learner()
    whole.process(given)
    assert (one.steps, one.learned) == (whole.steps, whole.learned) == (240, 240)
    assert one.log_loss.mean == pytest.approx(whole.log_loss.mean, rel=1e-6)
    ours, theirs = state(one.model, one.optimizer), state(whole.model, whole.optimizer)  # type: ignore[arg-type]
    assert all(torch.allclose(ours[name].double(), theirs[name].double(), rtol=1e-4, atol=1e-5) for name in theirs)
    assert one.total_alignment() == whole.total_alignment()


def test_training_mode_names_the_reason_for_torch() -> None:
    assert learner("linear").training_mode == "one event at a time, compiled"
    assert learner("deepfm").training_mode.startswith("one event at a time, with torch: the model is DeepFM")
    built, optimizer = started("fm", "CAdam")
    assert Learner(built, optimizer, LOG_LOSS).training_mode.startswith("in batches")

    def own(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (scores - labels).square().mean()

    assert "the loss is not" in Learner(built, optimizer, own, per_event=True).training_mode
    groups = cadam.CAdam([{"params": [param]} for param in built.parameters()])
    assert "more than one group" in Learner(built, groups, LOG_LOSS, per_event=True).training_mode
    plain = torch.optim.SGD(built.parameters(), lr=0.1)
    assert "SGD is not an optimizer of cadam" in Learner(built, plain, LOG_LOSS, per_event=True).training_mode


@pytest.mark.parametrize(
    "options",
    [
        {"moments": "bfloat16"},
        {"moments": "int8"},
        {"second_moment": "row"},
        {"row_steps": True},
        {"sparse_updates": "exact"},
    ],
    ids=str,
)
def test_quantized_moments_are_trained_with_torch(options: dict[str, Any]) -> None:
    given, found = cached(60), []
    for one_by_one in (True, False):
        built, optimizer = started("fm", "CAdam", **options)
        one = Learner(built, optimizer, LOG_LOSS, per_event=one_by_one, batch_size=1)
        for row in range(60):
            one.process(given.take(slice(row, row + 1)))
        assert next(iter(options)) in one.training_mode or not one_by_one
        found.append(state(built, optimizer))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


def test_a_table_with_too_many_rows_is_trained_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from cadam.online import per_event_kernel as engine

    built, optimizer = started("fm", "CAdam")
    monkeypatch.setattr(engine, "MAX_ROWS", 100)
    assert "at most 100 rows are supported" in Learner(built, optimizer, LOG_LOSS, per_event=True).training_mode


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.float64])
def test_features_of_another_type_or_length_are_processed_by_torch(kind: type) -> None:
    given = events(40)
    for change in ("item", "tags", "xy"):
        found: list[Any] = []
        for own_path in (False, True):
            features = dict(given.features)
            if change == "item":
                features["item"] = features["item"].astype(kind)
            else:  # shorter lists than the schema says
                features[change] = features[change][:, :1].copy()
            one = learner(own_path=own_path)
            try:
                one.process(Events(features, given.labels))
                found.append((one.learned, one.rejected, one.log_loss.mean))
            except (RuntimeError, TypeError) as error:
                found.append(type(error))
        assert found[0] == pytest.approx(found[1], nan_ok=True) if isinstance(found[0], tuple) else found[0] == found[1]


def freeze(one: Learner) -> None:
    next(one.model.parameters()).requires_grad_(False)


def hook(one: Learner) -> None:
    one.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: None)


def hook_a_parameter(one: Learner) -> None:
    one.model.get_parameter("inputs.bias").register_hook(lambda grad: 0 * grad)


def pad(one: Learner) -> None:
    one.model.inputs.linear.padding_idx = 3  # type: ignore[union-attr]


def schedule(one: Learner) -> None:
    torch.optim.lr_scheduler.StepLR(one.optimizer, 10)


def replace_a_forward(one: Learner) -> None:
    before = one.model.forward
    one.model.forward = lambda **features: 0.5 * before(**features)


def replace_a_table(one: Learner) -> None:
    class Halved(nn.Embedding):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().forward(rows)

    one.model.get_submodule("inputs.linear").__class__ = Halved


@pytest.mark.parametrize("change", [freeze, hook, hook_a_parameter, pad, schedule, replace_a_forward, replace_a_table])
def test_later_changes_of_model_or_optimizer_take_effect(change: Any) -> None:
    given, found = events(60), []
    for own_path in (False, True):
        one = learner(own_path=own_path)
        one.process(given.take(slice(0, 30)))
        change(one)
        one.process(given.take(slice(30, 60)))
        found.append((one.log_loss.mean, [param.detach().clone() for param in one.model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(found[0][1], found[1][1], strict=True))


def test_late_labels_are_learned_one_by_one_too() -> None:
    given, one = events(50), learner()
    assert given.labels is not None
    one.predict(Events(given.features, ids=np.arange(50)))
    one.observe(np.arange(50), given.labels)
    assert (one.steps, one.learned) == (50, 50)
    with pytest.raises(ValueError, match="batch_size is 4"):
        learner(batch_size=4)


Rows = list[tuple[str, int]]


def rows_of(kind: str, count: int, seed: int = 0) -> Rows:
    """The rows of a stream: events by number with a label ("both") or without ("event"), and labels ("label")."""
    draw, rows = random.Random(seed), Rows()
    for number in range(count):
        how = draw.choice(["both", "event", "early", "twice", "never"]) if kind == "mixed" else kind
        rows += [("label", number)] * (how == "early")
        rows += [("both" if how in ("both", "twice") else "event", number)]
        late = {"late": number - 20, "mixed": number - draw.randint(0, 9)}.get(kind, -1)
        rows += [("label", late)] * (late >= 0)
        rows += [("both", number)] * (how == "twice")
    return rows


def batches_of(rows: Rows, given: Events, size: int) -> list[Batch]:
    """The rows as a source produces them, `size` rows per batch."""
    assert given.labels is not None
    found = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        numbers = np.array([number for what, number in part if what != "label"], np.int64)
        asked = np.array([number for what, number in part if what == "label"], np.int64)
        labels = np.where([what == "both" for what, _ in part if what != "label"], given.labels[numbers], np.nan)
        before = np.cumsum([what != "label" for what, _ in part])[[what == "label" for what, _ in part]]
        events = replace(given.take(numbers), labels=labels, ids=7 * numbers) if len(numbers) else None
        found.append(Batch(events, Labels(7 * asked, given.labels[asked]), events_before=before))
    return found


@pytest.mark.parametrize("kind", ["both", "event", "late", "mixed"])
def test_events_with_ids_and_late_labels_are_learned_in_order(kind: str, tmp_path: Path) -> None:
    """The result does not depend on the batch size, to the bit, and agrees with torch."""
    given, rows = cached(300), rows_of(kind, 300)
    found = []
    for size, own_path in ((1, False), (7, False), (1000, False), (1, True)):
        folder = tmp_path / f"{size} {own_path}"
        one = learner(own_path=own_path, log=folder, capacity=60, remember=40)
        for batch in batches_of(rows, given, size):
            one.process(batch)
        one.finish()
        assert one.log is not None
        one.log.flush()
        found.append((one, pq.read_table(folder).to_pydict()))
    (first, log), *others = found
    for one, other_log in others[:2]:
        assert one.metrics() == pytest.approx(first.metrics(), rel=1e-12, nan_ok=True)
        assert other_log == log
        ours, theirs = state(first.model, first.optimizer), state(one.model, one.optimizer)  # type: ignore[arg-type]
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert repr(one.pending.state_dict()["resolved"]) == repr(first.pending.state_dict()["resolved"])
    by_autograd, their_log = others[2]
    assert by_autograd.metrics() == pytest.approx(first.metrics(), rel=1e-5, abs=1e-6, nan_ok=True)
    assert their_log["id"] == log["id"]
    assert their_log["outcome"] == log["outcome"]


def test_a_separate_label_knows_how_many_events_preceded_it() -> None:
    schema = Schema({"x": "number"}, label="y", id="i")
    records: list[dict[str, Any]] = [{"i": 1, "x": 1.0}, {"i": 1, "y": 1}, {"i": 2, "x": "?"}, {"i": 3, "x": 2.0}]
    records += [{"i": 3, "y": 0}, {"i": 4, "y": 1}]
    batch = schema.convert_records(records, [""] * 6)
    assert batch.events_before is not None
    assert batch.events_before.tolist() == [1, 2, 2]
    order = [(0 if e is None else len(e), None if n is None else n.ids.tolist()) for e, n in batch.in_order()]
    assert order == [(1, [1]), (1, [3, 4])]


# The command ---------------------------------------------------------------------------------------------------


def stream(path: Path, rows: int) -> None:
    draw = np.random.default_rng(3)
    item = draw.integers(0, 300, rows)
    table = {
        "user": [f"u{n}" for n in draw.integers(0, 1000, rows)],
        "item": [f"i{n}" for n in item],
        "price": draw.lognormal(size=rows),
        "click": (draw.random(rows) < 0.1 + 0.4 * (item % 2)).astype(int),
    }
    pq.write_table(pa.table(table), path)


def run(folder: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "cadam.cli.main", "run", str(folder / "clicks.parquet"), "--label", "click"]
    return [*command, "--batch-size", "1", "--model", "fm", "--lr", "0.01", "--quiet", *more]


@pytest.mark.parametrize("kills", [pytest.param(2, id="2"), pytest.param(20, id="20", marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(kills: int, tmp_path: Path) -> None:
    stream(tmp_path / "clicks.parquet", 60_000 if kills < 10 else 600_000)
    done = []
    for name, deaths in (("whole", 0), ("killed", kills)):
        command = run(tmp_path, "--checkpoint", str(tmp_path / name), "--every", "5000" if kills < 10 else "10000")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        moments, killed = random.Random(0), 0
        while True:
            process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            if killed < deaths:
                _wait_for_progress(tmp_path / name, process)
                time.sleep(moments.uniform(0, 0.1))
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    killed += 1
            _, error = process.communicate()
            if process.returncode != -signal.SIGKILL:
                assert process.returncode == 0, error
                break
        assert killed == deaths or deaths == 0
        learned = _state(tmp_path / name)
        done.append(learned)
    whole, killed_state = done
    assert whole.keys() == killed_state.keys()
    for name, value in whole.items():
        assert torch.equal(value, killed_state[name]), name


def _wait_for_progress(folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until there is one more checkpoint, or the process has ended."""
    before = {path.name for path in folder.glob("*")}
    while process.poll() is None and {path.name for path in folder.glob("*")} <= before:
        time.sleep(0.005)


def _state(folder: Path) -> dict[str, torch.Tensor]:
    from cadam.online.persistence.checkpoints import Checkpoints

    checkpoints = Checkpoints(folder, 3)
    found = checkpoints.load_newest()
    checkpoints.close()
    assert found is not None
    content: dict[str, torch.Tensor] = dict(found[1]["model"])
    for param, moments in found[1]["optimizer"]["state"].items():
        content |= {f"{param} {name}": value for name, value in moments.items()}
    content["loss"] = torch.tensor(found[1]["metrics"][0]["loss"], dtype=torch.float64)
    return content
