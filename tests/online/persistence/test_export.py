"""A loaded or exported model, also behind HTTP, predicts like its learner."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadam.cli import main
from cadam.cli.exit_codes import NO_PACKAGE, USAGE
from cadam.online import DamagedCheckpointError, Events, Schema, load_model, models
from cadam.online.models.model_file import UsageError
from cadam.online.persistence.export import LoadedModel, export
from tests.cli.test_run import HERE, MODEL, run
from tests.documented import blocks
from tests.online.data.test_sources import write_jsonl
from tests.online.streams import SCHEMA, build, events, learner, table

EXPORT = Path(__file__).parents[3] / "docs" / "export.md"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("run")
    write_jsonl(folder / "a.jsonl", table(3000))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        data = ("--data", f"jsonl:{folder / 'a.jsonl'}", "--batch-size", 50, "--lr", 0.05)
        assert run(*data, "--checkpoint", folder / "state", "--quiet") == 0
        yield folder / "state"


def learnt_scores(state: Path, given: Events) -> np.ndarray:
    """The predictions of the resumed learner."""
    ours = learner(build(seed=3), checkpoint=state)
    assert ours.resume()
    ours.close()
    return ours.training.predict(given.features, len(given))


def agree(found: np.ndarray, expected: np.ndarray) -> bool:
    """Predictions agree to the precision of float32, since batches of another size may be added in another order."""
    return found.shape == expected.shape and bool(np.abs(found - expected).max() <= 1e-6)


def test_the_model_of_a_checkpoint_predicts_like_its_learner(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = events(500, seed=9)
    monkeypatch.chdir(tmp_path)
    loaded = load_model(state, MODEL)
    expected = learnt_scores(state, given)
    assert loaded.schema == SCHEMA
    assert loaded.events == 3000
    assert not any(module.training for module in loaded.model.modules())
    assert agree(loaded.scores(given.features), expected)
    raw = {name: values.tolist() for name, values in table(500, seed=9).items()}
    records = [{name: values[row] for name, values in raw.items() if name in SCHEMA.features} for row in range(500)]
    assert agree(loaded.predict(records), expected)
    records[3] = {"user": 1, "item": 10**6, "price": 0.0}
    records[4] = {"user": 1}
    found = loaded.predict(records)
    assert np.flatnonzero(np.isnan(found)).tolist() == [3, 4]
    assert agree(np.delete(found, [3, 4]), np.delete(expected, [3, 4]))
    as_text = [{name: str(value) for name, value in record.items()} for record in records[:3]]
    assert agree(loaded.predict(as_text, text=True), expected[:3])


def test_a_model_is_loaded_while_its_learner_runs_and_from_the_newest_good_checkpoint(tmp_path: Path) -> None:
    ours = learner(checkpoint=tmp_path)
    for first in (0, 100):
        ours.learn(events(100, first=first))
        ours.save()
    loaded = load_model(tmp_path, build(seed=5), SCHEMA)
    assert loaded.events == 200
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), ours.model.parameters(), strict=True))
    files = sorted(tmp_path.glob("checkpoint-*"))
    files[-1].write_bytes(files[-1].read_bytes()[:-1])
    assert load_model(tmp_path, build(seed=5), SCHEMA).events == 100
    assert sorted(tmp_path.glob("checkpoint-*")) == files  # loading renames no file
    files[0].unlink()
    with pytest.raises(DamagedCheckpointError, match="none of the 1 checkpoints"):
        load_model(tmp_path, build(seed=5), SCHEMA)
    ours.close()


def test_a_folder_that_does_not_fit_is_reported(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
            return price * self.weight

    with pytest.raises(ValueError, match=r"weights in .*checkpoint-.* belong to another model"):
        load_model(state, Other())
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"lacks model.json"):
        load_model(tmp_path)
    assert main.main(["export", str(state), str(tmp_path / "model.bin")]) == 2
    assert ".pt2" in capsys.readouterr().err
    assert main.main(["export", str(tmp_path), str(tmp_path / "model.pt2")]) == 2
    assert "lacks model.json" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["export", "load_model", "run"])
def test_a_checkpoint_folder_never_imports_the_file_that_it_names(
    command: str, state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(state, tmp_path / "folder")
    file = tmp_path / "not mine.py"
    file.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'imported')!r}).touch()\n")
    (folder / "model.json").write_text(json.dumps({"model": f"{file}:build"}))
    if command == "load_model":
        with pytest.raises(UsageError, match=re.escape(f"--model '{file}:build'")):
            load_model(folder)
    else:
        rest: list[object] = [folder, tmp_path / "model.pt2"]
        if command == "run":
            rest = [state.parent / "a.jsonl", "--checkpoint", folder]
        assert main.main([command, *map(str, rest)]) == USAGE
        assert f"--model '{file}:build'" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    "settings", [{"width": "8"}, {"width": -1}, {"hidden": [8, "x"]}, {"hidden": 3}, {"width": True}]
)
def test_sizes_in_model_json_that_are_not_sizes_are_reported(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"model": "deepfm", **settings}))
    SCHEMA.write(tmp_path / "schema.json")
    with pytest.raises(UsageError, match=r"model\.json is damaged"):
        load_model(tmp_path)


def test_without_safetensors_the_command_says_what_to_install(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main.main(["export", str(state), str(tmp_path / "model.pt2"), "--model", MODEL]) == NO_PACKAGE
    assert "needs safetensors" in capsys.readouterr().err


TORCH_ALONE = """
import json, sys
import torch

