"""The command `cadam run`."""

from __future__ import annotations

import json
import os
import re
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

from cadam import online
from cadam.cli import main, writable_paths
from cadam.cli.exit_codes import NO_PACKAGE
from cadam.online import LinesSource, Schema, measure, recompute
from cadam.online.data.validation import MismatchError, check_arguments, check_columns
from cadam.online.models.model_file import OptimizerSpec, UsageError
from cadam.online.persistence.checkpoints import read_newest
from cadam.online.persistence.prediction_log import PredictionLog
from cadam.online.training_step import default_threads
from tests.online.data.test_sources import write_csv, write_jsonl, write_parquet
from tests.online.streams import build, learner, table

HERE = Path(__file__).parents[1] / "online"
MODEL = f"{HERE / 'model_file.py'}:build"


# The command ---------------------------------------------------------------------------------------------------

SPARSE_MODEL = """
import torch
from cadam.online import Schema

SCHEMA = Schema({"price": "number"}, label="click")


class Model(torch.nn.Linear):
    def forward(self, price):
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,))
        return super().forward(price[:, None]).squeeze(1)


def build():
    return Model(1, 1)
"""
"""A model for which torch warns that the ids of sparse tensors are not checked, unless the process has chosen that."""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "cadam", "run", "--model", MODEL, *map(str, arguments)]


PATHS = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}


def test_torch_does_not_warn_about_sparse_tensors(tmp_path: Path) -> None:
    (tmp_path / "sparse_model.py").write_text(SPARSE_MODEL)
    write_jsonl(tmp_path / "clicks.jsonl", table(100))
    options = ("--model", "sparse_model.py:build", "--data", "jsonl:clicks.jsonl")
    arguments = [sys.executable, "-m", "cadam", "run", *options]
    process = subprocess.run(arguments, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert "Sparse invariant" not in process.stderr


def test_sigterm_saves_a_checkpoint_and_the_same_command_resumes(tmp_path: Path) -> None:
    lines = tmp_path / "clicks.jsonl"
    write_jsonl(lines, table(1000))
    arguments = command(
        "--data", f"jsonl:{lines}", "--checkpoint", tmp_path / "state", "--log", tmp_path / "log", "--batch-size", 50,
        "--lr", 0.01,
    )  # fmt: skip
    console = tmp_path / "console"
    with (
        console.open("w") as out,
        subprocess.Popen([*arguments, "--follow"], env=ENVIRONMENT, stdout=out, stderr=-1, text=True) as process,
    ):
        for _ in range(1200):
            if console.read_text():  # it learns, and handles signals since before that
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert "SIGTERM: finishing the batch" in error
    assert "stopped at" in error
    assert "events  average" in console.read_text()
    write_jsonl(lines, table(500, first=1000), "a")
    again = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr
    assert "resumed from" in again.stderr
    assert "the stream has ended at 1,500 events" in again.stderr
    assert sorted(pq.read_table(tmp_path / "log")["id"].to_pylist()) == list(range(1500))


def run(*arguments: object) -> int:
    return main.main(["run", "--model", MODEL, *map(str, arguments)])


def test_a_last_checkpoint_that_could_not_be_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_csv(tmp_path / "events.csv", table(300))
    arguments = ("--data", f"csv:{tmp_path / 'events.csv'}", "--checkpoint", tmp_path / "state", "--batch-size", 50)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cadam.online.persistence.checkpoints.Checkpoints.save", full)
        assert run(*arguments) == 1
    assert "could not be written; the same command starts from the beginning" in capsys.readouterr().err
    assert run(*arguments, "--events", 100) == 0
    with monkeypatch.context() as patch:
        patch.setattr("cadam.online.persistence.checkpoints.Checkpoints.save", full)
        assert run(*arguments) == 1
    told = capsys.readouterr().err
    assert "the last checkpoint, at 300 events, could not be written" in told
    assert "the same command resumes from the one before it" in told
    assert "the checkpoint is in" not in told.split("could not be written")[1]
    assert run(*arguments) == 0


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--patience", "nan", "--patience must be"),
        ("--patience", "-1", "--patience must be"),
        ("--events", "-5", "--events must be at least 1, got -5"),
        ("--seed", str(2**64), "--seed must have at most 64 bits"),
        ("--threads", "100000", "--threads must be at most 1024"),
    ],
)
def test_invalid_numbers_are_rejected(
    option: str, value: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--data", "csv:nowhere.csv", "--checkpoint", tmp_path / "state", option, value) == 2
    assert told in capsys.readouterr().err


def test_events_with_the_id_of_an_earlier_event_are_counted_in_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text(
        "id,x,y\n" + "".join(f"{row // 2},{row % 7},{row % 3 // 2}\n" for row in range(300))
    )
    arguments = ["run", str(tmp_path / "a.csv"), "--label", "y", "--id", "id", "--checkpoint", str(tmp_path / "state")]
    assert main.main(arguments) == 0
    assert "150 had the id of an earlier event and were not learned from again" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "threads"), [((), 1), (("--threads", 3), 3)])
def test_a_small_model_uses_one_thread_unless_another_number_is_given(
    options: tuple[object, ...], threads: int, tmp_path: Path
) -> None:
    write_csv(tmp_path / "events.csv", table(100))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run("--data", f"csv:{tmp_path / 'events.csv'}", "--checkpoint", tmp_path / "state", *options) == 0
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_the_default_number_of_threads_depends_on_dense_weights_and_batch_size() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tables = online.models.build("deepfm", Schema({"user": "hash:10000000"}, label="click"))
        assert default_threads(tables, 1024) == 1
        large = torch.nn.Linear(1000, 1000)
        assert [default_threads(large, size) for size in (1, 64, 1024)] == [1, 1, 2]
    finally:
        torch.set_num_threads(before)


