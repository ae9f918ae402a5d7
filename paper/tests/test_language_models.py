from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import cadam
from cadam.statistics.intervals import Interval
from cadam_paper import published
from cadam_paper.harness.experiment import Finished
from cadam_paper.harness.results import Outcome, Provenance, Result, Results, RunSpec
from cadam_paper.language_models import corpus, optimizers, page, runs, stream, study
from cadam_paper.language_models.corpus import Corpus, CorpusError
from cadam_paper.language_models.model import GPT, SIZES
from cadam_paper.language_models.optimizers import ARMS, MaskedAdamW
from cadam_paper.language_models.study import BASELINE
from cadam_paper.language_models.train import Run, Task, learning_rates

TEXT = Corpus.of("test", {"a": bytes(range(100)) * 40, "b": bytes(range(100, 200)) * 20})


def task(**changes: object) -> Task:
    values = {
        "model": "tiny GPT",
        "optimizer": "CAdamW",
        "lr": 0.01,
        "seed": 0,
        "condition": stream.MIXED,
        "schedule": "constant",
        "steps": 6,
        "batch": 4,
        "context": 16,
        "bfloat16": False,
        "compiled": False,
    }
    return Task(**{**values, **changes})  # type: ignore[arg-type]


def finished(**changes: object) -> Run:
    run = Run(task(**changes), TEXT, torch.device("cpu"))
    while run.advance():
        pass
    return run


# Optimizers -------------------------------------------------------------------------------------------------------


def trained(optimizer_of: object, steps: int = 20) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 60))
    optimizer = optimizer_of([parameter])  # type: ignore[operator]
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        parameter.grad = torch.randn(60, generator=generator)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize(("mask", "other"), [("none", torch.optim.AdamW), ("sign", cadam.CAdamW)])
def test_the_masked_optimizer_is_adamw_without_a_mask_and_cadamw_with_the_sign_mask(mask: str, other: object) -> None:
    masked = trained(lambda params: MaskedAdamW(params, torch.tensor(0.1), mask=mask, weight_decay=0.1))  # type: ignore[arg-type]
    expected = trained(lambda params: other(params, lr=0.1, weight_decay=0.1))  # type: ignore[operator]
    torch.testing.assert_close(masked, expected)


def test_the_cautious_mask_keeps_the_mean_factor_at_one() -> None:
    optimizer = MaskedAdamW([torch.nn.Parameter(torch.ones(4))], torch.tensor(0.1), mask="cautious")
    (mask,) = optimizer._masks([torch.tensor([1.0, 1, 1, 1])], [torch.tensor([1.0, 2, 0, -1])])
    assert mask.tolist() == [2, 2, 0, 0]


def test_the_random_mask_keeps_the_same_share_and_ignores_signs() -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.ones(10_000))
    optimizer = MaskedAdamW([parameter], torch.tensor(0.1), mask="random", generator=generator)
    gradient = torch.ones(10_000)
    gradient[:7_500] = -1
    (mask,) = optimizer._masks([torch.ones(10_000)], [gradient])
    assert mask.mean().item() == pytest.approx(0.25, abs=0.02)
    assert mask[:7_500].mean().item() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("arm", optimizers.ARMS)
def test_every_arm_learns(arm: str) -> None:
    loss = finished(optimizer=arm, steps=60, lr=0.03).record().loss
    assert loss[-5:].mean() < loss[:5].mean() - 1


def test_vectors_are_not_decayed() -> None:
    model = GPT(SIZES["tiny GPT"], 16, 0)
    optimizer = optimizers.build("CAdamW", model, torch.tensor(0.1), 0)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all((decay[id(p)] > 0) == (p.dim() >= 2) for p in model.parameters())


# Model ------------------------------------------------------------------------------------------------------------


