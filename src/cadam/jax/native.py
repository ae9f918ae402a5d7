"""The C kernels, called by XLA on the CPU: one pass over gradients and moments makes the new moments, and counts.

XLA alone runs a loop for each array that it writes, and reads each gradient for every moment, the step and the count.
Here it makes only the step, from the new moments, in the loop that adds it to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..array_update import Arrays, check_rule, count_true
from ..codegen.kernel_spec import Structure, structures
from ..codegen.trace import ARITHMETIC, Value, record
from ..native import shared_library as shared
from ..rules import RULES, Rule
from ..rules.adam import ADAM
from ..rules.defaults import defaults
from ..rules.update import Scalars, Update

LEAST = 2**13
"""From so many elements on, leaves go there."""

MOST = 2**20
"""Leaves go there together while they have no more elements than these, which stay in the cache."""

enabled = True
"""Whether they are called in what is traced from now on. `jax.export` wants programs without them."""


class Together(NamedTuple):
    """Some leaves after their update, and how many of all their elements were aligned."""

    steps: list[jax.Array]
    buffers: dict[str, list[jax.Array]]
    aligned: jax.Array


OPERATIONS: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    "sqrt": Arrays.sqrt,
    "sign": Arrays.sign,
    "maximum": Arrays.maximum,
    "hold": Arrays.hold,
}


def explain(rule: Rule = ADAM) -> str:
    """What makes the moments of large float32 leaves under a rule with confidence: ``C``, or ``XLA`` and why not C."""
    check_rule(rule)
    o = {**defaults(rule), "weight_decay": 0.0}
    update = Update.of(rule, True, o)
    found = form(update, tuple(rule.state(o)), frozenset(update.coefficients(2.0, o, Scalars)))
    return f"XLA: {found}" if isinstance(found, str) else "C"


def form(update: Update, buffers: tuple[str, ...], coefficients: frozenset[str]) -> Form | str:
    """The C form of this update, or why there is none here."""
    if not enabled:
        return "cadam.jax.native.enabled is False"
    if (backend := jax.default_backend()) != "cpu":
        return f"the default device is a {backend}"
    if (count := jax.device_count()) != 1:
        return f"there are {count} devices, and XLA could not shard what C computes"
    if not jax.sharding.get_abstract_mesh().empty:
        return "in the context of a mesh, arrays have shardings that C does not know"
    return _form(update, buffers, coefficients)


@cache
def _form(update: Update, buffers: tuple[str, ...], coefficients: frozenset[str]) -> Form | str:
    if not (update.confidence or update.aligned):
        return "with neither mask nor count, XLA reads no gradient twice for them"
    if RULES.get(update.rule.name) is not update.rule:
        return f"the rule {update.rule.name!r} is not one of the package's"
    program = record(update, buffers, tuple(sorted(coefficients)))
    ops = program.needed_for(program.param, known=[value.name for value in program.state.values()])
    if not buffers or any(isinstance(x, Value) and x.name in buffers for op in ops for x in op.args):
        return f"the step of the rule {update.rule.name!r} is not one of its new moments alone"
    for structure in structures([update.rule]):
        if structure.buffers == buffers and set(structure.coefficients) == coefficients | update.neutral.keys():
            kernel = _kernel(structure.name)
            return kernel if isinstance(kernel, str) else Form(update, structure, *kernel)
    return f"there is no kernel for the rule {update.rule.name!r} with these options"


@cache
def _kernel(name: str) -> tuple[str, int] | str:
    """What XLA calls the kernels, and the number of the one of this name; or why they cannot be called."""
    c = shared.package()
    if isinstance(c, str):
        return c
    target = f"cadam_{c.cadam_fingerprint().decode()}"  # programs that XLA kept may call no others
    try:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(c.cadam_xla_moments), platform="cpu")
    except Exception as error:  # of several kinds, by version
        return f"XLA refuses the C kernels: {error}"
    return target, int(c.cadam_kernel_index(name.encode()))


class Form:
    """An update of leaves by a C kernel. Where it is mapped or differentiated, or not on a CPU, XLA computes it all."""

    def __init__(self, update: Update, structure: Structure, target: str, kernel: int) -> None:
        self.update, self.structure, self.target, self.kernel = update, structure, target, kernel
        chosen = jax.custom_batching.custom_vmap(
            lambda *args: jax.lax.platform_dependent(*args, cpu=self._by_c, default=self._by_xla)
        )
        chosen.def_vmap(self._mapped)
        whole = jax.custom_jvp(chosen)
        whole.defjvp(lambda primals, tangents: jax.jvp(self._by_xla, primals, tangents))
        self._move = jax.jit(whole)

    def __call__(self, grads: list[Any], old: dict[str, list[Any]], c: Mapping[str, jax.Array], last: Any) -> Together:
        """Move leaves by these gradients, buffers and coefficients, once `last` is computed, whatever it is."""
        c = {name: jnp.asarray(value, jnp.float32) for name, value in c.items()}
        values = {**self.update.neutral, **c}
        packed = jnp.stack([jnp.asarray(values[name], jnp.float32) for name in self.structure.coefficients])
        moved: Together = self._move(grads, old, c, packed, last)
        return moved

    def _by_c(self, grads: Any, old: Any, c: Any, packed: Any, last: Any) -> Together:
        names, count = self.structure.buffers, len(grads)
        like = [jax.ShapeDtypeStruct(grad.shape, grad.dtype) for grad in grads]
        call = jax.ffi.ffi_call(
            self.target,
            [*like * len(names), jax.ShapeDtypeStruct((), jnp.uint32)],
            input_output_aliases={count + i: i for i in range(count * len(names))},
        )
        buffers = [buffer for name in names for buffer in old[name]]
        *made, aligned = call(*grads, *buffers, packed, *jax.tree.leaves(last), kernel=np.int64(self.kernel))
        new = {name: made[k * count : (k + 1) * count] for k, name in enumerate(names)}
        steps = [self._step(grad, {name: new[name][i] for name in names}, c) for i, grad in enumerate(grads)]
        return Together(steps, new, aligned)

    def _step(self, grad: Any, new: Mapping[str, Any], c: Mapping[str, Any]) -> Any:
        """The step as the rule makes it, from its new buffers on."""
        program = record(self.update, self.structure.buffers, tuple(sorted(c)))
        values = {**c, "p": 0.0, "g": grad, **{program.state[name].name: value for name, value in new.items()}}
        for op in program.needed_for(program.param, known=values):
            args = (values[x.name] if isinstance(x, Value) else x for x in op.args)
            values[op.out.name] = OPERATIONS[op.kind](*args)
        return values[program.param.name]

    def _by_xla(self, grads: Any, old: Any, c: Any, packed: Any, last: Any) -> Together:
        moved = [
            self.update(0.0, grad, {name: leaves[i] for name, leaves in old.items()}, c, Arrays)
            for i, grad in enumerate(grads)
        ]
        new = {name: [one.state[name] for one in moved] for name in old}
        aligned = sum((count_true(one.alignment > 0) for one in moved), jnp.uint32(0))
        return Together([one.param for one in moved], new, aligned)

    def _mapped(self, size: int, is_mapped: Any, *args: Any) -> Any:
        axes = jax.tree.map(lambda mapped: 0 if mapped else None, is_mapped)
        out = jax.vmap(self._by_xla, in_axes=tuple(axes), axis_size=size)(*args)
        return out, jax.tree.map(lambda _: True, out)


def groups(grads: Sequence[Any], buffers: Mapping[str, Sequence[Any]]) -> Iterator[list[int]]:
    """The places of leaves that a C form moves, by call: float32 alone, of the same shape as their buffers.

    Those on a mesh, if only of one device, would lose their shardings there.
    """
    group: list[int] = []
    for i, leaf in enumerate(zip(grads, *buffers.values(), strict=True)):
        kinds = {(x.shape, x.dtype == jnp.float32, x.sharding.mesh.empty) for x in map(jax.typeof, leaf)}
        if jnp.size(leaf[0]) < LEAST or kinds != {(jnp.shape(leaf[0]), True, True)}:
            continue
        if group and sum(jnp.size(grads[j]) for j in group) + jnp.size(leaf[0]) > MOST:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
