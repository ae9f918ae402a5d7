"""Compare sharded tables on one CUDA device with the CPU, and their time with FBGEMM's own fused optimizers.

    python benchmarks/torchrec_cuda.py FOLDER [--steps 50] [--rows 4000000x32 16000000x64] [--ids 1 4]

Three parts, each of which is run even if another fails:

1. Bags (sum, mean, weighted) and sequences, in float32 and bfloat16, trained by CAdam on the device and, by the same
   classes in a second process, on the CPU: the largest difference of weights and moments, and the alignment ratios.
2. cadam's Adam against FBGEMM's fused Adam, both on the device: the largest difference.
3. Time of a step, lookup and backward with the update in it: interleaved, medians. `step` goes through TorchRec and
   waits for the device before and after; `backward` is its second half; `flow` is one of ten steps without a
   synchronization between them; `tables` is `flow` of the table module alone, without TorchRec around it; `busy` is
   how long the device computes in a `tables` step, as the profiler saw it.

All results are written to FOLDER/torchrec_cuda.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # a single process needs no network
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
STARTED = time.perf_counter()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor  # noqa: E402
from torchrec.distributed import DistributedModelParallel  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # noqa: E402
from torchrec.distributed.planner.types import ParameterConstraints  # noqa: E402
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType  # noqa: E402

import cadam  # noqa: E402
from cadam.torchrec import BagSharder, SequenceSharder, alignment, iter_tables  # noqa: E402

BATCH, TABLES = 10_000, 8
Result = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """The models of the first two parts. Their tables are small, so that rows occur repeatedly."""

    sharding: str = "table_wise"
    sequences: bool = False
    mean: bool = False
    weighted: bool = False
    half: bool = False
    rows: int = 500
    width: int = 16
    features: int = 3
    batch: int = 64


CASES = {
    f"{kind}, {'bf16' if half else 'fp32'}": Case(**how, half=half)
    for kind, how in {
        "bags sum": {},
        "bags mean": {"mean": True},
        "bags weighted": {"weighted": True},
        "bags row-wise": {"sharding": "row_wise"},
        "sequences": {"sequences": True},
    }.items()
    for half in (False, True)
}


# Models and batches ------------------------------------------------------------------------------------------------


def sharded(case: Case, sharder: Any, device: torch.device) -> DistributedModelParallel:
    """Return the tables t0, t1... of a case, with features of the same names."""
    names = [f"t{i}" for i in range(case.features)]
    shared = [
        {
            "name": name,
            "embedding_dim": case.width,
            "num_embeddings": case.rows,
            "feature_names": [name],
            "data_type": DataType.BF16 if case.half else DataType.FP32,
        }
        for name in names
    ]
    module: nn.Module
    if case.sequences:
        module = EmbeddingCollection([EmbeddingConfig(**kw) for kw in shared], device=torch.device("meta"))
    else:
        pooling = PoolingType.MEAN if case.mean else PoolingType.SUM
        configs = [EmbeddingBagConfig(**kw, pooling=pooling) for kw in shared]
        module = EmbeddingBagCollection(configs, is_weighted=case.weighted, device=torch.device("meta"))
    constraint = ParameterConstraints(sharding_types=[case.sharding], compute_kernels=["fused"])
    topology = Topology(world_size=1, compute_device=device.type, hbm_cap=1 << 37, ddr_cap=1 << 45)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=dict.fromkeys(names, constraint))
    # FBGEMM's sharder is left out: on the CPU it plans no row-wise sharding, although it carries out such a plan.
    plan = planner.plan(module, [SequenceSharder() if case.sequences else BagSharder()])
    return DistributedModelParallel(module, device=device, plan=plan, sharders=[sharder])


def start(model: DistributedModelParallel) -> None:
    """Build tables with equal weights on every device."""
    for name, value in sorted(model.state_dict().items()):
        generator = torch.Generator().manual_seed(int(name.split(".")[-2][1:]))
        for shard in value.local_shards():
            drawn = torch.randn(shard.tensor.shape, generator=generator) / 2
            shard.tensor.detach().copy_(drawn)


def small_batch(case: Case, step: int, device: torch.device) -> KeyedJaggedTensor:
    """Return bags of 0 to 4 ids, some of which are frequent."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 5, (case.features * case.batch,), generator=generator)
    n = int(lengths.sum())
    ids = (torch.rand(n, generator=generator) ** 2 * case.rows).long()
    weights = torch.rand(n, generator=generator) + 0.5 if case.weighted else None
    names = [f"t{i}" for i in range(case.features)]
    return KeyedJaggedTensor(keys=names, values=ids, lengths=lengths, weights=weights).to(device)


