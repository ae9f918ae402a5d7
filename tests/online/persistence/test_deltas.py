"""A serving copy that applies deltas equals the learner to the bit, and a delta that does not fit changes nothing."""

from __future__ import annotations

import errno
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cadam import checkpoint_files
from cadam.atomic_write import wait_for_folder
from cadam.cli.main import main
from cadam.online import CheckpointOptions, Events, Learner, LoadedModel, load_model
from cadam.online.persistence.deltas import (
    DeltaError,
    apply_delta_to_file,
    compute_delta,
    read_exported,
    read_weights,
    version_of,
)
from cadam.online.persistence.export import export
from tests.online.models.test_id_features import batches, new_learner, schema


class Run:
    """A learner whose checkpoints can be loaded and exported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        schema().write(folder / "schema.json")
        (folder / "model.json").write_text('{"model": "fm"}')
        self.learner: Learner = new_learner("fm", checkpoint=CheckpointOptions(folder, every=10**9, keep=9))
        self.events = batches(1000)

    def learn(self, count: int) -> LoadedModel:
        for _ in range(count):
            self.learner.learn(next(self.events))
        self.learner.save()
        return load_model(self.folder)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    run = Run(tmp_path / "run")
    yield run
    run.learner.close()


def assert_equal(a: LoadedModel, b: LoadedModel) -> None:
    for name, value in a.model.state_dict().items():
        assert torch.equal(value, b.model.state_dict()[name]), name
    events: Events = next(batches(1))
    np.testing.assert_array_equal(a.scores(events.features), b.scores(events.features))


def test_an_exported_model_finds_the_rows_of_ids(run: Run, tmp_path: Path) -> None:
    loaded = run.learn(10)
    export(loaded, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for events in batches(2):
        features = {name: torch.from_numpy(values) for name, values in events.features.items()}
        np.testing.assert_allclose(program(features).detach(), loaded.scores(events.features), atol=1e-6)
    assert_equal(loaded, load_model(run.folder))  # exporting does not change the model


def test_copies_in_memory_and_in_a_file_follow_the_learner(run: Run, tmp_path: Path) -> None:
    copy = run.learn(5)
    torch.save(copy.model.state_dict(), tmp_path / "model.pt")
    for number in range(4):
        loaded = run.learn(3)
        delta = tmp_path / f"{number}.delta"
        assert main(["export", str(run.folder), str(delta), "--since", str(tmp_path / "model.pt")]) == 0
        assert main(["apply", str(delta), str(tmp_path / "model.pt")]) == 0
        copy = copy.apply_delta(delta)
        assert copy.events == loaded.events
        assert copy.version == loaded.version == version_of(torch.load(tmp_path / "model.pt"))
        assert_equal(copy, loaded)


def test_a_delta_starts_from_an_earlier_checkpoint(run: Run, tmp_path: Path, capsys: Any) -> None:
    copy = run.learn(5)
    run.learn(2)
    command = ["export", str(run.folder), str(tmp_path / "a.delta"), "--since"]
    assert main([*command, "1"]) == 0
    assert "changed rows" in capsys.readouterr().out
    assert_equal(copy.apply_delta(tmp_path / "a.delta"), load_model(run.folder))
    assert main([*command, "123"]) == 1
    assert "does not have checkpoint 123 any more" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "none.pt")]) == 1
    assert main(["export", str(run.folder), str(tmp_path / "a.pt2"), "--since", "1"]) == 2
    other = tmp_path / "other.safetensors"
    (tmp_path / "a.delta").rename(other)
    assert main([*command, str(other)]) == 1
    assert "its content is not that of a learner's checkpoint" in capsys.readouterr().err


def test_deltas_in_the_wrong_order_change_nothing(run: Run, tmp_path: Path) -> None:
    copy = run.learn(3)
    torch.save(copy.model.state_dict(), tmp_path / "model.pt")
    for number in range(2):
        run.learn(2)
        assert main(["export", str(run.folder), str(tmp_path / f"{number}.delta"), "--since", str(1 + number)]) == 0
    version, content = copy.version, (tmp_path / "model.pt").read_bytes()
    with pytest.raises(DeltaError, match="a delta is missing, or comes in the wrong order"):
        copy.apply_delta(tmp_path / "1.delta")
    with pytest.raises(DeltaError, match="a delta is missing, or comes in the wrong order"):
        apply_delta_to_file(tmp_path / "1.delta", tmp_path / "model.pt")
    assert version_of(copy.model.state_dict()) == version
    assert (tmp_path / "model.pt").read_bytes() == content
    copy = copy.apply_delta(tmp_path / "0.delta")
    assert_equal(copy.apply_delta(tmp_path / "1.delta"), load_model(run.folder))


def test_a_delta_may_be_applied_again_and_may_be_empty(run: Run, tmp_path: Path) -> None:
    copy, weights = run.learn(3), tmp_path / "model.pt"
    torch.save(copy.model.state_dict(), weights)
    run.learn(2)
    for name, since in (("first.delta", "1"), ("empty.delta", "2")):
        assert main(["export", str(run.folder), str(tmp_path / name), "--since", since]) == 0
    for name in ("first.delta", "first.delta", "empty.delta", "empty.delta", "first.delta"):
        assert main(["apply", str(tmp_path / name), str(weights)]) == 0
        copy = copy.apply_delta(tmp_path / name)
        assert version_of(torch.load(weights)) == copy.version == load_model(run.folder).version


def test_deltas_to_a_learner_that_was_set_back(tmp_path: Path) -> None:
    """Earlier weights have fewer ids, and may have no other difference in a tensor."""
    weights = {"ids": torch.arange(40), "table": torch.ones(40, 3), "same": torch.ones(3)}
    for count in (10, 39):
        earlier = {**weights, "ids": weights["ids"][:count], "table": weights["table"][:count]}
        delta, path = compute_delta(weights, earlier), tmp_path / "a.delta"
        checkpoint_files.write_tree(path, {**delta, "events": 0})
        torch.save(weights, tmp_path / "model.pt")
        apply_delta_to_file(path, tmp_path / "model.pt")
        assert version_of(read_exported(tmp_path / "model.pt")) == version_of(earlier)


def test_exports_to_the_same_delta_wait_for_each_other(run: Run, tmp_path: Path) -> None:
    run.learn(3)
    run.learn(2)
    arguments = ["export", str(run.folder), str(tmp_path / "a.delta"), "--since", "1"]
    with ThreadPoolExecutor(1) as pool:
        with wait_for_folder(tmp_path):
            export = pool.submit(main, arguments)
            with pytest.raises(TimeoutError):
                export.result(timeout=1)
            assert not list(tmp_path.glob("*.delta*"))
        assert export.result() == 0


def test_a_damaged_or_incomplete_delta_changes_nothing(run: Run, tmp_path: Path) -> None:
    copy = run.learn(3)
    torch.save(copy.model.state_dict(), tmp_path / "model.pt")
    run.learn(2)
    good = tmp_path / "good.delta"
    assert main(["export", str(run.folder), str(good), "--since", "1"]) == 0
    content, weights = good.read_bytes(), (tmp_path / "model.pt").read_bytes()
    bad = tmp_path / "bad.delta"
    damaged = bytearray(content)
    damaged[-5] ^= 1
    for each in (content[:-7], content[: len(content) // 2], content[:5], b"", bytes(damaged)):
        bad.write_bytes(each)
        with pytest.raises(DeltaError, match="nothing was changed"):
            copy.apply_delta(bad)
        assert main(["apply", str(bad), str(tmp_path / "model.pt")]) == 1
        assert (tmp_path / "model.pt").read_bytes() == weights
    shutil.copy(next(run.folder.glob("checkpoint-*")), bad)
    with pytest.raises(DeltaError, match="is not a delta"):
        copy.apply_delta(bad)
    with pytest.raises(DeltaError, match="cannot be read"):
        copy.apply_delta(tmp_path / "none.delta")
    assert_equal(copy.apply_delta(good), load_model(run.folder))


@pytest.mark.parametrize("content", [b"", b"abc\n", b"a,b\n1,2\n", b"PK\x03\x04"])
def test_a_file_without_weights_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.pt cannot be read as weights"):
        read_exported(tmp_path / "other.pt")


def test_a_full_disk_leaves_no_part_of_a_delta(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.learn(3)
    run.learn(2)

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "write_with", fail)
    assert main(["export", str(run.folder), str(tmp_path / "a.delta"), "--since", "1"]) == 1
    assert not (tmp_path / "a.delta").exists()
    monkeypatch.undo()
    copy = tmp_path / "model.pt"
    torch.save(read_weights("1", run.folder), copy)
    assert main(["export", str(run.folder), str(tmp_path / "a.delta"), "--since", "1"]) == 0
    content = copy.read_bytes()

    def fail_in_torch(*arguments: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 16960 vs 16876")

    monkeypatch.setattr(torch, "save", fail_in_torch)
    assert main(["apply", str(tmp_path / "a.delta"), str(copy)]) == 1
    assert copy.read_bytes() == content


def test_only_changed_rows_are_stored() -> None:
    random = torch.Generator().manual_seed(0)
    base = {
        "table": torch.randn(10_000, 8, generator=random),
        "ids": torch.arange(10_000),
        "scalar": torch.tensor(3.0),
        "sketch": torch.zeros(4, 1000, dtype=torch.int16),
        "same": torch.randn(50, 3),
        "negative_zero": torch.zeros(100),
    }
    new = {name: value.clone() for name, value in base.items()}
    new["table"][::100] += 1
    new["ids"] = torch.cat([new["ids"], torch.tensor([7, 8])])
    new["sketch"][2, 5] = 1
    new["negative_zero"][3] = -0.0
    delta = compute_delta(base, new)
    assert delta["whole"] == {}
    counts = {name: len(part["rows"]) for name, part in delta["rows"].items()}
    assert counts == {"table": 100, "ids": 2, "sketch": 1, "negative_zero": 1}
    new["scalar"] = torch.tensor(4.0)
    assert list(compute_delta(base, new)["whole"]) == ["scalar"]
    with pytest.raises(ValueError, match="different models"):
        compute_delta(base, {**new, "other": torch.zeros(1)})
    with pytest.raises(ValueError, match="table has another shape"):
        compute_delta(base, {**new, "table": torch.zeros(10_000, 4)})
