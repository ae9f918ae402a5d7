"""The configuration of a service: from a run, without one, and invalid ones."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cadam.cli import main
from cadam.cli.serve_arguments import add_serve_arguments
from cadam.online import Schema, models
from cadam.online.models.model_file import UsageError
from cadam.online.persistence.checkpoints import list_checkpoints, read_newest
from cadam.serving.config import ServiceConfig, locate, read_config
from cadam.serving.learner_process import build_learner, restore
from cadam.serving.log_source import LogSource
from cadam.serving.snapshots import ServedModel
from cadam.serving.sqlite_log import SqliteLog
from tests.serving.world import World


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return parser.parse_args(words)


def test_a_service_starts_with_the_model_and_the_optimizer_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generator = random.Random(0)
    rows = [f"{generator.randrange(5)},{generator.random()},{generator.randrange(2)}" for _ in range(600)]
    Path("clicks.csv").write_text("\n".join(["item,price,click", *rows]) + "\n")
    command = "run clicks.csv --label click --quiet --model linear --optimizer Adam --lr 0.02"
    assert main.main(command.split()) == 0
    config = read_config(options("runs/clicks"))
    assert (config.model, config.optimizer, config.lr) == ("linear", "Adam", 0.02)
    assert Path(config.folder) == (tmp_path / "runs" / "clicks" / "serve").resolve()
    assert ServiceConfig.from_json(config.to_json()) == config
    learner = build_learner(config)
    _, state = read_newest(Path("runs/clicks"))
    for name, value in learner.model.state_dict().items():
        assert torch.equal(value, state["model"][name]), name
    assert learner.optimizer.state_dict()["state"].keys() == state["optimizer"]["state"].keys()
    assert learner.events == 0, "the events of the run are not those of the service"
    learner.close()
    assert config.schema().id == "event_id:text"
    with pytest.raises(UsageError, match="cannot change"):
        read_config(options("runs/clicks", "--model", "fm"))
    Path("weighted.json").write_text(
        Path("runs/clicks/schema.json").read_text().replace('"label"', '"weight": "weight", "label"')
    )
    assert read_config(options("runs/clicks", "--schema", "weighted.json")).schema().weight == "weight"


def test_the_place_of_the_log_is_stored_for_its_owner_alone(
    tmp_path: Path, redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"features": {"a": "number"}, "label": "y"}')
    given = ("--schema", "schema.json", "--log", f"{redis_server.url}/clicks")
    config = read_config(options("service", *given))
    assert (config.path / "log-uri").stat().st_mode & 0o777 == 0o600
    assert "clicks" not in config.to_json(), "the command lines of the processes can be read by all users"
    assert locate(config.path) == (config.path, None)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "events.db").touch()
    with pytest.raises(UsageError, match="cannot change"):
        read_config(options("other", *given))


def test_a_log_that_has_lost_entries_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(tmp_path)
    world.stream(10)
    world.learn()
    world.log.close()
    for path in tmp_path.glob("events.db*"):
        path.unlink()
    SqliteLog(tmp_path / "events.db").close()
    assert main.main(["serve", str(tmp_path), "--address", "0"]) == 2
    assert "has learned 20 entries of its log, but the log" in capsys.readouterr().err


def test_label_options_that_would_lose_waiting_labels_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path, horizon=30.0)
    world.stream(10)
    world.learn()
    world.log.close()
    for unfit in ([], ["--horizon", "30", "--unmatched", "drop"]):
        with pytest.raises(UsageError, match=r"10 events wait for their labels with horizon=30\.0, unmatched=negative"):
            read_config(options(str(tmp_path), *unfit))
    assert read_config(options(str(tmp_path), "--horizon", "60")).horizon == 60


def test_a_schema_that_changes_while_the_service_runs_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("given.json").write_text('{"features": {"a": "number"}, "label": "y>=2"}')
    config = read_config(options("service", "--schema", "given.json", "--model", "linear"))
    path = config.path / "schema.json"
    text = path.read_text()
    path.write_text(text.replace("y>=2", "y>=3"))
    with pytest.raises(UsageError, match="has changed while the service ran"):
        config.schema()
    path.write_text(text)
    assert config.schema().label == "y>=2"


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--schema"):
        read_config(options())
    Path("schema.json").write_text('{"features": {"a": "number"}, "label": "y"}')
    Path("token").write_text("short")
    with pytest.raises(UsageError, match="at least 16"):
        read_config(options("--schema", "schema.json", "--token-file", "token"))
    with pytest.raises(UsageError, match="--horizon"):
        read_config(options("--schema", "schema.json", "--unmatched", "negative"))
    with pytest.raises(UsageError, match="--promote auto needs a --challenger"):
        read_config(options("--schema", "schema.json", "--promote", "auto"))
    for horizon in ("0", "-1", "nan"):
        with pytest.raises(UsageError, match="--horizon must be a positive number"):
            read_config(options("--schema", "schema.json", "--horizon", horizon))
    assert main.main(["serve", "--schema", "schema.json", "--address", "0.0.0.0:0"]) == 2


@pytest.mark.parametrize(
    "words",
    [
        ("--refresh", "fast"),
        ("--retain", "7 weeks"),
        ("--retain-size", "much"),
        ("--guard", "0"),
        ("--guard", "0ms"),
        ("--timeout", "0"),
    ],
)
def test_values_of_options_are_checked(words: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        options(*words)
    assert options("--refresh", "20steps").refresh.steps == 20
    assert options("--retain-size", "10G").retain_size == 10 << 30


def test_events_beyond_the_capacity_wait_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    world.config = replace(world.config, capacity=read_config(options(str(tmp_path), "--capacity", "5")).capacity)
    for number in range(20):
        world.log.append(world.event(f"waits {number}"))
    assert list(world.learn().pending.number_of) == [f"waits {number}" for number in range(15, 20)]
    world.log.close()


def test_the_same_command_continues_after_a_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration writes hidden layers that the command had not named."""
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    world.config = config = replace(world.config, model="deepfm")
    world.served = ServedModel(config.runtime_folder(), lambda: models.build("deepfm", config.schema()))
    Path("model.json").write_text('{"model": "deepfm"}')
    world.stream(20)
    world.learn()
    world.log.close()
    assert main.main(["migrate", str(tmp_path), "--add", "brand=hash:9?"]) == 0
    for words in (["--model", "deepfm"], ["--model", "deepfm", "--width", "8"], []):
        assert read_config(options(str(tmp_path), *words)).settings["hidden"] == [32]
    with pytest.raises(UsageError, match="cannot change"):
        read_config(options(str(tmp_path), "--model", "deepfm", "--hidden", "7"))
    Path("old.json").write_text('{"features": {"item": "category:10"}, "label": "click"}')
    with pytest.raises(UsageError, match=r"brand was hash:9\?. Give that schema, or none"):
        read_config(options(str(tmp_path), "--schema", "old.json"))
    schema = Schema.read("schema.json")
    replace(schema, time="at").write("schema.json")
    with pytest.raises(UsageError, match=r"has been edited, .* the time was received_at and is at"):
        read_config(options(str(tmp_path)))
    schema.write("schema.json")
    assert read_config(options(str(tmp_path))).schema().time == "received_at"


def test_a_service_does_not_read_the_model_of_its_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clicks.csv").write_text("\n".join(["item,click", *(f"{n % 5},{n // 5 % 2}" for n in range(100))]) + "\n")
    command = "run clicks.csv --label click --quiet --model linear"
    assert main.main(command.split()) == 0
    run = Path("runs/clicks")
    config = read_config(options("runs/clicks"))
    log = SqliteLog(config.path / "events.db")
    learner = build_learner(config)
    learner.run(LogSource(log, config.schema(), follow=False))
    learner.close()
    assert main.main(["migrate", str(config.path), "--add", "brand=hash:50?"]) == 0

    def start() -> None:
        config = read_config(options("runs/clicks"))
        learner = build_learner(config)
        restore(learner, config, log)
        assert learner.resumed
        learner.close()

    start()
    for path in list_checkpoints(run):
        path.write_bytes(b"damaged")
    start()
    for path in list_checkpoints(run):
        path.unlink()
    assert locate(run) == (run / "serve", None), "the service is found without the run's checkpoints"
    start()
    log.close()