def embeddings(case: Case, model: DistributedModelParallel, batch: KeyedJaggedTensor) -> Tensor:
    found = model(batch)
    names = [f"t{i}" for i in range(case.features)]
    if case.sequences:
        return torch.cat([found[name].values() for name in names])
    return torch.cat([found[name] for name in names], 1)


def train(case: Case, sharder: Any, device: torch.device, steps: int) -> Result:
    """Return tables and moments after a number of steps towards random targets."""
    model = sharded(case, sharder, device)
    start(model)
    for step in range(steps):
        found = embeddings(case, model, small_batch(case, step, device))
        generator = torch.Generator().manual_seed(1000 + step)
        target = torch.randn(found.shape, generator=generator).to(device)
        ((found - target).square().sum() / case.batch).backward()
    result = {name: value.local_shards()[0].tensor.detach().cpu() for name, value in model.state_dict().items()}
    for of_table in model.fused_optimizer.state_dict()["state"].values():
        for name, value in of_table.items():
            tensor = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
            result[name] = tensor.detach().cpu()
    ratio = alignment(model).total
    result["alignment"] = torch.tensor([ratio.aligned, ratio.touched, ratio.seen])
    return result


def sharder_of(case: Case) -> Any:
    return (SequenceSharder if case.sequences else BagSharder)(cadam.CAdam, lr=0.02)


def furthest(a: Result, b: Result, names: Callable[[str], bool]) -> float:
    return max((a[k].double() - b[k].double()).abs().max().item() for k in a if names(k))


# Parts 1 and 2: what comes out ---------------------------------------------------------------------------------------