def test_the_model_does_not_see_later_bytes() -> None:
    model = GPT(SIZES["tiny GPT"], 16, 0)
    text = torch.arange(16).unsqueeze(0)
    changed = text.clone()
    changed[0, 10] = 200
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize(("name", "millions"), [("GPT 3M", 3.3), ("GPT 10M", 10.8), ("GPT 50M", 49.5)])
def test_the_model_has_the_number_of_parameters_in_its_name(name: str, millions: float) -> None:
    count = sum(parameter.numel() for parameter in GPT(SIZES[name], 16, 0).parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.1)


# Stream -----------------------------------------------------------------------------------------------------------


def starts(condition: str, **changes: int) -> np.ndarray:
    return stream.build(TEXT, condition, 0, **{"context": 16, "batch": 4, "steps": 20, **changes}).starts


def test_examples_are_disjoint_and_do_not_reach_into_another_domain() -> None:
    first = np.sort(starts(stream.MIXED, steps=90).ravel())
    assert (np.diff(first) >= 16).all()
    boundary = len(TEXT.train["a"])
    assert not ((first < boundary) & (first + 16 >= boundary)).any()


def test_domains_follow_each_other_only_under_domain_shift() -> None:
    is_second = starts(stream.SHIFT).ravel() >= len(TEXT.train["a"])
    assert (np.diff(is_second.astype(int)) >= 0).all()
    assert is_second.mean() == pytest.approx(1 / 3, abs=0.05)
    mixed = starts(stream.MIXED).ravel() >= len(TEXT.train["a"])
    assert mixed.mean() == pytest.approx(1 / 3, abs=0.05)
    assert (np.diff(mixed.astype(int)) < 0).any()


def test_noise_replaces_the_share_of_targets_and_the_loss_is_measured_on_true_ones() -> None:
    run = Run(task(condition=stream.noisy(0.2)), TEXT, torch.device("cpu"))
    true = torch.zeros(100, 100, dtype=torch.int64)
    assert (run._corrupt(true) != true).float().mean().item() == pytest.approx(0.2 * 255 / 256, abs=0.02)
    clean = finished(steps=1).record().loss
    noisy = finished(steps=1, condition=stream.noisy(0.2)).record().loss
    assert clean == noisy  # the first loss is measured before the first step


def test_an_unknown_condition_or_a_short_corpus_is_refused() -> None:
    with pytest.raises(ValueError, match="'warm'"):
        starts("warm")
    with pytest.raises(ValueError, match="1000 steps"):
        starts(stream.MIXED, steps=1000)


# Training ---------------------------------------------------------------------------------------------------------


def test_learning_rates_warm_up_and_end_at_a_tenth() -> None:
    rates = learning_rates(1.0, 1000, "cosine")
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[19] == 1
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert set(learning_rates(1.0, 1000, "constant")[19:]) == {1.0}


def test_a_run_on_the_cpu_is_repeatable_and_depends_on_its_seed() -> None:
    first, again, other = (finished(seed=seed).record() for seed in (0, 0, 1))
    assert (first.loss == again.loss).all()
    assert (first.held_out == again.held_out).all()
    assert not (first.loss == other.loss).any()


def test_outcomes_are_nan_if_the_loss_diverged() -> None:
    record = finished(lr=0.01).record()
    assert runs.outcome(record).metrics["loss"] == pytest.approx(record.loss.mean())
    record.loss[3] = np.nan
    assert all(np.isnan(value) for value in runs.outcome(record).metrics.values())


# Corpus -----------------------------------------------------------------------------------------------------------


def test_a_missing_or_changed_corpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADAM_DATA", str(tmp_path))
    corpus.load.cache_clear()
    with pytest.raises(CorpusError, match=r"cadam_paper\.language_models\.corpus"):
        corpus.load(corpus.DEBIAN.name)
    folder = tmp_path / corpus.DEBIAN.path
    folder.mkdir()
    for domain in corpus.DOMAINS:
        (folder / f"{domain.name}.txt").write_bytes(b"text")
    hashes = {domain.name: {"sha256": "0"} for domain in corpus.DOMAINS}
    (folder / "manifest.json").write_text(json.dumps({"domains": hashes}))
    with pytest.raises(CorpusError, match="differs"):
        corpus.load(corpus.DEBIAN.name)


