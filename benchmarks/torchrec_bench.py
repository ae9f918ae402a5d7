"""Time a step of sharded tables with cadam and with FBGEMM's own optimizers, interleaved.

    python benchmarks/torchrec_bench.py [--rows 1000000 4000000] [--json FILE]

Each case has one row-wise table with 32 columns and 4096 bags of 8 uniform ids. A step is lookup and backward; the
times are medians with one thread per rank. Under torchrun each rank has its own batch, and the times are those of
rank 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

import cadam
from cadam.torchrec import BagSharder, leave

BATCH, IDS, WIDTH = 4096, 8, 32
FBGEMM = {"FBGEMM Adagrad": EmbOptimType.EXACT_ADAGRAD, "FBGEMM row-wise Adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}


def sharders() -> dict[str, Callable[[], Any]]:
    """The functions that create the sharder of each arm, by name."""
    made: dict[str, Callable[[], Any]] = {
        "CAdam": lambda: BagSharder(cadam.CAdam),
        "CAdam, unfused": lambda: BagSharder(cadam.CAdam, fused=False),
        "CAmsGrad": lambda: BagSharder(cadam.CAmsGrad),
    }
    for name, kind in FBGEMM.items():
        made[name] = lambda kind=kind: EmbeddingBagCollectionSharder({"optimizer": kind, "learning_rate": 1e-3})
    return made


def own(where: str) -> Callable[[], Any]:
    """Load a sharder class that is given as FILE:CLASS."""
    file, name = where.rsplit(":", 1)
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location("own_sharder", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sharder: Callable[[], Any] = getattr(module, name)
    return sharder


def model(rows: int, tables: int, sharder: Any, dtype: DataType) -> DistributedModelParallel:
    names = [f"t{i}" for i in range(tables)]
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=WIDTH, num_embeddings=rows // tables, feature_names=[name], data_type=dtype
        )
        for name in names
    ]
    module = EmbeddingBagCollection(configs, device=torch.device("meta"))
    constraints = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in names}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu", ddr_cap=1 << 45)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    # FBGEMM's sharder plans no rows on the CPU, though it carries such a plan out.
    plan = planner.collective_plan(module, [BagSharder()], dist.group.WORLD)
    return DistributedModelParallel(module, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def batches(rows: int, tables: int, count: int) -> list[KeyedJaggedTensor]:
    """Each sample has 8 ids, spread over the tables."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    lengths = torch.full((tables * BATCH,), IDS // tables)
    return [
        KeyedJaggedTensor(
            keys=[f"t{i}" for i in range(tables)],
            values=torch.randint(rows // tables, (BATCH * IDS,), generator=generator),
            lengths=lengths,
        )
        for _ in range(count)
    ]


def measure(rows: int, arms: dict[str, Any], tables: int, seconds: float, dtype: DataType) -> dict[str, float]:
    """Return the milliseconds of a step by arm, the median over interleaved rounds."""
    models = {name: model(rows, tables, make(), dtype) for name, make in arms.items()}
    data, grad = batches(rows, tables, 8), torch.randn(BATCH, WIDTH * tables) / BATCH
    times: dict[str, list[float]] = {name: [] for name in arms}
    end, turn = time.perf_counter() + seconds, 0
    while True:
        for name, trained in models.items():
            dist.barrier()
            start = time.perf_counter()
            trained(data[turn % len(data)]).values().backward(grad)
            times[name].append(1e3 * (time.perf_counter() - start))
        turn += 1
        # Every rank does as many rounds as rank 0.
        more = torch.tensor([time.perf_counter() < end])
        dist.broadcast(more, 0)
        if not more:
            return {name: statistics.median(of_arm[2:]) for name, of_arm in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 4_000_000])
    parser.add_argument("--tables", type=int, default=1, help="among which rows and ids are divided")
    parser.add_argument("--arms", nargs="+", default=["CAdam", *FBGEMM], help=f"any of {', '.join(sharders())}")
    parser.add_argument("--own", metavar="FILE:CLASS", help="your own sharder, as another contender")
    parser.add_argument("--bf16", action="store_true", help="tables in bfloat16")
    parser.add_argument("--seconds", type=float, default=8, help="for each number of rows, after the start")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    for name in ("torchrec", "root"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        start = tempfile.mktemp()
        dist.init_process_group("gloo", init_method=f"file://{start}", rank=0, world_size=1)
    arms = {name: sharders()[name] for name in given.arms}
    if given.own:
        arms["own"] = own(given.own)
    found = {}
    for rows in given.rows:
        dtype = DataType.BF16 if given.bf16 else DataType.FP32
        found[rows] = measure(rows, arms, given.tables, given.seconds, dtype)
        if dist.get_rank() == 0:
            print(
                f"{rows:>11,} rows: " + "  ".join(f"{name} {ms:.2f} ms" for name, ms in found[rows].items()), flush=True
            )
    if given.json and dist.get_rank() == 0:
        given.json.write_text(json.dumps({"ranks": dist.get_world_size(), "milliseconds": found}, indent=1))
    leave()


if __name__ == "__main__":
    main()