def test_a_signal_while_the_state_is_read_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_csv(tmp_path / "events.csv", table(300))
    arguments = ("--data", f"csv:{tmp_path / 'events.csv'}", "--checkpoint", tmp_path / "state", "--batch-size", 50)
    assert run(*arguments, "--events", 100) == 0
    load = online.learner.Learner.load_state_dict

    def interrupted(self: Any, state: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        load(self, state)

    monkeypatch.setattr(online.learner.Learner, "load_state_dict", interrupted)
    assert run(*arguments, "--follow") == 0  # otherwise it would wait forever
    with monkeypatch.context() as patch:
        patch.setattr(online.learner.Learner, "load_state_dict", load)
        assert run(*arguments, "--events", 150) == 0


def test_a_run_in_this_process_starts_from_a_torch_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_parquet(tmp_path / "a.parquet", table(300))
    model = build(seed=7)
    adam = torch.optim.Adam(model.parameters())
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "old.pt")
    data, state = f"parquet:{tmp_path / 'a.parquet'}", tmp_path / "state"
    assert run("--data", data, "--checkpoint", state, "--warm-start", tmp_path / "old.pt", "--lr", 1e-9) == 0
    assert "300" in capsys.readouterr().out
    after = learner(checkpoint=state)
    assert after.resume()
    assert torch.allclose(after.model.get_parameter("users.weight"), model.users.weight, atol=1e-6)
    after.close()
    schema = {"features": {"user": "category:50", "item": "category:20", "price": "number"}, "label": "click"}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    arguments = ("--data", data, "--checkpoint", tmp_path / "s2", "--schema", tmp_path / "schema.json", "--quiet")
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    assert run(*arguments, "--optimizer", "adamw", "--prometheus", tmp_path / "p.prom") == 0
    assert capsys.readouterr().out == ""
    assert "cadam_events 300.0\n" in (tmp_path / "p.prom").read_text()


FEATURES = {"user": "category:50", "item": "category:20", "price": "number"}


