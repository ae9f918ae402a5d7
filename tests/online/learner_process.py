"""A learner in a separate process that is killed at random moments and started again.

    python learner_process.py KIND PLACE FOLDER KILLS

The learner reads the stream at PLACE once without interruption, with its files in FOLDER/whole. Then it reads the
stream again, with its files in FOLDER/0, FOLDER/1, ..., and is killed with SIGKILL at random moments and restarted,
until KILLS kills have happened. PLACE is a folder of Parquet files, the URL of a Redis server, or SERVERS/TOPIC of
Kafka, which is followed until all events have arrived. If KIND is labeled, the labels in the Parquet files come with
their events, so that the fused training step learns them. For each run, one line of JSON is printed with the number of
kills and hashes of everything that must be equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # Optimizers import it, which takes seconds; here it is imported once for all children.

from cadam.online import KafkaSource, Learner, ParquetSource, RedisSource, Source, models, rate_tuning
from cadam.online.labels.batch_growth import BatchGrowth
from tests.online.kafka_broker import settings
from tests.online.streams import ITEMS, SCHEMA, SHORT_SCHEDULE, files, learner, table, weights

COUNT = 1500
BATCH = 16
KINDS = json.loads(os.environ.get("ONLINE_KINDS", "{}"))
"""Kinds of features that differ from those of the tests' schema."""
SCHEMA = replace(SCHEMA, features={**SCHEMA.features, **KINDS})


def records() -> list[dict[str, Any]]:
    """Events with and without labels, labels that come later, some twice, and events that cannot be used."""
    columns = {name: values.tolist() for name, values in table(COUNT, seed=2).items()}
    found: list[dict[str, Any]] = []
    for row in range(COUNT):
        event = {name: values[row] for name, values in columns.items()}
        if row % 3:
            del event["click"]
        if row % 17 == 5:
            event["item"] = 10**6
        found.append(event)
        if row > 100 and row % 2:
            found.append({"event": row - 100, "click": columns["click"][row - 100]})
        if row > 100 and row % 50 == 1:
            found.append({"event": row - 100, "click": 0.0})
    return found


def source(kind: str, place: str) -> Source:
    if kind in ("parquet", "labeled"):
        return ParquetSource(place, SCHEMA, batch_size=BATCH)
    if kind == "redis":
        return RedisSource(place, "clicks", SCHEMA, batch_size=BATCH, patience=None)
    servers, _, topic = place.partition("/")
    return KafkaSource(servers, topic, SCHEMA, batch_size=BATCH, follow=True, patience=None, settings=settings())


def learn(kind: str, place: str, folder: Path) -> None:
    """Resume from the checkpoint, run to the end of the stream, and write the results."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    name = os.environ.get("ONLINE_MODEL")  # a ready-made one, instead of the small one of these tests
    later: dict[str, Any] = {} if kind == "labeled" else {"horizon": 200, "unmatched": "negative", "batch_size": 24}
    is_tuned = os.environ.get("ONLINE_TUNED") == "1"
    if os.environ.get("ONLINE_GROWTH") == "1":
        later |= {"batch_growth": BatchGrowth(first=4, last=BATCH, divisor=64), "initialize_bias": True}
    vars(rate_tuning).update(SHORT_SCHEDULE)
    ours = learner(
        models.build(name, SCHEMA) if name else None,
        json.loads(os.environ.get("ONLINE_STORAGE", "{}")),  # the moments of the kills
        log=folder / "log", log_rows=250, checkpoint=folder / "state", checkpoint_every=80, tune_rate=is_tuned, **later,
    )  # fmt: skip
    assert kind != "labeled" or ours.training_mode == "in batches, with a fused training step"
    if kind == "kafka":
        usable = sum("user" in one and one["item"] < ITEMS for one in records())
        ours.run(source(kind, place), events=usable).finish()
        assert ours.log is not None
        ours.log.flush()
    else:
        ours.run(source(kind, place))
    outcome = {
        "weights": hashlib.sha256(b"".join(weights(ours))).hexdigest(),
        "metrics": {name: repr(value) for name, value in ours.metrics().items()},
        "log": files(folder / "log"),
        "rejected": files(folder / "state")["rejected.jsonl"],
        "candidates": _hash_candidates(ours),
        "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }
    (folder / "outcome.new").write_text(json.dumps(outcome))
    (folder / "outcome.new").rename(folder / "outcome.json")


def _hash_candidates(ours: Learner) -> dict[int, str]:
    """Hash the weights that learn at other rates, if the learning rate is tuned."""
    candidates = {} if ours.rate_tuning is None else ours.rate_tuning.candidates
    return {position: hashlib.sha256(b"".join(weights(each))).hexdigest() for position, each in candidates.items()}


def live(kind: str, place: str, folder: Path, seconds: float | None) -> bool:
    """Run a learner process, kill it after `seconds` unless that is None, and return whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            learn(kind, place, folder)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit("the learner failed")
    return False


def main(kind: str, place: str, folder: Path, kills: int, seed: int | None = None) -> None:
    torch.set_num_threads(1)
    chance = random.Random(kills if seed is None else seed)
    folder.mkdir(exist_ok=True)
    (folder / "whole").mkdir()
    start = time.monotonic()
    live(kind, place, folder / "whole", None)
    seconds = time.monotonic() - start
    print(json.dumps({"kills": 0, **json.loads((folder / "whole" / "outcome.json").read_text())}), flush=True)
    dealt = trial = 0
    while dealt < kills:
        here, before = folder / str(trial), dealt
        here.mkdir()
        trial += 1
        while not (here / "outcome.json").exists():
            wait = chance.uniform(0.02, 0.6 * seconds) if dealt < kills else None
            dealt += live(kind, place, here, wait)
        outcome = json.loads((here / "outcome.json").read_text())
        print(json.dumps({"kills": dealt - before, **outcome}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
