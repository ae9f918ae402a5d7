"""Generated clicks: reproducible bits in any order, skew, click rate, best AUC, drift and label noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cadam.online.metrics.auc import auc
from cadam_paper.ctr import generator
from cadam_paper.ctr.data import Clicks, Part, keyed, mix, noise_limit, shuffled
from cadam_paper.ctr.fields import FIELDS, VOCABULARY, offsets, scale_vocabulary
from cadam_paper.ctr.generator import CLICK_RATE, Generated, best_auc, popularity

CPU = torch.device("cpu")
SMALL = Generated(6_000, scale_vocabulary(0.01))


def everything(clicks: Clicks, part: Part, batch_size: int = 3000, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(clicks.batches(part, batch_size, device=CPU, **options))
    return torch.cat([batch.ids for batch in batches]), torch.cat([batch.labels for batch in batches])


def streamed(clicks: Clicks, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(clicks.stream(3000, device=CPU, **options))
    return torch.cat([batch.ids for batch in batches]), torch.cat([batch.labels for batch in batches])


def as_rows(ids: torch.Tensor, labels: torch.Tensor) -> list[tuple[int, ...]]:
    return sorted(map(tuple, torch.column_stack([ids, labels.long()]).tolist()))


def test_the_fields_are_those_of_the_published_split() -> None:
    assert len(FIELDS) == len(VOCABULARY) == 39
    assert sum(VOCABULARY) == 910_747
    assert offsets(VOCABULARY)[:3] == [0, 44, 143]
    assert offsets(VOCABULARY)[-1] + VOCABULARY[-1] == 910_747


def test_mix_is_splitmix64() -> None:
    """The expected values are the first outputs of the published generator with seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + golden * step) % 2**64 for step in (1, 2, 3)]
    mixed = mix(torch.tensor(np.array(states, np.uint64).astype(np.int64)))
    assert mixed.numpy().astype(np.uint64).tolist() == published
    assert torch.equal(keyed(1234567, torch.tensor([1, 2, 3])), mixed)


def test_a_row_does_not_depend_on_batch_size_and_order() -> None:
    whole, labels = streamed(SMALL)
    again = Generated(SMALL.rows, SMALL.vocabulary)
    for size in (1, 777):
        feed = again.feed("stream", size, device=CPU)
        for index in (0, 3, 6):
            ids, clicked = torch.empty(size, 39, dtype=torch.int64), torch.empty(size)
            feed.fill(torch.tensor(index), ids, clicked)
            assert torch.equal(ids, whole[index * size : (index + 1) * size])
            assert torch.equal(clicked, labels[index * size : (index + 1) * size])
    other, _ = streamed(Generated(SMALL.rows, SMALL.vocabulary, seed=1))
    assert (other != whole).any(0).all()


def test_the_parts_partition_the_rows_and_the_seed_shuffles_an_epoch() -> None:
    parts = {part: everything(SMALL, part) for part in ("train", "validation", "test")}
    for part, (ids, _) in parts.items():
        assert len(ids) == SMALL.size(part)  # type: ignore[arg-type]
    joined = [torch.cat(tensors) for tensors in zip(*parts.values(), strict=True)]
    assert as_rows(*joined) == as_rows(*streamed(SMALL))
    assert torch.equal(everything(SMALL, "train")[0], parts["train"][0])
    reordered = everything(SMALL, "train", seed=1)
    assert not torch.equal(reordered[0], parts["train"][0])
    assert as_rows(*reordered) == as_rows(*parts["train"])
    assert torch.equal(everything(SMALL, "test", seed=1)[0], parts["test"][0])


def test_ids_belong_to_their_field_and_have_the_configured_skew() -> None:
    clicks = Generated()
    batch = next(clicks.stream(100_000, device=CPU))
    assert batch.ids.dtype == torch.int64
    assert batch.labels.dtype == torch.float32
    for column, (name, begin, size) in enumerate(zip(FIELDS, offsets(VOCABULARY), VOCABULARY, strict=True)):
        ids = batch.ids[:, column] - begin
        assert int(ids.min()) >= 0
        assert int(ids.max()) < size
        seen = torch.bincount(ids, minlength=size)[:30] / len(ids)
        np.testing.assert_allclose(seen, popularity(name, size)[:30], atol=0.006, err_msg=name)


def test_fields_are_drawn_independently() -> None:
    """A chi-squared test on the halves of the vocabularies finds no dependence between any two of the 39 fields."""
    ids = next(Generated().stream(100_000, device=CPU)).ids
    halves = (ids > ids.float().median(0).values).double()
    correlations = torch.corrcoef(halves.T).fill_diagonal_(0).abs()
    assert correlations.nan_to_num(0).max() < 5 / 100_000**0.5


def test_click_rate_and_best_auc_at_full_size() -> None:
    clicks = Generated()
    labels = torch.cat([batch.labels for _, batch in zip(range(20), clicks.stream(10_000, device=CPU), strict=False)])
    assert abs(labels.mean() - CLICK_RATE) < 0.005
    assert 0.81 < best_auc(clicks, rows=200_000, device=CPU) < 0.83