@pytest.mark.parametrize(
    ("features", "label", "message"),
    [
        (dict(reversed(FEATURES.items())), "click", "the order of the features was user, item, price and is price,"),
        ({**FEATURES, "user": "hash:50"}, "click", "user was category:50 and is hash:50"),
        ({**FEATURES, "user": "category:20", "item": "category:50"}, "click", "user was category:50 and is category:2"),
        ({"user": "category:50", "item": "category:20"}, "click", "price was number"),
        (FEATURES, "click!=1", "the label was click and is click!=1"),
        ({**FEATURES, "price": "number?"}, "click", ""),
    ],
)
def test_a_run_does_not_resume_with_another_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], features: dict[str, str], label: str, message: str
) -> None:
    write_parquet(tmp_path / "a.parquet", table(300))
    data = ("--data", f"parquet:{tmp_path / 'a.parquet'}", "--schema", tmp_path / "schema.json")
    arguments = (*data, "--checkpoint", tmp_path / "state", "--model", "linear")
    (tmp_path / "schema.json").write_text(json.dumps({"features": FEATURES, "label": "click"}))
    assert run(*arguments) == 0
    kept = {path: path.read_bytes() for path in (tmp_path / "state").iterdir()}
    (tmp_path / "schema.json").write_text(json.dumps({"features": features, "label": label}))
    assert run(*arguments) == (2 if message else 0)
    error = capsys.readouterr().err
    assert message in error
    assert ("trained with another schema" in error) == bool(message)
    if message:
        assert {path: path.read_bytes() for path in (tmp_path / "state").iterdir()} == kept, "nothing has changed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": "at"}, "the weight was none and is at"),
        ({"id": "at:text"}, "the id was event and is at:text"),
        ({"user": None}, "the user was user and is none"),
        ({"time": "at"}, "the time was none and is at"),
        ({"id": "event:integer"}, ""),
    ],
)
def test_a_run_with_waiting_events_does_not_resume_with_other_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    columns, schema = table(400), Schema(FEATURES, "click", id="event", user="user")
    write_csv(tmp_path / "a.csv", {name: values[:300] for name, values in columns.items()})
    schema.write(tmp_path / "schema.json")
    arguments = [tmp_path / "a.csv", "--schema", tmp_path / "schema.json", "--checkpoint", tmp_path / "state"]
    arguments += ["--model", "linear", "--horizon", 100]
    assert run(*arguments) == 0
    write_csv(tmp_path / "a.csv", columns)
    replace(schema, **change).write(tmp_path / "schema.json")
    assert run(*arguments) == (2 if message else 0)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": {**FEATURES, "price": "number[1]"}}, "price was number and is number[1]"),
        ({"features": dict(reversed(FEATURES.items()))}, "the order of the features was"),
        ({"time": "at:ms"}, "the time was at and is at:ms"),
        ({"time": None}, "the time was at and is none"),
        ({"decimal": ",", "separator": ";"}, "the decimal separator was . and is ,"),
        ({"negative_rate": 0.5}, ""),
    ],
)
def test_an_edited_schema_in_the_folder_of_a_run_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    columns, schema = table(400), Schema(FEATURES, "click", id="event", time="at")
    write_jsonl(tmp_path / "a.jsonl", {name: values[:300] for name, values in columns.items()})
    schema.write(tmp_path / "schema.json")
    arguments = [tmp_path / "a.jsonl", "--checkpoint", tmp_path / "state", "--model", "linear"]
    given = ["--schema", tmp_path / "schema.json"]
    assert run(*arguments, *given) == 0
    write_jsonl(tmp_path / "a.jsonl", columns)
    saved = tmp_path / "state" / "schema.json"
    replace(schema, **change).write(saved)
    kept = {path: path.read_bytes() for path in (tmp_path / "state").iterdir()}
    capsys.readouterr()
    assert run(*arguments) == (2 if message else 0)
    error = capsys.readouterr().err
    assert (f"{saved} has been edited" in error) == bool(message)
    if message:
        assert message in error
        assert {path: path.read_bytes() for path in (tmp_path / "state").iterdir()} == kept, "nothing has changed"
        assert main.main(["migrate", str(tmp_path / "state"), "--lr", "0.1", "--dry-run"]) == 2
        assert run(*arguments, *given) == 0, "the schema of the first run fits"
        assert Schema.read(saved) == schema


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": "nowhere.py:build"}, "nowhere.py does not exist"),
        ({"--model": "build"}, "no model is called 'build'; there are linear, fm, deepfm"),
        ({"--model": MODEL.replace(":build", ":missing")}, "has no function 'missing'"),
        ({"--model": MODEL.replace(":build", ":nothing")}, "returned a NoneType"),
        ({"--data": "ftp://x"}, "ftp://x does not exist\na source is one of\n  PATH"),
        ({"--data": "clicks.parquet"}, "clicks.parquet does not exist"),
        ({"--checkpoint": "/proc/cadam"}, "--checkpoint: /proc/cadam cannot be written to"),
        ({"--data": "csv:nowhere.csv"}, "nowhere.csv is not a file\n"),
        ({"--data": "csv:/dev/null"}, "/dev/null is not a file: give csv:- and pipe the data to standard input"),
        ({"--optimizer": "adagrad"}, "no optimizer 'adagrad'"),
        ({"--every": "0"}, "must be at least 1 event apart"),
        ({"--unmatched": "negative"}, "--unmatched negative needs --horizon"),
        ({"--unmatched": "negative", "--horizon": "inf", "--model": "nowhere.py:build"}, "needs --horizon"),
        ({"--metrics": "auroc"}, "no metric auroc; there are auc, gauc"),
        ({"--metrics": "auc", "--window": "0"}, "window must be at least 1"),
    ],
)
def test_an_invalid_command_says_why(
    change: dict[str, str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(10))
    given = {"--model": MODEL, "--data": f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint": str(tmp_path / "state")}
    arguments = [part for pair in {**given, **change}.items() for part in pair]
    assert main.main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def build(:\n    pass\n", "own_model.py, line 1: "),
        ("def build():\n    raise RuntimeError('no weights')\n", "own_model.py:build failed: RuntimeError: no weights"),
    ],
)
def test_a_model_file_that_fails_is_named(
    code: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", table(10))
    (tmp_path / "own_model.py").write_text(code)
    (tmp_path / "schema.json").write_text(json.dumps({"features": FEATURES, "label": "click"}))
    options = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state")
    assert run(*options, "--schema", tmp_path / "schema.json", "--model", f"{tmp_path / 'own_model.py'}:build") == 2
    assert message in capsys.readouterr().err


WRONG: dict[str, Any] = {
    "features": {"user": "category:50", "item": "category:20", "prize": "number"},
    "label": "click", "id": "event", "time": "at",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["parquet", "folder", "csv", "jsonl"])
def test_a_misspelled_column_is_named_with_the_existing_columns(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    columns, data = table(10), tmp_path / "data"
    data.mkdir()
    if kind in ("parquet", "folder"):
        write_parquet(data / "a.parquet", columns)
    elif kind == "csv":
        write_csv(data / "a.csv", columns)
    else:
        write_jsonl(data / "a.jsonl", columns)
    uri = f"parquet:{data}" if kind == "folder" else f"{kind}:{data / f'a.{kind}'}"
    (tmp_path / "schema.json").write_text(json.dumps(WRONG))
    assert run("--data", uri, "--checkpoint", tmp_path / "state", "--schema", tmp_path / "schema.json") == 2
    message = "has no column 'prize', which the schema requires; it has event, user, item, price, click, at\n"
    assert capsys.readouterr().err == f"cadam run: {uri.partition(':')[2]} {message}"
    assert not (tmp_path / "state").exists()


def test_rows_after_a_damaged_page_count_as_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.parquet"
    schema = {"features": {"user": "category:50", "item": "category:20", "price": "number"}, "label": "click"}
    names = [*schema["features"], "click"]
    pq.write_table(pa.table(table(1000)).select(names), path, row_group_size=400, use_dictionary=False)
    page = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[page : page + 40] = bytes(40)
    path.write_bytes(content)
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    assert run(path, "--schema", tmp_path / "schema.json", "--checkpoint", tmp_path / "state", "--batch-size", 5) == 1
    error = capsys.readouterr().err
    assert re.search(r"800 events, and 200 rejected \(20\.00%: 200 x the file cannot be read", error)
    assert "more than 1.0% of the events were rejected" in error
    assert "write the damaged file again" in error


@pytest.mark.parametrize("label_first", [True, False])
@pytest.mark.parametrize("label", ["click", "click>=1"])
def test_labels_may_come_in_separate_records(label: str, label_first: bool, tmp_path: Path) -> None:
    schema = Schema(**{**WRONG, "features": {"price": "number"}, "label": label})
    event, late = {"event": 1, "price": 2.0, "at": 3.0}, {"event": 1, "click": 1.0}
    lines = [late] if label_first else [event]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    check_columns(LinesSource(tmp_path / "a.jsonl", schema, "jsonl"), schema)
    without = Schema({"price": "number"}, label=label)
    if not label_first:  # without an id a label can only come with its event
        with pytest.raises(MismatchError, match="has no column 'click'"):
            check_columns(LinesSource(tmp_path / "a.jsonl", without, "jsonl"), without)


def test_a_model_whose_arguments_are_not_the_features_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(10))
    schema = {"features": {"user": "category:50", "item": "category:20"}, "label": "click"}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    data = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--schema", tmp_path / "schema.json")
    assert run(*data, "--checkpoint", tmp_path / "state") == 2
    error = capsys.readouterr().err
    assert (
        "its forward takes user, item, price, but the schema has user, item (missing a required argument: 'p" in error
    )
    assert error.count("\n") == 1


class AnyFeatures(torch.nn.Module):
    def forward(self, **features: torch.Tensor) -> torch.Tensor:
        return features["price"]


class Optional(torch.nn.Module):
    def forward(self, price: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        return weight * price


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit has its own signature
def test_a_model_may_take_features_in_any_way() -> None:
    schema = Schema({"price": "number"})
    models: list[Any] = [AnyFeatures(), Optional(), torch.jit.script(Optional()), torch.compile(Optional())]
    for model in models:
        check_arguments(model, schema, "here")
    with pytest.raises(MismatchError, match="its forward takes input, but the schema has price"):
        check_arguments(torch.nn.Sequential(torch.nn.Linear(1, 1)), schema, "here")


@pytest.mark.parametrize(
    ("package", "more", "advice"),
    [
        ("safetensors", [], "needs safetensors: in a clone of the project, pip install"),
        ("pyarrow", ["--log", "log"], "need pyarrow: pip install pyarrow"),
        ("pyarrow", ["--data", "parquet:here"], "need pyarrow: pip install pyarrow"),
        ("redis", ["--data", "redis://localhost/clicks"], "need redis-py: pip install"),
        ("confluent_kafka", ["--data", "kafka://localhost/clicks"], "needs confluent-kafka: pip install"),
        ("tensorboard", ["--tensorboard", "board"], "needs TensorBoard: pip install tensorboard"),
        ("prometheus_client", ["--status", "0"], "need prometheus_client: pip install prometheus_client"),
        ("prometheus_client", ["--prometheus", "p.prom"], "need prometheus_client: pip install prometheus_client"),
    ],
)
def test_a_missing_package_is_reported_before_anything_is_learned(
    package: str,
    more: list[str],
    advice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    write_jsonl(tmp_path / "a.jsonl", table(10))
    assert run("--data", "jsonl:a.jsonl", "--checkpoint", "state", *more) == NO_PACKAGE
    error = capsys.readouterr().err
    assert advice in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("state/*.safetensors"))


@pytest.mark.parametrize("option", ["--checkpoint", "--log", "--rejected", "--tensorboard", "--prometheus"])
def test_a_path_that_cannot_be_written_is_reported_before_anything_is_learned(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(10))
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "below"
    data = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state")
    assert run(*data, option, place) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cadam run: {option}: {tmp_path / 'file'}")
    assert error.endswith(f"cannot be written to: {tmp_path / 'file'} is not a folder\n")
    assert not (tmp_path / "state").exists()


def test_permissions_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(Path(path)))
    with pytest.raises(
        writable_paths.UnwritableError, match=f"--log: {tmp_path}/a/b cannot be written to: permission denied"
    ):
        writable_paths.check_folder(tmp_path / "a" / "b", "--log")
    assert asked == [tmp_path]
    with pytest.raises(writable_paths.UnwritableError, match=f"--log: {tmp_path} is a folder, not a file"):
        writable_paths.check_file(tmp_path, "--log")


def test_the_command_stops_after_exactly_the_given_number_of_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(1500))
    for most in (500, 600):
        data = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state")
        assert run(*data, "--events", most) == 0
        assert f"done at {most} events" in capsys.readouterr().err


def test_a_reader_that_closes_the_console_ends_the_run_and_the_state_is_saved(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", table(1000))
    arguments = command("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state", "--follow")
    with subprocess.Popen([*arguments, "--batch-size", "50"], env=ENVIRONMENT, stdout=-1, stderr=-1) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b"optimizer CAdam, learning rate 0.001\n"
    ours = learner(checkpoint=tmp_path / "state")
    assert ours.resume()
    assert ours.events > 0
    ours.close()


def test_metrics_are_those_of_the_log_and_continue_after_a_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(1000))
    data = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--batch-size", 50, "--metrics", "gauc,auc,log-loss,calibration")
    shown = []
    for name, stops in (("whole", [1000]), ("stopped", [350, 1000])):
        for stop in stops:
            more = ("--checkpoint", tmp_path / name, "--log", tmp_path / f"{name}-log", "--events", stop)
            assert run(*data, *more, "--window", 500) == 0
            out = capsys.readouterr().out
        shown.append({m[1]: float(m[2]) for m in re.finditer(r"(?m)^([a-z_]+/[a-z_]+?)  +([-.e\d]+|nan)$", out)})
    assert shown[0] == shown[1]
    afterwards = recompute(tmp_path / "stopped-log")
    for name in ("log_loss", "calibration"):
        assert shown[0][f"{name}/total"] == pytest.approx(afterwards[name], rel=1e-5)
    log = pq.read_table(tmp_path / "whole-log").to_pydict()
    last = measure(*(np.array(log[name][500:]) for name in ("score", "label", "user")))
    for name in ("auc", "gauc_by_impressions", "gauc_by_user"):
        assert shown[0][f"{name}/window"] == pytest.approx(last[name], rel=1e-5)


def test_a_run_whose_log_could_not_be_written_fails_and_the_same_command_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(100))
    data = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state", "--log", tmp_path / "log")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PredictionLog, "_write", full)
        assert run(*data, "--quiet") == 1
    assert "100 rows of the prediction log could not be written" in capsys.readouterr().err
    assert run(*data, "--quiet") == 0
    assert pq.read_table(tmp_path / "log").num_rows == 100


