"""The formats in which moments are stored: float32, bfloat16, or int8 with one scale per row or block.

Arithmetic is float32 in every format: a step dequantizes the moments, updates them and quantizes the new values.

- ``bfloat16``: the upper 16 bits of a float32. It has the range of float32, so only subnormal numbers round to zero.
- ``int8``: an 8-bit floating-point number with a shared scale. Each row of an embedding table, or each block of
  `BLOCK_SIZE` elements of any other parameter, has one scale: a power of two, stored as its 8-bit exponent. Quantized
  values cover the 32 powers of two below the scale, so an element that is small compared with others of its row keeps
  its sign and its magnitude, which the confidence mask depends on. ``signed`` values (first moments) have a sign bit
  and two mantissa bits; ``positive`` values (second moments) have three mantissa bits.

Both formats use stochastic rounding: a value is rounded to one of its two neighbors with probabilities such that the
expected result is the value itself. A first moment below the smallest quantized value becomes zero. A second moment
there is rounded up to the smallest quantized value, since the step divides by its square root.

The random bits are a hash of the parameter's seed (`parameter_seed`), the step number and the index of the element. So
every engine draws the same bits with any number of threads, and the replicas of a distributed training stay equal. Two
neighboring elements share one 32-bit word. For the first quantized buffer of a rule, the element with the even index
uses the lower 16 bits and the other one the upper 16; for the second buffer it is the other way round. So neighbors use
different bits for each of their moments, and an element uses different bits for its two moments.

With scale exponent e, the quantized value q with k mantissa bits stands for the float32 with the bits
``(q << (23 - k)) + ((e - 31) << 23)``; q = 0 stands for zero. Quantization is integer arithmetic on these bits: they
are rounded to k mantissa bits, e is the exponent field of the largest rounded element, and q is the difference to the
smallest value. The largest q stands for NaN (`NAN_VALUES`). It stores infinite and NaN elements, which do not count for
e, so they do not affect the other elements of their row or block. If a finite element would get this q, e is one
larger. Elements that would then need e = 255, those that round to 1.75 * 2**127 or more, are stored as NaN too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STORAGES = ("float32", "bfloat16", "int8")
"""The formats in which moments can be stored; values of the option `moments`."""
MANTISSA_BITS = {"signed": 2, "positive": 3}
"""Mantissa bits of an int8 value, by kind of moment."""
BLOCK_SIZE = 256
"""Number of elements of a dense parameter that share a scale."""
MIN_SCALE = 32
"""The smallest scale exponent: below it, quantized values would stand for subnormal numbers."""
NAN_VALUES = {kind: (32 << bits) - 1 for kind, bits in MANTISSA_BITS.items()}
"""The quantized value, without its sign, that stands for NaN, by kind of moment."""
NONFINITE_EXPONENT = 255
"""The exponent field of infinite and NaN float32 numbers."""
MAX_EXACT_STEP = 2.0**24
"""Beyond this step count, float32 cannot represent step + 1; counting continues with the next larger float32."""
SEED = "rounding_seed"
"""State key of the seed of a parameter's stochastic rounding."""
ROW_STEPS = "row_steps"
"""State key of the step counts of the rows of a table."""


def scale_name(buffer: str) -> str:
    """Return the state key of the scales of a buffer."""
    return f"{buffer}_scale"


def mix_bits(x: Any) -> Any:
    """Return 32 bits that each depend on all bits of x, an int or an int64 tensor.

    This is the finalizer of MurmurHash3 (https://github.com/aappleby/smhasher/wiki/MurmurHash3).
    """
    x = x & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def parameter_seed(rounding_seed: int, number: int) -> int:
    """Return the seed of the stochastic rounding of one parameter.

    It depends on nothing that differs between the processes of a distributed training.

    Args:
        rounding_seed: The option of the same name.
        number: A number that gives each parameter its own seed: its position among all parameters of the optimizer.
    """
    return mix_bits(number) << 31 ^ rounding_seed  # type: ignore[no-any-return]


