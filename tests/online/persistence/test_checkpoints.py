"""The files of a checkpoint folder: which of them are checkpoints, and how invalid contents are handled."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cadam import checkpoint_files
from cadam.checkpoint_files import DamagedCheckpointError, read_tree, write_tree
from cadam.cli.exit_codes import DONE, FAILED, USAGE
from cadam.distributed.sharded_checkpoint import CHECKPOINT_NAME
from cadam.online import load_model
from cadam.online.persistence.checkpoints import Checkpoints, list_checkpoints
from tests.cli.test_run import HERE, run
from tests.online.data.test_sources import write_jsonl
from tests.online.streams import SCHEMA, build, events, learner, table

REMOVED = object()
REPLACEMENTS = {
    "removed": REMOVED,
    "text": "\x1b[2J",
    "list": [1],
    "number": -7,
    "None": None,
    "tensor": torch.zeros(3),
    "dict": {"a": 1},
}


def test_only_files_with_names_of_the_learner_are_checkpoints(tmp_path: Path) -> None:
    ours = learner(checkpoint=tmp_path)
    ours.learn(events(10))
    ours.save()
    (own,) = ours.checkpoints.files()  # type: ignore[union-attr]
    others = [tmp_path / f"checkpoint-{name}.safetensors" for name in ("backup", "000000000001-copy", "99", "best")]
    for path in others:
        path.write_bytes(b"")
    ours.learn(events(10, first=10))
    ours.save()
    ours.close()
    store = Checkpoints(tmp_path, keep=1)
    newest, _ = store.load_newest() or (None, None)
    assert newest == tmp_path / "checkpoint-000000000002.safetensors"
    store.save(3, {})
    store.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-000000000003.safetensors"]
    assert not own.exists()
    assert all(path.exists() for path in others)


def test_tensors_that_share_memory_are_saved(tmp_path: Path) -> None:
    numbers = torch.arange(12.0)
    tree = {"a": numbers, "b": numbers, "part": numbers[2:5], "columns": numbers.view(3, 4).t(), "empty": numbers[:0]}
    write_tree(tmp_path / "x", tree)
    saved = read_tree(tmp_path / "x")
    assert all(torch.equal(saved[name], tensor) for name, tensor in tree.items())


def test_only_folders_with_names_of_a_job_are_sharded_checkpoints() -> None:
    names = ["checkpoint-000000000001", "checkpoint-backup", "checkpoint-000000000001.partial", "checkpoint-1"]
    assert [name for name in names if CHECKPOINT_NAME.fullmatch(name)] == names[:1]


def positions(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a tree, and of the first entries of each list."""
    if path:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:2]) if isinstance(tree, (list, tuple)) else ()
    for key, value in items:
        yield from positions(value, (*path, key))


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Copy a tree with one value replaced or removed."""
    items = dict(tree) if isinstance(tree, dict) else dict(enumerate(tree))
    items[path[0]] = value if len(path) == 1 else changed(items[path[0]], path[1:], value)
    items = {key: entry for key, entry in items.items() if entry is not REMOVED}
    return items if isinstance(tree, dict) else type(tree)(items.values())


@pytest.mark.parametrize("kind", ["removed", pytest.param("all", marks=pytest.mark.slow)])
def test_an_intact_checkpoint_with_other_content_ends_the_command_with_a_message(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(200))
    state, log = tmp_path / "state", tmp_path / "log"
    options: tuple[object, ...] = (
        "--data",
        f"jsonl:{tmp_path / 'a.jsonl'}",
        "--checkpoint",
        state,
        "--log",
        log,
        "--batch-size",
        50,
    )
    options = (*options, "--metrics", "gauc", "--quiet")
    assert run(*options, "--events", 70) == 0
    path = list_checkpoints(state)[-1]
    tree = read_tree(path)
    for folder in (state, log):
        shutil.copytree(folder, tmp_path / f"good {folder.name}")
    every_key = [position for position in positions(tree) if position[0] != "random" or len(position) < 3]
    chosen = every_key if kind == "all" else [position for position in every_key if len(position) < 3]
    for value in REPLACEMENTS.values() if kind == "all" else [REPLACEMENTS[kind]]:
        for position in chosen:
            for folder in (state, log):
                shutil.rmtree(folder)
                shutil.copytree(tmp_path / f"good {folder.name}", folder)
            for old in list_checkpoints(state):
                old.unlink()
            write_tree(path, changed(tree, position, value))
            code = run(*options)  # an exception would fail the test here
            message = capsys.readouterr().err
            assert code in (DONE, FAILED, USAGE), position
            assert code == DONE or message.startswith("cadam run: "), position
            is_optional = position in (("missing_columns",), ("drift",), ("rate_tuning",), ("first_labels",))
            if len(position) == 1 and value is REMOVED and not is_optional:
                assert code == FAILED, position
                assert str(path) in message, position


def test_a_learner_and_load_model_name_the_checkpoint_whose_content_is_another_one(tmp_path: Path) -> None:
    for tree in ({}, {"model": build().state_dict(), "counts": {"events": "many"}}, [1, 2], "text"):
        path = tmp_path / "checkpoint-000000000001.safetensors"
        write_tree(path, tree)
        with pytest.raises(DamagedCheckpointError, match=path.name):
            load_model(tmp_path, build(), SCHEMA)
        ours = learner(checkpoint=tmp_path)
        with pytest.raises(DamagedCheckpointError, match=path.name):
            ours.resume()
        ours.close()


@pytest.mark.parametrize(
    "tree",
    ["{", '{"dict": 3}', '{"tensor": "a"}', '{"dtype": "load"}', '{"code": "x"}', '{"a": 1, "b": 2}', "[" * 9999],
)
def test_a_header_that_describes_no_tree_is_damage(tree: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-000000000001.safetensors"
    metadata = {"format": checkpoint_files.FORMAT, "tree": tree, "sha256": checkpoint_files.hash_content(tree, {})}
    save_file({}, path, metadata)
    with pytest.raises(DamagedCheckpointError, match=path.name):
        read_tree(path)
