"""Measures when masking pays and when it costs: the first-order effect of the update that CAdam masks.

The tasks are generated, so the true distribution is known. A step moves the parameters by ``-lr * u``, where
``u`` is Adam's direction, and changes the expected loss by about ``-lr * sum(u * G)``, where ``G`` is the gradient of
the loss on a large probe batch with true labels. An element is useful where ``u * G`` is positive, because its update
decreases the expected loss, and harmful where it is negative. The harmful share of some elements is the sum of the
negative products divided by the sum of all absolute products: at 50% their update does not change the loss, and above
50% it increases the loss. If that of the masked elements is above 50%, masking pays; below, it costs progress.

There are two kinds of tasks. A small network learns labels of a fixed random network: without change, with label noise,
or with a sudden shift half-way. And an embedding table learns items of very different frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import cadam
from cadam.ab.report import palette
from cadam.statistics.intervals import Array, Interval, interval

from .harness.experiment import Experiment, Plan
from .harness.panels import panels
from .harness.results import Outcome, Results, RunSpec
from .harness.summary import Row, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS, BATCH, PROBE = 600, 64, 1024
INPUTS, HIDDEN, CLASSES = 20, 64, 10
NOISE = 0.4
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
REFERENCE_RATE = 3e-3
"""The learning rate of the panels over time."""
STEADY, NOISY, SHIFTED, RARE = "without change", f"label noise {NOISE:.0%}", "sudden shift", "items of all frequencies"
NETWORK_CONDITIONS = (STEADY, NOISY, SHIFTED)
ITEMS, WIDTH, TABLE_STEPS = 3000, 8, 2000
COUNTS = (1, 3, 10, 30, 100, 300, math.inf)
"""The upper ends of the groups of rows by the number of their updates."""
WINDOW = 20
"""The number of steps that a point of a curve is averaged over."""
BEFORE_SHIFT, AFTER_SHIFT = 5, 25
"""The number of steps around a sudden shift that have a point for each step."""
AGREEMENT_EVERY = 5
"""The gradients of single examples are computed once in this number of steps."""


def spec(condition: str, lr: float, seed: int) -> RunSpec:
    """Return the spec of one run."""
    settings = {"steps": TABLE_STEPS if condition == RARE else STEPS, "batch": BATCH}
    model = "embedding table" if condition == RARE else "small network"
    return RunSpec("masking", model, "generated", "CAdam", lr, condition, seed, settings)


def run_specs(plan: Plan, _: Results) -> list[RunSpec]:
    """Return the runs of all conditions at every learning rate and seed."""
    conditions = (*NETWORK_CONDITIONS, RARE)
    return [spec(condition, lr, seed) for seed in plan.test_seeds() for condition in conditions for lr in RATES]


def compute(run: RunSpec) -> Outcome:
    """Train one model and measure the effect of the masked update."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        return _train_table(run) if run.condition == RARE else _train_network(run)


def _direction(state: Mapping[str, Tensor], options: Mapping[str, Any], step: int) -> Tensor:
    """Return Adam's direction after its moments were updated in this step."""
    beta1, beta2 = options["betas"]
    second = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + options["eps"]
    direction: Tensor = state["exp_avg"] / (1 - beta1**step) / second
    return direction


# The network ---------------------------------------------------------------------------------------------------------


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


class _Effects:
    """Sums of the harmful and of all first-order effects, of kept and of masked elements.

    Args:
        groups: The number of groups of elements that are counted separately, such as steps.
    """

    def __init__(self, groups: int) -> None:
        self.harmful, self.total = np.zeros((2, groups)), np.zeros((2, groups))

    def add(self, group: int, effect: Tensor, is_masked: Tensor) -> None:
        """Add elements to a group."""
        for row, selected in enumerate((effect[~is_masked], effect[is_masked])):
            self.harmful[row, group] += float((-selected).clamp_min(0).sum())
            self.total[row, group] += float(selected.abs().sum())

    def shares(self, window: int = 1) -> tuple[Array, Array]:
        """Return the harmful shares of kept and of masked elements, by group or by window of groups."""
        harmful, total = (sums.reshape(2, -1, window).sum(-1) for sums in (self.harmful, self.total))
        kept, masked = np.divide(harmful, total, out=np.full_like(total, np.nan), where=total > 0)
        return kept, masked

    def metrics(self, groups: slice = slice(None)) -> dict[str, float]:
        """Return the harmful shares over some groups."""
        kept, masked = self.harmful[:, groups].sum(1) / self.total[:, groups].sum(1)
        return {"harmful_kept": float(kept), "harmful_masked": float(masked)}