given = torch.load("inputs.pt")
model = torch.export.load("model.pt2").module()
torch.save([model(dict(reversed(features.items()))).detach() for features in given], "scores.pt")
assert not any(name.partition(".")[0] == "cadam" for name in sys.modules)
"""


@pytest.fixture(scope="module")
def exported(state: Path) -> Path:
    """A folder with the exported model."""
    path = state.parent / "exported" / "model.pt2"
    assert main.main(["export", str(state), str(path), "--model", MODEL]) == 0
    return path.parent


def test_the_exported_model_scores_as_the_learner_does_in_a_process_with_torch_alone(
    state: Path, exported: Path
) -> None:
    counts = (1, 2, 7, 1000)
    given = [events(count, seed=count) for count in counts]
    inputs = [{n: torch.from_numpy(v) for n, v in one.features.items()} for one in given]
    torch.save([{**one, "price": one["price"].double()} for one in inputs], exported / "inputs.pt")
    subprocess.run([sys.executable, "-I", "-c", TORCH_ALONE], cwd=exported, check=True, timeout=120)
    for one, scores in zip(given, torch.load(exported / "scores.pt"), strict=True):
        assert agree(scores.numpy(), learnt_scores(state, one))
    weights = torch.load(exported / "model.pt", weights_only=True)
    loaded = load_model(state, MODEL)
    assert all(torch.equal(value, weights[name]) for name, value in loaded.model.state_dict().items())
    inside = {"schema.json": ""}
    torch.export.load(exported / "model.pt2", extra_files=inside)
    assert json.loads(inside["schema.json"]) == json.loads((exported / "model.schema.json").read_text())
    assert sorted(path.name for path in exported.glob("*model*")) == ["model.pt", "model.pt2", "model.schema.json"]


EVERY_KIND = Schema(
    {
        "user": "hash:100",
        "item": "category:20",
        "price": "number?",
        "sizes": "number[3]",
        "words": "hash:50[4]?",
        "colour": "hash:9?",
        "at": "clock:iso?",
    },
    label="click",
)


def raw_events(count: int, seed: int) -> list[dict[str, Any]]:
    """Events of every kind of feature, some of whose values are missing."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        event = {
            "user": f"user {random.integers(60)}",
            "item": int(random.integers(20)),
            "price": None if random.random() < 0.2 else float(random.lognormal()),
            "sizes": random.normal(size=3).tolist(),
            "words": [f"word {n}" for n in random.integers(30, size=random.integers(6))],
            "colour": None if random.random() < 0.2 else str(random.integers(9)),
            "at": None if random.random() < 0.2 else f"2026-01-{random.integers(1, 29):02d}T10:00:00",
        }
        found.append({**event, "click": int(event["item"] > 12)})
    return found


