"""Random sequences of steps and changes: the default engine computes the results of the reference engine.

A sequence (a "life") trains a few parameters for some steps. Gradients are missing, kept, replaced, expanded,
transposed, lazily negated or conjugated, or sparse. Between steps, options, engines, groups, state and data change, or
the optimizer is replaced by a copy. Everything follows from the seed, so the same sequence can be run with the eager
engine, which makes a new plan for every step, and with any other.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import cadam
from tests.engines.triton_interpreter import on_cuda
from tests.lazy_negation import lazily_negated

CLASSES: list[type[cadam.Optimizer]] = [
    cadam.CAdam,
    cadam.Adam,
    cadam.CAdamW,
    cadam.CAmsGrad,
    cadam.CSGDM,
    cadam.CLion,
    cadam.CRAdam,
]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.complex64]
STEPS = 8


class Life:
    """An optimizer and its parameters, to which random changes happen."""

    def __init__(self, seed: int, device: str, **how: Any) -> None:
        self.chance, self.device, self.is_reference = random.Random(seed), device, bool(how)
        self.generator = torch.Generator().manual_seed(seed)
        self.params = [self.new_param() for _ in range(self.chance.randint(1, 5))]
        cls = self.chance.choice(CLASSES)
        options: dict[str, Any] = {"lr": 0.05, "weight_decay": self.chance.choice([0.0, 0.0, 0.1])}
        if "betas" in cls.options_of():
            options["betas"] = (0.8, 0.9)
        self.optimizer = cls(self.params, **options, **how)
        self.happened: list[str] = []
        self.is_calm = self.chance.random() < 0.5
        """Whether most steps are like the step before, so that cached plans are used."""
        self.saved: dict[str, Any] | None = None

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, dtype=dtype, generator=self.generator).to(self.device)

    def new_param(self) -> Tensor:
        shape = self.chance.choice([(), (5,), (4, 3), (3, 4), (2, 3, 2), (0, 3)])
        return torch.nn.Parameter(self.random(*shape, dtype=self.chance.choice(DTYPES)))

    # Gradients

    def set_grads(self) -> None:
        for p in self.params:
            kind = self.chance.choice(DENSE if self.is_calm else list(GRADIENTS))
            self.happened.append(kind)
            if kind != "kept" or p.grad is None or p.grad.shape != p.shape or p.grad.dtype != p.dtype:
                p.grad = GRADIENTS[kind](self, p)

    # Steps

    def live(self) -> Iterator[list[Tensor]]:
        """Yield parameters, state and counters after each step."""
        for _ in range(STEPS):
            for _ in range(self.chance.choice([0, 0, 1] if self.is_calm else [0, 0, 1, 2])):
                change = self.chance.choice(CHANGES)
                self.happened.append(change.__name__)
                change(self)
            self.set_grads()
            if self.is_reference:
                self.optimizer._plan = None
            with self.somewhere():
                self.optimizer.step()
            yield self.seen()

    def somewhere(self) -> Any:
        """Return a context with another stream in a fifth of the calls on CUDA."""
        elsewhere = self.chance.random() < 0.2
        if self.device != "cuda" or not elsewhere:
            return nullcontext()
        torch.cuda.synchronize()
        return torch.cuda.stream(torch.cuda.Stream())

    def seen(self) -> list[Tensor]:
        if self.device == "cuda":
            torch.cuda.synchronize()
        state = [self.optimizer.state[p] for p in self.params if p in self.optimizer.state]
        tensors = [*self.params, *(one[name] for one in state for name in sorted(one))]
        ratios = self.optimizer.alignment().parameters.values()
        counts = torch.tensor([(ratio.aligned, ratio.touched, ratio.seen) for ratio in ratios])
        return [*(x.detach().cpu().resolve_neg().clone() for x in tensors), counts]


def plain(life: Life, p: Tensor) -> Tensor:
    return life.random(*p.shape, dtype=p.dtype)


def transposed(life: Life, p: Tensor) -> Tensor:
    return life.random(*reversed(p.shape), dtype=p.dtype).permute(tuple(reversed(range(p.dim()))))


def strided(life: Life, p: Tensor) -> Tensor:
    return life.random(*p.shape, 2, dtype=p.dtype)[..., 1]


def conjugated(life: Life, p: Tensor) -> Tensor:
    """Return, for a real parameter, the imaginary part of a conjugate, which is lazily negated."""
    z = life.random(*p.shape, dtype=torch.complex128 if p.dtype == torch.float64 else torch.complex64).conj()
    return z if p.is_complex() else z.imag.to(p.dtype)


def sparse(life: Life, p: Tensor) -> Tensor:
    if p.dim() != 2 or not len(p):
        return plain(life, p)
    ids = torch.randint(0, len(p), (1, 6), generator=life.generator).to(life.device)
    return torch.sparse_coo_tensor(ids, life.random(6, p.shape[1], dtype=p.dtype), p.shape, check_invariants=False)


GRADIENTS: dict[str, Callable[[Life, Tensor], Tensor | None]] = {
    "plain": plain,
    "kept": plain,
    "none": lambda life, p: None,
    "expanded": lambda life, p: life.random(dtype=p.dtype).expand(p.shape),
    "transposed": transposed,
    "strided": strided,
    "negated": lambda life, p: lazily_negated(plain(life, p)),
    "wholly negated": lambda life, p: torch._neg_view(plain(life, p)),
    "conjugated": conjugated,
    "sparse": sparse,
    "zeros without memory": lambda life, p: torch._efficientzerotensor(p.shape, dtype=p.dtype, device=p.device),
}
DENSE = [kind for kind in GRADIENTS if kind not in ("none", "sparse")]


def set_lr(life: Life) -> None:
    life.chance.choice(life.optimizer.param_groups)["lr"] = life.chance.choice([0.0, 0.01, 0.1])


def set_betas(life: Life) -> None:
    group = life.chance.choice(life.optimizer.param_groups)
    if "betas" in group:
        group["betas"] = life.chance.choice([(0.5, 0.9), (0.0, 0.9), (0.9, 0.5)])


def set_decay(life: Life) -> None:
    life.chance.choice(life.optimizer.param_groups)["weight_decay"] = life.chance.choice([0.0, 0.01, 0.5])


def flip_direction(life: Life) -> None:
    group = life.chance.choice(life.optimizer.param_groups)
    group["maximize"] = not group["maximize"]


def add_group(life: Life) -> None:
    param = life.new_param()
    life.params.append(param)
    life.optimizer.add_param_group({"params": [param], "lr": 0.02})


def replace_param(life: Life) -> None:
    """Replace a parameter by another one, as pruning and growing do."""
    group = life.chance.choice(life.optimizer.param_groups)
    i = life.chance.randrange(len(group["params"]))
    old, new = group["params"][i], life.new_param()
    life.optimizer.state.pop(old, None)
    life.params[next(j for j, p in enumerate(life.params) if p is old)] = group["params"][i] = new


def stepped(life: Life) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Return a parameter with its state, or None if none has a state."""
    found = [(p, life.optimizer.state[p]) for p in life.params if life.optimizer.state.get(p)]
    return life.chance.choice(found) if found else None


