"""Sharded tables train like one process for every sharding, optimizer and kind of collection."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadam
from tests.optim.exact import present
from tests.optim.family import FAMILY

try:
    import cadam.torchrec
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from cadam.distributed.process_group import all_gather_objects
from cadam.torchrec import BagSharder, Tables, iter_tables, versions
from cadam.torchrec import tables as tables_module
from tests.process_groups import run
from tests.torchrec.model import (
    BATCH,
    Batch,
    Setting,
    Table,
    batch,
    distributed,
    furthest,
    keyed,
    sharded,
    train_plainly,
)

SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
SUMS = (Table("users", 37, ("user",)), Table("goods", 50, ("shown", "clicked")))


def settings_of(sharding: str) -> dict[str, Setting]:
    """TorchRec divides a weighted mean by the sum of the weights if rows are sharded, by the number of ids if not."""
    means = SUMS if sharding == "row_wise" else Setting.tables
    return {
        f"{sharding} bags": Setting(sharding),
        f"{sharding} sequences": Setting(sharding, sequences=True),
        f"{sharding} weighted": Setting(sharding, weighted=True, tables=means),
    }


SETTINGS = {name: setting for sharding in SHARDINGS for name, setting in settings_of(sharding).items()}
WIDE = (Table("users", 37, ("user",), width=16), *Setting.tables[1:], Table("shops", 11, ("shop",), width=16))


# If a gradient is zero except for rounding errors, the mask may be 0 or 1: the seeds
# here are free of that.

# On two ranks, and for long on one to four -------------------------------------------------------------------------


def train(settings: dict[str, Setting], steps: int) -> dict[str, dict[str, Tensor]]:
    results = {}
    for name, setting in settings.items():
        trainer = sharded(setting)
        trainer.train(steps)
        results[name] = trainer.result()
        alignments = all_gather_objects(cadam.torchrec.alignment(trainer.model).over_ranks())
        assert all(alignment == alignments[0] for alignment in alignments)
        ratio = alignments[0].total
        results[name]["alignment"] = torch.tensor([ratio.aligned, ratio.touched, ratio.seen])
    return results


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = run(2, tmp_path_factory.mktemp("world") / "two", train, SETTINGS, 20)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_equal_one_plain_process(name: str, on_two_ranks: dict[str, dict[str, Tensor]]) -> None:
    found = {k: v for k, v in on_two_ranks[name].items() if k != "alignment"}
    assert furthest(found, train_plainly(SETTINGS[name], 20)) < 1e-5
    assert {"users", "users.exp_avg", "users.exp_avg_sq", "users.step", "goods", "linear.weight"} <= set(found)
    assert found["users.step"].item() == 20


@pytest.mark.parametrize("name", ["table_wise bags", "row_wise bags", "column_wise bags", "data_parallel bags"])
def test_alignment_over_all_ranks(name: str, on_two_ranks: dict[str, dict[str, Tensor]]) -> None:
    """Each shard counts once, and a table that every rank has a copy of counts once, too."""
    aligned, touched, seen = on_two_ranks[name]["alignment"].tolist()
    assert seen == 20 * (37 + 50) * 8
    assert 0 < aligned < touched < seen
    assert touched % 8 == 0


def align_copies_and_shards(folder: str) -> dict[str, Any]:
    """Return the alignment of a replicated table, a table with two shards, and an unsharded collection."""
    common: dict[str, Any] = {"embedding_dim": 8, "feature_names": ["user"]}
    copied = [EmbeddingBagConfig(name="copied", num_embeddings=20, **common)]
    split = [EmbeddingBagConfig(name="split", num_embeddings=30, **common)]
    unsharded = [EmbeddingConfig(name="plain", num_embeddings=20, **common)]
    module = nn.ModuleDict(
        {
            "a": EmbeddingBagCollection(copied, device=torch.device("meta")),
            "b": EmbeddingBagCollection(split, device=torch.device("meta")),
            "c": EmbeddingCollection(unsharded),
        }
    )
    constraints = {
        "copied": ParameterConstraints(sharding_types=["data_parallel"], compute_kernels=["dense"]),
        "split": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"]),
    }
    topology = Topology(world_size=2, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    sharders = [BagSharder(cadam.CAdam, lr=0.1)]
    plan = planner.collective_plan(module, sharders, torch.distributed.group.WORLD)
    model = DistributedModelParallel(module, device=torch.device("cpu"), plan=plan, sharders=sharders)
    features = KeyedJaggedTensor(["user"], torch.tensor([1, 18]), lengths=torch.tensor([1, 1]))
    (model.module["a"](features).values() + model.module["b"](features).values()).sum().backward()
    plain = r"c is a plain EmbeddingCollection, .* Give .* a SequenceSharder too"
    with pytest.warns(UserWarning, match=plain):
        counted = cadam.torchrec.alignment(model).over_ranks()
    dense = cadam.CAdam(model.module["c"].parameters())
    with pytest.warns(UserWarning, match=plain):
        cadam.torchrec.save(folder, 1, model, dense)
    with pytest.warns(UserWarning, match=plain):
        cadam.torchrec.load(folder, model, dense)
    assert counted.groups == (counted.total,)
    return {name: vars(ratio) for name, ratio in {**counted.parameters, "total": counted.total}.items()}


def test_copies_count_once_beside_shards_and_unsharded_collections_cause_a_warning(tmp_path: Path) -> None:
    found = run(2, tmp_path / "world", align_copies_and_shards, str(tmp_path / "run"))
    assert found["copied"]["seen"] == 20 * 8
    assert found["split"]["seen"] == 30 * 8
    for count in ("aligned", "touched", "seen"):
        assert found["total"][count] == found["copied"][count] + found["split"][count] > 0
    assert found["copied"]["touched"] == 2 * 8


def test_alignment_of_each_table() -> None:
    made = tables([8, 8], merge=False)
    ids, offsets, _ = look_up(made, 0)
    made(ids, offsets).square().sum().backward()
    assert {name: ratio.seen for name, ratio in made.alignment(reset=True).items()} == {"t0": 80, "t1": 88}
    assert all(ratio.seen == 0 for ratio in made.alignment().values())
    assert BagSharder(by_table=True).fused_params["by_table"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_hundreds_of_steps_on_many_ranks(sharding: str, world: int, tmp_path: Path) -> None:
    settings = {name: setting for name, setting in SETTINGS.items() if setting.sharding == sharding}
    distance = {}
    for name, found in run(world, tmp_path / "world", train, settings, 200, seconds=900).items():
        del found["alignment"]
        assert {"users.exp_avg", "users.exp_avg_sq", "goods.exp_avg", "goods.exp_avg_sq"} <= set(found)
        distance[name] = furthest(found, train_plainly(settings[name], 200))
    print(world, distance)  # shown by -s
    assert len(distance) == 3
    assert max(distance.values()) < 1e-5, distance


def one_has_no_samples() -> dict[str, Tensor]:
    """The first batch is on the first rank, the second batch on the second rank, and the third is divided."""
    setting = Setting("row_wise")
    trainer = sharded(setting)
    for step, middle in enumerate((BATCH, 0, BATCH // 2)):
        part = slice(middle, BATCH) if torch.distributed.get_rank() else slice(0, middle)
        every = batch(setting, step)
        share = Batch([x[part] for x in every.ids], [x[part] for x in every.weights], every.labels[part])
        trainer.dense.zero_grad()
        output = trainer.model(keyed(setting, share))
        ((output - share.labels).square().sum() * (2 / BATCH)).backward()
        trainer.dense.step()
    sequences = sharded(replace(setting, sequences=True))
    with pytest.raises(ValueError, match="EmbeddingCollection got a batch without samples"):
        sequences.model(keyed(setting, Batch([[]] * 3, [[]] * 3, torch.empty(0))))
    return trainer.result()


def test_a_rank_without_samples(tmp_path: Path) -> None:
    """Mean pooling is included, because TorchRec counts the ids of each sample for it."""
    found = run(2, tmp_path / "world", one_has_no_samples)
    assert furthest(found, train_plainly(Setting("row_wise"), 3)) < 1e-5


# On one rank: what does not depend on their number -----------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "decay": {"options": (("lr", 0.05), ("weight_decay", 0.1))},
    "decoupled decay": {"optimizer": cadam.CAdamW, "options": (("lr", 0.05), ("weight_decay", 0.1))},
    "betas": {"options": (("lr", 0.05), ("betas", (0.5, 0.9)), ("eps", 1e-4))},
    "maximize": {"options": (("lr", 0.01), ("maximize", True))},
    "rows of different lengths": {"tables": WIDE},
    "second moments of rows": {"options": (("lr", 0.05), ("second_moment", "row"))},
    "steps of rows": {"options": (("lr", 0.05), ("row_steps", True)), "tables": WIDE},
}
ALONE = {name: Setting(optimizer=cls, options=(("lr", 0.03),)) for name, cls in FAMILY.items()}
ALONE.update({name: Setting(**how) for name, how in OPTIONS.items()})


def alone() -> dict[str, Any]:
    results: dict[str, Any] = {"trained": train(ALONE, 20)}
    trainer = sharded(Setting())
    trainer.train(5)
    for group in (*trainer.model.fused_optimizer.param_groups, *trainer.dense.param_groups):
        group["lr"] = 0.001
    trainer.train(5)
    results["slower"] = trainer.result()
    trainer = sharded(Setting(half=True))
    trainer.train(20)
    results["half"] = trainer.result()
    for name, sharding, sharder in (
        ("kernel", "row_wise", BagSharder()),
        ("out of range", "table_wise", BagSharder()),
    ):
        try:
            setting = Setting(sharding)
            if name == "kernel":
                refused(setting, sharder)
            else:
                trainer = sharded(replace(setting, tables=(Table("users", 37, ("user",)),)))
                bad = replace(setting, tables=(Table("users", 99, ("user",)),))
                trainer.setting = bad
                trainer.train(20)
        except Exception as error:
            results[name] = repr(error)
    return results


def refused(setting: Setting, sharder: BagSharder) -> None:
    from torchrec.distributed.types import ShardingEnv

    config = EmbeddingBagConfig(name="users", embedding_dim=8, num_embeddings=37, feature_names=["user"])
    module = EmbeddingBagCollection([config], device=torch.device("meta"))
    tables = replace(setting, tables=(Table("users", 37, ("user",)),))
    plan = distributed(module, [sharder], tables).plan
    parameter = next(iter(plan.plan.values()))["users"]
    parameter.compute_kernel = "fused_uvm_caching"
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    sharder.shard(module, {"users": parameter}, env, torch.device("cpu"))


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run(1, tmp_path_factory.mktemp("world") / "one", alone)
    return found


@pytest.mark.parametrize("name", ALONE)
def test_every_optimizer_and_option(name: str, on_one_rank: dict[str, Any]) -> None:
    found = {k: v for k, v in on_one_rank["trained"][name].items() if k != "alignment"}
    assert furthest(found, train_plainly(ALONE[name], 20)) < 1e-5


def test_learning_rate_counts_at_once(on_one_rank: dict[str, Any]) -> None:
    assert furthest(on_one_rank["slower"], train_plainly(Setting(), 10, slower_from=5)) < 1e-5
    assert furthest(on_one_rank["slower"], train_plainly(Setting(), 10)) > 1e-3


def test_bfloat16_tables(on_one_rank: dict[str, Any]) -> None:
    """Gradients and moments are float32, so that only the rounding of the weights makes a difference."""
    found, single = on_one_rank["half"], train_plainly(Setting(), 20)
    assert found["users"].dtype == torch.bfloat16
    assert found["users.exp_avg"].dtype == torch.float32
    for name in ("users", "goods"):
        difference = (found[name].float() - single[name]).abs()
        assert difference.mean() < 0.004
        assert (difference < 0.02).float().mean() > 0.98


def test_unsupported_kernels_and_invalid_ids_are_refused(on_one_rank: dict[str, Any]) -> None:
    assert "fused_uvm_caching" in on_one_rank["kernel"]
    assert "set compute_kernels=['fused']" in on_one_rank["kernel"]
    assert re.match(r"IndexError\(\"table 'users': id \d+ is not one of its 37 rows", on_one_rank["out of range"])


def test_sharders_refuse_invalid_optimizers_and_options() -> None:
    with pytest.raises(TypeError, match=r"must be an optimizer class of cadam.*SGD"):
        BagSharder(torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'lr'"):
        BagSharder(cadam.CAdam, learning_rate=1e-3)
    with pytest.raises(ValueError, match="capturable=True is not supported"):
        BagSharder(cadam.CAdam, capturable=True)
    assert dict(BagSharder(cadam.CAdamW).fused_params["cadam"].options)["weight_decay"] == 0.01


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.find_problem() is None
    monkeypatch.setattr(versions, "_installed_version", {"torch": "2.13.0", "torchrec": "1.9.0"}.get)
    message = present(versions.find_problem())
    assert "fbgemm-gpu-cpu or fbgemm-gpu is not installed (needs 1.8.0), torchrec 1.9.0 (needs 1.8.0)" in message
    assert "pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 '.[torchrec]'" in message  # cadam is on no index
    assert "in a clone of cadam's repository" in message
    monkeypatch.setattr(
        versions, "_installed_version", {"torch": "2.11.0", "fbgemm-gpu": "1.6.0", "torchrec": "1.8.0"}.get
    )
    assert "torchrec 1.8.0 (needs 1.6.1)" in present(versions.find_problem())  # fits the installed torch


# The tables by themselves ------------------------------------------------------------------------------------------

HOST = (EmbeddingLocation.HOST, ComputeDevice.CPU)


def tables(
    widths: list[int], merge: bool, pooling: PoolingMode = PoolingMode.SUM, precision: SparseType = SparseType.FP32
) -> Tables:
    options = cadam.CAdam([torch.zeros(1)], lr=0.1).defaults
    made = Tables(
        [(10 + i, width, *HOST) for i, width in enumerate(widths)],
        cadam.CAdam,
        dict(options),
        feature_table_map=list(range(len(widths))),
        table_names=[f"t{i}" for i in range(len(widths))],
        pooling_mode=pooling,
        weights_precision=precision,
        merge=merge,
    )
    torch.manual_seed(0)
    made.init_embedding_weights_uniform(-1, 1)
    return made


def look_up(made: Tables, step: int, weights: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bags of 0 to 2 ids for 6 samples of each feature."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 3, (6 * len(made.table_names),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, 10, (int(lengths.sum()),), generator=generator)
    given = torch.rand(len(ids), generator=generator).requires_grad_() if weights else None
    return ids, offsets, given


@pytest.mark.parametrize("widths", [[8, 8, 8], [8, 8, 4], [4, 8, 8, 4]])
@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN])
def test_tables_updated_together_are_updated_alike(widths: list[int], pooling: PoolingMode) -> None:
    together, apart = tables(widths, True, pooling), tables(widths, False, pooling)
    assert len(together._groups) < len(apart._groups) == len(widths)
    for step in range(8):
        if step == 4:  # simulates tables of different age
            for made in (together, apart):
                made.steps[1] = 100
        for made in (together, apart):
            ids, offsets, weights = look_up(made, step, weights=step % 2 == 1)
            made(ids, offsets, weights).square().sum().backward()
    assert torch.equal(together.flat_weights(), apart.flat_weights())
    for name, buffer in apart.flat_state.items():
        assert torch.equal(together.flat_state[name], buffer)
    assert together.steps.tolist() == apart.steps.tolist() == [8, 104, *[8] * (len(widths) - 2)]


@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN])
def test_weights_of_ids_get_their_gradient(pooling: PoolingMode) -> None:
    made = tables([8, 8], merge=True, pooling=pooling)
    before = [table.clone() for table in made.split_by_table(made.flat_weights())]
    ids, offsets, weights = look_up(made, 3, weights=True)
    factor = torch.randn(6, 16)
    (made(ids, offsets, weights) * factor).sum().backward()
    assert weights is not None
    again = weights.detach().clone().requires_grad_()
    middle = int(offsets[6])
    outputs = []
    for table, part in ((0, slice(0, middle)), (1, slice(middle, None))):
        lengths = offsets.diff()[6 * table : 6 * table + 6]
        bag = torch.arange(6).repeat_interleave(lengths)
        rows = before[table][ids[part]] * again[part].unsqueeze(1)
        total = torch.zeros(6, 8).index_add(0, bag, rows)
        outputs.append(total / lengths.clamp(min=1).unsqueeze(1) if pooling == PoolingMode.MEAN else total)
    (torch.cat(outputs, 1) * factor).sum().backward()
    torch.testing.assert_close(weights.grad, again.grad)


@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN, PoolingMode.NONE])
@pytest.mark.parametrize("weighted", [False, True])
def test_bfloat16_rows_are_looked_up_as_float32_ones(pooling: PoolingMode, weighted: bool) -> None:
    half, single = (tables([8, 8], True, pooling, p) for p in (SparseType.BF16, SparseType.FP32))
    single.flat_weights().copy_(half.flat_weights())
    ids, offsets, weights = look_up(half, 3, weights=weighted and pooling != PoolingMode.NONE)
    torch.testing.assert_close(half(ids, offsets, weights), single(ids, offsets, weights))
    nothing = half(ids[:0], offsets[:1])
    assert nothing.shape == ((0, 8) if pooling == PoolingMode.NONE else (0, 16))
    nothing.sum().backward()


@pytest.mark.parametrize("precision", [SparseType.FP32, SparseType.BF16])
@pytest.mark.parametrize("learning", [False, True])
def test_negative_ids_are_refused(precision: SparseType, learning: bool) -> None:
    """The id is in the second table, because -1 would then be the last row of the first one."""
    made = tables([8, 8], True, precision=precision)
    with torch.set_grad_enabled(learning), pytest.raises(IndexError, match=r"table 't1': id -1 is not"):
        made(torch.tensor([1, -1]), torch.tensor([0, 1, 2]))
    looked_up = made.describe_lookup(torch.tensor([1, -1, 2]), torch.tensor([0, 1, 3]))
    assert made._group_ids(made._groups[0], looked_up, 0).rows.tolist() == [1, -1, 12]


@pytest.mark.parametrize("precision", [SparseType.FP32, SparseType.BF16])
@pytest.mark.parametrize("learning", [False, True])
def test_ids_that_are_too_large_are_refused(precision: SparseType, learning: bool) -> None:
    """Row 10 of the first table would be row 0 of the second. Row 10 of the second table is valid."""
    made = tables([8, 8], True, precision=precision)
    made(torch.tensor([9, 10, 10]), torch.tensor([0, 1, 1, 2, 3]))
    with (
        torch.set_grad_enabled(learning),
        pytest.raises(IndexError, match=r"table 't0': id 10 is not one of its 10 rows$"),
    ):
        made(torch.tensor([9, 10, 10]), torch.tensor([0, 1, 2, 2, 3]))
    made.shard_offsets = [(0, 0), (30, 0)]
    with pytest.raises(IndexError, match=r"'t1': id 11 is not one of its 11 rows in the shard that starts at row 30"):
        made(torch.tensor([9, 11]), torch.tensor([0, 1, 2]))


def test_looking_without_gradients_changes_nothing() -> None:
    made = tables([8], merge=False)
    before = made.flat_weights().clone()
    ids, offsets, _ = look_up(made, 0)
    with torch.no_grad():
        made(ids, offsets)
    assert made.steps.tolist() == [0]
    assert torch.equal(made.flat_weights(), before)


def test_tables_refuse_unsupported_options() -> None:
    made = tables([8], merge=False)
    ids, offsets, _ = look_up(made, 0)
    with pytest.raises(NotImplementedError, match="batch sizes per feature"):
        made(ids, offsets, batch_size_per_feature_per_rank=[[6]])
    with pytest.raises(ValueError, match="must have the same width"):
        tables([8, 4], merge=False, pooling=PoolingMode.NONE)
    output = made(ids, offsets)
    made.weights_host = nn.Parameter(made.weights_host.clone())
    with pytest.raises(RuntimeError, match="was moved"):
        output.sum().backward()
    with pytest.raises(ValueError, match="unknown option 'learning_rate'"):
        made.update_hyper_parameters({"learning_rate": 1.0})


def test_rows_are_reset_for_a_new_id() -> None:
    """All buffers of the rows are reset, and no others."""
    made = tables([8, 8], merge=False)
    for step in range(5):
        ids, offsets, _ = look_up(made, step)
        made(ids, offsets).square().sum().backward()
    before = [{k: v.clone() for k, v in state.items()} for state in made.get_optimizer_state()]
    rows = torch.tensor([2, 5])
    made.reset_embedding_weight_momentum(rows, torch.tensor([0, 2]), torch.tensor([1]), torch.tensor([0]))
    after = made.get_optimizer_state()
    others = [row for row in range(11) if row not in (2, 5)]
    for name in ("exp_avg", "exp_avg_sq"):
        assert before[1][name][rows].ne(0).any()
        assert after[1][name][rows].eq(0).all()
        assert torch.equal(after[1][name][others], before[1][name][others])
        assert torch.equal(after[0][name], before[0][name])
    assert made.split_by_table(made.flat_weights())[1][rows].eq(0).all()


def test_all_column_shards_of_a_table_are_reset() -> None:
    options = dict(cadam.CAdam([torch.zeros(1)]).defaults)
    made = Tables([(4, 8, *HOST)] * 2, cadam.CAdam, options, feature_table_map=[0, 1], table_names=["t", "t"])
    made(torch.tensor([1, 1]), torch.tensor([0, 1, 2])).sum().backward()
    assert all(state["exp_avg"][1].ne(0).all() for state in made.get_optimizer_state())
    made.start_tracking()
    made.reset_embedding_weight_momentum(torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0]))
    assert all(state["exp_avg"].eq(0).all() for state in made.get_optimizer_state())
    assert [rows.tolist() for rows in made.pop_changes()] == [[1], [1]]


def test_many_steps_of_changes_are_kept_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "MAX_TRACKED_STEPS", 3)
    made = tables([8, 4, 8], merge=True)
    made.start_tracking()
    seen: list[set[int]] = [set(), set(), set()]
    for step in range(8):
        ids, offsets, _ = look_up(made, step)
        made(ids, offsets).square().sum().backward()
        for table in range(3):
            seen[table] |= set(ids[offsets[6 * table] : offsets[6 * table + 6]].tolist())
    assert len(present(made._changed_rows)) < 3
    assert [rows.tolist() for rows in made.pop_changes()] == [sorted(rows) for rows in seen]
    assert [len(rows) for rows in made.pop_changes()] == [0, 0, 0]


def test_reset_starts_yogi_at_its_accumulator() -> None:
    options = dict(cadam.CYogi([torch.zeros(1)], initial_accumulator=0.5).defaults)
    made = Tables([(4, 8, *HOST)], cadam.CYogi, options, feature_table_map=[0], table_names=["t"])
    made(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()
    made.reset_embedding_weight_momentum(torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0]))
    assert made.get_optimizer_state()[0]["exp_avg_sq"].eq(0.5).all()


def test_finding_the_tables_of_a_model() -> None:
    assert list(iter_tables(nn.Linear(2, 2))) == []
