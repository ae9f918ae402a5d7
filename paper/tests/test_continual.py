from __future__ import annotations

import re

import numpy as np
import pytest

from cadam_paper.continual import page, runs, study, tasks
from cadam_paper.continual.arms import ARMS
from cadam_paper.harness.measured_runs import current_provenance
from cadam_paper.harness.results import Outcome, Provenance, Result, Results, RunSpec
from cadam_paper.published import format_interval, is_significant_among, load

SHAPE = {"tasks": 5, "steps": 6, "batch": 4, "images": 30, "pixels": 12, "classes": 3}
SETTINGS = {"device": "cpu", "hidden": 32, "tasks": 3, "steps": 20, "batch": 16, "precision": "float32"}


@pytest.mark.parametrize("condition", tasks.CONDITIONS)
def test_a_task_permutes_labels_or_pixels_and_shows_each_image_at_most_once(condition: str) -> None:
    drawn = tasks.build(condition, 0, **SHAPE)
    assert all(len(set(examples.ravel())) == 24 for examples in drawn.examples)
    for permutations, permutes in (
        (drawn.labels, condition == tasks.LABELS),
        (drawn.pixels, condition == tasks.PIXELS),
    ):
        length = permutations.shape[1]
        assert all(sorted(row) == list(range(length)) for row in permutations)
        assert (permutations == np.arange(length)).all() == (not permutes)
    again, other = tasks.build(condition, 0, **SHAPE), tasks.build(condition, 1, **SHAPE)
    assert (again.examples == drawn.examples).all()
    assert not (other.examples == drawn.examples).all()


def test_unknown_conditions_and_too_few_images_are_refused() -> None:
    with pytest.raises(ValueError, match="permuted labels, permuted pixels"):
        tasks.build("rotated", 0, **SHAPE)
    with pytest.raises(ValueError, match="only 20 images"):
        tasks.build(tasks.LABELS, 0, **{**SHAPE, "images": 20})


def test_the_cautious_mask_rescales_and_the_random_mask_keeps_the_same_share() -> None:
    jax = pytest.importorskip("jax")
    from cadam_paper.continual import optimizers

    gradient = jax.numpy.ones(10_000).at[:6_000].set(-0.1)
    steps = {}
    for arm in ("Adam", "CAdam", "cautious Adam", "Adam with a random mask"):
        optimizer = optimizers.build(arm, 0.1, jax.random.key(0))
        state = optimizer.init(gradient)
        _, state = optimizer.update(jax.numpy.ones(10_000), state, gradient)
        steps[arm], _ = optimizer.update(gradient, state, gradient)
    is_kept = np.asarray(steps["CAdam"]) != 0
    assert is_kept.mean() == 0.4
    np.testing.assert_allclose(steps["CAdam"], np.where(is_kept, steps["Adam"], 0), rtol=1e-6)
    np.testing.assert_allclose(steps["cautious Adam"], np.asarray(steps["CAdam"]) / 0.4, rtol=1e-5)
    is_random = np.asarray(steps["Adam with a random mask"]) != 0
    assert is_random.mean() == pytest.approx(0.4, abs=0.02)
    assert is_random[is_kept].mean() == pytest.approx(0.4, abs=0.03)


def test_the_arm_with_a_longer_momentum_is_adam_with_that_beta1() -> None:
    jax = pytest.importorskip("jax")
    import optax

    from cadam_paper.continual import optimizers

    params = jax.numpy.zeros(3)
    ours = optimizers.build("Adam with beta1 0.95", 0.1, jax.random.key(0))
    theirs, default = optax.adam(0.1, b1=0.95), optax.adam(0.1)
    states = [each.init(params) for each in (ours, theirs, default)]
    for gradient in (1.0, -2.0, 0.5):
        grads = jax.numpy.array([gradient, 1.0, -gradient])
        steps = []
        for index, each in enumerate((ours, theirs, default)):
            step, states[index] = each.update(grads, states[index], params)
            steps.append(np.asarray(step))
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-5)
    assert not np.allclose(steps[0], steps[2], rtol=1e-2)


def test_runs_of_an_arm_are_one_program_and_give_the_result_of_a_single_run() -> None:
    pytest.importorskip("jax")
    specs = [
        RunSpec("continual", "network", "digits", "CAdam", lr, condition, seed, SETTINGS)
        for condition in tasks.CONDITIONS
        for lr, seed in ((0.01, 0), (0.003, 1))
    ]
    together = {finished.spec: finished.outcome for finished in runs.compute_many(iter(specs))}
    assert set(together) == set(specs)
    assert len({outcome.metrics["accuracy"] for outcome in together.values()}) == 4
    alone = runs.compute(specs[1])
    assert alone.metrics["accuracy"] == pytest.approx(together[specs[1]].metrics["accuracy"], abs=2)
    assert together[specs[2]].curves["accuracy"][-1] > 15  # one in ten is chance
    assert alone.curves["accuracy"].shape == (3,)
    assert "jax" in current_provenance(1.0).versions


def test_l2_toward_the_start_keeps_the_weights_near_it() -> None:
    jax = pytest.importorskip("jax")
    from cadam_paper.continual import train

    x = jax.numpy.ones((2, 3))
    params = train.initial_params(jax.random.key(0), (3, 4, 2))
    logits, hidden = train.forward(params, x)
    assert logits.shape == (2, 2)
    assert (hidden[0] >= 0).all()
    losses = {}
    for arm in ("Adam", "Adam, L2 toward the start 1e-2"):
        task = train.Task(arm, "digits", 8, 4, 40, 16, "float32")
        losses[arm] = train.compute(task, [train.Run(tasks.LABELS, 0.01, 0)])[0].loss
    assert losses["Adam"][0] == pytest.approx(losses["Adam, L2 toward the start 1e-2"][0], rel=0.2)
    assert not (losses["Adam"] == losses["Adam, L2 toward the start 1e-2"]).any()


