"""Online learning on sharded tables: a DLRM that predicts a stream of clicks and learns from it, on many processes.

    python examples/online_dlrm.py --make clicks --ranks 2     # a stream to try it on, a share for each process
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/online_dlrm.py --data clicks --folder online-run

Each process reads its own share, clicks/share-RANK.jsonl, and holds its part of every table. One checkpoint for all of
them is in online-run/state, and the predictions of each are logged in online-run/log. If one of them is
killed, torchrun restarts all, and they resume from the checkpoint with the same result. After SIGTERM to one of them,
all stop with a checkpoint, and the same command resumes from there.
"""

from __future__ import annotations

import cadam.torchrec

# isort: split
import argparse
import json
import logging
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM

from cadam.online import CheckpointOptions, Console, LabelOptions, LinesSource, Schema, StreamMetrics
from cadam.online.distributed_learner import DistributedLearner, join, leave
from cadam.online.stop_signals import stop_on_signals
from cadam.torchrec import BagSharder

ROWS, WIDTH, RATE = 10_000, 16, 1e-2
SPARSE = ("user", "item", "shop")
SCHEMA = Schema(
    {**dict.fromkeys(SPARSE, f"hash:{ROWS}"), "price": "number"}, label="click", id="event", user="user", time="at"
)


class Model(nn.Module):
    """A DLRM that takes the features of the schema by name, and batches without events too."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[name])
            for name in SPARSE
        ]
        tables = EmbeddingBagCollection(configs, device=torch.device("meta"))
        self.dlrm = DLRM(tables, 1, dense_arch_layer_sizes=[32, WIDTH], over_arch_layer_sizes=[64, 1])

    def forward(self, price: Tensor, **ids: Tensor) -> Tensor:
        values = torch.cat([ids[name] for name in SPARSE])
        lengths = torch.ones(len(values), dtype=torch.int64, device=values.device)
        score: Tensor = self.dlrm(price.unsqueeze(1), KeyedJaggedTensor(list(SPARSE), values, lengths=lengths))
        return score.squeeze(1)


def make(folder: Path, ranks: int, count: int) -> None:
    """Clicks that depend on user, item and price; an event and its label, which comes later, go to the same share."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    shares = [open(folder / f"share-{rank}.jsonl", "w") for rank in range(ranks)]  # noqa: SIM115
    late: list[dict[str, float]] = []
    for event in range(count):
        ids = {name: int(chance.random() ** 3 * 1000) for name in SPARSE}
        price = round(chance.gauss(0, 1), 3)
        click = int((ids["user"] % 7 < 3) + (ids["item"] % 5 < 2) - price + chance.gauss(0, 0.5) > 1)
        record = {"event": event, "at": event / 100, **ids, "price": price}
        print(json.dumps(record), file=shares[event % ranks])
        late.append({"event": event, "click": click})
        if event >= 500:
            print(json.dumps(late[event - 500]), file=shares[(event - 500) % ranks])
    for share in shares:
        share.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="write a stream there, and nothing else")
    parser.add_argument("--ranks", type=int, default=2, help="how many shares to make")
    parser.add_argument("--count", type=int, default=50_000, help="how many events to make")
    parser.add_argument("--data", type=Path, help="the folder with a share for each process")
    parser.add_argument(
        "--folder", type=Path, help="folder of checkpoints and logs; a run resumes from the newest checkpoint"
    )
    given = parser.parse_args()
    if given.make:
        make(given.make, given.ranks, given.count)
        return
    if not (given.data and given.folder):
        parser.error("--data and --folder are needed")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    join("gloo")
    torch.manual_seed(0)
    model = DistributedModelParallel(Model(), device=torch.device("cpu"), sharders=[BagSharder(cadam.CAdam, lr=RATE)])
    dense = [(name, p) for name, p in model.named_parameters() if not hasattr(p, "_in_backward_optimizers")]
    learner = DistributedLearner(
        model,
        cadam.CAdam(dense, lr=RATE),
        nn.functional.binary_cross_entropy_with_logits,
        labels=LabelOptions(horizon=60.0, unmatched="negative"),
        metrics=[StreamMetrics(5_000, kinds=["auc", "calibration"])],
        checkpoint=CheckpointOptions(given.folder / "state", every=5_000),
        log=given.folder / "log",
        reports=[Console()],
    )
    share = LinesSource(given.data / f"share-{dist.get_rank()}.jsonl", SCHEMA, "jsonl", batch_size=256, patience=None)
    with stop_on_signals(learner):
        learner.run(share)
    learner.close()
    leave()


if __name__ == "__main__":
    main()
