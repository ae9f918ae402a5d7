"""State dicts are converted from torch to JAX and back, and training continues as without the conversion."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import cadam
import cadam.jax
from tests.jax.jax_cases import LR, NAMES, largest_difference
from tests.optim.family import FAMILY

CLASSES: dict[str, Any] = {name.lower(): cls for name, cls in FAMILY.items()}


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def grads(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: (rng.integers(-16, 17, p.shape) / 16).astype(np.float32) for name, p in model().named_parameters()}


def nested(flat: dict[str, Any]) -> Any:
    """Return a tree of parameters by layer and then by name, as in a JAX model."""
    tree: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        layer, own = name.split(".")
        tree.setdefault(layer, {})[own] = jnp.asarray(value)
    return tree


def torch_steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for name, p in net.named_parameters():
            p.grad = torch.from_numpy(grads(step)[name])
        optimizer.step()


def values(net: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in net.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_training_continues_in_the_other_framework_and_back(name: str) -> None:
    stayed, net = model(), model()
    there, ours = (CLASSES[name](m.named_parameters(), lr=LR) for m in (stayed, net))
    torch_steps(stayed, there, 0, 9)

    torch_steps(net, ours, 0, 3)
    params, tx = nested(values(net)), getattr(cadam.jax, name)(LR)
    state = cadam.jax.from_torch(ours.state_dict(), tx.init(params))
    step = jax.jit(lambda p, s, g: (lambda u, s: (optax.apply_updates(p, u), s))(*tx.update(g, s, p)))
    for number in range(3, 6):
        params, state = step(params, state, nested(grads(number)))

    back = model()
    for key, p in back.named_parameters():
        layer, own = key.split(".")
        p.data = torch.from_numpy(np.array(params[layer][own]))
    again = CLASSES[name](back.named_parameters(), lr=LR)
    again.load_state_dict(cadam.jax.to_torch(state, again.state_dict()))
    torch_steps(back, again, 6, 9)
    for key, value in values(stayed).items():
        assert largest_difference(values(back)[key], value) < 1e-6, key


@pytest.mark.parametrize("name", ["cadam", "cadamw", "csgdm"])
def test_a_table_with_sparse_gradients_continues_in_jax_and_back(name: str) -> None:
    """The moments of all rows, touched or not, and the step count are converted. In JAX the table alone has no name."""
    batches = [np.array(([1, 3], [3, 0], [2, 1], [4, 4])[number % 4]) for number in range(9)]

    def table() -> torch.nn.Embedding:
        torch.manual_seed(0)
        return torch.nn.Embedding(6, 3, sparse=True)

    def steps(net: torch.nn.Embedding, there: torch.optim.Optimizer, given: list[np.ndarray]) -> None:
        for ids in given:
            there.zero_grad()
            net(torch.from_numpy(ids)).square().sum().backward()
            there.step()

    stayed, net = table(), table()
    steps(stayed, CLASSES[name](stayed.named_parameters(), lr=LR), batches)
    there = CLASSES[name](net.named_parameters(), lr=LR)
    steps(net, there, batches[:3])

    tx, weight = getattr(cadam.jax, name)(LR), jnp.asarray(net.weight.detach().numpy())
    state = cadam.jax.from_torch(there.state_dict(), tx.init(weight), rename=lambda _: "weight")
    for ids in batches[3:6]:
        weight, state = cadam.jax.sparse_update.update(weight, state, jnp.asarray(ids), 2 * weight[ids], optimizer=tx)

    net.weight.data = torch.from_numpy(np.array(weight))
    there.load_state_dict(cadam.jax.to_torch(state, there.state_dict(), rename=lambda _: "weight"))
    steps(net, there, batches[6:])
    assert largest_difference(values(net)["weight"], values(stayed)["weight"]) < 1e-6


def test_a_state_dict_of_torch_optim_adam_can_be_converted() -> None:
    net = model()
    weight = next(net.parameters())
    theirs = torch.optim.Adam(net.named_parameters())
    torch_steps(net, theirs, 0, 2)
    state = cadam.jax.from_torch(theirs.state_dict(), cadam.jax.cadam(LR).init(nested(values(net))))
    assert int(optax.tree_utils.tree_get(state, "RuleState").count) == 2
    exp_avg = theirs.state[weight]["exp_avg"]
    assert largest_difference(optax.tree_utils.tree_get(state, "exp_avg")["0"]["weight"], exp_avg.numpy()) == 0
    new = torch.optim.Adam(net.named_parameters())
    new.load_state_dict(cadam.jax.to_torch(state, new.state_dict()))
    assert torch.equal(new.state[weight]["exp_avg"], exp_avg)


def test_moments_from_torch_are_a_copy() -> None:
    net = model()
    ours = cadam.CAdam(net.named_parameters(), lr=LR)
    torch_steps(net, ours, 0, 2)
    state = cadam.jax.from_torch(ours.state_dict(), cadam.jax.cadam(LR).init(nested(values(net))))
    before = jax.tree.map(np.array, state)
    torch_steps(net, ours, 2, 4)
    assert all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(before)))


def test_the_next_step_after_torch_optim_sgd_is_dampened() -> None:
    """The state of torch.optim.SGD has no step count, but a momentum buffer exists only after a step."""
    net = model()
    theirs = torch.optim.SGD(net.named_parameters(), lr=LR, momentum=0.9, dampening=0.5)
    torch_steps(net, theirs, 0, 3)
    params, tx = nested(values(net)), cadam.jax.sgdm(LR, momentum=0.9, dampening=0.5)
    state = cadam.jax.from_torch(theirs.state_dict(), tx.init(params))
    updates, _ = tx.update(nested(grads(3)), state, params)
    torch_steps(net, theirs, 3, 4)
    after, expected = optax.apply_updates(params, updates), nested(values(net))
    for ours, other in zip(*map(jax.tree.leaves, (after, expected)), strict=True):
        assert largest_difference(ours, other) < 1e-6


def test_names_may_differ() -> None:
    net = torch.nn.Linear(2, 1, bias=False)
    ours = cadam.CAdam(net.named_parameters())
    net.weight.grad = torch.ones(1, 2)
    ours.step()
    state = cadam.jax.cadam(LR).init({"kernel": jnp.zeros((1, 2))})
    state = cadam.jax.from_torch(ours.state_dict(), state, rename={"kernel": "weight"}.__getitem__)
    assert optax.tree_utils.tree_get(state, "exp_avg")["kernel"] == pytest.approx(0.1)


def test_mismatched_states_are_rejected() -> None:
    net = model()
    params, tx = nested(values(net)), cadam.jax.cadam(LR)
    unnamed, named = cadam.CAdam(net.parameters()), cadam.CAdam(net.named_parameters())
    with pytest.raises(ValueError, match="the state has no moments of a rule"):
        cadam.jax.from_torch({"state": {}, "param_groups": []}, optax.adam(LR).init({"w": jnp.ones(2)}))
    with pytest.raises(ValueError, match=r"group 0 has no names: construct the torch optimizer with model.named"):
        cadam.jax.from_torch(unnamed.state_dict(), tx.init(params))
    with pytest.raises(ValueError, match=r"no exp_avg of '0.bias'; it has state of '0.weight', '0.bias'"):
        cadam.jax.from_torch(named.state_dict(), tx.init(params))
    torch_steps(net, named, 0, 1)
    with pytest.raises(ValueError, match=r"no exp_avg_var of '0.bias'; it has step, exp_avg, exp_avg_sq"):
        cadam.jax.from_torch(named.state_dict(), cadam.jax.adabelief(LR).init(params))
    with pytest.raises(ValueError, match=r"'0.weight' has shape"):
        cadam.jax.from_torch(named.state_dict(), tx.init({"0": {"weight": jnp.zeros((3, 2))}}))
    with pytest.raises(ValueError, match=r"no parameter '2.weight'; it has 0.weight"):
        cadam.jax.to_torch(tx.init({"2": {"weight": jnp.zeros(1)}}), named.state_dict())
    net[1].bias.grad = None
    named.step()
    with pytest.raises(ValueError, match=r"'1.bias' has taken 1 steps"):
        cadam.jax.from_torch(named.state_dict(), tx.init(params))
    raw = torch.optim.Adam(net.named_parameters(), amsgrad=True)
    raw.step()
    with pytest.raises(ValueError, match=r"cadam.AmsGrad"):
        cadam.jax.to_torch(cadam.jax.amsgrad(LR).init(params), raw.state_dict())
