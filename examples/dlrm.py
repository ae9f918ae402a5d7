"""A DLRM on a stream of clicks: embedding tables in TorchRec, updated in backward by CAdam, and a dense part.

One process, no network:

    python examples/dlrm.py

Two processes with gloo, each with half of every batch and half of every table's rows; then, from the checkpoint that
they left, resume with one:

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/dlrm.py --folder run
    python examples/dlrm.py --folder run --steps 600

One process for each GPU, with NCCL (needs fbgemm-gpu for CUDA):

    torchrun --standalone --nproc-per-node=8 --max-restarts=3 examples/dlrm.py --device cuda --rows 10000000 \\
        --folder run

If a process dies, torchrun restarts all of them, up to three times, and they resume from the newest checkpoint.

The clicks are simulated: each id has a taste, tastes drift, and a tenth of the labels are flipped.
"""

from __future__ import annotations

import cadam.torchrec

# isort: split
import argparse
import logging
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM

from cadam import torchrec as tables

FEATURES, DENSE, WIDTH = [f"f{i}" for i in range(8)], 4, 16


def batch(step: int, size: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return dense features, one id per sparse feature, and labels. They depend only on the step, not on the rank."""
    generator = torch.Generator().manual_seed(step)
    dense = torch.randn(size, DENSE, generator=generator)
    ids = (torch.rand(size, len(FEATURES), generator=generator) ** 3 * rows).long()  # few ids are hot
    taste = torch.sin(ids * 12.9898 + torch.arange(len(FEATURES)) + step / 300).sum(1)
    clicked = (taste + dense[:, 0] > 0).float()
    lies = torch.rand(size, generator=generator) < 0.1
    return dense, ids, torch.where(lies, 1 - clicked, clicked)


def build(rows: int, device: torch.device) -> DistributedModelParallel:
    configs = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=WIDTH, num_embeddings=rows, feature_names=[name])
        for name in FEATURES
    ]
    model = DLRM(
        EmbeddingBagCollection(configs, device=torch.device("meta")),
        dense_in_features=DENSE,
        dense_arch_layer_sizes=[32, WIDTH],
        over_arch_layer_sizes=[64, 1],
        dense_device=device,
    )
    sharders = [tables.BagSharder(cadam.CAdam, lr=1e-2)]
    constraints = {config.name: ParameterConstraints(sharding_types=["row_wise"]) for config in configs}
    topology = Topology(world_size=dist.get_world_size(), compute_device=device.type)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1024, help="batch size of all processes together")
    parser.add_argument("--rows", type=int, default=10_000, help="rows of each table")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--folder", help="folder of the checkpoints; a run resumes from the newest one")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device")
    logging.getLogger("torchrec").setLevel(logging.ERROR)

    torch.manual_seed(0)
    backend = "nccl" if options.device == "cuda" else "gloo"
    tables.join(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device(options.device, int(os.environ.get("LOCAL_RANK", 0))) if backend == "nccl" else torch.device("cpu")
    )
    if options.batch % world:
        parser.error(f"--batch {options.batch} cannot be divided among {world} processes")

    model = build(options.rows, device)
    dense_parameters = [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer = cadam.CAdam(dense_parameters, lr=1e-2)
    saved = tables.load(options.folder, model, optimizer) if options.folder else None
    first = saved.step if saved else 0
    if rank == 0 and saved:
        print(f"resuming from step {first}")

    loss_of, share = (
        nn.BCEWithLogitsLoss(),
        slice(rank * options.batch // world, (rank + 1) * options.batch // world),
    )
    recent, start = torch.zeros((), device=device), time.perf_counter()
    for step in range(first + 1, options.steps + 1):
        dense, ids, labels = (x[share].to(device) for x in batch(step, options.batch, options.rows))
        lengths = torch.ones(ids.numel(), dtype=torch.int64, device=device)
        features = KeyedJaggedTensor(FEATURES, ids.t().reshape(-1), lengths=lengths)
        optimizer.zero_grad()
        loss = loss_of(model(dense, features).squeeze(1), labels)
        loss.backward()  # also updates the tables
        optimizer.step()  # updates the dense part
        recent += loss.detach()
        if step % 50 == 0:
            dist.all_reduce(recent)
            aligned = tables.alignment(model, reset=True).over_ranks().total
            if rank == 0:
                pace = (step - first) / (time.perf_counter() - start)
                mean = recent.item() / world / 50
                print(f"step {step:5d}   loss {mean:.4f}   aligned {aligned.over_touched:.3f}   {pace:.0f} steps/s")
            recent.zero_()
        if options.folder and (step % 100 == 0 or step == options.steps):
            tables.save(options.folder, step, model, optimizer)
    tables.leave()


if __name__ == "__main__":
    main()
