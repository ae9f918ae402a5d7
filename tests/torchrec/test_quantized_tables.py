"""Sharded tables with quantized moments: training, resharding, conversion and eviction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

try:
    import cadam.torchrec
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice

from cadam.engines import quantization
from cadam.rules.moment_storage import MIN_SCALE, ROW_STEPS
from cadam.rules.sparse_updates import LAST_STEPS
from cadam.torchrec import BagSharder, Tables, load, save
from tests.process_groups import run
from tests.torchrec.model import Setting, sharded, state_of, train_plainly

INT8_BY_ROW: dict[str, Any] = {"moments": "int8", "second_moment": "row", "row_steps": True}
STORAGES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"moments": "bfloat16"},
    "int8": {"moments": "int8"},
    "int8 by row": INT8_BY_ROW,
    "exact": {"sparse_updates": "exact"},
    "exact int8": {"sparse_updates": "exact", "moments": "int8"},
    "late": {"confidence_after": 3},
}
STEPS = 8


def setting(storage: dict[str, Any], sharding: str = "row_wise") -> Setting:
    return Setting(sharding, options=(("lr", 0.05), *storage.items()))


def train_and_save(folder: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, storage in STORAGES.items():
        torch.manual_seed(0)  # the seed of the stochastic rounding
        trainer = sharded(setting(storage))
        trainer.train(STEPS)
        save(Path(folder, name), STEPS, trainer.model, trainer.dense)
        found[name] = state_of(trainer.model)
    return found


def load_as(folder: str, saved: str, storage: dict[str, Any]) -> dict[str, Tensor]:
    trainer = sharded(setting(storage))
    assert load(Path(folder, saved), trainer.model, trainer.dense) is not None
    groups = trainer.model.fused_optimizer.param_groups
    assert all(group[name] == value for group in groups for name, value in storage.items())
    found = state_of(trainer.model)
    trainer.train(1)
    return found


def load_each(folder: str) -> dict[str, Any]:
    """Load on this number of ranks, first with the storage of the checkpoint, then with another one."""
    same = {name: load_as(folder, name, storage) for name, storage in STORAGES.items()}
    pairs = [("float32", "int8"), ("float32", "int8 by row"), ("int8", "float32"), ("int8 by row", "float32")]
    pairs += [("float32", "exact"), ("exact", "float32"), ("exact", "exact int8"), ("late", "float32")]
    return {"same": same, **{f"{a} as {b}": load_as(folder, a, STORAGES[b]) for a, b in pairs}}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and save on two ranks, then load on one."""
    folder = tmp_path_factory.mktemp("quantized")
    saved = run(2, folder / "two", train_and_save, str(folder))
    return saved, run(1, folder / "one", load_each, str(folder))


Worlds = tuple[dict[str, Any], dict[str, Any]]


@pytest.mark.parametrize("storage", STORAGES)
def test_another_number_of_ranks_loads_the_same_bits(storage: str, worlds: Worlds) -> None:
    saved, loaded = worlds
    assert saved[storage].keys() == loaded["same"][storage].keys()
    for name, value in saved[storage].items():
        assert torch.equal(loaded["same"][storage][name], value), name


def test_quantized_moments_learn_like_float32(worlds: Worlds) -> None:
    exact, start = worlds[0]["float32"], train_plainly(setting({}), 0)
    for storage in ("bfloat16", "int8"):
        for table in ("users", "goods"):
            moved = (exact[table] - start[table]).norm()
            assert (worlds[0][storage][table] - exact[table]).norm() < 0.2 * moved
    torch.testing.assert_close(exact["users"], train_plainly(setting({}), STEPS)["users"], rtol=0, atol=1e-5)


def decoded(state: dict[str, Tensor], table: str, name: str, kind: str) -> Tensor:
    return quantization.dequantize(kind, state[f"{table}.{name}"], state[f"{table}.{name}_scale"].view(-1))


def test_from_float32_to_one_byte_values_are_rounded_to_the_nearest(worlds: Worlds) -> None:
    exact, quantized = worlds[0]["float32"], worlds[1]["float32 as int8"]
    for table in ("users", "goods"):
        for name, kind, bits in (("exp_avg", "signed", 2), ("exp_avg_sq", "positive", 3)):
            value, found = exact[f"{table}.{name}"], decoded(quantized, table, name, kind)
            small = value.abs() < 2.0**-30 * value.abs().amax(1, keepdim=True)
            error = (found - value).abs()[~small]
            assert (error <= value.abs()[~small] * 2.0 ** -(bits + 1) * 1.0001).all()
        assert torch.equal(quantized[table], exact[table])


