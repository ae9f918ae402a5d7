"""Quantized moments on tensors, in the formats that `cadam.rules.moment_storage` defines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..rules import Options, Rule, moment_storage
from ..rules.moment_storage import (
    BLOCK_SIZE,
    MANTISSA_BITS,
    MIN_SCALE,
    NONFINITE_BASE,
    NONFINITE_SCALE,
    ROW_STEPS,
    SEED,
    STORAGE_DEFAULTS,
    first_nondefault_option,
    scale_name,
)
from . import row_layout
from .base import ParamSlot, Refusal, fills_memory
from .huge_pages import filled, filled_like

NEAREST = 1 << 15
"""The noise that makes stochastic rounding the nearest."""
INFINITY = 0x7F800000
"""The bits of it in float32. Those of a NaN are more."""
AT_A_TIME = 1 << 20
"""Elements."""
CODES = {"bfloat16": torch.bfloat16, "int8": torch.uint8}
"""What coded moments are kept in."""


# One block, or many -----------------------------------------------------------------------------------------------


def encode(kind: str, values: Tensor, noise: Tensor | int) -> tuple[Tensor, Tensor]:
    """Codes of float32 values, blocks first, and the exponent of each block; `noise` is 16 bits for each value."""
    if isinstance(noise, Tensor):
        return _encode(kind, values, noise)
    codes, exponents = zip(
        *(_encode(kind, part, noise) for part in torch.split(values, _at_a_time(values))), strict=True
    )
    return torch.cat(codes), torch.cat(exponents)


def _at_a_time(x: Tensor) -> int:
    """How many blocks to code at a time: what that takes meanwhile is many times as large as what comes out."""
    return max(1, AT_A_TIME // max(1, x.shape[1]))


def _encode(kind: str, values: Tensor, noise: Tensor | int) -> tuple[Tensor, Tensor]:
    shift = 23 - MANTISSA_BITS[kind]
    bits = values.contiguous().view(torch.int32)
    size = bits & 0x7FFFFFFF
    largest = size.amax(1, keepdim=True) if size.shape[1] else size.new_zeros(len(size), 1)
    exponent = ((largest.clamp_max(INFINITY) + (1 << shift)) >> 23).clamp_min(MIN_SCALE)  # a NaN would overflow
    exponent = torch.where(exponent >= 254, NONFINITE_SCALE, exponent)
    base = torch.where(exponent == NONFINITE_SCALE, NONFINITE_BASE, (exponent - 31) << 23)
    codes = (size - base + (noise << (shift - 16))) >> shift
    codes = torch.maximum(codes, size.clamp(max=1) if kind == "positive" else torch.zeros_like(size))
    if kind == "signed":
        codes = codes | (bits >> 31 & 1) << 7
    return codes.to(torch.uint8), exponent[:, 0].to(torch.uint8)


def decode(kind: str, codes: Tensor, exponents: Tensor) -> Tensor:
    """The float32 values of codes, blocks first, with the exponent of each block."""
    size = _at_a_time(codes)
    if len(codes) <= size:
        return _decode(kind, codes, exponents)
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for start in range(0, len(codes), size):
        part = slice(start, start + size)
        values[part] = _decode(kind, codes[part], exponents[part])
    return values


def _decode(kind: str, codes: Tensor, exponents: Tensor) -> Tensor:
    shift, exponent = 23 - MANTISSA_BITS[kind], exponents.int()[:, None]
    codes = codes.int()
    size = codes & 0x7F if kind == "signed" else codes
    bits = (size << shift) + ((exponent - 31) << 23)
    if kind == "signed":
        bits = bits | (codes >> 7) << 31
    values = torch.where(exponent == NONFINITE_SCALE, math.nan, bits.view(torch.float32))
    return torch.where(size == 0, 0.0, values)


def to_bfloat16(values: Tensor, noise: Tensor | int) -> Tensor:
    """Float32 values in bfloat16; `noise` is 16 bits for each."""
    bits = values.contiguous().view(torch.int32)
    rounded = (bits + noise) >> 16 << 16
    rounded = torch.where(values.isfinite(), rounded, bits)
    return torch.where(values.isnan(), math.nan, rounded.view(torch.float32)).to(torch.bfloat16)


# The moments of a parameter ---------------------------------------------------------------------------------------


def is_by_row(buffer: Tensor, param: Tensor) -> bool:
    """Does the buffer hold one number for each row?"""
    return buffer.shape != param.shape


def shares_moments(slot: ParamSlot) -> bool:
    """Has it such a buffer?"""
    return any(is_by_row(buffer, slot.param) for buffer in slot.state.values())


def shares(param: Tensor, kind: str | None, o: Options) -> bool:
    """Do the rows of this table share such a moment? Rows of one element have their own, which is the same."""
    return o["second_moment"] == "row" and may_share(kind) and by_row(param) != tuple(param.shape)


def may_share(kind: str | None) -> bool:
    """Is a moment of this kind one that the rows of a table can share? None is one of which the rule says nothing."""
    return kind is not None and kind != "signed"


def by_row(param: Tensor) -> tuple[int, ...]:
    """The shape of such a buffer."""
    return (*param.shape[:1], *[1] * (param.dim() - 1))


def as_rows(x: Tensor) -> Tensor:
    """Its elements, those of a row in a row."""
    return x.reshape(len(x), x.shape[1:].numel())


def mean_of_rows(x: Tensor) -> Tensor:
    """That of each row, in the shape of such a buffer; zero where a row has no elements."""
    return (as_rows(x).mean(1) if x.numel() else x.new_zeros(len(x))).view(by_row(x))


def storage(state: Mapping[str, Any], rule: Rule, o: Options) -> dict[str, Any]:
    """What an `ParamSlot` says of how its moments are stored."""
    return {
        "moments": o["moments"] if rule.state(o) else "float32",
        "kinds": rule.moments,
        "scales": {name: state[scale_name(name)] for name in rule.state(o) if scale_name(name) in state},
        "seed": int(state[SEED]) if SEED in state else 0,
        "row_steps": state.get(ROW_STEPS) if o["row_steps"] else None,
    }


def described(slot: ParamSlot, o: Options) -> str:
    """How its moments are stored, in words, and what of the options waits; empty for one float32 for each element."""
    said = [f"moments in {slot.moments}"] if slot.moments != "float32" else []
    done = {"second_moment": shares_moments(slot), "row_steps": slot.row_steps is not None}
    names = {"second_moment": "second moments", "row_steps": "steps"}
    said += [f"{names[option]} by row" for option in names if done[option]]
    waiting = [names[option] for option in names if not done[option] and o[option] != STORAGE_DEFAULTS[option]]
    if waiting:
        said.append(f"{' and '.join(waiting)} by row if the gradient is sparse")
    return ", ".join(said)


def coded(slot: ParamSlot) -> list[str]:
    """The buffers that are coded, in order: the first takes the lower half of the noise."""
    if slot.moments == "float32":
        return []
    return [name for name, buffer in slot.state.items() if not is_by_row(buffer, slot.param)]


def other_scales(slot: ParamSlot, rows: bool) -> str | None:
    """Why gradients of `rows`, or dense ones, do not fit the scales of coded moments; None if they do."""
    if all((scales.dim() == 2) == rows for scales in slot.scales.values()):
        return None
    if rows:
        return "the moments have a scale for each block of elements, and the gradient is sparse"
    return "the moments have a scale for each row, and the gradient is dense"


def lie_alike(slot: ParamSlot) -> bool:
    """Do rows follow each other in one way: in all buffers of codes, in all scales, and in all that rows share?"""
    shared = [buffer for buffer in slot.state.values() if is_by_row(buffer, slot.param)]
    for tensors in ([slot.state[name] for name in coded(slot)], slot.scales.values(), shared):
        strides = {row_layout.row_stride(x) for x in tensors if slot.param.numel()}
        if len(strides) > 1 or None in strides:
            return False
    return True


def load(slot: ParamSlot, where: tuple[Tensor, ...] | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The moments of all elements, or of the rows `where`, in the dtype of the arithmetic."""
    found = {}
    for name, buffer in slot.state.items():
        part = buffer if where is None else buffer[where]
        if name in slot.scales:
            scales = slot.scales[name]
            if where is not None:
                part = decode(slot.kinds[name], as_rows(part), scales[where[0], 0]).view(part.shape)
            else:
                part = _decoded(slot.kinds[name], buffer, scales)
        found[name] = part.to(dtype)
    return found