@pytest.mark.parametrize(
    "kinds", [["deepfm"], pytest.param([*models.MODELS], marks=pytest.mark.slow)], ids=["default", "all"]
)
def test_ready_made_models_are_exported_and_score_like_their_learners(kinds: list[str], tmp_path: Path) -> None:
    given, expected = raw_events(200, seed=1), {}
    for name in kinds:
        folder = tmp_path / name
        torch.manual_seed(0)
        model = models.build(name, EVERY_KIND)
        ours = learner(model, checkpoint=folder)
        for seed in range(2, 8):
            ours.process(EVERY_KIND.convert_records(raw_events(50, seed), [""] * 50))
        ours.save()
        ours.close()
        EVERY_KIND.write(folder / "schema.json")
        (folder / "model.json").write_text(json.dumps({"model": name}))
        events = EVERY_KIND.convert_records(given, [""] * 200).events
        assert events is not None
        expected[name] = ours.training.predict(events.features, 200)
        assert expected[name].std() > 0.001
        loaded = load_model(folder)
        assert agree(loaded.predict(given), expected[name])
        export(loaded, folder / "model.pt2")
        torch.save([{name: torch.from_numpy(v) for name, v in events.features.items()}], folder / "inputs.pt")
    lines = "\n".join(f"    {line}" for line in TORCH_ALONE.splitlines())
    names = sorted(expected)
    code = f"import os\nfor name in {names}:\n    os.chdir(name)\n{lines}\n    os.chdir('..')"
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, check=True, timeout=120)
    for name in names:
        assert agree(torch.load(tmp_path / name / "scores.pt")[0].numpy(), expected[name]), name


def test_a_model_that_cannot_be_exported_leaves_its_weights_and_a_reason(tmp_path: Path) -> None:
    class Branching(type(build())):  # type: ignore[misc]
        def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
            scores: Tensor = super().forward(user, item, price)
            return scores if bool(price.sum() > 0) else -scores

    ours = learner(checkpoint=tmp_path / "state")
    ours.learn(events(10))
    ours.save()
    ours.close()
    with pytest.raises(RuntimeError, match=r"torch.export does not support this model .*model\.pt has its weights"):
        export(load_model(tmp_path / "state", Branching(), SCHEMA), tmp_path / "model.pt2")
    assert sorted(path.name for path in tmp_path.glob("*model*")) == ["model.pt", "model.schema.json"]


def test_the_page_works_from_its_first_command_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(next(b.code for b in blocks(EXPORT.with_name("your_data.md")) if b.language == "python"), {})
    for block in blocks(EXPORT):
        if not block.marks.get("tested in", "").endswith("test_export.py"):
            continue
        names: dict[str, Any] = {}
        for line in block.code.splitlines() if block.language == "sh" else ():
            if line.startswith("cadam "):
                assert main.main(shlex.split(line, comments=True)[1:]) == 0, line
        if block.language == "python":
            exec(block.code, names)
        if "loaded" in names:
            likely, unlikely = names["loaded"].predict([names["event"], {**names["event"], "item_id": 6}])
            assert likely > unlikely
        if "scores" in names:
            predicted = torch.from_numpy(load_model("runs/clicks").predict([names["event"]]))
            torch.testing.assert_close(names["scores"].detach(), predicted, rtol=1e-5, atol=1e-6)


def test_an_event_that_has_none_of_the_columns_is_rejected_with_a_reason() -> None:
    schema = Schema({"a": "category:5?", "b": "number?"}, label="y", id="i", time="t")
    batch = schema.encode([{"A": 1}, {"b": None}, {}, {"a": 2, "c": 3}, {"a": 9}])
    assert batch.events is not None
    assert len(batch.events) == 2
    assert [one.where for one in batch.rejected] == ["0", "2", "4"]
    reason = "the event has none of the model's columns (a, b)"
    assert [one.reason == reason for one in batch.rejected] == [True, True, False]
    nothing = schema.encode([{"A": 1}])
    assert nothing.events is None
    assert len(nothing.rejected) == 1
    model = models.Linear(schema)
    found = LoadedModel(model.eval(), schema, Path("none"), 0).predict([{"A": 1}, {"a": 2}])
    assert np.isnan(found).tolist() == [True, False]
    assert LoadedModel(model, schema, Path("none"), 0).predict([]).tolist() == []


def test_predict_logs_the_reason_of_the_first_rejected_event_once(caplog: pytest.LogCaptureFixture) -> None:
    schema = Schema({"price": "number?"}, label="y")
    loaded = LoadedModel(models.Linear(schema).eval(), schema, Path("none"), 0)
    for _ in range(2):
        assert np.isnan(loaded.predict([{"price": 1.0}, {"price": "cheap"}, {"price": "dear"}])).tolist() == [0, 1, 1]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "price" in message
    assert "'cheap'" in message
    assert "2 of 3" in message


@pytest.mark.parametrize("records", [{"price": 1.0}, ["price"], [{"price": 1.0}, None], "price"])
def test_predict_requires_a_list_of_records(records: Any) -> None:
    schema = Schema({"price": "number?"}, label="y")
    loaded = LoadedModel(models.Linear(schema).eval(), schema, Path("none"), 0)
    with pytest.raises(TypeError, match="list of records"):
        loaded.predict(records)
