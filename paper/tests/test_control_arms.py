from __future__ import annotations

import pytest
import torch
from torch import nn

import cadam
from cadam_paper.harness import ab_controls, control_arms
from cadam_paper.harness.ab_study import Study
from cadam_paper.harness.results import Outcome, Provenance, Result, Results, RunSpec


def model() -> nn.ModuleDict:
    generator = torch.Generator().manual_seed(0)
    built = nn.ModuleDict({"table": nn.Embedding(20, 4, sparse=True), "dense": nn.Linear(4, 1)})
    for parameter in built.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return built


def train(built: nn.ModuleDict, optimizer: torch.optim.Optimizer, rows: int = 20) -> list[torch.Tensor]:
    """Take 30 steps on random targets; each step meets some rows, some of them repeatedly."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        ids = torch.randint(0, rows, (8,), generator=generator)
        targets = torch.randn(8, 1, generator=generator).to(built.get_parameter("table.weight").dtype)
        optimizer.zero_grad()
        (built["dense"](built["table"](ids)) - targets).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in built.parameters()]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("mask", "kind"), [("none", "Adam"), ("sign", "CAdam")])
def test_without_rescaling_it_is_adam_and_cadam_also_on_sparse_gradients(
    mask: control_arms.Mask, kind: str, decay: float, capturable: bool
) -> None:
    ours, theirs = model().double(), model().double()
    masked = control_arms.MaskedAdam(ours.parameters(), 0.03, weight_decay=decay, mask=mask, capturable=capturable)
    optimizer = getattr(cadam, kind)(theirs.parameters(), lr=0.03, weight_decay=decay)
    for our, their in zip(train(ours, masked), train(theirs, optimizer), strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-12)
    assert masked.alignment().groups == optimizer.alignment().groups
    assert masked.alignment_counts().tolist() == optimizer.alignment_counts().tolist()
    assert 0.3 < control_arms.agreement(masked) < 0.9


@pytest.mark.parametrize("arm", control_arms.CONTROL_ARMS)
def test_a_step_over_the_whole_table_changes_the_same_rows(arm: str) -> None:
    def trained(capturable: bool) -> tuple[list[torch.Tensor], float]:
        built = model().double()
        cpu = torch.device("cpu")
        optimizer = control_arms.masked(arm, built.parameters(), 0.03, 0, cpu, capturable=capturable)
        return train(built, optimizer, rows=16), control_arms.agreement(optimizer)

    (by_row, share), (by_table, same_share) = trained(False), trained(True)
    assert torch.equal(by_table[0][16:], model().double().get_parameter("table.weight")[16:]), (
        "rows that no gradient contains"
    )
    if arm != control_arms.RANDOM:
        torch.testing.assert_close(by_table, by_row, rtol=0, atol=1e-12)
        assert same_share == share


def test_a_longer_momentum_is_adam_with_that_beta1() -> None:
    ours, theirs = model(), model()
    arm = control_arms.build(control_arms.LONG_MOMENTUM, ours, 0.03, seed=0)
    adam = cadam.Adam(theirs.named_parameters(), lr=0.03, betas=(0.95, 0.999))
    for our, their in zip(train(ours, arm), train(theirs, adam), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


def test_the_cautious_mask_rescales_and_the_random_mask_keeps_the_same_share() -> None:
    moment, gradient = torch.ones(10_000), torch.ones(10_000)
    gradient[:6_000] = -1
    factors = {
        mask: control_arms.mask_factor(mask, moment, gradient, torch.Generator().manual_seed(0))
        for mask in ("none", "sign", "cautious", "random")
    }
    assert (factors["none"] == 1).all()
    assert factors["sign"].tolist() == [0.0] * 6_000 + [1.0] * 4_000
    torch.testing.assert_close(factors["cautious"], factors["sign"] / 0.4)
    assert set(factors["random"].tolist()) == {0.0, 1.0}
    assert factors["random"].mean() == pytest.approx(0.4, abs=0.02)
    assert factors["random"][6_000:].mean() == pytest.approx(0.4, abs=0.03), "regardless of the sign"


def test_the_share_is_that_of_the_elements_that_a_gradient_contains() -> None:
    rows = torch.zeros(1_000, 1, dtype=torch.bool)
    rows[:500] = True
    moment, gradient = torch.ones(1_000, 10), torch.ones(1_000, 10) * rows
    gradient[:300] = -1
    touched = control_arms.Touched(rows, torch.tensor(5_000))
    cautious, random = (
        control_arms.mask_factor(mask, moment, gradient, torch.Generator().manual_seed(0), touched)
        for mask in ("cautious", "random")
    )
    assert set(cautious.flatten().tolist()) == {0.0, 2.5}
    assert (cautious[300:500] == 2.5).all()
    assert random[:500].mean() == pytest.approx(0.4, abs=0.03)
    assert not random[500:].any()


def test_the_random_mask_follows_from_the_seed() -> None:
    def trained(seed: int) -> torch.Tensor:
        built = model()
        return train(built, control_arms.build(control_arms.RANDOM, built, 0.03, seed))[0]

    assert torch.equal(trained(0), trained(0))
    assert not torch.equal(trained(0), trained(1))


STUDY = Study("ab-stream", "stream", ("Adam", "CAdam"), 32)
BEST = {"Adam": 3e-3, "CAdam": 1e-2, control_arms.CAUTIOUS: 3e-3, control_arms.RANDOM: 3e-1}
"""The best learning rate by arm, which is 3e-3 for the arm that is not listed."""


def computed() -> Results:
    """Compute results whose GAUC falls with the distance of the learning rate from an arm's best."""

    def result(spec: RunSpec) -> Result:
        distance = abs(torch.tensor(spec.lr / BEST.get(spec.optimizer, 3e-3)).log10().item())
        value = 0.7 - 0.01 * distance + 1e-4 * spec.seed + 0.002 * (spec.optimizer == "CAdam")
        return Result(
            spec, Outcome({"gauc_by_impressions": value, "log_loss": 1 - value}), Provenance(1.0, 0, "test", {})
        )

    results = Results()
    while True:
        specs = ab_controls.run_specs(STUDY, 3, results)
        if results.has(specs):
            return results
        results = Results([result(spec) for spec in specs])


def test_every_arm_has_the_rates_of_adam_and_more_where_its_best_is_at_an_end() -> None:
    results = computed()
    rates = {arm: sorted({r.spec.lr for r in results.where(optimizer=arm)}) for arm in ab_controls.ARMS}
    assert rates["Adam"] == rates["CAdam"] == rates[control_arms.CAUTIOUS] == sorted(STUDY.grid)
    assert rates[control_arms.RANDOM] == [*sorted(STUDY.grid), 0.3, 1.0]
    summary = ab_controls.summary(results)
    assert not summary.warnings
    differences = {
        row.label.rpartition(": ")[2]: row.values["difference"] for row in summary.rows[: len(ab_controls.PAIRS)]
    }
    assert differences["CAdam minus Adam"] == pytest.approx(0.002)
    assert differences["cautious Adam minus Adam"] == pytest.approx(0.0, abs=1e-9)
    assert differences["CAdam minus Adam with a random mask"] == pytest.approx(0.002)
    assert len(ab_controls.figures(results)) == 1
