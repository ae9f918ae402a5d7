"""A rule of `cadam.rules` as a gradient transformation of optax.

`cadam.rules.update.Update` runs on arrays as it is. It gets 0 as the parameter and -1 as the learning rate, so that its
result is the step itself. The other transformations of an optax chain apply weight decay and learning rate to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..jax_arrays import CountedMask, JaxFunctions, aging_coefficients, count_true, is_array, step_coefficients
from ..rules import Options, Rule
from ..rules.defaults import check_ranges, defaults, own_options
from ..rules.sparse_updates import check_sparse_updates
from ..rules.update import Update

SEQUENTIAL_SIZE = 2**16
"""Leaves with at least this many elements are updated one after the other on a CPU; see `_after`."""


class RuleState(NamedTuple):
    """The optimizer state of a rule.

    Attributes:
        count: Number of steps taken, an int32.
        moments: Buffers by name, each a tree like the parameters. The names are those of torch's state dicts.
        alignment: Share of elements whose momentum and gradient agreed in sign in the last step; 0 before the first.
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
    """Replace gradients by the steps of a rule.

    Moments and steps are at least float32; `optax.apply_updates` adds the steps to parameters in half precision with
    one rounding. The `update` function takes extra arguments, which `cadam.jax.sparse_update` passes: ``touched``, the
    number of elements that the gradient really has, if it is padded; ``missed``, the number of steps without a gradient
    by which the moments age first; and ``is_masked``, whether the confidence mask applies.

    Args:
        rule: A rule of `cadam.rules.RULES`, or your own.
        confidence: Whether steps are masked (0) where momentum and gradient disagree in sign.
        mu_dtype: Dtype of the rule's first buffer, its first moment; by default the parameter's, but at least float32.
        track_alignment: Whether to count the aligned elements; the state then has their share.
        options: Options of the rule, such as ``betas``; numbers or arrays.

    Returns:
        A gradient transformation with a `RuleState`.

    Raises:
        TypeError: If `rule` is not a rule, or does not have an option.
        ValueError: If an option is out of range.

    Example:
        >>> tx = optax.chain(scale_by_rule(RULES["lion"], betas=(0.9, 0.99)), optax.scale_by_learning_rate(1e-4))
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"a rule is needed, such as cadam.rules.RULES['adam'], got {rule!r}")
    unknown = sorted(options.keys() - set(own_options(rule)))
    if unknown:
        raise TypeError(f"the rule {rule.name!r} has no option {unknown[0]!r}; it has {', '.join(own_options(rule))}")
    o = {**defaults(rule), **options, "weight_decay": 0.0, "track_alignment": track_alignment}
    check_ranges(o, lambda value: None if is_array(value) else float(value))
    plain = {name: rule.defaults[name] if is_array(value) else value for name, value in o.items()}
    initial = _initial_buffers(rule, o)
    update = Update.of(rule, confidence, o)
    coefficients = jax.jit(lambda count: step_coefficients(update, count, o))

    def init_fn(params: optax.Params) -> RuleState:
        def buffer(name: str) -> Any:
            dtype = mu_dtype if name == next(iter(initial)) else None
            return jax.tree.map(lambda p: _new_buffer(p, initial[name], dtype), params)

        moments = {name: buffer(name) for name in initial}
        return RuleState(jnp.zeros([], jnp.int32), moments, jnp.zeros([], jnp.float32))

    def update_fn(
        updates: optax.Updates,
        state: RuleState,
        params: Any = None,
        *,
        touched: Any = None,
        missed: Any = None,
        is_masked: Any = None,
        **extra: Any,
    ) -> tuple[optax.Updates, RuleState]:
        count = optax.safe_increment(state.count)
        c = coefficients(count)
        aging_update, functions = update, JaxFunctions if is_masked is None else CountedMask(is_masked)
        if missed is not None:
            check_sparse_updates(rule, {**plain, "sparse_updates": "exact", "confidence": confidence})
            rule.check({**plain, "sparse_updates": "exact"})
            aging_update = replace(update, ages=True)
            c = {**c, **aging_coefficients(rule, missed, o)}
        if is_masked is not None and not confidence:
            raise ValueError("confidence_after needs an optimizer with confidence, such as cadam.jax.cadam")
        grads, tree = jax.tree.flatten(updates)
        buffers = {name: tree.flatten_up_to(moments) for name, moments in state.moments.items()}
        steps: list[jax.Array] = []
        aligned_counts: list[jax.Array] = []
        previous = None
        for i, grad in enumerate(grads):
            old = {name: leaves[i] for name, leaves in buffers.items()}
            dtype = jnp.result_type(grad, jnp.float32, *old.values())
            is_large, grad = jnp.size(grad) >= SEQUENTIAL_SIZE, jnp.asarray(grad, dtype)
            result = aging_update(
                0.0,
                _after(previous, grad) if is_large and previous is not None else grad,
                {name: buffer.astype(dtype) for name, buffer in old.items()},
                {name: jnp.asarray(value, dtype) for name, value in c.items()},
                functions,
            )
            steps.append(result.param)
            for name, buffer in old.items():
                buffers[name][i] = result.state[name].astype(buffer.dtype)
            if track_alignment:
                aligned_counts.append(aligned := count_true(result.alignment > 0))
                if is_large:
                    # This is always false, but XLA cannot know that. `_after` uses it to order the large leaves.
                    previous = aligned > min(jnp.size(grad), 2**32 - 1)
        alignment = state.alignment
        if track_alignment:
            # The counts are stacked and summed at once: XLA takes a minute to compile a chain of 1,000 additions.
            aligned = jnp.sum(jnp.stack(aligned_counts), dtype=jnp.float32) if aligned_counts else jnp.zeros([])
            alignment = aligned / jnp.maximum(float(sum(map(jnp.size, grads))) if touched is None else touched, 1)
        moments = {name: tree.unflatten(leaves) for name, leaves in buffers.items()}
        return tree.unflatten(steps), RuleState(count, moments, alignment.astype(jnp.float32))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Unknown:
    """An option that is an array. It equals nothing, since its value may differ in the next step."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def _initial_buffers(rule: Rule, o: Options) -> dict[str, Any]:
    """Return the initial value of each buffer. Which buffers there are must not depend on options that are arrays."""
    wrapped = {name: _Unknown(value) if is_array(value) else value for name, value in o.items()}
    rule.check({name: rule.defaults[name] if isinstance(v, _Unknown) else v for name, v in wrapped.items()})
    initial = rule.state(wrapped)
    return {name: value.value if isinstance(value, _Unknown) else value for name, value in initial.items()}


def _new_buffer(param: Any, value: Any, dtype: Any) -> jax.Array:
    if not jnp.issubdtype(jnp.result_type(param), jnp.floating):
        raise TypeError(f"parameters must be real floating-point arrays, got {jnp.result_type(param)}")
    return jnp.full_like(param, value, dtype=dtype or jnp.promote_types(jnp.result_type(param), jnp.float32))


def _after(previous: jax.Array, grad: jax.Array) -> jax.Array:
    """Return the gradient, but make a CPU wait for `previous`, which is always false.

    On a CPU, XLA would run first the loops over the moments of all leaves, then those over all steps and counts, whose
    inputs have left the cache by then. Updating one leaf after the other takes three quarters of that time.
    """
    return jax.lax.platform_dependent(
        previous, grad, cpu=lambda previous, grad: jnp.where(previous, jnp.nan, grad), default=lambda _, grad: grad
    )