def fill_state(life: Life) -> None:
    if found := stepped(life):
        for name, value in found[1].items():
            if name != "step":
                value.fill_(0.25)


def replace_buffer(life: Life) -> None:
    if found := stepped(life):
        name = life.chance.choice(sorted(found[1]))
        found[1][name] = found[1][name].clone()


def move_buffer(life: Life) -> None:
    if found := stepped(life):
        name = life.chance.choice(sorted(found[1]))
        found[1][name].data = found[1][name].data.clone()


def negate_buffer(life: Life) -> None:
    """Replace a buffer by one with the other sign, which torch negates lazily."""
    if found := stepped(life):
        names = [name for name in sorted(found[1]) if name.endswith(("exp_avg", "momentum_buffer"))]
        if names:
            found[1][names[0]].data = lazily_negated(found[1][names[0]].data)


def set_step_count(life: Life) -> None:
    if found := stepped(life):
        found[1]["step"].fill_(life.chance.choice([0, 3, 50]))


def copy_state(life: Life) -> None:
    if found := stepped(life):
        life.optimizer.state[found[0]] = dict(found[1])


def drop_state(life: Life) -> None:
    if found := stepped(life):
        del life.optimizer.state[found[0]]


def reload(life: Life) -> None:
    life.optimizer.load_state_dict(copy.deepcopy(life.optimizer.state_dict()))


def save(life: Life) -> None:
    life.saved = copy.deepcopy(life.optimizer.state_dict())


def load(life: Life) -> None:
    """Load the state dict that was saved some steps ago, if it still fits."""
    if life.saved is not None:
        try:
            life.optimizer.load_state_dict(life.saved)
        except ValueError:
            life.saved = None