def test_labels_that_a_metric_cannot_take_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    columns = table(100)
    columns["click"][7] = 0.25
    write_jsonl(tmp_path / "a.jsonl", columns)
    data = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--quiet")
    assert run(*data, "--checkpoint", tmp_path / "a") == 0
    assert not (tmp_path / "a" / "rejected.jsonl").read_text()
    assert run(*data, "--checkpoint", tmp_path / "b", "--metrics", "gauc,auc") == 0
    (one,) = (tmp_path / "b" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(one)["reason"] == "click: 0.25 is not 0 or 1, which the metrics require"
    assert "a.jsonl, line 8 at byte" in json.loads(one)["where"]
    schema = {"features": {"user": "category:50", "item": "category:20", "price": "number"}, "label": "click"}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    more = ("--schema", tmp_path / "schema.json", "--metrics", "gauc")
    assert run(*data, "--checkpoint", tmp_path / "c", *more) == 2
    assert "--metrics gauc: the schema names no user" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": np.array([f"u{n}" for n in range(20)])}, "none of 20 events could be used"),
        ({"click": np.array([None] * 20)}, "20 events, and none of them got a label"),
        ({name: np.array([]) for name in table(1)}, "there were no events"),
    ],
)
def test_a_stream_from_which_nothing_was_learned_is_a_failure(
    change: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", {**table(20), **change})
    assert run("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state", "--quiet") == 1
    assert message in capsys.readouterr().err


def test_a_horizon_that_is_longer_than_the_stream_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{number},{number},{number % 7},{number % 2}" for number in range(300)]
    (tmp_path / "a.csv").write_text("\n".join(["event,at,item,click", *rows, ""]))
    options = ("--label", "click", "--id", "event", "--time", "at", "--horizon", "3600", "--model", "linear")
    assert run(tmp_path / "a.csv", *options, "--checkpoint", tmp_path / "state", "--quiet") == 1
    assert "nothing was learned: all 300 events wait for their horizon" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["no horizon", "drop"])
