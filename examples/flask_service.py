"""Predict and learn in one process with Flask and `Learner`, the shortest service that can be written by hand.

    pip install flask waitress
    python examples/flask_service.py schema.json STATE_FOLDER PORT

It has no durable log: a label that was acknowledged after the last checkpoint is lost in a crash. Predictions wait for
training, because one lock protects the model. `cadam serve` has neither limit; see docs/serve.md.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import torch
from flask import Flask, request
from waitress import serve

from cadam import CAdam
from cadam.online import Learner, Schema, models
from cadam.online.persistence.checkpoint_schedule import CheckpointOptions

schema = replace(Schema.read(sys.argv[1]), id="event_id:text")
torch.set_num_threads(1)
torch.manual_seed(0)
model = models.build("deepfm", schema)
learner = Learner(
    model,
    CAdam(model.named_parameters(), lr=3e-3),
    torch.nn.functional.binary_cross_entropy_with_logits,
    checkpoint=CheckpointOptions(sys.argv[2], seconds=60),
)
learner.resume()
lock = threading.Lock()
app = Flask(__name__)


@app.post("/predict")
def predict() -> Any:
    """Predict one event, which waits for its label from now on."""
    event = request.get_json(force=True)
    batch = schema.encode([event])
    if batch.events is None:
        return {"error": batch.rejected[0].reason}, 422
    with lock:
        [score] = learner.predict(batch.events).tolist()
    return {"predictions": [{"id": event["event_id"], "score": score}]}


@app.post("/feedback")
def feedback() -> Any:
    """Learn one event with its label."""
    label = request.get_json(force=True)
    with lock:
        learner.observe([label["id"]], [label["label"]])
    return {"accepted": 1}


if __name__ == "__main__":
    serve(app, host="127.0.0.1", port=int(sys.argv[3]), threads=8)