def test_a_full_run_without_a_gpu_is_refused() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    spec = RunSpec("continual", "network", "CIFAR-10", "Adam", 0.1, tasks.LABELS, 0, {**SETTINGS, "device": "cuda"})
    with pytest.raises(RuntimeError, match="JAX does not find one"):
        runs.compute(spec)


def results(best: dict[str, float]) -> Results:
    """Results in which the accuracy falls with the distance of the learning rate from an arm's best."""

    def result(spec: RunSpec) -> Result:
        accuracy = 50 - abs(np.log(spec.lr / best.get(spec.optimizer, 5e-4)))
        metrics = {"accuracy": accuracy, "first_accuracy": accuracy, "last_accuracy": accuracy}
        curves = {"accuracy": np.full(200, accuracy), "inactive": np.zeros(200)}
        return Result(spec, Outcome(metrics, curves), Provenance(1.0, 0, "test", {}))

    computed, plan = Results(), study.CONTINUAL.plan("full", seeds=2)
    while True:
        specs = study.run_specs(plan, computed)
        if computed.has(specs):
            return computed
        computed = Results([result(spec) for spec in specs])


def test_grids_are_extended_and_every_arm_is_compared_with_adam() -> None:
    computed = results({"CAdam": 4e-3})
    rates = {arm: sorted({r.spec.lr for r in computed.where(optimizer=arm)}) for arm in ARMS}
    assert rates["CAdam"] == [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
    assert rates["Adam"] == [1e-4, 2e-4, 5e-4, 1e-3, 2e-3]
    summary = study.summary(computed)
    labels = [row.label for row in summary.rows]
    assert all(f"{c}, all tasks: {arm}" in labels for c in tasks.CONDITIONS for arm in ARMS if arm != "Adam")
    assert not summary.warnings
    assert len(study.figures(computed)) == 2


@pytest.mark.parametrize("condition", tasks.CONDITIONS)
def test_the_page_compares_the_archived_runs_and_no_best_rate_is_at_an_end(condition: str) -> None:
    runs_of = load(page.NAME).results.where(condition=condition)
    for arm in ARMS:
        assert not page.curve(condition, arm, "accuracy").best_is_at_an_end
        best = page.curve(condition, arm, "accuracy").best()
        at_best = runs_of.where(optimizer=arm, lr=best)
        tenths = at_best.curve("accuracy").reshape(len(at_best), 10, -1).mean(axis=2)
        assert page.decline(condition, arm).mean == pytest.approx((tenths[:, -1] - tenths[:, 0]).mean(), abs=1e-3)


def test_the_page_says_after_correction_which_differences_are_clear() -> None:
    text = "\n".join(page.answer())
    for arm, other, start in (
        (page.TREATMENT, study.BASELINE, "- **CAdam minus Adam**"),
        (page.PENALIZED_TREATMENT, page.PENALIZED, "- **The same with"),
    ):
        compared = page.differences(arm, other)
        (sentence,) = [each for each in text.splitlines() if each.startswith(start)]
        clear = [is_significant_among(each, page.MAIN_COMPARISONS) for each in compared.values()]
        assert ("both are clear" in sentence) == all(clear)
        assert ("neither is clear" in sentence) == (not any(clear))
        assert all(format_interval(each) in sentence for each in compared.values())
    assert f"these {page.MAIN_COMPARISONS} comparisons" in text
    assert (
        page.MAIN_COMPARISONS
        == sum(len(re.findall(r"\](?:\*\*)? with permuted", line)) for line in page.answer()[2:6])
        == 8
    )


def test_the_statements_of_the_page_follow_from_the_archive() -> None:
    for condition in tasks.CONDITIONS:
        declines = {arm: page.decline(condition, arm) for arm in ARMS}
        penalized = [arm for arm in ARMS if "L2" in arm]
        assert declines[page.TREATMENT].high < 0, "CAdam alone does not stop the loss of plasticity"
        assert all(declines[arm].high > 0 for arm in (*penalized, "cautious Adam"))
        gains = {arm: each.difference for arm, each in page.comparisons(condition, "accuracy").items()}
        assert min(gains[arm].mean for arm in penalized) > gains[page.TREATMENT].mean
        assert gains["Adam with a random mask"].mean < 0
        longer = gains["Adam with beta1 0.95"]
        assert longer.mean < 0
        assert is_significant_among(longer, len(tasks.CONDITIONS) * (len(ARMS) - 1))
        inactive = {arm: page.inactive(condition, arm) for arm in ARMS}
        assert all(inactive[arm] < inactive["Adam"] for arm in ARMS if arm not in ("Adam", "Adam with beta1 0.95"))
        assert gains[page.TREATMENT].count == 6
    over_larger_penalty = page.differences(page.PENALIZED_TREATMENT, page.STRONGLY_PENALIZED)
    assert page.clear_names(over_larger_penalty) == [tasks.LABELS]
    over_cautious = page.differences(page.TREATMENT, "cautious Adam")
    assert over_cautious[tasks.LABELS].high < 0 < over_cautious[tasks.PIXELS].low