def test_a_run_does_not_resume_with_options_that_lose_waiting_labels(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = table(4000)
    write_csv(tmp_path / "a.csv", {name: values[:3000] for name, values in columns.items()})
    options = ("--label", "click", "--id", "event", "--time", "at", "--model", "linear", "--lr", 0.01)
    arguments = (tmp_path / "a.csv", *options, "--checkpoint", tmp_path / "state", "--quiet")
    horizon = ("--horizon", 1000)
    assert run(*arguments, *horizon) == 0
    write_csv(tmp_path / "a.csv", columns)
    kept = {path: path.read_bytes() for path in (tmp_path / "state").iterdir()}
    capsys.readouterr()
    assert run(*arguments, *(() if change == "no horizon" else (*horizon, "--unmatched", "drop"))) == 2
    error = capsys.readouterr().err
    assert "events wait for their labels with horizon=1000.0, unmatched=negative" in error
    assert "use the options of the first run" in error
    assert {path: path.read_bytes() for path in (tmp_path / "state").iterdir()} == kept, "nothing has changed"
    assert run(*arguments, "--horizon", 500) == 0
    _, state = read_newest(tmp_path / "state")
    assert state["counts"]["learned_events"] + len(state["pending"]["number_of"]["keys"]) == 4000


@pytest.mark.parametrize("mistake", ["schema", "file", "empty"])
def test_once_a_mistake_is_fixed_the_same_command_reads_everything(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    data, schema = tmp_path / "a.parquet", tmp_path / "schema.json"
    features = {"user": "category:50", "item": "category:20", "price": "number"}
    wrong = {**features, "user": "category:1", "item": "category:1"} if mistake == "schema" else features
    columns = table(300)
    columns["user"][:] = columns["user"].clip(1)
    write_parquet(data, {name: values[:0] for name, values in columns.items()} if mistake == "empty" else columns)
    if mistake == "file":
        data.write_bytes(data.read_bytes()[:100])
    schema.write_text(json.dumps({"features": wrong, "label": "click"}))
    arguments = ("--data", f"parquet:{data}", "--checkpoint", tmp_path / "state", "--schema", schema)
    assert run(*arguments, "--metrics", "auc") == 1
    told = capsys.readouterr()
    assert "nothing was learned" in told.err
    assert "nan" not in told.out
    write_parquet(data, columns)
    schema.write_text(json.dumps({"features": features, "label": "click"}))
    assert run(*arguments) == 0
    assert "the stream has ended at 300 events" in capsys.readouterr().err


def test_a_resumed_run_without_new_events_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(20))
    write_jsonl(tmp_path / "b.jsonl", {**table(20), "click": np.array([None] * 20)})
    for name, code in (("a", 0), ("b", 1)):
        arguments = ("--data", f"jsonl:{tmp_path / name}.jsonl", "--checkpoint", tmp_path / name)
        run(*arguments)
        capsys.readouterr()
        assert run(*arguments) == code
        told = capsys.readouterr()
        assert f"the checkpoint in {tmp_path / name} is at the end of the data (20 events)" in told.err
        assert "another --checkpoint" in told.err
        assert "stream has ended" not in told.err
        assert "  average   recent" in told.out


def test_metrics_that_differ_from_the_checkpoint_are_reported_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(200))
    data = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--quiet")
    measured = (*data, "--checkpoint", tmp_path / "with")
    assert run(*measured, "--metrics", "auc", "--window", 50, "--events", 100) == 0
    assert run(*data, "--checkpoint", tmp_path / "without", "--events", 100) == 0
    assert run(*measured) == 2
    assert "has metrics: give --metrics A,B with any of auc, gauc" in capsys.readouterr().err
    assert run(*measured, "--metrics", "auc") == 2
    assert "give --metrics auc and --window 50, or another --checkpoint" in capsys.readouterr().err
    assert run(*data, "--checkpoint", tmp_path / "without", "--metrics", "auc") == 2
    assert "has no metrics: leave out --metrics, or give another --checkpoint" in capsys.readouterr().err
    assert run(*measured, "--metrics", "auc", "--window", 50) == 0