def store(slot: ParamSlot, new: Mapping[str, Tensor], where: tuple[Tensor, ...] | None, step: Tensor | int) -> None:
    """Keep new moments of all elements, or of the rows `where`, rounded by the noise of this step."""
    row_layout.stay_for_graphs(slot)
    names = coded(slot)
    both = _noise(slot, where, step) if names else None
    for name, values in new.items():
        buffer = slot.state[name]
        if name not in names:
            if where is None:
                buffer.copy_(values)
            else:
                buffer[where] = values.to(buffer.dtype)
            continue
        assert both is not None
        noise = (both >> (16 * names.index(name)) & 0xFFFF).int()
        values, kind = values.float(), slot.kinds[name]
        if slot.moments == "bfloat16":
            if where is None:
                laid_out = _laid_out(values, slot.param)
                buffer.copy_(to_bfloat16(flat(laid_out), noise).as_strided(laid_out.shape, laid_out.stride()))
            else:
                buffer[where] = to_bfloat16(values, noise.view(values.shape))
        elif where is None:
            _encode_into(kind, _laid_out(values, slot.param), noise, buffer, slot.scales[name])
        else:
            codes, exponents = encode(kind, as_rows(values), noise)
            buffer[where] = codes.view(values.shape)
            slot.scales[name][where[0], 0] = exponents


