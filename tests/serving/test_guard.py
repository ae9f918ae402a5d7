"""The guard: corrupted labels are stopped, a rollback recovers, and a changed world is served in the end."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from cadam.cli.main import main
from cadam.serving import guard
from cadam.serving.event_log import Entry
from cadam.serving.guard import Guard
from cadam.serving.learner_process import learn
from cadam.serving.learner_report import STATUS_FILE, RollbackRequestedError
from cadam.serving.snapshots import GUARD_TAG, SNAPSHOT_FILE
from cadam.serving.versions import Version, Versions
from tests.serving.service_process import wait_for
from tests.serving.world import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[World]:
    monkeypatch.setattr(guard, "BLOCK", 200)
    world = World(tmp_path, guard_seconds=request.param)
    yield world
    world.log.close()


@pytest.mark.parametrize("world", [1e9], indirect=True)
def test_wrong_labels_are_not_served_and_a_rollback_recovers(world: World) -> None:
    world.stream(6000)
    assert not world.learn().is_alert
    good = world.loss()
    version = world.served.info
    assert version is not None
    assert good < 0.4  # the entropy of the labels is 0.325, and a constant has 0.693

    world.stream(1500, flipped=True)
    assert world.learn().is_alert
    assert world.loss() == pytest.approx(good), "the version from before the corrupted labels is served"
    assert world.served.info is not None
    assert world.served.info.version == version.version
    world.stream(500)
    assert world.learn().is_alert, "a restart keeps the alert"
    assert world.loss() == pytest.approx(good)

    versions = Versions(world.config.path)
    tagged = versions.get(GUARD_TAG)
    assert tagged.name == version.version
    world.log.add_rollback(tagged.name, tagged.position)
    world.stream(500)
    assert not world.learn().is_alert
    assert world.served.info.generation == 1
    assert world.loss() < good + 0.02


@pytest.mark.parametrize("world", [None], indirect=True)
def test_events_whose_labels_were_rolled_back_wait_no_longer(world: World) -> None:
    world.stream(100)
    world.learn()
    version = Versions(world.config.path).list()[-1]
    world.log.append([Entry("label", "early", "1", 1.0), *world.event("waits")])
    world.stream(50)
    assert world.learn().learned == 150
    world.log.add_rollback(version.name, version.position)
    world.log.append(world.event("early"))
    learner = world.learn()
    assert learner.learned == 100
    assert list(learner.pending.number_of) == ["waits"]
    world.log.append([Entry("label", "waits", "1", 1.0)])
    learner = world.learn()
    assert (learner.learned, len(learner.pending)) == (101, 0)


@pytest.mark.parametrize("world", [None], indirect=True)
def test_a_rollback_forgets_events_whose_entries_were_deleted_only_with_force(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.config = replace(world.config, keep=1, retain_seconds=1.0)
    folder = str(world.config.path)
    world.stream(100)
    world.learn()
    world.log.append(world.event("waits"))
    world.stream(10)
    world.learn()
    world.log.append([Entry("label", "e110", "1", 1.0), *world.event("new")])
    assert [entry.number for entry in world.log.read(0)] == [221, 223], "the repeated label has used up a number"
    assert main(["rollback", folder, "200"]) == 2
    assert "The oldest version with all entries is 221. To forget" in capsys.readouterr().err
    assert not world.log.rollbacks()
    assert main(["rollback", folder, "221"]) == 0
    assert list(world.learn().pending.number_of) == ["waits", "new"]
    assert main(["rollback", folder, "200", "--force"]) == 0
    assert list(world.learn().pending.number_of) == ["new"]


@pytest.mark.parametrize("world", [None], indirect=True)
def test_a_rollback_to_a_version_that_is_gone_leaves_the_model_in_use(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.stream(300)
    learned = world.learn().learned
    world.log.add_rollback("12345", 0)
    world.stream(100)
    with caplog.at_level(logging.ERROR):
        assert world.learn().learned == learned + 100
    assert "there is no version '12345'" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        world.learn()
    assert not caplog.text, "it is not tried again"


def test_versions_are_ordered_by_what_they_have_learned(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.folder.mkdir()
    for name, seconds in (("100", 5000.0), ("200", 1000.0), ("50-r1", 1.0)):  # the clock was set back
        versions.path(name).touch()
        versions._write(Version(name, int(name.partition("-")[0]), seconds, 0, 0, None))
    assert [version.name for version in versions.list()] == ["100", "200", "50-r1"]
    newest = versions.newest_before(300)
    assert newest is not None
    assert newest.name == "50-r1"


@pytest.mark.parametrize("world", [None], indirect=True)
def test_without_a_guard_wrong_labels_are_served(world: World) -> None:
    world.stream(6000)
    world.learn()
    world.stream(3000, flipped=True)
    world.learn()
    assert world.loss() > 0.6


@pytest.mark.parametrize("world", [0.0], indirect=True)
def test_a_changed_world_ends_the_alert(world: World) -> None:
    world.stream(6000)
    world.learn()
    world.stream(1000, flipped=True)
    assert world.learn().is_alert
    assert world.loss() < 0.4
    world.stream(4000, flipped=True)
    learner = world.learn()
    assert not learner.is_alert
    assert learner.guard is not None
    assert learner.guard.alerts == 1
    assert world.loss() > 0.9, "the labels have changed, and the served version has followed"


@pytest.mark.parametrize("world", [0.0], indirect=True)
def test_steady_labels_raise_no_alert(world: World) -> None:
    world.stream(10000)
    learner = world.learn()
    assert learner.guard is not None
    assert learner.guard.alerts == 0


@pytest.mark.parametrize("world", [1e9], indirect=True)
def test_a_learner_that_diverges_waits_for_a_rollback(world: World) -> None:
    world.stream(10)
    world.learn()
    config = replace(world.config, lr=3e38, batch_size=2)
    world.stream(200)
    status = config.runtime_folder() / STATUS_FILE
    stop: list[Callable[[], None]] = []
    with ThreadPoolExecutor() as pool:
        learning = pool.submit(learn, config, stop.append)
        try:
            wait_for(lambda: status.exists() and "cadam_diverged 1.0" in json.loads(status.read_text())["metrics"], 30)
            assert not learning.done()
            version = Versions(config.path).list()[-1]
            world.log.add_rollback(version.name, version.position)
            with pytest.raises(RollbackRequestedError):
                learning.result(30)
        finally:  # a failure must not leave the test waiting for the learner
            for function in stop:
                function()
    with safe_open(config.runtime_folder() / SNAPSHOT_FILE, framework="pt") as snapshot:
        assert all(bool(snapshot.get_tensor(name).isfinite().all()) for name in snapshot.keys())  # noqa: SIM118


@pytest.mark.parametrize("world", [None], indirect=True)
def test_what_is_deleted_in_shared_memory_is_written_again(world: World) -> None:
    """When a user logs out, systemd-logind may delete what the user's services have in shared memory."""
    world.stream(10)
    stop: list[Callable[[], None]] = []
    files = [world.config.runtime_folder() / name for name in (SNAPSHOT_FILE, STATUS_FILE)]
    with ThreadPoolExecutor() as pool:
        learning = pool.submit(learn, world.config, stop.append)
        try:
            for _ in range(2):
                wait_for(lambda: all(path.exists() for path in files), 30)
                shutil.rmtree(files[0].parent, ignore_errors=True)
            wait_for(lambda: all(path.exists() for path in files), 30)
        finally:
            stop[0]()
        learning.result(30)


