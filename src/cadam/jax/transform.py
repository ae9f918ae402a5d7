"""A rule of `cadam.rules` as a gradient transformation of optax.

`cadam.rules.update.Update` runs as it is, on arrays. The parameter it is given is 0 and its learning rate -1, so that
what comes out is the step itself; the rest of a chain decays, scales and adds it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..array_update import Arrays, check_rule, count_true, is_array, of_step
from ..rules import Options, Rule
from ..rules.defaults import check_ranges, defaults
from ..rules.update import Update
from . import native

LARGE = 2**16
"""From so many elements on, the leaves of a tree are updated one after the other on a CPU."""


class RuleState(NamedTuple):
    """What a rule remembers.

    - `count`: the steps taken, an int32.
    - `moments`: its buffers by name, each a tree like the parameters. The names are those of torch's state dicts.
    - `alignment`: the share of elements whose momentum and gradient agreed in sign in the last step; 0 before the
      first one.
    """

    count: jax.Array
    moments: dict[str, Any]
    alignment: jax.Array


def scale_by_rule(
    rule: Rule,
    *,
    confidence: bool = True,
    mu_dtype: Any = None,
    track_alignment: bool = True,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Replace gradients by the steps of a rule; with `confidence`, by 0 where momentum and gradient disagree in sign.

    Moments are float32 at the least and so are the steps, which `optax.apply_updates` adds to parameters in half
    precision with one rounding.

    Args:
        rule: one of `cadam.rules.RULES`, or your own.
        confidence: whether an element waits where momentum and gradient disagree.
        mu_dtype: dtype of the rule's first buffer, its first moment; by default the parameter's, or float32.
        track_alignment: whether to count the alignment ratio, which is then in the state.
        options: the rule's own, such as ``betas``; numbers or arrays.

    The update takes ``touched=`` as an extra argument: how many elements the gradient really holds, if not all.
    """
    check_rule(rule)
    unknown = sorted(options.keys() - rule.defaults.keys() | options.keys() & {"lr"})
    if unknown:
        known = ", ".join(name for name in rule.defaults if name != "lr")
        raise TypeError(f"the rule {rule.name!r} has no option {unknown[0]!r}; it has {known}")
    o = {**defaults(rule), **options, "weight_decay": 0.0, "track_alignment": track_alignment}
    check_ranges(o, lambda value: None if is_array(value) else float(value))
    start = _start(rule, o)
    update = Update.of(rule, confidence, o)
    scalars = jax.jit(lambda count: of_step(update, count, o))

    def init_fn(params: optax.Params) -> RuleState:
        def buffer(name: str) -> Any:
            dtype = mu_dtype if name == next(iter(start)) else None
            return jax.tree.map(lambda p: _new_buffer(p, start[name], dtype), params)

        return RuleState(jnp.zeros([], jnp.int32), {name: buffer(name) for name in start}, jnp.zeros([], jnp.float32))

    def update_fn(
        updates: optax.Updates, state: RuleState, params: Any = None, *, touched: Any = None, **extra: Any
    ) -> tuple[optax.Updates, RuleState]:
        count = optax.safe_increment(state.count)
        c = scalars(count)
        grads, tree = jax.tree.flatten(updates)
        buffers = {name: tree.flatten_up_to(moments) for name, moments in state.moments.items()}
        steps: list[Any] = [None] * len(grads)
        counts: list[jax.Array] = []
        last = None
        form = native.form(update, tuple(start), frozenset(c))
        if not isinstance(form, str):
            for group in native.groups(grads, buffers):
                chosen = {name: [leaves[i] for i in group] for name, leaves in buffers.items()}
                together = form([grads[i] for i in group], chosen, c, counts[-1:])
                counts.append(together.aligned)
                for place, i in enumerate(group):
                    steps[i] = together.steps[place]
                    for name, leaves in together.buffers.items():
                        buffers[name][i] = leaves[place]
        for i, grad in enumerate(grads):
            if steps[i] is not None:
                continue
            old = {name: leaves[i] for name, leaves in buffers.items()}
            work = jnp.result_type(grad, jnp.float32, *old.values())
            is_large, grad = jnp.size(grad) >= LARGE, jnp.asarray(grad, work)
            moved = update(
                0.0,
                _after(last, grad) if is_large and last is not None else grad,
                {name: buffer.astype(work) for name, buffer in old.items()},
                {name: jnp.asarray(value, work) for name, value in c.items()},
                Arrays,
            )
            steps[i] = moved.param
            for name, buffer in old.items():
                buffers[name][i] = moved.state[name].astype(buffer.dtype)
            if track_alignment:
                counts.append(counted := count_true(moved.alignment > 0))
                if is_large:
                    last = counted > min(jnp.size(grad), 2**32 - 1)  # never, but XLA cannot know
        alignment = state.alignment
        if track_alignment:
            # Not one addition after the other: with 1,000 leaves XLA would compile that for a minute.
            aligned = jnp.sum(jnp.stack(counts), dtype=jnp.float32) if counts else jnp.zeros([])
            alignment = aligned / jnp.maximum(float(sum(map(jnp.size, grads))) if touched is None else touched, 1)
        moments = {name: tree.unflatten(leaves) for name, leaves in buffers.items()}
        return tree.unflatten(steps), RuleState(count, moments, alignment.astype(jnp.float32))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Unknown:
    """A number that a rule cannot branch on, since it may be another one in the next step: it differs from any."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def _start(rule: Rule, o: Options) -> dict[str, Any]:
    """The buffers of a rule and the value each starts at; options that are arrays do not decide which there are."""
    hidden = {name: _Unknown(value) if is_array(value) else value for name, value in o.items()}
    rule.check({name: rule.defaults[name] if isinstance(v, _Unknown) else v for name, v in hidden.items()})
    start = rule.state(hidden)
    return {name: value.value if isinstance(value, _Unknown) else value for name, value in start.items()}


def _new_buffer(param: Any, value: Any, dtype: Any) -> jax.Array:
    if not jnp.issubdtype(jnp.result_type(param), jnp.floating):
        raise TypeError(f"parameters must be real floating-point arrays, got {jnp.result_type(param)}")
    return jnp.full_like(param, value, dtype=dtype or jnp.promote_types(jnp.result_type(param), jnp.float32))


def _after(last: jax.Array, grad: jax.Array) -> jax.Array:
    """The gradient, which a CPU cannot read before it knows `last`, which is false.

    There XLA runs whichever loop is ready: the moments of all leaves, then all steps and counts, which find nothing in
    the cache any more. Leaf by leaf they do, and a step takes three quarters of the time.
    """
    return jax.lax.platform_dependent(
        last, grad, cpu=lambda last, grad: jnp.where(last, jnp.nan, grad), default=lambda last, grad: grad
    )