def noise_key(seed: int, step: Any) -> Any:
    """Return the 32-bit key of the rounding noise of one parameter in one step.

    Args:
        seed: Seed of the parameter, 64 bits.
        step: Step number, an int or an int64 tensor.
    """
    return mix_bits((seed & 0xFFFFFFFF) ^ mix_bits((seed >> 32 & 0xFFFFFFFF) ^ mix_bits(step)))


def rounding_noise(key: Any, index: Any, row_start: Any = 0) -> Any:
    """Return 32 random bits for an element, shared with its neighbor.

    The lower 16 bits are for the first quantized buffer of the element: for an odd index, the halves of the shared word
    are swapped.

    Args:
        key: Result of `noise_key`.
        index: Index of the element in its row, or in the whole of a dense parameter.
        row_start: Index of the first element of the row; 0 for a dense parameter.
    """
    word = row_start + ((index & 0xFFFFFFFF) >> 1) & 0xFFFFFFFF
    bits = mix_bits(word ^ mix_bits((row_start >> 32) + (index >> 32) ^ key))
    odd = index & 1
    return bits >> 16 * odd | (bits << 16 * odd & 0xFFFF0000)


STORAGE_DEFAULTS: Mapping[str, Any] = {"moments": "float32", "second_moment": "element", "row_steps": False}
"""Options of the storage of moments. By default, each element has float32 moments and a parameter one step count."""


def first_nondefault_option(o: Mapping[str, Any]) -> str | None:
    """Return the first storage option that differs from its default, as ``name=value``, or None."""
    for name, default in STORAGE_DEFAULTS.items():
        if o.get(name, default) != default:
            return f"{name}={o[name]!r}"
    return None


def check_storage_options(
    kinds: Mapping[str, str], buffers: Mapping[str, Any], rule: str, o: Mapping[str, Any], counts_steps: bool
) -> None:
    """Check that the storage options are valid together.

    Args:
        kinds: The kind of each buffer, `Rule.moments`.
        buffers: The buffers that the rule has under these options.
        rule: Name of the rule, for messages.
        o: Options of the parameter group.
        counts_steps: Whether a coefficient of the rule depends on the step number.

    Raises:
        ValueError: If an option is unknown or contradicts another one.
    """
    if o["moments"] not in STORAGES:
        raise ValueError(f"Invalid moments value: {o['moments']!r} (one of {', '.join(map(repr, STORAGES))})")
    if o["second_moment"] not in ("element", "row"):
        raise ValueError(f"Invalid second_moment value: {o['second_moment']!r} ('element' or 'row')")
    option = first_nondefault_option(o)
    if option is None:
        return
    if o["differentiable"]:
        raise ValueError(
            f"{option} and differentiable=True: autograd cannot differentiate through quantized or shared moments"
        )
    if o["state_dtype"] is not None:
        raise ValueError(
            f"{option} and state_dtype={o['state_dtype']}: both say how moments are stored; pass only one of them"
        )
    unknown = [name for name in buffers if name not in kinds]
    if unknown:
        raise ValueError(f"{option}: the rule {rule!r} does not list the kind of its buffer {unknown[0]} in `moments`")
    maxima = [name for name in buffers if kinds[name] == "maximum"]
    if maxima and o["moments"] != "float32":
        raise ValueError(
            f"moments={o['moments']!r}: {maxima[0]} must stay float32, because a running maximum of stochastically "
            f"rounded values only grows; use moments='float32' with {rule}'s maximum (amsgrad), or turn it off"
        )
    if o["row_steps"] and not counts_steps:
        raise ValueError(f"row_steps=True: no coefficient of {rule!r} depends on the step number; leave it out")
    if o["second_moment"] == "row" and not any(kinds[name] != "signed" for name in buffers):
        raise ValueError(f"second_moment='row': the rule {rule!r} has no second moment")