def test_the_teacher_is_calibrated() -> None:
    """Among rows whose probability is about p, the share of clicks is about p."""
    feed = Generated().feed("test", 100_000, device=CPU)
    ids, labels = torch.empty(100_000, 39, dtype=torch.int64), torch.empty(100_000)
    chances = feed.draw_(torch.tensor(0), ids, labels).double() / 2**32
    for low in (0.0, 0.1, 0.2, 0.4, 0.6, 0.8):
        about = (chances >= low) & (chances < low + 0.2)
        error = (labels[about].double() - chances[about]).mean()
        assert abs(error) < 4.5 * 0.5 / float(about.sum()) ** 0.5, low


def test_logits_are_exact_in_any_order_of_sums() -> None:
    teacher = generator._teacher(SMALL)
    ids, _ = streamed(SMALL)
    logits = SMALL._logits(teacher, ids, None)
    linear = teacher.linear.double()[ids].sum(1)
    vectors = teacher.pairs.double()[ids[:, teacher.paired]]
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(8) for j in range(i)]
    assert torch.equal(logits.double(), linear + torch.stack(pairs).sum(0) + teacher.bias)
    assert linear.abs().max() + torch.stack(pairs).abs().sum(0).max() < 2**23


@pytest.mark.parametrize("drift", ["gradual", "sudden", "hours"])
def test_drift_changes_the_frequencies_and_the_weights_of_ids(drift: generator.Drift) -> None:
    clicks = Generated(33_600, scale_vocabulary(0.01), drift=drift)
    teacher = generator._teacher(clicks)
    ids, labels = streamed(clicks)
    rows = torch.arange(clicks.rows)
    towards = clicks._drift_progress(rows)
    assert towards is not None
    expected = {
        "gradual": (rows * 256 / clicks.rows).floor(),
        "sudden": 256.0 * ((rows // 8_400) % 2),
        "hours": ((rows // 200 % 24 - 12).abs() * 256 / 12).floor(),
    }[drift]
    assert torch.equal(towards, expected.long())
    a, b = towards <= 32, towards >= 224
    column = FIELDS.index("C15")
    head = ids[:, column] - offsets(clicks.vocabulary)[column] <= 3
    assert head[a].float().mean() > 3 * head[b].float().mean()

    def auc_of_a(rows: torch.Tensor) -> float:
        score = clicks._logits(teacher, ids[rows], None)
        return auc(score.numpy(), labels[rows].numpy())

    assert auc_of_a(a) > auc_of_a(b) + 0.03
    still, _ = streamed(Generated(clicks.rows, clicks.vocabulary))
    assert not torch.equal(ids, still)


@pytest.mark.parametrize("reading", ["train", "stream"])
def test_noise_flips_an_exact_share_of_negatives_and_always_the_same_rows(reading: str) -> None:
    def rows(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return streamed(SMALL, **options) if reading == "stream" else everything(SMALL, "train", **options)

    ids, clean = rows(seed=3)
    same, noisy = rows(seed=3, noise=0.01)
    assert torch.equal(ids, same)
    assert (noisy >= clean).all()
    assert int((noisy - clean).sum()) == round(0.01 * int((clean == 0).sum()))
    assert torch.equal(rows(seed=3, noise=0.01)[1], noisy)
    assert as_rows(*rows(seed=4, noise=0.01)) != as_rows(ids, noisy)


@pytest.mark.parametrize("part", ["validation", "test"])
def test_validation_and_test_are_never_noisy(part: Part) -> None:
    assert torch.equal(everything(SMALL, part)[1], everything(SMALL, part, noise=0.5)[1])


def test_noise_limit_is_exact_for_several_parts_and_validates_the_share() -> None:
    rows = torch.arange(1000)
    assert noise_limit(rows, 0.1, 5) == noise_limit([rows[:30], rows[30:]], 0.1, 5)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        noise_limit(rows, 1.5, 0)


def test_shuffled_is_a_permutation() -> None:
    assert torch.equal(shuffled(1000, 1).sort().values, torch.arange(1000))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"rows": 3}, "rows"), ({"vocabulary": [5, 5]}, "vocabulary"), ({"drift": "sideways"}, "none, gradual, sudden")],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Generated(**settings)  # type: ignore[arg-type]


def test_the_description_names_generated_clicks() -> None:
    assert Generated(drift="hours").description == (
        "generated clicks, 45,840,617 rows, 910,747 ids, drift hours, seed 2018"
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("drift", ["none", "hours"])
def test_cuda_gives_the_same_bits_also_in_a_graph(drift: generator.Drift) -> None:
    clicks, cuda = Generated(drift=drift), torch.device("cuda")
    feed = clicks.feed("train", 10_000, seed=1, device=cuda)
    index = torch.zeros((), dtype=torch.int64, device=cuda)
    ids, labels = torch.empty(10_000, 39, dtype=torch.int64, device=cuda), torch.empty(10_000, device=cuda)
    feed.fill(index, ids, labels)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        feed.fill(index, ids, labels)
        index += 1
    expected = clicks.batches("train", 10_000, seed=1, device=CPU)
    for _, batch in zip(range(5), expected, strict=False):
        graph.replay()
        assert torch.equal(ids.cpu(), batch.ids)
        assert torch.equal(labels.cpu(), batch.labels)
