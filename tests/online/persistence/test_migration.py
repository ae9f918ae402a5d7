"""Migration of a state: what is kept, and that a learner continues with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cadam.cli.main import main
from cadam.online import Events, Learner, Schema, models
from cadam.online.models.model_file import LOG_LOSS, OptimizerSpec, UsageError
from cadam.online.persistence.checkpoints import list_checkpoints, read_newest
from cadam.online.persistence.migration import Migration, change_schema
from cadam.online.run_config import RunConfig

SCHEMA = Schema(
    {"item": "hash:10", "price": "number", "tags": "hash:7[2]?", "shop": "category:3", "user": "id:max=20?"},
    label="click",
    id="key",
)
ADDED = {"brand": "hash:9?", "rating": "number?", "word": "words:5[3]?", "seller": "id:max=5?"}


def records(count: int, first: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(first)
    return [
        {
            **{"key": first + number, "item": int(random.integers(30)), "price": float(random.normal())},
            **{"tags": [int(random.integers(9))], "shop": int(random.integers(3)), "user": int(random.integers(30))},
            "click": int(random.random() < 0.3),
        }
        for number in range(count)
    ]


def encode(schema: Schema, events: list[dict[str, Any]]) -> Events:
    """Encode events with their labels."""
    encoded = schema.encode(events).events
    assert encoded is not None
    return replace(encoded, labels=np.array([event["click"] for event in events], np.float32))


def train(model: str, optimizer: str = "CAdam", count: int = 200, **checkpoint: Any) -> Learner:
    torch.manual_seed(0)
    network = models.build(model, SCHEMA)
    learner = Learner(network, OptimizerSpec.parse(optimizer).build(network, 0.01), LOG_LOSS, **checkpoint)
    for start in range(0, count, 20):
        learner.learn(encode(SCHEMA, records(20, start)))
    learner.predict(encode(SCHEMA, records(5, 10_000)))
    return learner


def load(migration: Migration, state: dict[str, Any]) -> Learner:
    """Create a learner of the new schema with the migrated state."""
    migrated = migration.state(state)
    network = models.build(migration.model, migration.new, hidden=migration.new_settings.get("hidden"))
    spec = OptimizerSpec.parse(migrated["optimizer_name"])
    learner = Learner(network, spec.build(network, 0.01), LOG_LOSS)
    learner.load_state_dict(migrated)
    return learner


def scores(learner: Learner, schema: Schema) -> Any:
    events = encode(schema, records(50, 500))
    return learner.training.predict(events.features, len(events))


@pytest.mark.parametrize("model", ["linear", "fm", "deepfm", "dcn", "mlp"])
def test_new_and_larger_columns_change_no_score_and_are_learned(model: str) -> None:
    learner = train(model)
    new = change_schema(SCHEMA, ADDED, [], {"item": "hash:30", "tags": "hash:13[2]?", "shop": "category:5"})
    migrated = load(Migration(model, {}, SCHEMA, new), learner.state_dict())
    before = scores(learner, SCHEMA)
    np.testing.assert_allclose(scores(migrated, new), before, rtol=1e-4, atol=1e-5)
    assert len(migrated.pending) == 5
    assert migrated.learned == learner.learned
    migrated.observe([10_000, 10_001], [1, 0])  # pending events have the new columns, as missing values
    more = [{**record, "brand": "b", "rating": 1.5, "word": "red", "seller": 3} for record in records(100, 20_000)]
    for start in range(0, 100, 20):
        migrated.learn(encode(new, more[start : start + 20]))
    assert migrated.learned == learner.learned + 102
    changed = [{**record, "brand": "other", "seller": 4} for record in more]
    first, second = (migrated.training.predict(encode(new, each).features, 100) for each in (more, changed))
    assert not np.allclose(first, second), "the new columns matter"


def test_moments_are_kept_and_dropped_columns_are_gone() -> None:
    learner = train("deepfm")
    new = change_schema(SCHEMA, {}, ["tags", "user"], {"item": "hash:20"})
    migrated = load(Migration("deepfm", {}, SCHEMA, new), learner.state_dict())
    assert "feature/tags" not in migrated.pending.ring
    pairs: Any = [(each.model.inputs, each.optimizer.state_dict()) for each in (learner, migrated)]
    (old_inputs, old_state), (new_inputs, new_state) = pairs
    keys = [
        names.index("inputs.table.weight")
        for names in (list(dict(each.named_parameters())) for each in (learner.model, migrated.model))
    ]
    for old, new_values in (
        (old_inputs.table.weight, new_inputs.table.weight),
        (old_state["state"][keys[0]]["exp_avg"], new_state["state"][keys[1]]["exp_avg"]),
        (old_state["state"][keys[0]]["exp_avg_sq"], new_state["state"][keys[1]]["exp_avg_sq"]),
    ):
        assert bool(old.any())
        for name, copies in (("item", 2), ("shop", 1)):
            start, size = old_inputs.row_ranges[name]
            new_start, new_size = new_inputs.row_ranges[name]
            assert new_size == copies * size
            expected = old[start : start + size].repeat(copies, 1)
            torch.testing.assert_close(new_values[new_start : new_start + new_size], expected, rtol=0, atol=0)
        torch.testing.assert_close(new_values[-17:], old[-17:], rtol=0, atol=0)  # the bins of the price
    torch.testing.assert_close(new_inputs.normalizer.sample, old_inputs.normalizer.sample)


@pytest.mark.parametrize(("old", "new"), [("Adam", "CAdam"), ("CAdam", "Adam")])
def test_another_optimizer_continues_with_the_moments(old: str, new: str) -> None:
    learner = train("fm", old)
    migrated = load(Migration("fm", {}, SCHEMA, SCHEMA, OptimizerSpec.parse(new), 0.02), learner.state_dict())
    assert type(migrated.optimizer).__name__ == new
    assert migrated.optimizer.param_groups[0]["lr"] == 0.02
    before, after = (each.optimizer.state_dict()["state"] for each in (learner, migrated))
    for key, values in before.items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(values[name], after[key][name])
    np.testing.assert_array_equal(scores(migrated, SCHEMA), scores(learner, SCHEMA))


def test_a_tuned_learning_rate_is_fixed() -> None:
    learner = train("fm", tune_rate=True)
    state = learner.state_dict()
    assert state["rate_tuning"] is not None
    rate = learner.optimizer.param_groups[0]["lr"]
    migration = Migration("fm", {}, SCHEMA, change_schema(SCHEMA, {}, ["tags"], {}))
    assert any(line.startswith("learning rate: ") for line in migration.describe(state, 0))
    migrated = load(migration, state)
    assert migrated.rate_tuning is None
    assert migrated.optimizer.param_groups[0]["lr"] == rate


@pytest.mark.parametrize(
    ("resize", "is_warned"),
    [
        ({"item": "hash:20"}, True),
        ({"item": "hash:15"}, True),
        ({"item": "hash:5"}, False),
        ({"shop": "category:9"}, False),
    ],
)
def test_events_that_wait_have_the_new_bucket_or_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resize: dict[str, str], is_warned: bool
) -> None:
    learner = train("fm", checkpoint=tmp_path)
    RunConfig("", SCHEMA, "fm", lambda: models.build("fm", SCHEMA), LOG_LOSS, {}).write(tmp_path)
    learner.save()
    learner.close()
    [(name, kind)] = resize.items()
    assert main(["migrate", str(tmp_path), "--resize", f"{name}={kind}"]) == 0
    warning = f"warning: 5 events that wait to be learned are stored with their old rows of {name}"
    assert (warning in capsys.readouterr().out) == is_warned
    new = encode(change_schema(SCHEMA, {}, [], resize), records(5, 10_000))
    pending = read_newest(tmp_path)[1]["pending"]
    assert len(pending["number_of"]["keys"]) == 5
    assert np.array_equal(pending["rows"][f"feature/{name}"], new.features[name]) == (not is_warned)


def test_impossible_changes_are_refused() -> None:
    for arguments, reason in (
        (({"brand": "hash:9"}, [], {}), "must be optional"),
        (({"item": "hash:9?"}, [], {}), "already a feature"),
        (({}, ["brand"], {}), "no feature 'brand'"),
        (({}, [], {"shop": "category:2"}), "not removed"),
        (({}, [], {"user": "id:max=30?"}), "only the size of hash"),
        (({}, [], {"item": "category:10"}), "only the size of hash"),
        (({"brand": "what"}, [], {}), "unknown kind"),
    ):
        with pytest.raises(UsageError, match=reason):
            change_schema(SCHEMA, *arguments)
    state = train("fm", "CAdam:moments=int8").state_dict()
    with pytest.raises(UsageError, match="quantized"):
        Migration("fm", {}, SCHEMA, change_schema(SCHEMA, {}, [], {"item": "hash:20"})).state(state)


def test_a_folder_is_migrated_as_a_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learner = train("deepfm", checkpoint=tmp_path)
    RunConfig("", SCHEMA, "deepfm", lambda: models.build("deepfm", SCHEMA), LOG_LOSS, {}).write(tmp_path)
    learner.save()
    command = ["migrate", str(tmp_path), "--add", "brand=hash:9?", "--drop", "tags", "--resize", "item=hash:20"]
    assert main([*command, "--dry-run"]) == 0
    assert main(command) == 1, "the learner still uses the folder"
    learner.close()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main([*command, "--optimizer", "adam", "--dry-run"]) == 0
    output = capsys.readouterr().out
    for line in ("brand: new", "item: hash:10 becomes hash:20; 20 of 20 rows", "tags: dropped", "CAdam becomes Adam"):
        assert line in output
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert main([*command, "--optimizer", "adam"]) == 0
    schema = Schema.read(tmp_path / "schema.json")
    assert list(schema.features) == ["item", "price", "shop", "user", "brand"]
    assert len(list_checkpoints(tmp_path)) == 1
    assert list_checkpoints(tmp_path / "before-migration")
    assert Schema.read(tmp_path / "before-migration" / "schema.json") == SCHEMA
    _, state = read_newest(tmp_path)
    network = models.build("deepfm", schema, hidden=[32])
    resumed = Learner(network, OptimizerSpec.parse("adam").build(network, 0.01), LOG_LOSS, checkpoint=tmp_path)
    assert resumed.resume()
    assert resumed.events == state["counts"]["events"] == learner.events
    resumed.close()
    assert main(["migrate", str(tmp_path), "--drop", "tags"]) == 2
    assert main(["migrate", str(tmp_path)]) == 2
    assert main(["migrate", str(tmp_path / "absent"), "--drop", "tags"]) == 2


def test_a_run_continues_with_the_optimizer_of_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = tmp_path / "clicks.csv", tmp_path / "state"
    rows = [f"{number % 37},{number % 2}" for number in range(300)]
    data.write_text("\n".join(["item,click", *rows, ""]))
    command = ["run", str(data), "--label", "click", "--model", "fm", "--checkpoint", str(folder), "--quiet"]
    assert main([*command, "--events", "100"]) == 0
    assert main(["migrate", str(folder), "--optimizer", "adam"]) == 0
    assert main([*command, "--events", "200"]) == 0
    assert main([*command, "--optimizer", "cadam"]) == 2
    assert "a learner with Adam, but this one has CAdam" in capsys.readouterr().err
    assert main(command) == 0
    state = read_newest(folder)[1]
    assert (state["optimizer_name"], state["counts"]["events"]) == ("Adam", 300)


@pytest.mark.parametrize("change", [["--add", "brand=hash:50?"], ["--resize", "item=hash:10?"]])
def test_a_run_that_stopped_in_the_middle_of_a_batch_continues_after_a_migration(
    tmp_path: Path, change: list[str]
) -> None:
    data, schema, folder = tmp_path / "full.csv", tmp_path / "schema.json", tmp_path / "state"
    rows = [f"{number % 37},{number % 7},b{number % 5},{number % 2}" for number in range(400)]
    data.write_text("\n".join(["item,price,brand,click", *rows, ""]))
    Schema({"item": "hash:30?", "price": "number"}, label="click").write(schema)
    command = ["run", str(data), "--model", "fm", "--batch-size", "100", "--lr", "0.01", "--checkpoint", str(folder)]
    assert main([*command, "--schema", str(schema), "--events", "250", "--quiet"]) == 0
    assert main(["migrate", str(folder), *change]) == 0
    new = Schema.read(folder / "schema.json")
    _, state = read_newest(folder)
    rest = state["source"]["rest_of_batch"]["events"]
    assert {name for name in rest if name.startswith("feature/")} == {f"feature/{name}" for name in new.features}
    assert all(rest["feature/item"] < new.kinds["item"].size)
    assert main([*command, "--quiet"]) == 0
    counts = read_newest(folder)[1]["counts"]
    assert (counts["events"], counts["learned_events"], counts["rejected"]) == (400, 400, 0)