OTHER_MODEL = """
from tests.online import model_file as online_model
from tests.online.streams import SCHEMA
from torch import nn

def build():
    model = online_model.build()
    model.items = nn.Embedding(21, 4, sparse=True)
    return model
"""


def test_a_checkpoint_that_does_not_fit_is_reported_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(200))
    write_jsonl(tmp_path / "b.jsonl", table(200, seed=1))
    (tmp_path / "other.py").write_text(OTHER_MODEL)
    write_parquet(tmp_path / "a.parquet", table(200))
    same = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state", "--quiet")
    assert run(*same, "--events", 100) == 0
    for change, message in (
        (("--optimizer", "adam"), "a learner with CAdam, but this one has Adam"),
        (("--model", f"{tmp_path / 'other.py'}:build"), "size mismatch for items.weight"),
        (("--data", f"jsonl:{tmp_path / 'b.jsonl'}"), "b.jsonl is not the file"),
        (("--data", f"parquet:{tmp_path / 'a.parquet'}"), "the position is of a source with source 'jsonl'"),
    ):
        capsys.readouterr()
        assert run(*same, *change) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"cadam run: the checkpoint in {tmp_path / 'state'} does not fit this command: ")
        assert message in error
        assert "another --checkpoint" in error
        assert error.count("\n") == 1
    assert run(*same) == 0


def test_a_warm_start_that_does_not_fit_or_comes_too_late_is_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(20))
    torch.save({"model": torch.nn.Linear(1, 1).state_dict()}, tmp_path / "linear.pt")
    torch.save(Path, tmp_path / "path.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty.pt").touch()
    same = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state", "--quiet")
    for name in ("linear", "path", "text", "empty", "nowhere"):
        assert run(*same, "--warm-start", tmp_path / f"{name}.pt") == 2
        error = capsys.readouterr().err
        assert error.startswith(f"cadam run: --warm-start {tmp_path / name}.pt does not fit: ")
        assert error.count("\n") == 1
    torch.save({"model": build(seed=7).state_dict()}, tmp_path / "good.pt")
    assert run(*same, "--warm-start", tmp_path / "good.pt") == 0
    assert "--warm-start" not in caplog.text
    assert run(*same, "--warm-start", tmp_path / "good.pt") == 0
    assert f"--warm-start {tmp_path / 'good.pt'} is ignored" in caplog.text


def test_a_log_of_another_run_is_reported_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(20))
    same = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--log", tmp_path / "log", "--quiet")
    assert run(*same, "--checkpoint", tmp_path / "a") == 0
    assert run(*same, "--checkpoint", tmp_path / "b") == 2
    assert "has the log of another run" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "meant"), [("a.csv", "csv"), ("a.jsonl", "jsonl"), ("clicks", "csv")])
def test_a_file_that_is_not_parquet_is_reported(
    name: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    path = tmp_path / name
    write_csv(path, table(20))
    assert run("--data", f"parquet:{path}", "--checkpoint", tmp_path / "state") == 2
    assert f"did you mean {meant}:{path}?" in capsys.readouterr().err


def _interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("cadam.cli.main.build_parser", "cadam: interrupted before anything was done"),
        ("cadam.cli.run.prepare", "cadam run: interrupted before anything was done"),
        ("cadam.cli.run.restore", "cadam run: interrupted at 0 events; earlier checkpoints are kept"),
        ("cadam.cli.run.stop_on_signals", "cadam run: interrupted at 0 events; earlier checkpoints are kept"),
    ],
)
def test_an_interrupt_is_one_line(
    place: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(10))
    monkeypatch.setattr(place, _interrupt)
    assert run("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state") == 130
    assert capsys.readouterr().err == f"{said}\n"


