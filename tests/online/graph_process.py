"""A learner on a CUDA device that is killed at random moments and started again.

    python graph_process.py FOLDER KILLS SEED

It is used like `learner_process`, which describes the output. The labels come with the events, so that the training
steps are captured as CUDA graphs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

from cadam import CAdam
from cadam.online import CheckpointOptions, Learner, models
from cadam.online.models.model_file import LOG_LOSS
from tests.online import learner_process
from tests.online.streams import Replayed
from tests.online.test_training_step import SCHEMA, make_events

BATCHES = 600


def learn(kind: str, place: str, folder: Path) -> None:
    """Resume from the checkpoint, run to the end of the stream, and write the results."""
    torch.manual_seed(0)
    model = models.build("deepfm", SCHEMA).cuda()
    optimizer = CAdam(model.named_parameters(), lr=0.01)
    checkpoint = CheckpointOptions(folder / "state", every=1000)
    learner = Learner(model, optimizer, LOG_LOSS, checkpoint=checkpoint)
    learner.run(Replayed([make_events(64 if seed % 5 else 24, seed) for seed in range(BATCHES)]))
    tensors = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    digest = hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)).hexdigest()
    metrics = {name: repr(value) for name, value in learner.metrics().items()}
    graphs = len(learner.training._graphs)  # type: ignore[attr-defined]
    (folder / "outcome.new").write_text(json.dumps({"weights": digest, "metrics": metrics, "graphs": graphs}))
    os.replace(folder / "outcome.new", folder / "outcome.json")


if __name__ == "__main__":
    learner_process.learn = learn
    learner_process.main("", "", Path(sys.argv[1]) / "runs", int(sys.argv[2]), int(sys.argv[3]))
