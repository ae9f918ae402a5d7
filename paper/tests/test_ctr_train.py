"""Training of the CTR models: it equals a loop with torch.optim, with clipping, and with and without CUDA graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from in_memory_clicks import InMemoryClicks
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from cadam.online.metrics.auc import auc
from cadam.online.metrics.log_loss import log_loss
from cadam_paper.ctr import models, train
from cadam_paper.ctr.generator import Generated
from cadam_paper.ctr.train import Record, Task, train_epoch, train_stream
from cadam_paper.harness.control_arms import CONTROL_ARMS

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
CLICKS = InMemoryClicks()


def task(optimizer: str = "CAdam", model: str = "DeepFM", **more: Any) -> Task:
    return Task(model, optimizer, **{"lr": 0.01, "seed": 3, "batch": 128, "width": 4, "hidden": 16, **more})


class LazyAdam:
    """torch.optim.SparseAdam with eps added after the bias correction of v, as in Algorithm 1 of the paper.

    SparseAdam divides by sqrt(v) + eps and applies the bias correction afterwards, so its eps is scaled at each step.
    """

    def __init__(self, tables: list[nn.Parameter], lr: float, eps: float = 1e-8) -> None:
        self.inner, self.eps, self.step_number = torch.optim.SparseAdam(tables, lr=lr), eps, 0

    def step(self) -> None:
        self.step_number += 1
        self.inner.param_groups[0]["eps"] = self.eps * (1 - 0.999**self.step_number) ** 0.5
        self.inner.step()


def torch_curve(model_name: str, lr: float, seed: int, max_norm: float) -> tuple[list[float], list[Tensor]]:
    """Train with torch.optim and return the losses and the final parameters.

    Gradients are clipped by the norm of all gradients, after sparse ones were converted to dense ones.
    """
    torch.manual_seed(seed)
    model = models.build(model_name, CLICKS.vocabulary, seed, width=4, hidden=16)
    dense, tables = models.parameters(model)
    optimizers: list[Any] = [torch.optim.Adam(dense, lr=lr), LazyAdam(tables, lr)]
    losses = []
    for batch in CLICKS.batches("train", 128, seed=seed, device=CPU):
        for p in model.parameters():
            p.grad = None
        loss = F.binary_cross_entropy_with_logits(model(batch.ids), batch.labels)
        loss.backward()
        grads = {p: p.grad for p in model.parameters() if p.grad is not None}
        norm = torch.cat([grad.to_dense().flatten() for grad in grads.values()]).norm()
        if norm > max_norm:
            for p, grad in grads.items():
                p.grad = grad * (max_norm / norm)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("max_norm", [10.0, 0.02])
@pytest.mark.parametrize("model", models.MODELS)
def test_without_confidence_the_curve_is_that_of_torch(model: str, max_norm: float) -> None:
    """The losses agree at every step, even if most steps are clipped."""
    config = task("Adam", model, max_norm=max_norm)
    record = train_epoch(config, CLICKS, CPU)
    losses, _ = torch_curve(model, config.lr, config.seed, max_norm)
    np.testing.assert_allclose(record.loss, losses, rtol=2e-5)
    clipped = (record.norm > max_norm).mean()
    assert clipped == 0 if max_norm == 10 else clipped > 0.5
    assert np.abs(train_epoch(task("CAdam", model, max_norm=max_norm), CLICKS, CPU).loss - losses).max() > 1e-3


def test_tables_are_updated_row_by_row() -> None:
    config = task("Adam")
    _, expected = torch_curve("DeepFM", config.lr, config.seed, config.max_norm)
    with train.numerics(config, CPU):
        learner = train.Learner(config, CLICKS, CPU)
        learner.train(CLICKS.feed("train", config.batch, seed=config.seed, device=CPU))
    for ours, theirs in zip(learner.model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5)
    met = torch.zeros(sum(CLICKS.vocabulary), dtype=torch.bool)
    met[CLICKS.ids[CLICKS.parts["train"]].flatten()] = True
    at_start = models.build("DeepFM", CLICKS.vocabulary, config.seed, width=4, hidden=16)
    weight = learner.model.get_parameter("table.weight")
    assert 0 < (~met).sum() < len(met)
    assert torch.equal((weight != at_start.get_parameter("table.weight")).any(1), met)


def same(first: Record, second: Record) -> bool:
    return np.array_equal(first.loss, second.loss) and first.scores == second.scores


def test_runs_are_paired_and_repeat_to_the_bit() -> None:
    cadam_, again, adam = (train_epoch(task(name), CLICKS, CPU) for name in ("CAdam", "CAdam", "Adam"))
    assert same(cadam_, again)
    assert cadam_.loss[0] == adam.loss[0]
    assert cadam_.loss[-1] != adam.loss[-1]
    assert not same(cadam_, train_epoch(task(seed=4), CLICKS, CPU))


def test_a_run_does_not_change_the_global_random_state() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    train_epoch(task(), CLICKS, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_float32_matmul_precision() == "highest"


def test_scores_cover_all_rows_without_noise() -> None:
    """The evaluated parts have no label noise, and the shorter last batch is included."""
    config = task(noise=0.1, batch=70)
    record = train_epoch(config, CLICKS, CPU)
    assert len(record.loss) == -(-2400 // 70)
    assert not same(record, train_epoch(task(batch=70), CLICKS, CPU))
    with train.numerics(config, CPU):
        learner = train.Learner(config, CLICKS, CPU)
        learner.train(CLICKS.feed("train", 70, seed=config.seed, device=CPU, noise=0.1))
    learner.model.eval()
    for part in ("validation", "test"):
        held = CLICKS.feed(part, 1000, device=CPU)
        logits = learner.model(held.ids).detach()
        assert record.scores[part].auc == pytest.approx(auc(logits, held.labels), abs=1e-6)
        assert record.scores[part].log_loss == pytest.approx(log_loss(logits, held.labels), abs=1e-6)


@pytest.mark.parametrize("optimizer", ["Adam", "CAdam", "CAmsGrad", "Yogi", "AdaBelief", "RAdam", *CONTROL_ARMS])
def test_clicks_are_learned(optimizer: str) -> None:
    record = train_epoch(task(optimizer, lr=0.02), CLICKS, CPU)
    assert record.scores["test"].auc > 0.7
    assert record.loss[-3:].mean() < record.loss[:3].mean()
    assert 0.3 < record.dense.over_touched < 1
    assert 0.5 < record.tables.over_touched <= 1


def test_the_stream_is_predicted_before_it_is_learned() -> None:
    config = task("CAdam", lr=0.02)
    record = train_stream(config, CLICKS, CPU, windows=6)
    learner, logits = train.Learner(config, CLICKS, CPU), []
    torch.manual_seed(config.seed)
    for batch in CLICKS.stream(config.batch, device=CPU):
        logits.append(learner.predict(batch.ids))
        learner.learn(batch.ids, batch.labels)
    expected = torch.cat(logits)
    assert record.scores["stream"].auc == auc(expected, CLICKS.labels)
    assert record.windows is not None
    assert len(record.windows) == 6
    assert record.windows[2] == auc(expected[1000:1500], CLICKS.labels[1000:1500])
    assert record.windows[-1] > record.windows[0]


def test_options_reach_the_optimizer() -> None:
    plain = train_epoch(task("AdamW", options={"weight_decay": 0.0}), CLICKS, CPU)
    assert same(plain, train_epoch(task("Adam"), CLICKS, CPU))
    assert not same(plain, train_epoch(task("AdamW"), CLICKS, CPU))
    assert not same(plain, train_epoch(task("Adam", table_l2=0.1), CLICKS, CPU))
    model = models.build("DNN", CLICKS.vocabulary, 0, width=4, hidden=16)
    dense, tables = train.optimizer_for(task("AdamW"), model, capturable=False).param_groups
    assert dense["weight_decay"] == tables["weight_decay"] == 0.01


def test_a_run_that_diverges_has_no_scores() -> None:
    record = train_epoch(task("SGDM", lr=1e20), CLICKS, CPU)
    assert np.isnan(record.scores["test"].auc)


def test_filling_a_batch_does_not_synchronize_with_the_device() -> None:
    """Meta tensors have no values, so `fill` does not read any. A CUDA graph requires that."""
    feed = Generated(rows=5000, vocabulary=[50] * 39, drift="hours").feed("train", 100, device=CPU, noise=0.01)
    assert feed.order is not None
    assert feed.limit is not None
    meta = torch.device("meta")
    meta_feed = dataclasses.replace(feed, teacher=feed.teacher.to(meta), order=feed.order.to(meta))
    ids, labels = torch.empty(100, 39, dtype=torch.int64, device=meta), torch.empty(100, device=meta)
    meta_feed.fill(torch.empty((), dtype=torch.int64, device=meta), ids, labels)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", models.MODELS)
@pytest.mark.parametrize("optimizer", ["CAdam", "AmsGrad", *CONTROL_ARMS])
def test_a_graph_gives_the_curve_of_eager_execution(model: str, optimizer: str) -> None:
    device = torch.device("cuda")
    config = task(optimizer, model, max_norm=0.05)
    plain, graph = (train_epoch(config, CLICKS, device, graph=graph) for graph in (False, True))
    np.testing.assert_array_equal(graph.loss, plain.loss)
    assert graph.scores == plain.scores