def test_the_small_corpus_has_two_domains_with_other_letters() -> None:
    small = corpus.standard_library(10_000)
    assert [len(text) for text in small.train.values()] == [9_900, 9_900]
    counts = [np.bincount(text, minlength=256) for text in small.train.values()]
    assert counts[0][ord("e")] > 2 * counts[0][ord("r")] or counts[1][ord("r")] > counts[1][ord("e")]


# Study ------------------------------------------------------------------------------------------------------------

CONDITION = study.Condition(stream.MIXED)
PLAN = study.MIXED.plan("full", seeds=2)


def results(best: dict[str, float]) -> Results:
    """Results in which the loss grows with the distance of the learning rate from an arm's best."""

    def result(spec: RunSpec) -> Result:
        loss = 2 + abs(np.log(spec.lr / best.get(spec.optimizer, 1e-3)))
        curve = np.linspace(8, 2, 200) if spec.optimizer == "AdamW" else np.maximum(2, np.linspace(8, -4, 200))
        outcome = Outcome({"loss": loss, "held_out": loss}, {"loss": curve})
        return Result(spec, outcome, Provenance(1.0, 0, "test", {}))

    computed = Results()
    while True:
        specs = study.run_specs(PLAN, computed, CONDITION)
        if computed.has(specs):
            return computed
        computed = Results([result(spec) for spec in specs])


def test_the_grid_of_an_arm_is_extended_until_its_best_rate_is_inside() -> None:
    rates = {
        arm: sorted({r.spec.lr for r in results({"CAdamW": 8e-3}).where(optimizer=arm)}) for arm in optimizers.ARMS
    }
    assert rates["CAdamW"] == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.02]
    assert rates["AdamW"] == [5e-4, 1e-3, 2e-3, 4e-3]


@pytest.mark.parametrize(("model", "lanes"), [("GPT 3M", 4), ("GPT 10M", 1)])
def test_only_the_small_model_shares_the_device(monkeypatch: pytest.MonkeyPatch, model: str, lanes: int) -> None:
    given: list[tuple[list[RunSpec], int]] = []

    def compute_specs(specs: Iterator[RunSpec], start: object, outcome: object, lanes: int) -> Iterator[Finished]:
        given.append((list(specs), lanes))
        return iter(())

    monkeypatch.setattr(runs, "compute_specs", compute_specs)
    specs = study.run_specs(PLAN, Results(), study.Condition(stream.MIXED, model=model))
    list(runs.compute_many(iter(specs)))
    assert given == [(specs, lanes)]


def test_the_speedup_compares_steps_to_the_same_loss() -> None:
    assert study.speedups(results({}), "CAdamW") == pytest.approx([2.0, 2.0], abs=0.15)


def test_the_summary_compares_every_arm_with_adamw() -> None:
    rows = study.summary(results({"AdamW": 2e-3}), CONDITION).rows
    labels = [row.label for row in rows]
    assert all(f"mean over the pass: {arm}" in labels for arm in CONDITION.treatments)
    assert set(study.figures(results({}), CONDITION)) >= {study.CAPTION}


def test_the_page_names_every_arm_and_the_conclusion_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    table = page.result_table()
    assert len(table) == 2 + len(page.CONDITIONS) * len(ARMS)
    shift = page.comparisons("lm-shift", "loss")["CAdamW"]
    better = dataclasses.replace(shift, difference=Interval(-0.1, -0.101, -0.099, 3))
    worse = dataclasses.replace(shift, difference=Interval(0.1, 0.02, 0.18, 3))
    by_condition = {name: worse if name == "lm-noise" else better for name in page.CONDITIONS}
    monkeypatch.setattr(page, "comparisons", lambda name, metric: {"CAdamW": by_condition[name]})
    text = page.answer()[-1]
    assert "in favor of CAdamW in 3 of 4 conditions and in favor of AdamW in 1" in text
    assert "After correction for 4 comparisons, 3 are significant" in text


