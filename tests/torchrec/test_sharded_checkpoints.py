"""Sharded runs that are saved and loaded by any number of ranks, or killed and restarted, end like undisturbed ones."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

try:
    import cadam.torchrec
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from cadam.atomic_write import flush_and_rename
from cadam.distributed import sharded_checkpoint
from cadam.distributed.process_group import all_gather_objects
from cadam.torchrec import (
    BagSharder,
    SavedRun,
    SequenceSharder,
    apply_changes,
    changed_rows,
    list_checkpoints,
    load,
    save,
    track_changes,
)
from tests.process_groups import run
from tests.torchrec.model import Setting, Table, distributed, furthest, sharded, state_of, train_plainly

BEFORE, AFTER = 8, 8
TABLES = (*Setting.tables, Table("shops", 11, ("shop",)))
SETTINGS = {
    **{name: Setting(name, tables=TABLES) for name in ("table_wise", "row_wise", "column_wise", "data_parallel")},
    "sequences": Setting("row_wise", sequences=True, tables=TABLES),
    "amsgrad": Setting("column_wise", optimizer=cadam.CAmsGrad, tables=TABLES),
}
RATE = 0.013  # the learning rate when the run is saved


def train_and_save(folder: str) -> None:
    for name, setting in SETTINGS.items():
        trainer = sharded(setting)
        trainer.train(BEFORE)
        for group in (*trainer.model.fused_optimizer.param_groups, *trainer.dense.param_groups):
            group["lr"] = RATE
        save(Path(folder, name), BEFORE, trainer.model, trainer.dense, {"batch": trainer.position})


def load_and_train(folder: str) -> dict[str, dict[str, Tensor]]:
    results = {}
    for name, setting in SETTINGS.items():
        trainer = sharded(setting)
        saved = load(Path(folder, name), trainer.model, trainer.dense)
        assert saved == SavedRun(BEFORE, {"batch": BEFORE})
        trainer.position = saved.position["batch"]
        trainer.train(AFTER)
        results[name] = trainer.result()
    return results


def never_stopped(setting: Setting) -> dict[str, Tensor]:
    return train_plainly(setting, BEFORE + AFTER, slower_from=BEFORE, rate=RATE)


def others() -> list[Any]:
    slow = pytest.mark.slow
    return [1, 3, pytest.param(2, marks=slow), pytest.param(4, marks=slow)]


@pytest.fixture(scope="module")
def saved_on_two(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("saved")
    run(2, folder / "world", train_and_save, str(folder))
    return str(folder)


@pytest.mark.parametrize("world", others())
def test_saved_on_two_ranks_and_loaded_on_others(world: int, saved_on_two: str, tmp_path: Path) -> None:
    found = run(world, tmp_path / "world", load_and_train, saved_on_two)
    distance = {name: furthest(found[name], never_stopped(setting)) for name, setting in SETTINGS.items()}
    print(world, distance)  # shown by -s
    assert max(distance.values()) < 1e-5, distance
    assert all(found[name]["shops.step"].item() == BEFORE + AFTER for name in SETTINGS)


# Interrupted and odd checkpoints -----------------------------------------------------------------------------------


def keep_and_refuse(folder: str) -> dict[str, Any]:
    trainer = sharded(Setting("row_wise"))
    assert load(folder, trainer.model, trainer.dense) is None
    for _ in range(3):
        trainer.train(2)
        save(folder, trainer.position, trainer.model, trainer.dense, trainer.position)
    Path(folder, "checkpoint-000000000099.partial").mkdir()
    kept = [path.name for path in list_checkpoints(folder)]
    again = sharded(Setting("row_wise"))
    newest = load(folder, again.model, again.dense)
    with pytest.raises(TypeError, match=r"position cannot be saved: .*not JSON serializable"):
        save(folder, 100, trainer.model, trainer.dense, object())
    same = furthest(again.result(), trainer.result())
    with pytest.raises(ValueError, match="newer than checkpoint-000000000005: load it, or save elsewhere"):
        save(folder, 5, trainer.model, trainer.dense, 5)
    save(folder, 6, trainer.model, trainer.dense, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, "flush_and_rename", settle_files_only)
        with pytest.raises(OSError, match="no space left"):
            save(folder, 6, trainer.model, trainer.dense, 7)
    again_saved = load(folder, again.model, again.dense)
    with pytest.raises(RuntimeError, match="another process writes its checkpoints"):
        sharded_checkpoint.ShardedCheckpoints(folder, lock=True)
    left = sorted(path.name for path in list_checkpoints(folder))
    return {"kept": kept, "newest": newest, "same": same, "again": again_saved, "left": left}


def settle_files_only(new: Path, path: Path) -> None:
    if new.is_dir():
        raise OSError("no space left")
    flush_and_rename(new, path)


def test_the_newest_whole_checkpoint_is_loaded(tmp_path: Path) -> None:
    found = run(1, tmp_path / "world", keep_and_refuse, str(tmp_path / "run"))
    assert found["kept"] == ["checkpoint-000000000004", "checkpoint-000000000006"]
    assert found["newest"] == found["again"] == SavedRun(6, 6)
    assert found["same"] == 0
    assert found["left"] == found["kept"]


# Options and optimizers --------------------------------------------------------------------------------------------

LATER = {"lr": 0.02, "betas": (0.5, 0.9), "weight_decay": torch.tensor(0.25), "eps": 1e-3, "maximize": True}


def change_options(folder: str) -> dict[str, Any]:
    """Change options in the middle of a run and compare a run that is loaded there with one that continues."""
    trainer = sharded(Setting("row_wise"))
    trainer.train(3)
    users, goods = trainer.model.fused_optimizer.param_groups
    users.update(LATER, initial_lr=0.05)
    goods["eps"] = 1e-2
    save(folder, 3, trainer.model, trainer.dense, 3)
    trainer.train(3)
    again = sharded(Setting("row_wise", options=(("lr", 0.5), ("fused", False), ("track_alignment", False))))
    load(folder, again.model, again.dense)
    again.position = 3
    again.train(3)
    mine, others = again.model.fused_optimizer.param_groups
    assert {name: mine[name] for name in LATER} == LATER
    # Options about how a step runs are not loaded.
    assert (mine["initial_lr"], mine["fused"], mine["track_alignment"]) == (0.05, False, False)
    assert (others["lr"], others["eps"]) == (0.05, 1e-2)
    users["owner"] = object()
    with pytest.raises(TypeError, match=r"options of tables/.*users.weight/owner is a object"):
        save(folder, 7, trainer.model, trainer.dense)
    return {"apart": furthest(again.result(), trainer.result())}


def test_every_option_of_the_tables_is_loaded(tmp_path: Path) -> None:
    assert run(1, tmp_path / "world", change_options, str(tmp_path / "run"))["apart"] < 1e-5


def load_into_others(folder: str) -> dict[str, str]:
    """Return the messages of loading a run of CAdam with other optimizers."""
    trainer = sharded(Setting("row_wise"))
    trainer.train(1)
    save(folder, 1, trainer.model, trainer.dense)
    said, logger = {}, logging.getLogger("cadam.torchrec")
    for optimizer in (cadam.CLion, cadam.CAmsGrad, cadam.Adam):
        other = sharded(Setting("row_wise", optimizer=optimizer))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                logger, "warning", lambda text, *given, to=optimizer: said.update({to.__name__: text % given})
            )
            try:
                load(folder, other.model, other.dense)
            except ValueError as error:
                said[optimizer.__name__] = f"refused: {error}"
    maximum = sharded(Setting("row_wise", optimizer=cadam.CAmsGrad))
    save(f"{folder}-amsgrad", 1, maximum.model, maximum.dense)
    with pytest.raises(ValueError, match=r"users.weight was saved with the buffers .*'max_exp_avg_sq'"):
        load(f"{folder}-amsgrad", trainer.model, trainer.dense)
    return said


def test_a_checkpoint_of_another_optimizer_is_reported(tmp_path: Path) -> None:
    said = run(1, tmp_path / "world", load_into_others, str(tmp_path / "run"))
    lion = r"refused: .*checkpoint-0+1 was saved with another optimizer: .*users\.weight had CAdam and now has CLion"
    assert re.match(lion, said["CLion"])
    assert "the dense part had CAdam" in said["CLion"]
    assert said["CAmsGrad"].startswith("refused:")
    assert "saved with another optimizer" in said["Adam"]  # Adam has the same rule, so loading succeeds
    assert "refused" not in said["Adam"]


def load_different_options(folder: str) -> str:
    """Return the error of loading tables that were saved with different options into tables that share them."""
    trainer = sharded(Setting("row_wise", tables=TABLES))
    trainer.train(1)
    trees: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint.ShardedCheckpoints, "save", lambda self, number, tree: trees.append(tree))
        save(folder, 1, trainer.model, trainer.dense)
    (tree,) = trees
    (shops,) = (options for name, options in tree["shared"]["options of tables"].items() if "shops" in name)
    shops["eps"] = 1e-4
    sharded_checkpoint.ShardedCheckpoints(folder).save(1, tree)
    with pytest.raises(ValueError, match="saved with different") as error:
        load(folder, trainer.model, trainer.dense)
    return str(error.value)


def test_tables_that_share_options_cannot_load_different_ones(tmp_path: Path) -> None:
    message = run(1, tmp_path / "world", load_different_options, str(tmp_path / "run"))
    assert "users.weight" in message
    assert "shops.weight" in message


# A serving copy ----------------------------------------------------------------------------------------------------


def serve(sharding: str, sequences: bool = False, **storage: Any) -> tuple[float, float, int, int]:
    """Return the largest errors of a serving copy before and after the changes, the rows that changed, and all rows."""
    trainer = sharded(Setting(sharding, sequences, options=(("lr", 0.05), *storage.items())))
    with pytest.raises(RuntimeError, match="call track_changes"):
        changed_rows(trainer.model)
    track_changes(trainer.model)
    names = [table.name for table in trainer.setting.tables]
    copy = {name: trainer.result()[name].clone() for name in names}
    sent = 0
    for steps in (3, 2, 1):
        trainer.train(steps)
        now = {name: trainer.result()[name] for name in names}
        stale = furthest(copy, now)
        changes = [change for of_rank in all_gather_objects(changed_rows(trainer.model)) for change in of_rank]
        apply_changes(copy, changes)
        sent = sum(len(change.rows) for change in changes)
    total = sum(table.rows for table in trainer.setting.tables)
    return stale, furthest(copy, now), sent, total


def serve_all() -> list[tuple[float, float, int, int]]:
    found = [serve(kind) for kind in ("table_wise", "row_wise", "column_wise", "data_parallel")]
    quantized: dict[str, Any] = {"moments": "int8", "second_moment": "row", "row_steps": True}
    return [*found, serve("row_wise", True), *(serve(kind, **quantized) for kind in ("table_wise", "row_wise"))]


def test_changed_rows_bring_a_serving_copy_up_to_date(tmp_path: Path) -> None:
    for stale, fresh, sent, total in run(2, tmp_path / "world", serve_all):
        assert stale > 1e-3
        assert fresh == 0
        assert 0 < sent < 2 * total


class Twice(nn.Module):
    """A module that looks up one feature in two tables of one collection and in a table of another."""

    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        common: dict[str, Any] = {"embedding_dim": 8, "num_embeddings": 20, "feature_names": ["user"]}
        bags = [EmbeddingBagConfig(name=name, **common) for name in names[:2]]
        self.bags = EmbeddingBagCollection(bags, device=torch.device("meta"))
        sequences = [EmbeddingConfig(name=names[2], **common)]
        self.sequences = EmbeddingCollection(sequences, device=torch.device("meta"))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled, rows = self.bags(features).values(), self.sequences(features)["user"].values()
        return self.scale * (pooled.square().sum() + rows.square().sum())


def serve_one_feature(sharding: str) -> list[float]:
    """Return the largest difference between the serving copy and the tables after each export."""
    sharders = [BagSharder(lr=0.1), SequenceSharder(lr=0.1)]

    def made(first: str, second: str, third: str) -> DistributedModelParallel:
        names = first, second, third
        return distributed(Twice(names), sharders, Setting(sharding, tables=tuple(Table(n, 20, ()) for n in names)))

    with pytest.raises(ValueError, match="2 collections have a table 'a'"):
        track_changes(made("a", "b", "a"))
    model = made("a", "b", "c")
    track_changes(model)
    copy = {name: value.clone() for name, value in state_of(model).items() if name in "abc"}
    distances = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(20, (4,), generator=generator)
        model(KeyedJaggedTensor(["user"], ids, lengths=torch.ones(4, dtype=torch.int64))).backward()
        apply_changes(copy, [change for of_rank in all_gather_objects(changed_rows(model)) for change in of_rank])
        distances.append(furthest(copy, {name: value for name, value in state_of(model).items() if name in "abc"}))
    return distances


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_one_feature_of_several_tables_changes_all_of_them(sharding: str, tmp_path: Path) -> None:
    assert run(2, tmp_path / "world", serve_one_feature, sharding) == [0, 0, 0]


def test_a_change_of_an_unknown_table_is_refused() -> None:
    change = cadam.torchrec.ChangedRows("users", torch.tensor([0]), 0, torch.zeros(1, 2))
    with pytest.raises(KeyError, match="no table 'users'"):
        apply_changes({"goods": torch.zeros(2, 2)}, [change])


# Killed ------------------------------------------------------------------------------------------------------------

KILLS, STEPS = 10, 60
RUN = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from tests.torchrec.model import Setting, furthest, sharded
from cadam.torchrec import join, leave, load, save

folder, kills, steps = Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
join("gloo")
trainer = sharded(Setting("row_wise"))
saved = load(folder / "run", trainer.model, trainer.dense)
trainer.position = saved.position if saved else 0
while trainer.position < steps:
    trainer.train(1)
    at = trainer.position
    if at in kills and dist.get_rank() == at % 2 and not (folder / f"killed-{at}").exists():
        (folder / f"killed-{at}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if at % 4 == 0:
        save(folder / "run", at, trainer.model, trainer.dense, at)
result = trainer.result()
if dist.get_rank() == 0:
    torch.save(result, folder / "result.pt")
leave()
"""


@pytest.mark.slow
def test_ranks_killed_ten_times(tmp_path: Path) -> None:
    """When one rank dies, torchrun restarts all; they resume from the last checkpoint with the same result."""
    script = tmp_path / "run.py"
    script.write_text(RUN)
    kills = [3 + 5 * i for i in range(KILLS)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [str(script), str(Path(__file__).parent), str(tmp_path), json.dumps(kills), str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, f"--max-restarts={KILLS}", *arguments], check=True, timeout=900, env=environment, capture_output=True
    )
    assert len(list(tmp_path.glob("killed-*"))) == KILLS
    result = torch.load(tmp_path / "result.pt")
    distance = furthest(result, train_plainly(Setting("row_wise"), STEPS))
    print(distance)  # shown by -s
    assert distance < 1e-5
    assert result["users.step"].item() == STEPS
