"""Challengers learn the log in shadow, and one of them becomes the champion when it is better or on request."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from cadam.cli.main import main
from cadam.cli.serve_arguments import add_serve_arguments
from cadam.online import models
from cadam.online.models.model_file import UsageError
from cadam.online.persistence.checkpoints import list_checkpoints, read_newest
from cadam.serving import arms, migration
from cadam.serving.arms import Arm
from cadam.serving.config import SERVICE_LOCK_FILE, read_config
from cadam.serving.event_log import Entry
from cadam.serving.learner_report import _arm_families
from cadam.serving.snapshots import ServedModel
from cadam.serving.versions import Versions
from tests.serving.service_process import assert_same_state, replay
from tests.serving.world import World

SLOW, FAST = "CAdam:lr=0.0001", "Adam:lr=0.05"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[World]:
    monkeypatch.setattr(arms, "BLOCK", 20)
    folder = tmp_path / "service"
    folder.mkdir()
    world = World(
        folder,
        optimizer="cadam",
        lr=1e-4,
        challengers=("adam:lr=0.05",),
        guard_seconds=None,
        batch_size=40,
        promotes_automatically=request.param,
    )
    yield world
    world.log.close()


@pytest.mark.parametrize("world", [True], indirect=True)
def test_a_better_challenger_is_promoted_and_a_crash_changes_nothing(world: World, tmp_path: Path) -> None:
    world.stream(200)
    learner = world.learn()
    assert str(learner.arm) == SLOW
    [challenger] = learner.challengers
    assert challenger.scores.over_time.mean < 0
    assert challenger.scores.kind == "inconclusive"
    world.stream(2900, flipped=True)
    learner = world.learn()
    assert str(learner.arm) == FAST
    [challenger] = learner.challengers
    assert str(challenger.arm) == SLOW
    assert challenger.scores.over_time.mean > 0, "the comparison has begun again, with the roles exchanged"
    assert world.loss() > 0.8, "the model of the new champion is served, which has learned the changed labels"
    assert [promotion.challenger for promotion in world.log.promotions()] == [FAST]
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    command = [str(world.config.path), "--challenger", "adam:lr=0.05"]
    config = read_config(parser.parse_args(command))
    assert [str(arm) for arm in config.arms()] == [SLOW, FAST], "the same command continues with the new champion"
    config = read_config(parser.parse_args([*command[:2], "adam"]))
    assert [str(arm) for arm in config.arms()] == [SLOW, FAST], "the saved learning rate of a challenger is kept"
    with pytest.raises(UsageError, match=r"the champion of .* is Adam:lr=0.05: give --challenger Adam:lr=0.05"):
        read_config(parser.parse_args(command[:1]))

    list_checkpoints(world.config.path)[-1].unlink()  # as if the process had died before the last checkpoint
    world.stream(20)
    assert str(world.learn().arm) == FAST
    assert len(world.log.promotions()) == 1
    replay(world.config, tmp_path / "replayed")
    assert_same_state(world.config.path, tmp_path / "replayed")


def test_a_log_in_redis_is_learned_like_one_in_sqlite(
    tmp_path: Path, redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "BLOCK", 20)
    worlds = []
    for name, uri in (("sqlite", None), ("redis", f"{redis_server.url}/clicks")):
        (folder := tmp_path / name).mkdir()
        world = World(folder, uri, challengers=("adam",), guard_seconds=None)
        world.stream(300)
        world.learn()
        world.stream(50)
        world.learn()
        world.log.add_rollback("600", 600)
        world.stream(100)
        assert world.learn().learned == 400
        world.log.add_promotion("Adam:lr=0.05")
        world.stream(20)
        assert str(world.learn().arm) == "Adam:lr=0.05"
        worlds.append(world)
        world.log.close()
    assert_same_state(*(world.config.path for world in worlds))
    replay(worlds[1].config, tmp_path / "replayed")
    assert_same_state(worlds[1].config.path, tmp_path / "replayed")


@pytest.mark.parametrize("world", [False], indirect=True)
def test_a_promotion_by_hand_and_a_rollback_before_it(world: World) -> None:
    world.stream(100)
    learner = world.learn()
    before = [parameter.clone() for parameter in learner.challengers[0].learner.model.parameters()]
    world.log.add_promotion("no such challenger")
    world.log.add_promotion(FAST)
    learner = world.learn()
    world.stream(20)
    learner = world.learn()
    assert str(learner.arm) == FAST
    assert not all(map(torch.equal, before, learner.model.parameters())), "the new champion continues to learn"
    assert learner.promotions == 2
    world.log.add_rollback("200", 200)
    learner = world.learn()
    assert str(learner.arm) == SLOW, "the version has the earlier champion"
    world.stream(20)
    assert str(world.learn().arm) == SLOW, "the promotion after that version is not repeated"


@pytest.mark.parametrize("world", [False], indirect=True)
def test_a_champion_with_the_optimizer_of_the_first_one_must_be_named(world: World) -> None:
    world.config = replace(world.config, challengers=("cadam:lr=0.05",))
    world.stream(20)
    world.learn()
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    command = [str(world.config.path)]
    assert read_config(parser.parse_args([*command, "--lr", "0.02"])).lr == 0.02
    world.log.add_promotion("CAdam:lr=0.05")
    world.stream(20)
    world.learn()
    with pytest.raises(UsageError, match=r"the champion of .* is CAdam:lr=0.05: give --challenger CAdam:lr=0.05$"):
        read_config(parser.parse_args(command))
    with pytest.raises(UsageError, match=r"or switch .* --optimizer CAdam --lr 0.02`"):
        read_config(parser.parse_args([*command, "--lr", "0.02"]))
    read_config(parser.parse_args([*command, "--challenger", "cadam:lr=0.05"]))


@pytest.mark.parametrize("world", [False], indirect=True)
def test_a_new_challenger_starts_like_the_champion(world: World) -> None:
    config = world.config
    world.config = config.from_json(config.to_json().replace("adam:lr=0.05", "cadam:lr=0.01"))
    world.stream(100)
    champion = world.learn()
    world.config = config
    learner = world.learn()
    assert learner.challengers[0].learner.learned == champion.learned
    for mine, theirs in zip(learner.model.parameters(), learner.challengers[0].learner.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    moments = learner.challengers[0].learner.optimizer.state_dict()["state"]
    assert all(bool(state["exp_avg"].any()) for state in moments.values())


@pytest.mark.parametrize("world", [False], indirect=True)
def test_a_challenger_that_diverges_does_not_stop_the_champion(world: World) -> None:
    world.config = world.config.from_json(world.config.to_json().replace("adam:lr=0.05", "adam:lr=3e38"))
    world.stream(200)
    learner = world.learn()
    [challenger] = learner.challengers
    assert challenger.failure is not None
    assert learner.learned == 200
    families = {family.name: family for family in _arm_families(learner)}
    assert families["cadam_challenger_failed"].samples[0].value == 1
    assert families["cadam_promotions"].samples[0].value == 0
    world.log.add_promotion(str(challenger.arm))
    assert str(world.learn().arm) == SLOW


@pytest.mark.parametrize("world", [False], indirect=True)
def test_a_service_with_challengers_is_migrated(world: World) -> None:
    world.stream(400)
    learner = world.learn()
    before = [world.loss(), learner.log_loss.count]
    folder = str(world.config.path)
    assert (
        main(["migrate", folder, "--add", "brand=hash:9?", "--optimizer", "adam:weight_decay=0.1", "--lr", "0.02"]) == 0
    )
    world.config = replace(world.config, optimizer="adam:weight_decay=0.1", lr=0.02)
    world.served = ServedModel(world.config.runtime_folder(), lambda: models.build("linear", world.config.schema()))
    learner = world.learn()
    assert str(learner.arm) == "Adam:weight_decay=0.1:lr=0.02"
    assert world.loss() == pytest.approx(before[0], abs=1e-5), "the scores have not changed"
    assert learner.log_loss.count == before[1]
    world.stream(400)
    learner = world.learn()
    assert world.loss() < before[0]
    assert learner.challengers[0].learner.learned == learner.learned == 800
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    assert read_config(parser.parse_args([folder])).optimizer == "Adam:weight_decay=0.1"


@pytest.mark.parametrize("world", [False], indirect=True)
def test_events_that_wait_are_encoded_again_from_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(migration, "ENTRIES_PER_READ", 30)
    folder = str(world.config.path)
    world.stream(100)
    world.learn()
    assert main(["migrate", folder, "--add", "brand=hash:4?"]) == 0
    records: list[dict[str, Any]] = [
        {"item": n % 10, "brand": f"b{n}", "event_id": f"w{n}", "received_at": 200 + n} for n in range(50)
    ]
    for record in records:
        world.log.append([Entry("event", record["event_id"], json.dumps(record), record["received_at"])])
    world.served = ServedModel(world.config.runtime_folder(), lambda: models.build("linear", world.config.schema()))
    world.learn()
    capsys.readouterr()
    assert main(["migrate", folder, "--resize", "brand=hash:64?"]) == 0
    assert "warning" not in capsys.readouterr().out
    expected = world.config.schema().encode(records).events
    assert expected is not None
    _, state = read_newest(world.config.path)
    for learner in (state, *(each["learner"] for each in state["arms"]["challengers"].values())):
        pending = learner["pending"]
        assert pending["number_of"]["keys"].tolist() == [f"w{n}" for n in range(50)]
        rows = pending["number_of"]["values"] - pending["head"]
        np.testing.assert_array_equal(pending["rows"]["feature/brand"][rows], expected.features["brand"])
    assert world.log.delete_old(world.log.last_number() - 20, seconds=0)
    assert main(["migrate", folder, "--resize", "brand=hash:96?", "--dry-run"]) == 0
    assert "warning: 30 events that wait to be learned" in capsys.readouterr().out
    world.log.append([Entry("label", f"w{n}", "1", 300) for n in range(50)])
    world.served = ServedModel(world.config.runtime_folder(), lambda: models.build("linear", world.config.schema()))
    assert world.learn().learned == 150


@pytest.mark.parametrize("world", [False], indirect=True)
def test_a_snapshot_of_a_killed_service_is_not_used_after_a_migration(world: World) -> None:
    for _ in range(2):
        world.stream(100)
        world.learn()
    list_checkpoints(world.config.path)[-1].unlink()  # as if the service had been killed before the last checkpoint
    assert main(["migrate", str(world.config.path), "--add", "brand=hash:9?"]) == 0
    world.served = ServedModel(world.config.runtime_folder(), lambda: models.build("linear", world.config.schema()))
    assert not world.served.refresh()
    world.learn()
    assert world.loss() > 0


@pytest.mark.parametrize("world", [False], indirect=True)
def test_a_service_that_runs_or_must_roll_back_is_not_migrated(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.stream(100)
    world.learn()
    command = ["migrate", str(world.config.path), "--add", "brand=hash:9?"]
    with FileLock(world.config.path / SERVICE_LOCK_FILE):
        assert main(command) == 1
    assert "stop it first" in capsys.readouterr().err
    [version] = Versions(world.config.path).list()
    world.log.add_rollback(version.name, version.position)
    assert main([*command, "--dry-run"]) == 0
    assert main(command) == 1
    assert f"has not gone back to version {version.name} yet" in capsys.readouterr().err
    world.learn()
    assert main(command) == 0


@pytest.mark.parametrize("world", [False], indirect=True)
def test_a_challenger_keeps_its_rate_when_the_champion_is_migrated_to_its_optimizer(world: World) -> None:
    world.stream(100)
    world.learn()
    folder = str(world.config.path)
    assert main(["migrate", folder, "--optimizer", "adam", "--lr", "0.02"]) == 0
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    config = read_config(parser.parse_args([folder, "--challenger", "adam"]))
    assert [str(arm) for arm in config.arms()] == ["Adam:lr=0.02", FAST]


def test_arms_are_parsed_and_contradictions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(Arm.parse("cadam:lr=0.01:weight_decay=0.1", 1.0)) == "CAdam:weight_decay=0.1:lr=0.01"
    assert str(Arm.parse("adam", 0.003)) == "Adam:lr=0.003"
    for text, reason in (("adam:lr=x", "must be a number"), ("adam:lr=-1", "above 0"), ("sgd", "no optimizer")):
        with pytest.raises(UsageError, match=reason):
            Arm.parse(text, 1.0)
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"features": {"item": "hash:5"}, "label": "click"}')
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    with pytest.raises(UsageError, match=r"CAdam:lr=0.003 is the champion too: .* --challenger cadam:lr=0.001"):
        read_config(parser.parse_args(["--schema", "schema.json", "--model", "linear", "--challenger", "cadam"]))