def _train_network(run: RunSpec) -> Outcome:
    """Train a network on labels of another one, and measure the parts of each update."""
    teachers = [_network(), _network()]
    model = _network()
    optimizer = cadam.CAdam(model.parameters(), lr=run.lr)
    params = list(model.parameters())
    effects = _Effects(STEPS)
    agreements: list[tuple[float, float]] = []
    for step in range(STEPS):
        teacher = teachers[1] if run.condition == SHIFTED and step >= STEPS // 2 else teachers[0]
        inputs, probe = torch.randn(BATCH, INPUTS), torch.randn(PROBE, INPUTS)
        with torch.no_grad():
            labels, true_labels = teacher(inputs).argmax(1), teacher(probe).argmax(1)
        is_corrupted = torch.rand(BATCH) < (NOISE if run.condition == NOISY else 0)
        labels = torch.where(is_corrupted, torch.randint(CLASSES, (BATCH,)), labels)
        true_gradients = torch.autograd.grad(nn.functional.cross_entropy(model(probe), true_labels), params)
        if run.condition == NOISY and step % AGREEMENT_EVERY == AGREEMENT_EVERY - 1:
            agreement = _agreement_by_example(model, optimizer, inputs, labels)
            agreements.append((float(agreement[~is_corrupted].mean()), float(agreement[is_corrupted].mean())))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for param, true_gradient in zip(params, true_gradients, strict=True):
            state = optimizer.state[param]
            effect = _direction(state, optimizer.param_groups[0], step + 1) * true_gradient
            effects.add(step, effect, _is_masked(state["exp_avg"], param.grad))
    measured = slice(STEPS // 2, STEPS) if run.condition == SHIFTED else slice(STEPS // 10, STEPS)
    kept, masked = effects.shares(WINDOW)
    metrics, curves = effects.metrics(measured), {"harmful_kept": kept, "harmful_masked": masked}
    if run.condition == SHIFTED:
        around = slice(STEPS // 2 - BEFORE_SHIFT, STEPS // 2 + AFTER_SHIFT)
        kept, masked = effects.shares()
        curves |= {"shift_kept": kept[around], "shift_masked": masked[around]}
        first = effects.metrics(slice(STEPS // 2, STEPS // 2 + 1))
        metrics |= {"first_kept": first["harmful_kept"], "first_masked": first["harmful_masked"]}
    if agreements:
        clean, corrupted = np.array(agreements).reshape(-1, WINDOW // AGREEMENT_EVERY, 2).mean(1).T
        curves |= {"clean": clean, "corrupted": corrupted}
        metrics |= {"clean": float(clean.mean()), "corrupted": float(corrupted.mean())}
    return Outcome(metrics, curves)


def _is_masked(momentum: Tensor, gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return torch.sign(momentum) * torch.sign(gradient) <= 0


def _agreement_by_example(model: nn.Module, optimizer: cadam.Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return, for each example, the share of elements whose gradient agrees in sign with the momentum before the step.

    Elements with a gradient of zero, as behind inactive units, are not counted.
    """
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, inputs, labels)
    agreeing, counted = torch.zeros(len(inputs)), torch.zeros(len(inputs))
    for name, param in model.named_parameters():
        gradient, momentum = gradients[name].flatten(1), optimizer.state[param]["exp_avg"].flatten()
        agreeing += (gradient * momentum > 0).sum(1)
        counted += (gradient != 0).sum(1)
    return agreeing / counted


# The table -----------------------------------------------------------------------------------------------------------


def _train_table(run: RunSpec) -> Outcome:
    """Train an embedding table on clicks, and measure the parts of each update by the number of updates of the row."""
    truth = torch.randn(ITEMS, WIDTH)
    probe = torch.randn(256, WIDTH)
    frequency = 1 / torch.arange(1, ITEMS + 1, dtype=torch.float32)
    table = nn.Embedding(ITEMS, WIDTH, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = cadam.CAdam(table.parameters(), lr=run.lr)
    updates = torch.zeros(ITEMS, dtype=torch.int64)
    effects = _Effects(len(COUNTS))
    ends = torch.tensor(COUNTS[:-1])
    for step in range(TABLE_STEPS):
        ids = torch.multinomial(frequency, BATCH, replacement=True)
        contexts = torch.randn(BATCH, WIDTH)
        clicks = torch.bernoulli(torch.sigmoid((contexts * truth[ids]).sum(1)))
        rows = torch.unique(ids)
        before = table.weight.detach()[rows]
        optimizer.zero_grad()
        scores = (contexts * table(ids)).sum(1)
        nn.functional.binary_cross_entropy_with_logits(scores, clicks).backward()  # type: ignore[no-untyped-call]
        gradient = table.weight.grad.coalesce().values()  # type: ignore[union-attr]
        optimizer.step()
        updates[rows] += 1
        # The expected gradient of a row over contexts, with the true probabilities.
        error = torch.sigmoid(before @ probe.T) - torch.sigmoid(truth[rows] @ probe.T)
        true_gradient = error @ probe / len(probe)
        state = {name: value[rows] for name, value in optimizer.state[table.weight].items() if value.ndim == 2}
        effect = _direction(state, optimizer.param_groups[0], step + 1) * true_gradient
        is_masked = _is_masked(state["exp_avg"], gradient)
        group = torch.bucketize(updates[rows].float(), ends)
        for number in range(len(COUNTS)):
            of_group = group == number
            effects.add(number, effect[of_group], is_masked[of_group])
    kept, masked = effects.shares()
    return Outcome(effects.metrics(), {"harmful_kept": kept, "harmful_masked": masked})


# Results -------------------------------------------------------------------------------------------------------------


def mean_of(results: Results, condition: str, lr: float, metric: str) -> Interval:
    """Return the mean of a metric over seeds, with its interval."""
    return interval(list(results.where(condition=condition, lr=lr).metric(metric).values()))


def summary(results: Results) -> Summary:
    """Report the harmful share of the masked update by condition and learning rate, and the agreement of examples."""
    rows = [
        _row(f"harmful share of the {part} update: {condition}, lr {lr:g}", results, condition, lr, f"harmful_{part}")
        for condition in (*NETWORK_CONDITIONS, RARE)
        for lr in RATES
        for part in ("masked", "kept")
    ]
    rows += [
        _row(f"agreement of {name} examples, lr {REFERENCE_RATE:g}", results, NOISY, REFERENCE_RATE, name)
        for name in ("clean", "corrupted")
    ]
    rows += [
        _row(f"first step after the shift, {part} update, lr {lr:g}", results, SHIFTED, lr, f"first_{part}")
        for lr in RATES
        for part in ("masked", "kept")
    ]
    low, high = (mean_of(results, STEADY, lr, "harmful_masked").mean for lr in (RATES[0], RATES[-1]))
    clean, corrupted = (mean_of(results, NOISY, REFERENCE_RATE, name).mean for name in ("clean", "corrupted"))
    verdict = (
        f"Without change, {low:.0%} of the masked update is harmful at a learning rate of {RATES[0]:g}, and {high:.0%} "
        f"at {RATES[-1]:g}; at 50% masking costs nothing. Clean examples agree with the momentum in {clean:.1%} of the "
        f"elements, corrupted ones in {corrupted:.1%}."
    )
    return Summary(verdict, rows, [])


def _row(label: str, results: Results, condition: str, lr: float, metric: str) -> Row:
    share = mean_of(results, condition, lr, metric)
    values = {"mean": share.mean, "low": share.low, "high": share.high}
    return Row(label, "", f"{share.mean:.3f}", f"{share:.3f}", share.count, 0.0, values=values)


def figures(results: Results) -> Mapping[str, Figure]:
    """Draw when masking pays and when it costs."""
    pays, axes = panels(1, 3, 11.5, 3.6)
    over_examples, over_shift, over_rates = axes[0]
    steps = (np.arange(STEPS // WINDOW) + 0.5) * WINDOW
    noisy = results.where(condition=NOISY, lr=REFERENCE_RATE)
    for name, color in (("clean", palette.SERIES[2]), ("corrupted", palette.SERIES[4])):
        over_examples.plot(steps, 100 * noisy.curve(name).mean(0), color=color, lw=1.6, label=f"{name} examples")
    over_examples.set(xlabel="step", ylabel="% of elements", title="Agreement with the momentum, label noise")
    shifted = results.where(condition=SHIFTED, lr=REFERENCE_RATE)
    since_shift = np.arange(-BEFORE_SHIFT, AFTER_SHIFT)
    for name, color in (("kept", palette.CADAM), ("masked", palette.ADAM)):
        values = 100 * shifted.curve(f"shift_{name}").mean(0)
        over_shift.plot(since_shift, values, "o-", ms=3, color=color, lw=1.4, label=f"{name} update")
    over_shift.axvline(-0.5, color=palette.TARGET, ls=":", lw=1)
    over_shift.set(xlabel="step after the shift", ylabel="harmful, %", title="A sudden shift (dotted line)")
    for condition, color in zip(NETWORK_CONDITIONS, palette.SERIES[2:], strict=False):
        shares = [mean_of(results, condition, lr, "harmful_masked") for lr in RATES]
        over_rates.plot(RATES, [100 * share.mean for share in shares], "o-", ms=4, color=color, label=condition)
        low, high = ([100 * getattr(share, end) for share in shares] for end in ("low", "high"))
        over_rates.fill_between(RATES, low, high, color=color, alpha=0.15, lw=0)
    over_rates.set(
        xscale="log", xlabel="learning rate", ylabel="harmful, %", title="The masked update by learning rate"
    )

    costs, table_axes = panels(1, 1, 6.8, 3.6)
    by_count = table_axes[0, 0]
    for lr, color in zip(RATES[1:4], palette.SERIES[2:], strict=False):
        harmful = 100 * results.where(condition=RARE, lr=lr).curve("harmful_masked").mean(0)
        by_count.plot(range(len(COUNTS)), harmful, "o-", ms=4, color=color, label=f"learning rate {lr:g}")
    by_count.set_xticks(range(len(COUNTS)), count_names())
    by_count.set(xlabel="updates of the row so far", ylabel="harmful, %", title="The masked update of embedding rows")
    for panel in (over_shift, over_rates, by_count):
        panel.axhline(50, color=palette.MUTED, lw=0.8, ls="--")
    for panel in (*axes[0], by_count):
        panel.legend(fontsize=8)
    return {
        "When masking pays: gradients of corrupted examples agree less with the momentum than those of clean ones, as "
        "long as the network learns; in the first step after a sudden shift, and at high learning rates, most of the "
        "masked update is harmful (dashed: 50%).": pays,
        "When masking costs: below 50%, the masked update would have decreased the loss.": costs,
    }


def count_names() -> list[str]:
    """Return the names of the groups of rows by the number of their updates."""
    starts = (0, *COUNTS)
    names = [f"{start + 1:g} to {end:g}" for start, end in zip(starts, COUNTS, strict=False)]
    return ["1", *names[1:-1], f"over {COUNTS[-2]:g}"]


MASKING = Experiment(
    name="masking",
    title="What the mask does to the true loss",
    shows="How much of the update that CAdam masks is harmful, on tasks whose true distribution is known.",
    claim="The paper says that disagreement of momentum and gradient indicates noise or a shift, without measuring it.",
    measure=(
        "Harmful: the part of an update that increases the loss on 1,024 fresh examples with true labels, to first "
        "order, as a share of its useful and harmful parts. Agreement: the share of elements in which the gradient of "
        "one example has the sign of the momentum before the step."
    ),
    run_specs=run_specs,
    compute=compute,
    summary=summary,
    figures=figures,
    seconds={"quick": 150, "full": 500},
    seeds={"quick": 3, "full": 10},
    version=2,
    notes=["The tasks are generated and small. The learning rates are not tuned: all of them are shown."],
)
