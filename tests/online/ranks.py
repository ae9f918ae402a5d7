"""A job of several ranks that learn online from shares of one stream, for tests.

    torchrun ... ranks.py KIND DATA FOLDER SECONDS

Every rank learns from DATA/share-RANK.jsonl to its end and writes its results to FOLDER/outcome-RANK.json. SECONDS is a
list with one number per attempt: in that attempt one rank is killed after this many seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cadam import CAdam
from cadam.online import Batch, Events, Labels, Learner, LinesSource, StreamMetrics
from cadam.online.data.events import concatenate_columns
from cadam.online.distributed_learner import DistributedLearner, join, leave
from cadam.online.stop_signals import stop_on_signals
from tests.online.streams import ITEMS, SCHEMA, USERS, Replayed, events, files, grouped, table

WIDTH, RATE = 4, 0.05
TABLES = {"users": USERS, "goods": ITEMS}


def start(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(TABLES[name])
    return torch.randn(TABLES[name], WIDTH, generator=generator) / 2


class Plain(nn.Module):
    """Embeddings of user and item with sparse gradients, and a linear layer over both and the price."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.users = nn.Embedding.from_pretrained(start("users"), freeze=False, sparse=True)
        self.goods = nn.Embedding.from_pretrained(start("goods"), freeze=False, sparse=True)
        torch.manual_seed(0)
        self.out = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * WIDTH + 1, 1))

    def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
        score: Tensor = self.out(torch.cat([self.users(user), self.goods(item), price[:, None]], 1)).squeeze(1)
        return score


class Sharded(nn.Module):
    """`Plain` with its tables in an EmbeddingBagCollection."""

    def __init__(self, tables: nn.Module, dropout: float) -> None:
        super().__init__()
        self.tables, self.out = tables, Plain(dropout).out

    def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
        from torchrec import KeyedJaggedTensor

        lengths = torch.ones(2 * len(user), dtype=torch.int64)
        found = self.tables(KeyedJaggedTensor(["user", "item"], torch.cat([user, item]), lengths=lengths))
        score: Tensor = self.out(torch.cat([found["user"], found["item"], price[:, None]], 1)).squeeze(1)
        return score


def model_of(kind: str, dropout: float) -> nn.Module:
    """Return a model in DistributedDataParallel, or with tables that TorchRec shards as `kind` says."""
    if kind == "ddp":
        return DistributedDataParallel(Plain(dropout))
    from torchrec import EmbeddingBagCollection
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    from cadam.torchrec import BagSharder
    from tests.torchrec.model import Setting, Table, distributed, fill

    tables = (Table("users", USERS, ("user",), width=WIDTH), Table("goods", ITEMS, ("item",), width=WIDTH))
    configs = [
        EmbeddingBagConfig(name=t.name, embedding_dim=t.width, num_embeddings=t.rows, feature_names=list(t.features))
        for t in tables
    ]
    module = Sharded(EmbeddingBagCollection(configs, device=torch.device("meta")), dropout)
    model = distributed(module, [BagSharder(CAdam, lr=RATE)], Setting(kind, tables=tables))
    fill(model, {name: start(name) for name in TABLES})
    return model


def learner(kind: str, dropout: float = 0.0, **options: Any) -> Learner:
    """Return a learner on the ranks of a job; the ordinary learner if the kind is "alone"."""
    loss = nn.functional.binary_cross_entropy_with_logits
    if kind == "alone":
        plain = Plain(dropout)
        return Learner(plain, CAdam(plain.named_parameters(), lr=RATE), loss, **grouped(options))
    model = model_of(kind, dropout)
    dense = [(name, p) for name, p in model.named_parameters() if not hasattr(p, "_in_backward_optimizers")]
    return DistributedLearner(model, CAdam(dense, lr=RATE), loss, **grouped(options))


def tensors(ours: Learner) -> dict[str, Tensor]:
    """Return weights and moments by table or layer, gathered from all ranks."""
    if not hasattr(ours.model, "fused_optimizer"):
        found = {}
        for name, parameter in ours.model.named_parameters():
            for buffer, value in {"": parameter.detach(), **ours.optimizer.state[parameter]}.items():
                found[f"{name.removeprefix('module.').removesuffix('.weight')}.{buffer}"] = value.clone()
        return found
    from tests.torchrec.model import state_of

    found = {f"{name}.": value for name, value in state_of(ours.model).items() if "." not in name}
    found.update({name: value for name, value in state_of(ours.model).items() if "." in name})
    for name, parameter in ours.model.named_parameters():
        if "out" in name:
            for buffer, value in {"": parameter.detach(), **ours.optimizer.state[parameter]}.items():
                found[f"{name[name.index('out') :].removesuffix('.weight')}.{buffer}"] = value.clone()
    return found


