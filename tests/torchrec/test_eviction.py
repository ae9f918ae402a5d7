"""Managed collision: after a slot is given to another id, the first update of that id is that of a new row."""

from __future__ import annotations

import logging
import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

try:
    import cadam.torchrec
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from cadam.distributed.process_group import all_gather_objects
from cadam.torchrec import BagSharder, Tables, apply_changes, changed_rows, iter_tables, load, save, track_changes
from tests.process_groups import run
from tests.torchrec.model import Setting, Table, distributed, state_of

SLOTS, IDS, STEPS, START, RATE = 32, 1000, 30, 0.5, 0.1


def start(rows: Tensor) -> Tensor:
    return rows.detach().fill_(START)


def with_slots(interval: int) -> DistributedModelParallel:
    """Build a table whose slots are given to other ids at a fixed interval of steps."""
    config = EmbeddingBagConfig(
        name="users", embedding_dim=8, num_embeddings=SLOTS, feature_names=["user"], init_fn=start
    )
    slots = MCHManagedCollisionModule(
        zch_size=SLOTS,
        device=torch.device("meta"),
        input_hash_size=IDS,
        eviction_interval=interval,
        buckets=dist.get_world_size(),
        eviction_policy=LRU_EvictionPolicy(),
    )
    module = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection([config], device=torch.device("meta")),
        ManagedCollisionCollection({"users": slots}, [config]),
    )
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(ebc_sharder=BagSharder(cadam.CAdam, lr=RATE))
    return distributed(module, [sharder], Setting("row_wise", tables=(Table("users", SLOTS, ("user",)),)))


def watch_evictions() -> dict[str, int]:
    """Train on ids that occur once, and check every update of every slot that belongs to one id."""
    model = with_slots(interval=1)
    (tables,) = iter_tables(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    own = tables.flat_weights().view(-1, 8)[:-1]  # the last slot is shared by all ids without a slot
    owners = checked = 0
    for step in range(1, STEPS + 1):
        before = own.clone()
        # Each rank owns a range of ids, and each looks up two new ids of every range.
        fresh = torch.tensor([part * (IDS // world) + 4 * step + 2 * rank + i for part in range(world) for i in (0, 1)])
        output, _ = model(KeyedJaggedTensor(["user"], fresh, lengths=torch.ones(len(fresh), dtype=torch.int64)))
        direction = 1.0 if step % 2 else -1.0  # against the momentum of the previous id
        (output["user"] * direction).sum().backward()
        g = direction / world
        m, v = (tables.flat_state[name].view(-1, 8)[:-1] for name in ("exp_avg", "exp_avg_sq"))
        moved = (own != before).any(1)
        owners += int(moved.sum())
        first_step = 0.1 * g / (1 - 0.9**step) / math.sqrt(0.001 * g * g / (1 - 0.999**step))
        now = moved & (m.sign() == direction).all(1)
        torch.testing.assert_close(own[now], torch.full_like(own[now], START - RATE * first_step))
        torch.testing.assert_close(v[now], torch.full_like(v[now], 0.001 * g * g))
        torch.testing.assert_close(m[now], torch.full_like(m[now], 0.1 * g))
        checked += int(now.sum())
    return {"owners": owners, "checked": checked, "slots": len(own)}


def serve_through_evictions() -> list[int]:
    """Return the number of rows in which a serving copy differs from the table, after each export."""
    model = with_slots(interval=3)
    track_changes(model)
    copy, wrong = {"users": state_of(model)["users"].clone()}, []
    for step in range(1, STEPS + 1):
        ids = torch.randint(IDS, (4,), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        output, _ = model(KeyedJaggedTensor(["user"], ids, lengths=torch.ones(4, dtype=torch.int64)))
        output["user"].sum().backward()
        if step % 5 == 0:
            apply_changes(copy, [change for of_rank in all_gather_objects(changed_rows(model)) for change in of_rank])
            wrong.append(int((copy["users"] != state_of(model)["users"]).any(1).sum()))
    return wrong


def test_a_serving_copy_follows_the_slots(tmp_path: Path) -> None:
    """A slot that is given to another id is reset at once, even if it is not looked up before the next export."""
    assert run(2, tmp_path / "world", serve_through_evictions) == [0] * (STEPS // 5)


def test_a_new_owner_starts_as_a_new_row(tmp_path: Path) -> None:
    found = run(2, tmp_path / "world", watch_evictions)
    # There are many more ids than slots, and each id was checked.
    assert found["checked"] > 3 * found["slots"]


def test_without_a_reset_the_old_momentum_would_act(tmp_path: Path) -> None:
    """The previous test fails with the reset of FBGEMM, which has no effect on these optimizers."""
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run(1, tmp_path / "world", watch_evictions_without_reset)


def watch_evictions_without_reset() -> dict[str, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tables, "reset_embedding_weight_momentum", lambda self, **given: None)
        return watch_evictions()


def save_slots(folder: str) -> None:
    model = with_slots(interval=3)
    dense = cadam.CAdam([torch.nn.Parameter(torch.zeros(1))])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # there is no warning about unmanaged collections
        save(folder, 1, model, dense)


def load_slots(folder: str) -> list[str]:
    """Return the warnings of loading a checkpoint into the model with slots."""
    model, said = with_slots(interval=3), []
    dense = cadam.CAdam([torch.nn.Parameter(torch.zeros(1))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("cadam.torchrec"), "warning", lambda text, *given: said.append(text % given))
        load(folder, model, dense)
    return said


def test_managed_collision_loaded_by_another_number_of_ranks_is_reported(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run(2, tmp_path / "two", save_slots, folder)
    assert run(2, tmp_path / "again", load_slots, folder) == []
    (said,) = run(1, tmp_path / "one", load_slots, folder)
    assert "saved by 2 ranks and is loaded by 1: with managed collision" in said