def test_the_help_says_the_exit_code_of_a_missing_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["run", "--help"])
    assert f"\n  {NO_PACKAGE}    a package is missing; nothing was learned\n" in capsys.readouterr().out


def test_an_option_that_does_not_exist_shows_the_usage_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--data", "csv:a.csv", "--checkpoint", "state", "--metric-s", "auc")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: cadam run")
    assert error.endswith("cadam run: error: unrecognized arguments: --metric-s\n")


def test_a_run_that_diverges_fails_and_says_where(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(2000))
    data = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state", "--batch-size", 50)
    assert run(*data, "--lr", 1e38, "--quiet") == 1
    error = capsys.readouterr().err
    assert "the model has diverged" in error
    assert "failed at" in error
    assert len(list((tmp_path / "state").glob("checkpoint-*"))) == 1  # the checkpoint from before the first event
    assert run(*data, "--lr", 0.01) == 0  # with another learning rate it resumes
    assert "the learning rate was 1e+38 until now and changes to 0.01" in caplog.text


def test_a_resumed_run_uses_the_optimizer_options_of_the_command_and_logs_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_parquet(tmp_path / "a.parquet", table(600))
    same = ("--data", f"parquet:{tmp_path / 'a.parquet'}", "--checkpoint", tmp_path / "state", "--batch-size", 50)

    def group() -> dict[str, Any]:
        ours = learner(checkpoint=tmp_path / "state")
        assert ours.checkpoints is not None
        found = ours.checkpoints.load_newest()
        ours.close()
        assert found is not None
        return {**found[1]["optimizer"]["param_groups"][0], "state": found[1]["optimizer"]["state"]}

    assert run(*same, "--optimizer", "cadam:moments=int8:weight_decay=0.01", "--events", 200) == 0
    assert (group()["moments"], group()["weight_decay"]) == ("int8", 0.01)
    assert group()["state"][0]["exp_avg"].dtype == torch.uint8
    # Options that are not given stay the same.
    assert run(*same, "--optimizer", "cadam:moments=int8", "--events", 400) == 0
    assert (group()["moments"], group()["weight_decay"]) == ("int8", 0.01)
    assert "until now" not in caplog.text
    assert run(*same, "--optimizer", "CAdam:weight_decay=0.02:betas=(0.8,0.99)") == 0
    assert (group()["moments"], group()["weight_decay"], group()["betas"]) == ("float32", 0.02, (0.8, 0.99))
    assert group()["state"][0]["exp_avg"].dtype == torch.float32
    for said in ("moments was int8", "weight_decay was 0.01", "betas was (0.9, 0.999)"):
        assert f"{said} until now and changes to " in caplog.text
    caplog.clear()
    assert run(*same, "--optimizer", "CAdam:betas=[0.8,0.99]:track_alignment=False") == 0  # betas stay the same
    (said,) = [record.getMessage() for record in caplog.records if "until now" in record.getMessage()]
    assert said == "track_alignment was True until now and changes to False"