# A stream in rounds, which one process can read too ----------------------------------------------------------------

SIZES = [(16, 16), (7, 20), (0, 9), (12, 0), (5, 5), (30, 1)] * 5 + [(0, 11), (0, 3)]  # events of each rank


def rounds(late: bool) -> list[list[Batch]]:
    """The batches of two ranks in each round: events with their labels, or labels three rounds after their events."""
    found: list[list[Batch]] = []
    first = 0
    for number, sizes in enumerate(SIZES):
        every = events(sum(sizes), seed=number, first=first)
        parts = [every.take(slice(0, sizes[0])), every.take(slice(sizes[0], None))]
        first += len(every)
        now = [Batch(part) for part in parts]
        if late:
            now, labels = [], []
            for part in parts:
                assert part.ids is not None
                assert part.labels is not None
                now.append(Batch(replace(part, labels=None)))
                labels.append(Labels(part.ids, part.labels))
            if number == 0:
                waiting: list[list[Labels]] = []
            waiting.append(labels)
            if number >= 3:
                for batch, due in zip(now, waiting[number - 3], strict=True):
                    batch.labels = due
        found.append(now)
    return found


def together(batches: list[Batch]) -> Batch:
    """Return the batches of all ranks as one."""
    columns = concatenate_columns([batch.events.columns() for batch in batches if batch.events is not None])
    labels = [batch.labels for batch in batches if batch.labels is not None]
    both = (
        Labels(np.concatenate([b.ids for b in labels]), np.concatenate([b.labels for b in labels])) if labels else None
    )
    return Batch(Events.from_columns(columns), both)


def learn_rounds(
    kind: str, late: bool, folder: Path, upto: int | None = None, finish: bool = True, **options: Any
) -> dict[str, Any]:
    """Learn from this rank's share of the rounds, all of it if there is one rank only."""
    import torch.distributed as dist

    world, rank = (1, 0) if kind == "alone" else (dist.get_world_size(), dist.get_rank())
    share = [together(batches) if world == 1 else batches[rank % 2] for batches in rounds(late)]
    ours = learner(kind, metrics=[StreamMetrics(100)], log=folder / "log", **options)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cadam.online").addHandler(handler)
    try:
        ours.run(Replayed(share), events=upto)
        if finish:
            ours.finish()
            assert ours.log is not None
            ours.log.flush()
    finally:
        ours.close()
        logging.getLogger("cadam.online").removeHandler(handler)
    return {
        "tensors": tensors(ours),
        "metrics": ours.metrics(),
        "events": ours.events,
        "resumed": ours.resumed,
        "failed_saves": ours.schedule.failures if ours.schedule else 0,
        "logged": logged,
    }


# A process of torchrun ---------------------------------------------------------------------------------------------