def _noise(slot: ParamSlot, where: tuple[Tensor, ...] | None, step: Tensor | int) -> Tensor:
    """32 bits for each element, in memory's order; by rows where these are given."""
    param, device = slot.param, slot.param.device
    if isinstance(step, Tensor):
        step = step.detach().to(torch.int64)
    key = moment_storage.noise_key(slot.seed, step)
    found: Tensor
    if where is None:
        found = moment_storage.rounding_noise(key, torch.arange(param.numel(), device=device))
        return found
    width = param.shape[len(where) :].numel()
    row = where[0]
    for size, more in zip(param.shape[1:], where[1:], strict=False):
        row = row * size + more
    start = row[:, None] * width
    found = moment_storage.rounding_noise(key, torch.arange(width, device=device), start)
    return found


def flat(x: Tensor) -> Tensor:
    """The elements in the order in which they lie in memory, which they must fill."""
    assert fills_memory(x)
    return x.as_strided((x.numel(),), (1,))


def _laid_out(values: Tensor, like: Tensor) -> Tensor:
    if values.stride() == like.stride() and fills_memory(values):
        return values
    return torch.empty_like(like, dtype=torch.float32, requires_grad=False).copy_(values)


def _blocks(x: Tensor, scales: Tensor) -> Tensor:
    """The elements of whole blocks: rows if the scales are of rows, else stretches of memory, the last padded."""
    if scales.dim() == 2:
        return as_rows(x)
    x = flat(x)
    return torch.nn.functional.pad(x, (0, -len(x) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)


def _decoded(kind: str, codes: Tensor, scales: Tensor) -> Tensor:
    values = decode(kind, _blocks(codes, scales), scales.view(-1))
    if scales.dim() == 2:
        return values.view(codes.shape)
    out = torch.empty_like(codes, dtype=torch.float32)
    flat(out).copy_(values.reshape(-1)[: out.numel()])
    return out


def _encode_into(kind: str, values: Tensor, noise: Tensor | int, codes: Tensor, scales: Tensor) -> None:
    if isinstance(noise, Tensor):
        noise = _blocks(noise.view(values.shape) if scales.dim() == 2 else noise, scales)
    made, exponents = encode(kind, _blocks(values, scales), noise)
    if scales.dim() == 2:
        codes.copy_(made.view(codes.shape))
    else:
        flat(codes).copy_(made.reshape(-1)[: codes.numel()])
    scales.view(-1).copy_(exponents)


MIXED = 10.0
"""How many times the median column's momentum another one may be before a row mixes scales."""
SAMPLE = 1000


def mixed_scales(slot: ParamSlot) -> str | None:
    """Does a column dominate the second moment that its row shares? Looks at some rows that were updated."""
    shared = [name for name, buffer in slot.state.items() if is_by_row(buffer, slot.param)]
    first = next((name for name in slot.state if name not in shared), None)
    if not shared or first is None or slot.is_planned or slot.param.dim() != 2 or not slot.param.numel():
        return None
    if any(scales.dim() != 2 for scales in slot.scales.values()):  # the last gradient was dense
        return None
    updated = slot.state[shared[0]].flatten().nonzero()[:SAMPLE, 0]
    if not len(updated):
        return None
    sizes = load(slot, (updated,), torch.float32)[first].square().mean(0).sqrt()
    column, usual = int(sizes.argmax()), float(sizes.median())
    times = float(sizes[column]) / usual if usual else math.inf
    if times <= MIXED:
        return None
    return (
        f"column {column} has {times:.0f} times the momentum of the median column, and second_moment='row' makes it "
        "decide for the whole row: keep it in a table of its own, or use second_moment='element'"
    )


# State ------------------------------------------------------------------------------------------------------------


def complete(
    state: dict[str, Any], param: Tensor, rule: Rule, o: Options, dtype: torch.dtype, *, rows: bool, number: int = 0
) -> None:
    """Make what is missing in the state of a parameter; convert what is stored otherwise than the options say.

    `rows`: is it a table, whose gradients are sparse? Then scales, second moments and step counts may be those of rows.
    `number` tells parameters apart whose roundings are to differ.
    """
    coded, shared = _in_records(param, rule, o) if rows else ([], [])
    new = row_layout.new_records(state, param, coded, shared, CODES[o["moments"]]) if coded else {}
    for name, start in rule.state(o).items():
        kind = rule.moments.get(name, "")
        scale = state.get(scale_name(name))
        if rows and shares(param, kind, o):
            if name not in state:
                if name in new:
                    state[name] = new[name].fill_(start)
                else:
                    state[name] = filled(by_row(param), start, torch.float32, param.device)
            elif not is_by_row(state[name], param):
                whole = _plain(kind, state[name], state.pop(scale_name(name), None))
                state[name] = mean_of_rows(whole)
            continue
        if name in state and is_by_row(state[name], param):
            if o["second_moment"] == "row":
                continue  # a table that has a dense gradient for once
            state[name] = torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(state[name])
        if o["moments"] != "int8":
            if scale is not None:
                state[name] = _plain(kind, state[name], state.pop(scale_name(name))).to(dtype)
            elif name not in state:
                fill = complex(start, start) if param.is_complex() else start
                state[name] = new[name].fill_(fill) if name in new else filled_like(param, fill, dtype)
            elif state[name].dtype != dtype and (SEED in state or o["moments"] != "float32"):
                state[name] = state[name].to(dtype)
            continue
        if scale is not None and (scale.dim() == 2 or not rows):
            continue
        values = _plain(kind, state[name], scale) if name in state else None
        if name in new:
            codes, scales = new[name], new[scale_name(name)].fill_(MIN_SCALE)
        else:
            blocks = (param.shape[0], 1) if rows else (-(-param.numel() // BLOCK_SIZE),)
            codes = filled_like(param, 0, torch.uint8)
            scales = filled(blocks, MIN_SCALE, torch.uint8, param.device)
        if values is None and start:
            values = filled_like(param, start, torch.float32)
        if values is not None:
            _encode_into(kind, _laid_out(values, param), NEAREST, codes, scales)
        state[name], state[scale_name(name)] = codes, scales
    state.update({name: place.copy_(state[name]) for name, place in new.items() if state[name] is not place})
    if not coded and (SEED in state or o["moments"] != "float32"):
        row_layout.set_apart(state, [*rule.state(o), *map(scale_name, rule.state(o))], param)
    if o["moments"] == "float32":
        state.pop(SEED, None)
    elif needs_seed(state, rule, o):
        state[SEED] = new_seed(number)
    if not o["row_steps"]:
        state.pop(ROW_STEPS, None)
    elif rows and ROW_STEPS not in state:
        state[ROW_STEPS] = filled(by_row(param), 0, torch.int32, param.device)


def _in_records(param: Tensor, rule: Rule, o: Options) -> tuple[list[str], list[str]]:
    """The moments of a table that are to lie in one record a row: those that are coded, and those that rows share."""
    if param.device.type != row_layout.RECORDS_ON or o["moments"] == "float32" or len(param) < 2 or not param.numel():
        return [], []
    shared = [name for name in rule.state(o) if shares(param, rule.moments.get(name), o)]
    coded = [name for name in rule.state(o) if name not in shared]
    if o["moments"] == "int8":
        return coded, shared
    return (coded, []) if len(coded) > 1 else ([], [])


def needs_seed(state: Mapping[str, Any], rule: Rule, o: Options) -> bool:
    """Are its moments to be rounded at random, and nothing says yet by what?"""
    return o["moments"] != "float32" and SEED not in state and bool(rule.state(o))


def saved_state_mismatch(state: Mapping[str, Any], param: Tensor, rule: Rule, o: Options) -> str | None:
    """Why what a saved state has beside its moments does not belong to them; None if it does."""
    by_rows, by_blocks = (*param.shape[:1], 1), (-(-param.numel() // BLOCK_SIZE),)
    for name in rule.state(o):
        buffer, scale = state.get(name), state.get(scale_name(name))
        if not isinstance(buffer, Tensor):
            continue
        if buffer.is_floating_point() or buffer.is_complex():
            if scale is not None:
                return f"{scale_name(name)} in it, but {name} is {buffer.dtype}, which has no scales"
            continue
        if buffer.dtype != torch.uint8 or buffer.shape != param.shape or name not in rule.moments:
            return f"{name} has dtype {buffer.dtype} and shape {tuple(buffer.shape)}, which are no codes of moments"
        if not isinstance(scale, Tensor) or scale.dtype != torch.uint8:
            found = "no" if scale is None else getattr(scale, "dtype", type(scale).__name__)
            return f"{name} is coded, which needs {scale_name(name)} of torch.uint8; it has {found}"
        if scale.shape not in (by_rows, by_blocks):
            expected = f"not {by_rows} or {by_blocks}"
            return f"{scale_name(name)} has shape {tuple(scale.shape)}, {expected}, of a parameter {tuple(param.shape)}"
    steps = state.get(ROW_STEPS)
    if steps is None:
        return None
    if not isinstance(steps, Tensor) or steps.dtype != torch.int32 or steps.shape != by_row(param):
        what = f"{steps.dtype} of shape {tuple(steps.shape)}" if isinstance(steps, Tensor) else type(steps).__name__
        return f"{ROW_STEPS} is {what}, not torch.int32 of shape {by_row(param)}"
    return None


def new_seed(number: int, seed: int | None = None) -> Tensor:
    """What the rounding of a parameter goes by, from the seed (torch's by default); the number tells it from others."""
    seed = torch.initial_seed() if seed is None else seed
    return torch.tensor(moment_storage.mix_bits(number) << 31 ^ seed & (2**63 - 1), dtype=torch.int64, device="cpu")


def count_step(slot: ParamSlot) -> None:
    """Add one to its step count. Moments that are rounded by it need another count each time, as `next_step` has it."""
    if slot.moments == "float32":
        slot.step.add_(1)
    else:
        slot.step.copy_(next_step(slot.step))


def next_step(step: Tensor) -> Tensor:
    """One more, as far as float32 can count; from 2^24 on, the next number that it has."""
    return torch.where(
        step < moment_storage.MAX_EXACT_STEP, step + 1, torch.nextafter(step, torch.full_like(step, math.inf))
    )


def shapes(table: Tensor, rule: Rule, o: Options) -> dict[str, tuple[int, ...]]:
    """What the state of a table consists of."""
    made: dict[str, tuple[int, ...]] = {}
    for name in rule.state(o):
        shared = shares(table, rule.moments.get(name, "signed"), o)
        made[name] = by_row(table) if shared else table.shape
        if o["moments"] == "int8" and not shared:
            made[scale_name(name)] = (table.shape[0], 1)
    if o["moments"] != "float32" and made:
        made[SEED] = ()
    return {**made, ROW_STEPS: by_row(table)} if o["row_steps"] else made


def _plain(kind: str, buffer: Tensor, scales: Tensor | None) -> Tensor:
    return buffer.float() if scales is None else _decoded(kind, buffer, scales)


def plain(state: Any, rule: Rule | None) -> Any:
    """A state with all moments in float32, one for each element, and nothing that only coded ones need."""
    if not isinstance(state, Mapping):
        return state
    kinds = rule.moments if rule is not None else {}
    found = dict(state)
    if any(name in (SEED, ROW_STEPS) for name in state):
        extra = (SEED, ROW_STEPS, *map(scale_name, kinds))
        found = {name: value for name, value in state.items() if name not in extra}
        for name, kind in kinds.items():
            if name in found:
                found[name] = _plain(kind, found[name], state.get(scale_name(name)))
    shapes = [found[name].shape for name in kinds if isinstance(found.get(name), Tensor) and kinds[name] == "signed"]
    for name in kinds:
        if shapes and isinstance(found.get(name), Tensor) and found[name].shape != shapes[0]:
            found[name] = found[name].expand(shapes[0]).clone()
    return found


def storage_refusal(param: Tensor, o: Options, grad: Tensor | None) -> Refusal | None:
    """Return why the moments of a parameter cannot be stored as the options say, or None if they can."""
    option = first_nondefault_option(o)
    if option is None:
        return None
    if param.is_complex() or param.dtype == torch.float64:
        return Refusal.unsupported(f"{option} is for real parameters of at most float32, and this one is {param.dtype}")
    if hasattr(param, "to_local"):
        return Refusal.unsupported(f"{option} does not serve a DTensor")
    if grad is not None and grad.is_sparse and grad.sparse_dim() != 1:
        return Refusal.unsupported(
            f"{option} serves gradients with one sparse dimension, and this one has {grad.sparse_dim()}"
        )
    return None
