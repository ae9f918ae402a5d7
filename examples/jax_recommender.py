"""A small recommender in JAX on a stream of clicks: row-sparse tables and a dense part, both with CAdam.

    python examples/jax_recommender.py
    python examples/jax_recommender.py --optimizer adam

The clicks are simulated: users and items have tastes, tastes drift, and a tenth of the labels are flipped. Each batch
is scored before it is learned, so the printed loss is that of unseen events.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import cadam.jax
from cadam.jax import sparse_update

WIDTH = 8


def batch(step: int, size: int, users: int, items: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return users, items and whether they clicked, which depend only on the step."""
    keys = jax.random.split(jax.random.key(step), 3)
    user = (jax.random.uniform(keys[0], (size,)) ** 3 * users).astype(jnp.int32)  # few are busy
    item = (jax.random.uniform(keys[1], (size,)) ** 3 * items).astype(jnp.int32)
    taste = jnp.sin(user * 12.9898 + item * 78.233 % 7 + step / 300)
    lies = jax.random.uniform(keys[2], (size,)) < 0.1
    return user, item, ((taste > 0) ^ lies).astype(jnp.float32)


def score(looked_up: Any, dense: Any) -> jax.Array:
    x = jnp.concatenate([looked_up["user"], looked_up["item"], looked_up["user"] * looked_up["item"]], -1)
    return jax.nn.relu(x @ dense["hidden"]) @ dense["out"] + dense["bias"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1_000, help="rows of each table")
    parser.add_argument("--optimizer", default="cadam", help="a function of cadam.jax, such as cadam or adam")
    arguments = parser.parse_args()

    optimizer = getattr(cadam.jax, arguments.optimizer)(1e-2)
    keys = jax.random.split(jax.random.key(0), 4)
    tables = {
        name: 0.1 * jax.random.normal(key, (arguments.rows, WIDTH))
        for name, key in zip(("user", "item"), keys[:2], strict=True)
    }
    dense = {
        "hidden": 0.2 * jax.random.normal(keys[2], (3 * WIDTH, 32)),
        "out": 0.2 * jax.random.normal(keys[3], (32,)),
        "bias": jnp.zeros(()),
    }
    of_tables = {name: optimizer.init(table) for name, table in tables.items()}
    of_dense = optimizer.init(dense)

    @partial(jax.jit, donate_argnums=(0, 1, 2, 3))
    def learn(tables: Any, of_tables: Any, dense: Any, of_dense: Any, user: Any, item: Any, clicked: Any) -> Any:
        ids = {"user": user, "item": item}
        looked_up = {
            name: tables[name][ids[name]] for name in tables
        }  # outside of the gradient, so that no dense gradient is made

        def loss_of(looked_up: Any, dense: Any) -> jax.Array:
            return optax.sigmoid_binary_cross_entropy(score(looked_up, dense), clicked).mean()

        loss, (of_rows, grads) = jax.value_and_grad(loss_of, argnums=(0, 1))(looked_up, dense)
        updates, of_dense = optimizer.update(grads, of_dense, dense)
        dense = optax.apply_updates(dense, updates)
        for name in ids:
            tables[name], of_tables[name] = sparse_update.update(
                tables[name], of_tables[name], ids[name], of_rows[name], optimizer=optimizer
            )
        return tables, of_tables, dense, of_dense, loss

    recent = []
    for step in range(1, arguments.steps + 1):
        events = batch(step, arguments.batch, arguments.rows, arguments.rows)
        tables, of_tables, dense, of_dense, loss = learn(tables, of_tables, dense, of_dense, *events)
        recent.append(loss)
        if step % 100 == 0 or step == arguments.steps:
            aligned = {
                "user": optax.tree_utils.tree_get(of_tables["user"], "alignment"),
                "dense": optax.tree_utils.tree_get(of_dense, "alignment"),
            }
            shown = "   ".join(f"{name} {float(value):.3f}" for name, value in aligned.items())
            print(f"step {step:5d}   loss {float(jnp.stack(recent).mean()):.4f}   aligned: {shown}")
            recent = []


if __name__ == "__main__":
    main()