def equality(device: torch.device, steps: int, on_cpu: Callable[[], dict[str, Result]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    here: dict[str, Result] = {}
    for name, case in CASES.items():
        try:
            here[name] = train(case, sharder_of(case), device, steps)
        except Exception:
            rows[name] = failed(name)
    there = on_cpu()
    for name, mine in here.items():
        if name not in there:
            rows[name] = {"error": "the CPU's process has no result"}
            continue
        other = there[name]
        weights = [k for k in mine if k.endswith(".weight")]
        apart = torch.cat([(mine[k].double() - other[k].double()).abs().flatten() for k in weights])
        rows[name] = {
            "weights": furthest(mine, other, lambda k: k.endswith(".weight")),
            "exp_avg": furthest(mine, other, lambda k: k.endswith(".exp_avg")),
            "exp_avg_sq": furthest(mine, other, lambda k: k.endswith(".exp_avg_sq")),
            "weights further than 1e-5": int((apart > 1e-5).sum()),
            "of": len(apart),
            "steps": {k: v.item() for k, v in mine.items() if k.endswith(".step")},
            "alignment here": mine["alignment"].tolist(),
            "alignment CPU": other["alignment"].tolist(),
        }
    for name, row in rows.items():
        print(
            f"  {name:22}" + "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        )
    return rows


def against_fbgemm(device: torch.device, steps: int) -> dict[str, float]:
    """Return the largest difference of the weights between cadam's Adam and FBGEMM's."""
    case = Case()
    theirs = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.ADAM, "learning_rate": 0.02, "eps": 1e-8})
    trained = []
    for sharder in (BagSharder(cadam.Adam, lr=0.02), theirs):
        model = sharded(case, sharder, device)
        start(model)
        for step in range(steps):
            embeddings(case, model, small_batch(case, step, device)).square().sum().backward()
        trained.append({k: v.local_shards()[0].tensor.detach().cpu() for k, v in model.state_dict().items()})
    found = {"weights": furthest(trained[0], trained[1], lambda k: True)}
    print(f"  weights {found['weights']:.3g} after {steps} steps")
    return found


# Part 3: time --------------------------------------------------------------------------------------------------------


def arms() -> dict[str, Callable[[], Any]]:
    def fbgemm(kind: EmbOptimType) -> Any:
        return EmbeddingBagCollectionSharder({"optimizer": kind, "learning_rate": 1e-3, "eps": 1e-8})

    return {
        "CAdam": lambda: BagSharder(cadam.CAdam, lr=1e-3),
        "FBGEMM Adam": lambda: fbgemm(EmbOptimType.ADAM),
        "FBGEMM row-wise Adagrad": lambda: fbgemm(EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def large_batches(rows: int, ids: int, device: torch.device, count: int = 8) -> list[Tensor]:
    """Return ids by Zipf's law: log-uniform ranks, scattered over the rows."""
    generator = torch.Generator(device).manual_seed(0)
    n = BATCH * TABLES * ids
    ranks = [torch.rand(n, generator=generator, device=device, dtype=torch.float64) for _ in range(count)]
    logarithm = torch.tensor(float(rows), dtype=torch.float64, device=device).log()
    return [((u * logarithm).exp().long().clamp(max=rows - 1) * 2_654_435_761) % rows for u in ranks]


def module_of(model: DistributedModelParallel) -> nn.Module:
    """Return the table module of a sharded model, which has one."""
    (found,) = [
        kernel.emb_module
        for m in model.modules()
        if hasattr(m, "_lookups")
        for x in m._lookups
        for kernel in x._emb_modules
    ]
    return found


def busy(step: Callable[[int], None], device: torch.device, steps: int = 10) -> dict[str, Any]:
    """Return the milliseconds that the device computes in a step, and the kernels that take most of them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for turn in range(steps):
            step(turn)
        wait(device)
    kernels = [(e.key[:70], e.self_device_time_total / 1e3 / steps, e.count / steps) for e in seen.key_averages()]
    kernels.sort(key=lambda k: -k[1])
    return {
        "milliseconds": sum(k[1] for k in kernels),
        "launches": sum(k[2] for k in kernels),
        "kernels": [[name, round(ms, 4), count] for name, ms, count in kernels[:12]],
    }


def measure(rows: int, width: int, ids: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """Return the milliseconds by arm and by kind of time."""
    case = Case(rows=rows // TABLES, width=width, features=TABLES, batch=BATCH)
    models: dict[str, DistributedModelParallel] = {}
    for name, make in arms().items():
        try:
            models[name] = sharded(case, make(), device)
        except Exception:
            failed(f"{name}, made")
    data = large_batches(case.rows, ids, device)
    grad = torch.randn(BATCH, TABLES * width, device=device) / BATCH
    lengths = torch.full((TABLES * BATCH,), ids, dtype=torch.int64, device=device)
    offsets = torch.arange(0, len(lengths) * ids + 1, ids, device=device)
    names = [f"t{i}" for i in range(TABLES)]

    def forward(model: DistributedModelParallel, turn: int) -> Tensor:
        batch = KeyedJaggedTensor(keys=names, values=data[turn % len(data)], lengths=lengths, stride=BATCH)
        values: Tensor = model(batch).values()
        return values

    found: dict[str, Any] = {}
    times: dict[str, dict[str, list[float]]] = {}
    for name in list(models):
        try:  # compiled and warmed up
            tables = module_of(models[name])
            for turn in range(4):
                forward(models[name], turn).backward(grad)
                tables(data[turn], offsets).backward(grad)
            wait(device)
            times[name] = {"step": [], "backward": [], "flow": [], "tables": []}
        except Exception:
            found[name] = failed(f"{name}, warmed")
            del models[name]
    for turn in range(rounds):
        for name, model in models.items():
            tables, of_arm = module_of(model), times[name]
            wait(device)
            values = forward(model, turn)
            wait(device)
            middle = time.perf_counter()
            values.backward(grad)
            wait(device)
            of_arm["backward"].append(1e3 * (time.perf_counter() - middle))
            begin = time.perf_counter()
            forward(model, turn).backward(grad)
            wait(device)
            of_arm["step"].append(1e3 * (time.perf_counter() - begin))
            if turn % 4:
                continue
            begin = time.perf_counter()
            for k in range(10):
                forward(model, turn + k).backward(grad)
            wait(device)
            of_arm["flow"].append(100 * (time.perf_counter() - begin))
            begin = time.perf_counter()
            for k in range(10):
                tables(data[(turn + k) % len(data)], offsets).backward(grad)
            wait(device)
            of_arm["tables"].append(100 * (time.perf_counter() - begin))
    for name, of_arm in times.items():
        found[name] = {kind: statistics.median(ms) for kind, ms in of_arm.items()}
        if device.type == "cuda":
            tables = module_of(models[name])
            try:
                seen = busy(lambda k, tables=tables: tables(data[k % len(data)], offsets).backward(grad), device)
                found[name]["busy"], found[name]["profile"] = seen["milliseconds"], seen
            except Exception:
                failed(f"{name}, profiled")
    for model in models.values():
        for tables in iter_tables(model):
            found["alignment"] = {k: [r.aligned, r.touched, r.seen] for k, r in tables.alignment().items()}
    return found


def show(found: dict[str, Any]) -> None:
    kinds = ("step", "backward", "flow", "tables", "busy")
    print(f"  {'':34}" + "".join(f"{kind:>10}" for kind in kinds))
    for setting, of_arms in found.items():
        if "error" in of_arms:
            continue
        base = of_arms.get("FBGEMM Adam", {})
        for name in arms():
            times = of_arms.get(name, {})
            cells = "".join(f"{times[k]:10.3f}" if k in times else f"{'-':>10}" for k in kinds)
            print(f"  {setting:20} {name:25}"[:48].ljust(36) + cells + "  ms")
        mine = of_arms.get("CAdam", {})
        cells = "".join(f"{mine[k] / base[k]:10.2f}" if k in mine and k in base else f"{'-':>10}" for k in kinds)
        print(f"  {setting:14} CAdam / Adam".ljust(36) + cells + "  times")


# The run -------------------------------------------------------------------------------------------------------------


def failed(what: str) -> dict[str, str]:
    print(f"  FAILED: {what}\n" + traceback.format_exc(limit=-12), flush=True)
    return {"error": traceback.format_exc()}


def part(name: str, work: Callable[[], Any]) -> Any:
    print(f"[{time.perf_counter() - STARTED:5.1f} s] {name}", flush=True)
    try:
        return work()
    except Exception:
        return failed(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", nargs="+", default=["4000000x32", "16000000x64"], help="rows x columns")
    parser.add_argument("--ids", type=int, nargs="+", default=[1, 4], help="ids per bag")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--train-only", action="store_true", help="the CPU's side of the first part")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    device, trained = torch.device(given.device), given.folder / "cpu.pt"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(2)
    rendezvous = f"file://{tempfile.mktemp()}"
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=rendezvous, rank=0, world_size=1)
    if given.train_only:
        results = {}
        for name, case in CASES.items():
            try:
                results[name] = train(case, sharder_of(case), device, given.steps)
            except Exception:
                failed(f"{name} on the CPU")
        torch.save(results, trained)
        return
    command = [sys.executable, __file__, str(given.folder), "--device", "cpu", "--train-only"]
    other = subprocess.Popen([*command, "--steps", str(given.steps)])

    def on_cpu() -> dict[str, Result]:
        if other.wait(timeout=60):
            raise RuntimeError(f"the CPU's process ended with {other.returncode}")
        results: dict[str, Result] = torch.load(trained)
        return results

    versions = {"torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        versions["name"] = torch.cuda.get_device_name(device)
    found: dict[str, Any] = {"versions": versions}
    print(versions)
    found["fbgemm"] = part("Adam, ours and FBGEMM's", lambda: against_fbgemm(device, 20))
    found["equality"] = part("CAdam here and on the CPU", lambda: equality(device, given.steps, on_cpu))
    found["time"] = {}
    for size in given.rows:
        rows, width = map(int, size.split("x"))
        for ids in given.ids:
            name = f"{size}, {ids} ids"
            found["time"][name] = part(name, lambda r=rows, w=width, i=ids: measure(r, w, i, device, given.rounds))
            (given.folder / "torchrec_cuda.json").write_text(json.dumps(found, indent=1))
    for name, of_arms in found["time"].items():
        for arm in arms():
            profile = of_arms.get(arm, {}).get("profile")
            if profile:
                print(f"  {name}, {arm}: {profile['launches']:.0f} launches a step")
                for kernel in profile["kernels"]:
                    print("    ", *kernel)
    if device.type == "cuda":
        found["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        print(f"  at most {found['peak GB']:.1f} GB on the device")
    part("Time", lambda: show(found["time"]))
    (given.folder / "torchrec_cuda.json").write_text(json.dumps(found, indent=1))
    print(f"[{time.perf_counter() - STARTED:5.1f} s] done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