def copy_all(life: Life) -> None:
    life.params, life.optimizer = copy.deepcopy((life.params, life.optimizer))


def pickle_all(life: Life) -> None:
    life.params, life.optimizer = pickle.loads(pickle.dumps((life.params, life.optimizer)))


def set_engine(life: Life) -> None:
    group = life.chance.choice(life.optimizer.param_groups)
    chosen = life.chance.choice([{"foreach": True}, {"foreach": False}, {"fused": False}, {}])
    if not life.is_reference:
        group.update({"foreach": None, "fused": None, **chosen})


def set_counting(life: Life) -> None:
    group = life.chance.choice(life.optimizer.param_groups)
    group["track_alignment"] = not group["track_alignment"]


def set_capturable(life: Life) -> None:
    """Toggle `capturable`. On the CPU, it changes only how coefficients are computed."""
    group = life.chance.choice(life.optimizer.param_groups)
    group["capturable"] = life.device == "cpu" and not group["capturable"]


def retype_data(life: Life) -> None:
    """Change the dtype like model.bfloat16() and model.double(), which leave the state unchanged."""
    p = life.chance.choice(life.params)
    dtype = life.chance.choice([torch.float32, torch.float64, torch.bfloat16])
    if not p.is_complex():
        p.grad = None
        p.data = p.data.to(dtype)


def reshape_data(life: Life) -> None:
    """Give a parameter another shape, which needs a new state."""
    p = life.chance.choice(life.params)
    p.grad = None
    p.data = life.chance.choice([p.data.flatten(), p.data.unsqueeze(0), torch.cat([p.data.flatten()] * 2)])
    life.optimizer.state.pop(p, None)


def write_data(life: Life) -> None:
    life.chance.choice(life.params).data.fill_(0.5)


def move_data(life: Life) -> None:
    p = life.chance.choice(life.params)
    p.data = p.data.clone()


def negate_data(life: Life) -> None:
    p = life.chance.choice(life.params)
    p.data = lazily_negated(p.data)


def lay_out_data(life: Life) -> None:
    """Change the memory layout and keep the values."""
    p = life.chance.choice(life.params)
    order = tuple(reversed(range(p.dim())))
    p.data = p.data.permute(order).contiguous().permute(order)


CHANGES = [
    set_lr,
    set_betas,
    set_decay,
    flip_direction,
    add_group,
    replace_param,
    fill_state,
    replace_buffer,
    move_buffer,
    negate_buffer,
    set_step_count,
    copy_state,
    drop_state,
    reload,
    save,
    load,
    copy_all,
    pickle_all,
    set_engine,
    set_counting,
    set_capturable,
    retype_data,
    reshape_data,
    write_data,
    move_data,
    negate_data,
    lay_out_data,
]


def assert_lives_agree(seed: int, device: str = "cpu") -> None:
    ours, reference = Life(seed, device), Life(seed, device, foreach=False)
    for step, (seen, expected) in enumerate(zip(ours.live(), reference.live(), strict=True)):
        for x, y in zip(seen, expected, strict=True):
            message = f"life {seed}, step {step}, {type(ours.optimizer).__name__}: {ours.happened}"
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, msg=partial("{}\n{}".format, message))


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_lives_agree_with_the_reference(first: int) -> None:
    for seed in range(first, first + 20):
        assert_lives_agree(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_many_lives_agree_with_the_reference(first: int) -> None:
    for seed in range(first, first + 100):
        assert_lives_agree(seed)


@on_cuda
@pytest.mark.parametrize("first", range(5000, 5300, 100))
def test_lives_on_cuda_agree_with_the_reference(first: int) -> None:
    for seed in range(first, first + 100):
        assert_lives_agree(seed, "cuda")


def test_lists_and_tensors_one_by_one_agree_where_memory_is_negated_lazily() -> None:
    """Torch's list operations refuse to write to such a tensor, so it is updated alone, beside the lists."""
    found = []
    for foreach in (True, False):
        params = [torch.nn.Parameter(torch.tensor([0.5, -1.0])) for _ in range(3)]
        optimizer = cadam.CAdam(params, foreach=foreach, lr=0.1)
        for number in range(4):
            for p in params:
                p.grad = torch.tensor([1.0, -1.0])
            if number == 2:
                params[1].data = lazily_negated(params[1].data)
            optimizer.step()
        found.append([p.detach().resolve_neg() for p in params] + [optimizer.alignment_counts()])
    torch.testing.assert_close(*found)
