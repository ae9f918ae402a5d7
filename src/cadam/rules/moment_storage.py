"""How moments are stored: in float32, in bfloat16, or in one byte each with a scale for each row or block.

Arithmetic is float32, whatever the storage: a step decodes the moments, updates them and codes the new ones.

- ``bfloat16``: the upper half of a float32, which has its range: nothing but subnormal numbers rounds to zero.
- ``int8``: a small floating-point number of one byte. The rows of a table, or blocks of `BLOCK` elements of any other
  parameter, share an exponent, a byte too. A code reaches 32 powers of two down from it: so an element that is small
  beside others of its row keeps its sign and its size, and confidence compares the gradient with what it should.
  ``signed`` codes (first moments) have a sign and two bits of mantissa, ``positive`` ones (second moments) have three.

All are rounded stochastically: to one of the two neighbours, the more often the nearer it is, so that the mean of many
roundings is the value itself. Below the smallest code a first moment is zero; a second moment is rounded up to the
smallest code, since the step divides by its square root.

The random bits are a hash of the seed of the parameter, the step and the place of the element, so every engine and any
number of threads finds the same. Two neighbours share 32 bits: of the first coded buffer of a rule, the one at an even
place takes the lower 16 and the other one the upper; of the second buffer it is the other way round. So
neighbours differ in the bits of each of their moments, and an element has other bits for its second moment than for its
first.

With e the shared exponent (that of the largest element, as float32 has it), a code q of k mantissa bits is the float32
with the bits ``(q << (23 - k)) + ((e - 31) << 23)``, and q = 0 is zero. To code is integer arithmetic on these bits.
Where an element is no finite number, e is `BROKEN`, and every code but zero is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STORAGES = ("float32", "bfloat16", "int8")
MANTISSA = {"signed": 2, "positive": 3}
"""By kind of moment, the bits of its mantissa in a code of one byte."""
BLOCK = 256
"""Elements of a dense parameter that share a scale."""
LOWEST = 32
"""The lowest shared exponent: below it, codes would be subnormal numbers."""
BROKEN = 255
"""The shared exponent of a row or block with an element that is no finite number."""
BROKEN_BASE = 0x78000000
"""What is taken off the bits to code such a one: all that is not finite gets a code above zero."""
COUNTED = 2.0**24
"""As far as a step count, a float32, can add one; then it goes on to the next number that float32 has."""
SEED = "rounding_seed"
"""What the state calls the seed of a parameter."""
ROW_STEPS = "row_steps"
"""What the state calls the step counts of the rows."""


def scale_of(name: str) -> str:
    """What the state calls the shared exponents of a buffer."""
    return f"{name}_scale"


def scramble(x: Any) -> Any:
    """32 bits of which each depends on all of the bits of x (MurmurHash3's finalizer); on ints and int64 tensors."""
    x = x & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def key(seed: int, step: Any) -> Any:
    """What the noise of one step of a parameter comes from; `step` is an int or an int64 tensor."""
    return scramble((seed & 0xFFFFFFFF) ^ scramble((seed >> 32 & 0xFFFFFFFF) ^ scramble(step)))


def noise(key: Any, place: Any, start: Any = 0) -> Any:
    """32 random bits for an element and the neighbour that it shares them with, the same for this key everywhere.

    `place` is that in a row which starts at `start`, or in all of a dense parameter. Its own half comes first: an odd
    place has the two swapped.
    """
    word = start + ((place & 0xFFFFFFFF) >> 1) & 0xFFFFFFFF
    both = scramble(word ^ scramble((start >> 32) + (place >> 32) ^ key))
    odd = place & 1
    return both >> 16 * odd | (both << 16 * odd & 0xFFFF0000)


USUAL: Mapping[str, Any] = {"moments": "float32", "second_moment": "element", "row_steps": False}
"""The options of how moments are stored, as they are by default: one float32 an element, one step count for all."""


def first_given(o: Mapping[str, Any]) -> str | None:
    """The first of these options that is not the usual one, as users write it; None if all are."""
    return next((f"{name}={o[name]!r}" for name, usual in USUAL.items() if o.get(name, usual) != usual), None)


def check(
    kinds: Mapping[str, str], buffers: Mapping[str, Any], rule: str, o: Mapping[str, Any], counts_steps: bool
) -> None:
    """Raise ValueError for options of storage that do not go together. `kinds` are those of the rule's buffers."""
    if o["moments"] not in STORAGES:
        raise ValueError(f"Invalid moments value: {o['moments']!r} (one of {', '.join(map(repr, STORAGES))})")
    if o["second_moment"] not in ("element", "row"):
        raise ValueError(f"Invalid second_moment value: {o['second_moment']!r} ('element' or 'row')")
    given = first_given(o)
    if given is None:
        return
    if o["differentiable"]:
        raise ValueError(f"{given} and differentiable=True: autograd cannot look through coded or shared moments")
    if o["state_dtype"] is not None:
        raise ValueError(
            f"{given} and state_dtype={o['state_dtype']}: both say how moments are stored; give one of them"
        )
    unknown = [name for name in buffers if name not in kinds]
    if unknown:
        raise ValueError(f"{given}: the rule {rule!r} does not say in `moments` what kind its {unknown[0]} is of")
    largest = [name for name in buffers if kinds[name] == "maximum"]
    if largest and o["moments"] != "float32":
        raise ValueError(
            f"moments={o['moments']!r}: {largest[0]} must stay float32, since a maximum of values that are rounded "
            f"at random only grows; use moments='float32' with {rule}'s maximum (amsgrad), or do without it"
        )
    if o["row_steps"] and not counts_steps:
        raise ValueError(f"row_steps=True: no step of {rule!r} depends on how many there were; leave it out")
    if o["second_moment"] == "row" and not any(kinds[name] != "signed" for name in buffers):
        raise ValueError(f"second_moment='row': the rule {rule!r} keeps no second moment")