def test_from_one_byte_to_float32_nothing_is_lost(worlds: Worlds) -> None:
    for table in ("users", "goods"):
        quantized, found = worlds[0]["int8"], worlds[1]["int8 as float32"]
        assert torch.equal(found[f"{table}.exp_avg"], decoded(quantized, table, "exp_avg", "signed"))
        assert torch.equal(found[f"{table}.exp_avg_sq"], decoded(quantized, table, "exp_avg_sq", "positive"))
        shared, spread = worlds[0]["int8 by row"][f"{table}.exp_avg_sq"], worlds[1]["int8 by row as float32"]
        assert torch.equal(spread[f"{table}.exp_avg_sq"], shared.expand_as(spread[f"{table}.exp_avg_sq"]))


def test_from_elements_to_rows_second_moments_become_the_mean_and_counts_begin(worlds: Worlds) -> None:
    exact, quantized = worlds[0]["float32"], worlds[1]["float32 as int8 by row"]
    for table in ("users", "goods"):
        mean = exact[f"{table}.exp_avg_sq"].mean(1, keepdim=True)
        torch.testing.assert_close(quantized[f"{table}.exp_avg_sq"], mean)
        assert quantized[f"{table}.{ROW_STEPS}"].eq(0).all()


@pytest.mark.parametrize("storage", ["exact", "late"])
def test_options_by_row_have_the_result_of_one_process(storage: str, worlds: Worlds) -> None:
    expected, lazy = (train_plainly(setting(o), STEPS) for o in (STORAGES[storage], {}))
    for table in ("users", "goods"):
        torch.testing.assert_close(worlds[0][storage][table], expected[table], rtol=0, atol=1e-5)
        assert (expected[table] - lazy[table]).abs().max() > 1e-3


def test_from_exact_to_lazy_updates_rows_make_up_for_their_steps(worlds: Worlds) -> None:
    exact, lazy, again = worlds[0]["exact"], worlds[1]["exact as float32"], worlds[1]["float32 as exact"]
    for table in ("users", "goods"):
        missed = STEPS - exact[f"{table}.{LAST_STEPS}"]
        assert missed.max() > 0
        for name, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.999)):
            torch.testing.assert_close(lazy[f"{table}.{name}"], exact[f"{table}.{name}"] * beta**missed)
        assert f"{table}.{LAST_STEPS}" not in lazy
        assert again[f"{table}.{LAST_STEPS}"].eq(STEPS).all()


# Replicas, columns, eviction -----------------------------------------------------------------------------------------


def with_other_seeds() -> list[bool]:
    torch.manual_seed(torch.distributed.get_rank())
    trainer = sharded(setting({"moments": "int8"}, "data_parallel"))
    trainer.train(STEPS)
    (found, *_) = cadam.torchrec.iter_tables(trainer.model)
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, (found.flat_weights(), found.flat_state))
    return [torch.equal(every[0][0], every[1][0]), *(torch.equal(every[0][1][n], every[1][1][n]) for n in every[0][1])]


def test_replicas_stay_equal_though_their_ranks_have_other_seeds(tmp_path: Path) -> None:
    assert all(run(2, tmp_path / "world", with_other_seeds))


def test_rows_that_share_numbers_are_not_sharded_by_columns() -> None:
    assert "column_wise" in BagSharder(moments="bfloat16").sharding_types("cpu")
    by_row: list[dict[str, Any]] = [{"moments": "int8"}, {"second_moment": "row"}, {"row_steps": True}]
    for storage in (*by_row, {"sparse_updates": "exact"}, {"confidence_after": 9}):
        assert "column_wise" not in BagSharder(**storage).sharding_types("cpu")


HOST = (EmbeddingLocation.HOST, ComputeDevice.CPU)


def tables(width: int, **storage: Any) -> Tables:
    options = dict(cadam.CAdam([torch.zeros(1)], lr=0.1, **storage).defaults)
    return Tables([(10, width, *HOST)], cadam.CAdam, options, feature_table_map=[0], table_names=["t"])


def test_rows_are_reset_for_a_new_id() -> None:
    made = tables(8, **INT8_BY_ROW)
    for _ in range(3):
        made(torch.arange(10), torch.arange(11)).sum().backward()
    rows = torch.tensor([2, 5])
    before = {name: value.clone() for name, value in made.get_optimizer_state()[0].items()}
    made.reset_embedding_weight_momentum(rows, torch.tensor([0, 2]), torch.tensor([0]), torch.tensor([0]))
    after, others = made.get_optimizer_state()[0], [0, 1, 3, 4, 6, 7, 8, 9]
    assert before[ROW_STEPS].eq(3).all()
    for name, start in (("exp_avg", 0), ("exp_avg_sq", 0), ("exp_avg_scale", MIN_SCALE), (ROW_STEPS, 0)):
        assert before[name][rows].ne(start).any(), name
        assert after[name][rows].eq(start).all(), name
        assert torch.equal(after[name][others], before[name][others])