def killed_after(seconds: list[float]) -> Iterator[float]:
    """Yield the time after which this process is killed in this attempt, if it is the one rank that is killed."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    victim = random.Random(attempt).randrange(int(os.environ["WORLD_SIZE"]))
    if attempt < len(seconds) and int(os.environ["RANK"]) == victim:
        yield seconds[attempt]


def die(folder: Path) -> None:
    (folder / f"killed-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def main(kind: str, data: Path, folder: Path, seconds: list[float]) -> None:
    torch.set_num_threads(1)
    for name in ("torchrec", "root"):
        logging.getLogger(name).setLevel(logging.ERROR)
    join("gloo")
    rank = os.environ["RANK"]
    random.seed(int(rank))
    np.random.seed(int(rank))
    ours = learner(
        kind, dropout=0.1, horizon=200, unmatched="negative", batch_size=24, metrics=[StreamMetrics(500)],
        log=folder / "log", log_rows=250, checkpoint=folder / "state", checkpoint_every=80,
    )  # fmt: skip
    (folder / f"process-{rank}").write_text(str(os.getpid()))
    for wait in killed_after(seconds):
        timer = threading.Timer(wait, die, (folder,))
        timer.daemon = True
        timer.start()
    began = time.monotonic()
    with stop_on_signals(ours):
        ours.run(LinesSource(data / f"share-{rank}.jsonl", SCHEMA, "jsonl", batch_size=16, patience=None))
    outcome = {
        "tensors": hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors(ours).values())).hexdigest(),
        "metrics": {name: repr(value) for name, value in ours.metrics().items()},
        "log": files(folder / "log" / f"rank-{rank}"),
        "rejected": files(folder / "state" / "rejected")[f"rank-{rank}.jsonl"],
        "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "resumed": ours.resumed,
        "stopped": ours.stopped,
        "seconds": time.monotonic() - began,
    }
    ours.close()
    (folder / f"outcome-{rank}.new").write_text(json.dumps(outcome))
    (folder / f"outcome-{rank}.new").rename(folder / f"outcome-{rank}.json")
    leave()


# torchrun and what it starts, watched from outside -----------------------------------------------------------------


def shares(folder: Path, count: int = 4000) -> Path:
    """A stream of events, labels that come later or never, and events that cannot be used, as a file for each of two
    ranks; the second has a third of it.
    """
    folder.mkdir()
    columns = {name: values.tolist() for name, values in table(count, seed=2).items()}
    lines: list[list[str]] = [[], []]
    for row in range(count):
        event = {name: values[row] for name, values in columns.items()}
        if row % 3:
            del event["click"]
        if row % 17 == 5:
            event["item"] = 10**6
        lines[row % 3 == 1].append(json.dumps(event))
        if row > 102 and row % 2:
            label = {"event": row - 102, "click": columns["click"][row - 102]}  # to the rank of its event
            lines[row % 3 == 1].append(json.dumps(label))
    for rank, share in enumerate(lines):
        (folder / f"share-{rank}.jsonl").write_text("\n".join(share) + "\n")
    return folder


def launch(kind: str, data: Path, folder: Path, seconds: list[float]) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [__file__, kind, str(data), str(folder), json.dumps(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "errors", "ab") as errors:
        return subprocess.Popen(
            [*command, f"--max-restarts={len(seconds)}", *arguments], env=environment, stdout=errors, stderr=errors
        )


def outcomes(job: subprocess.Popen[bytes], folder: Path) -> list[dict[str, Any]]:
    """The results of each rank at the end."""
    assert job.wait(600) == 0, (folder / "errors").read_text()[-8000:]
    return [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(2)]


def kill_and_compare(kind: str, kills: int, seed: int, data: Path, folder: Path) -> None:
    """Kill random ranks at random times, `kills` times, and check that the result is that of an undisturbed job."""
    chance = random.Random(seed)
    whole = outcomes(launch(kind, data, folder / "whole", []), folder / "whole")
    length = min(outcome.pop("seconds") for outcome in whole)
    assert not any(outcome.pop("resumed") for outcome in whole)
    assert whole[0]["metrics"] == whole[1]["metrics"]
    dealt = trial = 0
    while dealt < kills:
        here, trial = folder / str(trial), trial + 1
        # Most kills happen before an undisturbed run would end; a rank that is not killed in time runs to the end.
        moments = [chance.uniform(0, 0.2 * length) for _ in range(min(kills - dealt, 5))]
        job = outcomes(launch(kind, data, here, moments), here)
        dealt += sum(1 for _ in here.glob("killed-*"))
        for outcome in job:
            del outcome["seconds"], outcome["resumed"]
        assert job == whole
    print(dealt, "kills in", trial, "jobs")  # shown by -s


def stop_and_go_on(kind: str, data: Path, folder: Path) -> None:
    """After SIGTERM to one rank, all ranks save a checkpoint and end. Started again, they get the same result."""
    whole = outcomes(launch(kind, data, folder / "whole", []), folder / "whole")
    job = launch(kind, data, folder / "stopped", [])
    state = folder / "stopped" / "state"
    while len(list(state.glob("checkpoint-*"))) < 3:  # the run has begun
        assert job.poll() is None, (folder / "stopped" / "errors").read_text()[-8000:]
        time.sleep(0.02)
    os.kill(int((folder / "stopped" / "process-1").read_text()), signal.SIGTERM)
    stopped = outcomes(job, folder / "stopped")
    assert all(outcome["stopped"] for outcome in stopped)
    assert stopped[0]["metrics"] == stopped[1]["metrics"] != whole[0]["metrics"]
    again = outcomes(launch(kind, data, folder / "stopped", []), folder / "stopped")
    assert all(outcome["resumed"] for outcome in again)
    for before, after in zip(whole, again, strict=True):
        for name in before.keys() - {"seconds", "resumed", "stopped"}:
            assert before[name] == after[name], name


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