def test_rare_positives_raise_no_alert() -> None:
    watched, random = Guard(1e9), np.random.default_rng(0)
    for _ in range(10_000):
        labels = (random.random(1000) < 0.001).astype(np.float32)
        watched.update({"score": np.full(1000, -6.9), "label": labels}, None, 0)  # type: ignore[arg-type]
    assert watched.alerts == 0
    for _ in range(20):
        watched.update({"score": np.full(5000, -6.9), "label": np.ones(5000)}, None, 0)  # type: ignore[arg-type]
    assert watched.alerts == 1


def test_the_state_of_a_guard_is_complete() -> None:
    random = np.random.default_rng(0)

    def feed(watched: Guard, rounds: int, label: int) -> None:
        for _ in range(rounds):
            scores = np.full(150, 2.0) + random.normal(0, 0.1, 150)
            watched.update({"score": scores, "label": np.full(150, label)}, None, 0)  # type: ignore[arg-type]

    first, second = Guard(1e9), Guard(1e9)
    feed(first, 201, 1)
    second.load_state_dict(first.state_dict())
    random = np.random.default_rng(1)
    feed(first, 40, 0)
    random = np.random.default_rng(1)
    feed(second, 40, 0)
    assert first.is_alert
    assert second.is_alert
    assert first.state_dict()["position"] == second.state_dict()["position"]