def test_a_run_with_options_of_some_parameters_resumes_with_them(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_parquet(tmp_path / "a.parquet", table(600))
    same = ("--data", f"parquet:{tmp_path / 'a.parquet'}", "--checkpoint", tmp_path / "state", "--batch-size", 50)
    both = "cadam:weight_decay=0.01:weight_decay@*bias=0"

    def saved() -> list[tuple[float, bool]]:
        ours = learner(checkpoint=tmp_path / "state")
        assert ours.checkpoints is not None
        checkpoint = ours.checkpoints.load_newest()
        ours.close()
        assert checkpoint is not None
        groups = checkpoint[1]["optimizer"]["param_groups"]
        return [(group["weight_decay"], group["param_names"][0].endswith("bias")) for group in groups]

    assert run(*same, "--optimizer", both, "--events", 200) == 0
    assert sorted(saved()) == [(0, True), (0.01, False)]
    assert run(*same, "--optimizer", both, "--events", 400) == 0
    assert sorted(saved()) == [(0, True), (0.01, False)]
    assert "until now" not in caplog.text
    assert run(*same, "--optimizer", "cadam:confidence@users*=false") == 2
    assert "does not fit this command: the saved optimizer has other groups" in capsys.readouterr().err
    assert run(*same, "--optimizer", both.replace("bias=0", "bias=0.1")) == 0
    assert sorted(saved()) == [(0.01, False), (0.1, True)]


def test_optimizer_options_that_contradict_the_checkpoint_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_parquet(tmp_path / "a.parquet", table(600))
    data = ("--data", f"parquet:{tmp_path / 'a.parquet'}", "--batch-size", 50, "--quiet")
    same = (*data, "--checkpoint", tmp_path / "state")
    assert run(*same, "--optimizer", "csgdm:nesterov=True", "--events", 200) == 0
    # Nesterov, which was set before, needs a momentum.
    assert run(*same, "--optimizer", "csgdm:momentum=0", "--events", 400) == 2
    assert "Nesterov momentum requires a momentum" in capsys.readouterr().err
    assert run(*same, "--optimizer", "csgdm:momentum=0:nesterov=False", "--events", 400) == 0
    assert run(*same, "--optimizer", "csgdm", "--events", 600) == 0
    same = (*data, "--checkpoint", tmp_path / "other")
    assert run(*same, "--optimizer", "cadam:amsgrad=True", "--events", 200) == 0
    assert run(*same, "--optimizer", "cadam:moments=int8", "--events", 400) == 2
    assert run(*same, "--optimizer", "cadam:amsgrad=false:moments=int8", "--events", 400) == 0
    assert run(*same, "--optimizer", "cadam:moments=int8", "--events", 600) == 0


def test_optimizer_options_of_the_command_replace_those_of_a_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_parquet(tmp_path / "a.parquet", table(200))
    model = build(seed=7)
    adam = torch.optim.Adam(model.parameters(), betas=(0.5, 0.9), eps=1e-4)
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "old.pt")
    data, state = f"parquet:{tmp_path / 'a.parquet'}", tmp_path / "state"
    how = ("--warm-start", tmp_path / "old.pt", "--optimizer", "cadam:eps=1e-6:moments=bfloat16")
    assert run("--data", data, "--checkpoint", state, *how) == 0
    after = learner(checkpoint=state)
    assert after.resume()
    group = after.optimizer.param_groups[0]
    assert (group["eps"], group["betas"]) == (1e-6, (0.5, 0.9))
    assert after.checkpoints is not None
    found = after.checkpoints.load_newest()
    assert found is not None
    assert found[1]["optimizer"]["param_groups"][0]["moments"] == "bfloat16"
    after.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cadam:", "expected OPTION=VALUE after a colon, as in CAdam:moments=int8, got ''"),
        ("cadam:int8", "expected OPTION=VALUE after a colon, as in CAdam:moments=int8, got 'int8'"),
        ("cadam:lr=0.1", "the learning rate is given by --lr"),
        ("cadam:moment=int8", "unknown option 'moment'; did you mean 'moments'?"),
        ("cadam:params=1", "unknown option 'params'"),
        ("cadam:eps=1:eps=2", "eps is given twice"),
        ("cadam:eps=small", "eps must be a number"),
        ("cadam:confidence@=1:confidence@=1", "confidence@ is given twice"),
        ("cadam:moment@bias=int8", "unknown option 'moment'"),
        ("cadam:amsgrad=no", "Invalid amsgrad value: 'no' (True or False)"),
        ("cadam:amsgrad='False'", "Invalid amsgrad value: 'False' (True or False)"),
        ("csgdm:nesterov=yes", "Invalid nesterov value: 'yes' (True or False)"),
        ("cadam:betas={[]}", "Invalid betas"),
        ("cadam:differentiable=True", "unknown option 'differentiable'"),
        ("cadam:foreach=True:moments=int8", "foreach=True was asked for, but has no moments='int8'"),
        ("cadam:betas=(0.9,2)", "Invalid beta parameter at index 1: 2"),
        ("clion:second_moment=row", "second_moment"),
    ],
)
def test_an_invalid_optimizer_is_rejected_before_anything_is_written(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_parquet(tmp_path / "a.parquet", table(20))
    state = tmp_path / "state"
    assert run("--data", f"parquet:{tmp_path / 'a.parquet'}", "--checkpoint", state, "--optimizer", text) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cadam run: {text}: ")
    assert message in error
    assert not state.exists()


def test_an_optimizer_is_named_in_any_case_and_its_options_in_any_order() -> None:
    assert [str(OptimizerSpec.parse(text)) for text in ("adam", "CAdam", " cadamw")] == ["Adam", "CAdam", "CAdamW"]
    names = {
        str(OptimizerSpec.parse(text)) for text in ("cadam:eps=1e-6:row_steps=True", "CADAM:row_steps=True:eps=1e-6")
    }
    assert names == {"CAdam:eps=1e-06:row_steps=True"}
    given = ("cadam : moments = int8", "cadam:betas=[0,0.9]", "csgdm:nesterov=true", "cadam:weight_decay=0", *names)
    for text in given:
        before = torch.get_rng_state()
        spec = OptimizerSpec.parse(text)
        assert OptimizerSpec.parse(str(spec)) == spec
        assert torch.equal(torch.get_rng_state(), before), "the model that follows would start elsewhere"
    assert str(OptimizerSpec.parse(given[1])) == "CAdam:betas=(0.0, 0.9)"


def test_an_option_may_be_limited_to_parameters_by_their_names() -> None:
    spec = OptimizerSpec.parse("cadam:weight_decay@*=0.1:confidence@*bias=false:eps=1e-6")
    assert OptimizerSpec.parse(str(spec)) == spec
    optimizer = spec.build(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)), 0.01)
    groups = {tuple(group["param_names"]): group for group in optimizer.param_groups}
    weights, biases = groups["0.weight", "1.weight"], groups["0.bias", "1.bias"]
    names = ("eps", "weight_decay", "confidence")
    assert [weights[name] for name in names] == [1e-6, 0.1, True]
    assert [biases[name] for name in names] == [1e-6, 0.1, False]
    changed = OptimizerSpec.parse("cadam:confidence@*bias=true").update_options(optimizer.state_dict(), lr=0.02)
    assert [(group["confidence"], group["lr"]) for group in changed["param_groups"]] == [(True, 0.02), (True, 0.02)]
    with pytest.raises(ValueError, match="other groups"):
        OptimizerSpec.parse("cadam:confidence@0*=false").update_options(optimizer.state_dict())
    with pytest.raises(UsageError, match=r"no parameter matches 'table\*'; there are weight, bias"):
        OptimizerSpec.parse("cadam:confidence@table*=false").build(torch.nn.Linear(2, 1), 0.01)