def test_the_sentence_on_high_rates_counts_only_conditions_in_which_both_were_run() -> None:
    (sentence,) = page.high_rate()
    ends: dict[str, list[float]] = {"AdamW": [], "CAdamW": []}
    for name, condition in page.CONDITIONS.items():
        rates = {arm: page.curves(name, "loss")[arm] for arm in ends}
        is_complete = all(curve.rates[-1] >= page.HIGH_RATE for curve in rates.values())
        assert (f"AdamW was not run at this rate with *{condition}*" in sentence) == (not is_complete)
        for arm, curve in rates.items() if is_complete else ():
            by_seed = [curve.values[page.HIGH_RATE][seed] - curve.values[curve.best()][seed] for seed in curve.seeds]
            ends[arm].append(float(np.mean(by_seed)))
    assert f"in {len(ends['AdamW'])} of 4 conditions" in sentence
    assert f"loss of AdamW is {min(ends['AdamW']):.2f} to {max(ends['AdamW']):.2f} bits" in sentence
    assert f"loss of CAdamW {min(ends['CAdamW']):.2f} to {max(ends['CAdamW']):.2f}," in sentence


def test_the_statements_of_the_page_follow_from_the_archive() -> None:
    text = " ".join((published.ROOT / "docs" / "language_models.md").read_text("utf-8").split())
    differences = {name: page.comparisons(name, "loss") for name in page.CONDITIONS}
    gains = [-of_arms["CAdamW"].difference.mean for of_arms in differences.values()]
    assert f"under all four conditions**, by {min(gains):.2f} to {max(gains):.2f} bits" in text
    of_random = [-of_arms["AdamW with a random mask"].difference.mean for of_arms in differences.values()]
    assert f"A random mask gains at most {max(of_random):.2f} bits over the pass" in text
    for name in page.CONDITIONS:
        curves = page.curves(name, "loss")
        assert curves["cautious AdamW"].best() == curves["CAdamW"].best() / 2, "at half the learning rate"
        assert page.comparisons(name, "held_out")["CAdamW"].kind == "inconclusive"
    clear = [
        (name, arm)
        for name in page.CONDITIONS
        for arm, comparison in page.comparisons(name, "held_out").items()
        if comparison.kind == "better"
    ]
    assert clear == [("lm-mixed", "cautious AdamW")], "the one interval that excludes 0 in favor of another arm"


def test_the_speedup_table_has_every_condition_and_the_last_domain_comes_last() -> None:
    rows = [row.strip("| ").split(" | ") for row in page.speedup_table()[2:]]
    assert [row[0] for row in rows] == list(page.CONDITIONS.values())
    results = published.load("lm-shift").results
    losses = results.where(optimizer=BASELINE, lr=page.curves("lm-shift", "loss")[BASELINE].best()).curve("loss")
    jumps = np.flatnonzero(np.diff(losses.astype(float).mean(0)) > 0.5)
    assert jumps[-1] >= 0.9 * losses.shape[1], "no optimizer meets the last domain before the last tenth of the pass"


def test_a_speedup_that_no_seed_shows_is_named() -> None:
    assert page._format_speedups([1.5, 0.0, 1.25]) == "not reached, 1.25, 1.50"


def test_a_dagger_marks_best_rates_at_an_end_and_the_main_comparisons_have_none() -> None:
    arms_first = [BASELINE, *(arm for arm in ARMS if arm != BASELINE)]
    rows = iter(page.result_table()[2:])
    for name in page.CONDITIONS:
        for arm in arms_first:
            cells = next(rows).strip("| ").split(" | ")
            assert cells[1] == arm
            for cell, metric in zip(cells[3:], study.METRICS, strict=True):
                curves = page.curves(name, metric)
                is_at_an_end = curves[arm].best_is_at_an_end or curves[BASELINE].best_is_at_an_end
                assert cell.endswith(page.AT_AN_END) == is_at_an_end
                assert metric != "loss" or not is_at_an_end
