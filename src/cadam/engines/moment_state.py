"""The moments in the state of a parameter: creating, converting and validating them in every storage.

Moments can be quantized (`moments`), the elements of a row can share one second moment (`second_moment="row"`), and
each row can count its own steps (`row_steps=True`). `cadam.rules.moment_storage` defines these options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..rules import Options, Rule, moment_storage
from ..rules.defaults import defaults
from ..rules.moment_storage import (
    BLOCK_SIZE,
    MIN_SCALE,
    ROW_STEPS,
    SEED,
    STORAGE_DEFAULTS,
    first_nondefault_option,
    scale_name,
)
from ..rules.sparse_updates import AGING_OPTIONS, LAST_STEPS, aging_options, counts_updates, read_aging_options
from ..rules.update import ScalarFunctions
from . import row_layout
from .base import ParamSlot, Refusal
from .huge_pages import filled, filled_like
from .quantization import (
    QUANTIZED_DTYPES,
    ROUND_TO_NEAREST,
    as_rows,
    dequantize,
    dequantize_tensor,
    in_memory_order,
    quantize,
    quantize_tensor,
    round_to_bfloat16,
    with_layout_of,
)

# Moments that the elements of a row share -------------------------------------------------------------------------


def row_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape of a buffer with one number for each row of a table."""
    return (*param.shape[:1], *[1] * (param.dim() - 1))


def is_row_moment(buffer: Tensor, param: Tensor) -> bool:
    """Whether a buffer has one number for each row instead of one for each element."""
    return buffer.shape != param.shape


def has_row_moments(slot: ParamSlot) -> bool:
    """Whether any buffer of a parameter has one number for each row."""
    return any(is_row_moment(buffer, slot.param) for buffer in slot.state.values())


def can_be_row_moment(kind: str | None) -> bool:
    """Whether the rows of a table can share a moment of this kind; None is a buffer that the rule does not describe."""
    return kind is not None and kind != "signed"


def becomes_row_moment(param: Tensor, kind: str | None, o: Options) -> bool:
    """Whether the options make a buffer of a table a row moment. A row with one element does not need to share."""
    return o["second_moment"] == "row" and can_be_row_moment(kind) and row_shape(param) != tuple(param.shape)


def row_means(x: Tensor) -> Tensor:
    """Return the mean of each row in the shape of a row moment; zero where a row has no elements."""
    return (as_rows(x).mean(1) if x.numel() else x.new_zeros(len(x))).view(row_shape(x))


# Slots ------------------------------------------------------------------------------------------------------------


def slot_storage(state: Mapping[str, Any], rule: Rule, o: Options) -> dict[str, Any]:
    """Return the arguments of a `ParamSlot` that describe the storage of its moments."""
    return {
        "moments": o["moments"] if rule.state(o) else "float32",
        "kinds": rule.moments,
        "scales": {name: state[scale_name(name)] for name in rule.state(o) if scale_name(name) in state},
        "seed": int(state[SEED]) if SEED in state else 0,
        "row_steps": state.get(ROW_STEPS) if o["row_steps"] else None,
        "row_updates": state.get(ROW_STEPS) if counts_updates(o) else None,
        "last_steps": state.get(LAST_STEPS),
    }


def describe_storage(slot: ParamSlot, o: Options) -> str:
    """Describe for `explain()` how moments are stored; empty for one float32 number for each element."""
    parts = [f"moments in {slot.moments}"] if slot.moments != "float32" else []
    by_row = {"second_moment": has_row_moments(slot), "row_steps": slot.row_steps is not None}
    names = {"second_moment": "second moments", "row_steps": "steps"}
    parts += [f"{names[option]} by row" for option in names if by_row[option]]
    pending = [names[option] for option in names if not by_row[option] and o[option] != STORAGE_DEFAULTS[option]]
    if pending:
        parts.append(f"{' and '.join(pending)} by row if the gradient is sparse")
    if slot.last_steps is not None:
        parts.append("exact sparse updates")
    if slot.row_updates is not None:
        parts.append(f"confidence from update {o['confidence_after']:,} of a row on")
    return ", ".join(parts)


def quantized_buffers(slot: ParamSlot) -> list[str]:
    """Return the names of the quantized buffers. The first one uses the lower half of the rounding noise."""
    if slot.moments == "float32":
        return []
    return [name for name, buffer in slot.state.items() if not is_row_moment(buffer, slot.param)]


def scale_mismatch(slot: ParamSlot, rows: bool) -> str | None:
    """Return why sparse (`rows`) or dense gradients do not fit the scales of quantized moments, or None if they do."""
    if all((scales.dim() == 2) == rows for scales in slot.scales.values()):
        return None
    if rows:
        return "the moments have a scale for each block of elements, and the gradient is sparse"
    return "the moments have a scale for each row, and the gradient is dense"


def has_uniform_row_strides(slot: ParamSlot) -> bool:
    """Whether rows are equally far apart in all quantized buffers, in all scales, and in all row moments."""
    row_moments = [buffer for buffer in slot.state.values() if is_row_moment(buffer, slot.param)]
    for tensors in ([slot.state[name] for name in quantized_buffers(slot)], slot.scales.values(), row_moments):
        strides = {row_layout.row_stride(x) for x in tensors if slot.param.numel()}
        if len(strides) > 1 or None in strides:
            return False
    return True


def load_moments(slot: ParamSlot, where: tuple[Tensor, ...] | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the moments in the dtype of the arithmetic.

    Args:
        slot: The parameter with its state.
        where: The index of the rows to load, or None for all elements.
        dtype: The dtype of the arithmetic.
    """
    moments = {}
    for name, buffer in slot.state.items():
        part = buffer if where is None else buffer[where]
        if name in slot.scales:
            scales = slot.scales[name]
            if where is None:
                part = dequantize_tensor(slot.kinds[name], buffer, scales)
            else:
                part = dequantize(slot.kinds[name], as_rows(part), scales[where[0], 0]).view(part.shape)
        moments[name] = part.to(dtype)
    return moments


def store_moments(
    slot: ParamSlot, moments: Mapping[str, Tensor], where: tuple[Tensor, ...] | None, step: Tensor | int
) -> None:
    """Write new moments into the state, quantizing them with the rounding noise of this step.

    Args:
        slot: The parameter with its state.
        moments: The new moments by buffer.
        where: The index of the rows that the moments belong to, or None for all elements.
        step: The step count, which seeds the noise.
    """
    row_layout.stay_for_graphs(slot)
    names = quantized_buffers(slot)
    noise_words = _noise(slot, where, step) if names else None
    for name, values in moments.items():
        buffer = slot.state[name]
        if name not in names:
            if where is None:
                buffer.copy_(values)
            else:
                buffer[where] = values.to(buffer.dtype)
            continue
        assert noise_words is not None
        noise = (noise_words >> (16 * names.index(name)) & 0xFFFF).int()
        values, kind = values.float(), slot.kinds[name]
        if slot.moments == "bfloat16":
            if where is None:
                values = with_layout_of(slot.param, values)
                rounded = round_to_bfloat16(in_memory_order(values), noise)
                buffer.copy_(rounded.as_strided(values.shape, values.stride()))
            else:
                buffer[where] = round_to_bfloat16(values, noise.view(values.shape))
        elif where is None:
            quantize_tensor(kind, with_layout_of(slot.param, values), noise, buffer, slot.scales[name])
        else:
            quantized, exponents = quantize(kind, as_rows(values), noise)
            buffer[where] = quantized.view(values.shape)
            slot.scales[name][where[0], 0] = exponents


def _noise(slot: ParamSlot, where: tuple[Tensor, ...] | None, step: Tensor | int) -> Tensor:
    """Return 32 bits of rounding noise for each element, in memory order, or for each element of the rows `where`."""
    param, device = slot.param, slot.param.device
    if isinstance(step, Tensor):
        step = step.detach().to(torch.int64)
    key = moment_storage.noise_key(slot.seed, step)
    noise: Tensor
    if where is None:
        noise = moment_storage.rounding_noise(key, torch.arange(param.numel(), device=device))
        return noise
    width = param.shape[len(where) :].numel()
    row = where[0]
    for size, index in zip(param.shape[1:], where[1:], strict=False):
        row = row * size + index
    noise = moment_storage.rounding_noise(key, torch.arange(width, device=device), row[:, None] * width)
    return noise


DOMINANCE = 10.0
"""A column dominates its row if its momentum is this many times that of the median column."""
SAMPLED_ROWS = 1000
"""Rows that are examined for a dominating column."""


def dominant_column_warning(slot: ParamSlot) -> str | None:
    """Return a warning if one column dominates the second moment that its row shares, or None.

    The second moment of a row is the mean over its columns. A column with much larger gradients than the others makes
    their steps too small.
    """
    row_moments = [name for name, buffer in slot.state.items() if is_row_moment(buffer, slot.param)]
    first_moment = next((name for name in slot.state if name not in row_moments), None)
    if not row_moments or first_moment is None or slot.is_planned or slot.param.dim() != 2 or not slot.param.numel():
        return None
    if any(scales.dim() != 2 for scales in slot.scales.values()):  # the last gradient was dense
        return None
    updated = slot.state[row_moments[0]].flatten().nonzero()[:SAMPLED_ROWS, 0]
    if not len(updated):
        return None
    momentum = load_moments(slot, (updated,), torch.float32)[first_moment].square().mean(0).sqrt()
    column, median = int(momentum.argmax()), float(momentum.median())
    ratio = float(momentum[column]) / median if median else math.inf
    if ratio <= DOMINANCE:
        return None
    return (
        f"column {column} has {ratio:.0f} times the momentum of the median column and determines the second moment of "
        "the whole row (second_moment='row'): keep the column in its own table, or use second_moment='element'"
    )


# Step counts ------------------------------------------------------------------------------------------------------


def advance_step(slot: ParamSlot) -> None:
    """Add one to a step count. Quantized moments need a new count for each step, because it seeds their rounding."""
    if slot.moments == "float32":
        slot.step.add_(1)
    else:
        slot.step.copy_(next_step(slot.step))


def next_step(step: Tensor) -> Tensor:
    """Return step + 1, or the next larger float32 where float32 cannot represent step + 1."""
    return torch.where(
        step < moment_storage.MAX_EXACT_STEP, step + 1, torch.nextafter(step, torch.full_like(step, math.inf))
    )


# State ------------------------------------------------------------------------------------------------------------


def complete_state(
    state: dict[str, Any], param: Tensor, rule: Rule, o: Options, dtype: torch.dtype, *, rows: bool, number: int = 0
) -> None:
    """Create missing buffers of a parameter's state, and convert those that are stored in another way.

    Args:
        state: The state, which is changed in place.
        param: The parameter.
        rule: The rule of the optimizer.
        o: The options of the parameter's group.
        dtype: The dtype of buffers that are not int8.
        rows: Whether the parameter is a table with sparse gradients. Then scales, second moments and step counts may
            be those of rows.
        number: The position of the parameter among all parameters, which gives each its own rounding seed.
    """
    _complete_last_steps(state, param, rule, o, rows)
    in_record, row_moments_in_record = _record_buffers(param, rule, o) if rows else ([], [])
    new: dict[str, Tensor] = {}
    if in_record:
        new = row_layout.new_records(state, param, in_record, row_moments_in_record, QUANTIZED_DTYPES[o["moments"]])
    for name, start in rule.state(o).items():
        kind = rule.moments.get(name, "")
        if rows and becomes_row_moment(param, kind, o):
            _complete_row_moment(state, name, kind, param, start, new.get(name))
            continue
        if name in state and is_row_moment(state[name], param):
            if o["second_moment"] == "row":
                continue  # the table has a dense gradient in this step only
            state[name] = torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(state[name])
        if o["moments"] == "int8":
            _complete_int8(state, name, kind, param, start, new, rows)
        elif scale_name(name) in state:
            state[name] = _to_float32(kind, state[name], state.pop(scale_name(name))).to(dtype)
        elif name not in state:
            fill = complex(start, start) if param.is_complex() else start
            state[name] = new[name].fill_(fill) if name in new else filled_like(param, fill, dtype)
        elif state[name].dtype != dtype and (SEED in state or o["moments"] != "float32"):
            state[name] = state[name].to(dtype)
    state.update({name: part.copy_(state[name]) for name, part in new.items() if state[name] is not part})
    if not in_record and (SEED in state or o["moments"] != "float32"):
        row_layout.move_out_of_records(state, [*rule.state(o), *map(scale_name, rule.state(o))], param)
    if not has_seed(param, rule, o):
        state.pop(SEED, None)
    elif SEED not in state:
        state[SEED] = new_seed(o, number)
    if not o["row_steps"] and not counts_updates(o):
        state.pop(ROW_STEPS, None)
    elif rows and ROW_STEPS not in state:
        state[ROW_STEPS] = filled(row_shape(param), 0, torch.int32, param.device)


def _complete_last_steps(state: dict[str, Any], param: Tensor, rule: Rule, o: Options, rows: bool) -> None:
    """Create or remove the steps of the rows' last updates, which exact sparse updates need.

    Rows that have missed steps make up for them with the options that applied in these steps: before the options
    change, before a dense gradient, and before the updates become lazy.
    """
    is_exact = rows and o["sparse_updates"] == "exact" and bool(rule.state(o))
    if LAST_STEPS in state:
        applied = state[AGING_OPTIONS].tolist()
        if is_exact and np.array_equal(applied, aging_options(rule, o), equal_nan=True):
            return
        catch_up(state, rule, o if is_exact else None)
    elif is_exact and state.get("step", 0):  # after dense gradients, or a state dict without the steps of rows
        _start_maxima(state, rule, o)
    if is_exact:
        step = int(state.get("step", 0))
        state[LAST_STEPS] = filled(row_shape(param), step, torch.int32, param.device)
        state[AGING_OPTIONS] = torch.tensor(aging_options(rule, o), dtype=torch.float64, device="cpu")


_FUNCTIONS = SimpleNamespace(square=torch.square, sqrt=torch.sqrt, sign=torch.sign, maximum=torch.maximum)
"""The functions that a rule's `age` and `update` may call."""


def catch_up(state: dict[str, Any], rule: Rule, following: Options | None = None) -> None:
    """Let the moments of all rows make up for the steps that they missed, and remove the record of these steps.

    Quantized moments are rounded to nearest.

    Args:
        state: The state of a table with exact sparse updates, whose buffers are replaced.
        rule: The rule of the optimizer.
        following: The options of the steps that follow if these are exact, too. A running maximum then contains the
            first of them, since other options may correct the second moment of a row without a gradient to a larger
            one. In the steps after that it decreases.
    """
    last_steps, numbers = state.pop(LAST_STEPS), state.pop(AGING_OPTIONS).tolist()
    o = read_aging_options(rule, numbers)
    buffers = {name: state[name] for name in rule.state(o)}
    if rule.age is None or not buffers:
        return
    if following is not None:  # a maximum of the time before it was switched off
        buffers |= {name: state[name] for name in rule.state(following) if name in state}
    missed = float(state["step"]) - last_steps.to(torch.float64)
    work = {
        name: buffer.to(torch.promote_types(buffer.dtype, torch.float32))
        if buffer.is_floating_point()
        else _to_float32(rule.moments[name], buffer, state[scale_name(name)])
        for name, buffer in buffers.items()
    }
    dtype = next(iter(work.values())).dtype
    c = {name: torch.as_tensor(v).to(dtype) for name, v in rule.aging(missed, o, ScalarFunctions).items()}
    aged = rule.age(SimpleNamespace(**work), SimpleNamespace(**c), _FUNCTIONS)
    if following is not None:
        maxima = _maxima_after(aged, rule, following, int(state["step"]) + 1)
        aged.update(maxima)
        state.update({name: maximum for name, maximum in maxima.items() if name not in buffers})
    for name, buffer in buffers.items():
        if buffer.is_floating_point():
            state[name] = aged[name].to(buffer.dtype)
        else:
            quantized, scales = torch.empty_like(buffer), torch.empty_like(state[scale_name(name)])
            quantize_tensor(rule.moments[name], aged[name], ROUND_TO_NEAREST, quantized, scales)
            state[name], state[scale_name(name)] = quantized, scales


def _start_maxima(state: dict[str, Any], rule: Rule, o: Options) -> None:
    """Let running maxima contain a step without a gradient, for the rows that the first sparse gradient misses."""
    names = rule.state(o)
    maxima = {name for name in names if rule.moments.get(name) == "maximum"}
    if not maxima or not names.keys() - maxima <= state.keys():
        return
    moments = {
        name: state[name]
        if scale_name(name) not in state
        else _to_float32(rule.moments[name], state[name], state[scale_name(name)])
        for name in names
        if name in state
    }
    state.update(_maxima_after(moments, rule, o, int(state["step"]) + 1))


def _maxima_after(moments: Mapping[str, Tensor], rule: Rule, o: Options, step: int) -> dict[str, Tensor]:
    """Return the running maxima after a step without a gradient."""
    names = [name for name in rule.state(o) if rule.moments.get(name) == "maximum"]
    zeros = torch.zeros_like(next(iter(moments.values())))
    c = SimpleNamespace(**rule.coefficients(step, o, ScalarFunctions))
    state = rule.update(zeros, SimpleNamespace(**{**dict.fromkeys(names, zeros), **moments}), c, _FUNCTIONS).state
    return {name: state[name] for name in names}


def catch_up_in_place(
    state: Mapping[str, Tensor], rule: Rule, numbers: tuple[float, ...], step: int, following: Options
) -> None:
    """Let the moments of all rows of a table make up for the steps that they missed before the options change.

    Args:
        state: The state of the table, as `sparse_update.new_state` returns it, which is changed in place.
        rule: The rule of the optimizer.
        numbers: The options by which the rows have aged so far, see `aging_options`.
        step: The number of steps that the table has taken.
        following: The options of the steps that follow.
    """
    aged: dict[str, Any] = {
        **state,
        AGING_OPTIONS: torch.tensor(numbers, dtype=torch.float64, device="cpu"),
        "step": step,
    }
    catch_up(aged, rule, following)
    for name, tensor in state.items():
        if name != LAST_STEPS:
            tensor.copy_(aged[name])
    state[LAST_STEPS].fill_(step)


def _complete_row_moment(
    state: dict[str, Any], name: str, kind: str, param: Tensor, start: float, memory: Tensor | None
) -> None:
    """Create a row moment, or convert a moment of all elements to the means of its rows."""
    if name not in state:
        if memory is not None:
            state[name] = memory.fill_(start)
        else:
            state[name] = filled(row_shape(param), start, torch.float32, param.device)
    elif not is_row_moment(state[name], param):
        state[name] = row_means(_to_float32(kind, state[name], state.pop(scale_name(name), None)))


def _complete_int8(
    state: dict[str, Any], name: str, kind: str, param: Tensor, start: float, new: Mapping[str, Tensor], rows: bool
) -> None:
    """Create an int8 buffer with its scales, or convert another one. A table keeps scales of rows."""
    scales = state.get(scale_name(name))
    if scales is not None and (scales.dim() == 2 or not rows):
        return
    values = _to_float32(kind, state[name], scales) if name in state else None
    if name in new:
        quantized, scales = new[name], new[scale_name(name)].fill_(MIN_SCALE)
    else:
        shape = (param.shape[0], 1) if rows else (-(-param.numel() // BLOCK_SIZE),)
        quantized = filled_like(param, 0, torch.uint8)
        scales = filled(shape, MIN_SCALE, torch.uint8, param.device)
    if values is None and start:
        values = filled_like(param, start, torch.float32)
    if values is not None:
        quantize_tensor(kind, with_layout_of(param, values), ROUND_TO_NEAREST, quantized, scales)
    state[name], state[scale_name(name)] = quantized, scales


def _record_buffers(param: Tensor, rule: Rule, o: Options) -> tuple[list[str], list[str]]:
    """Return the quantized moments and the row moments of a table that `row_layout` keeps in one record per row."""
    if param.device.type != row_layout.RECORDS_ON or o["moments"] == "float32" or len(param) < 2 or not param.numel():
        return [], []
    row_moments = [name for name in rule.state(o) if becomes_row_moment(param, rule.moments.get(name), o)]
    quantized = [name for name in rule.state(o) if name not in row_moments]
    if o["moments"] == "int8":
        return quantized, row_moments
    return (quantized, []) if len(quantized) > 1 else ([], [])


def has_seed(param: Tensor, rule: Rule, o: Options) -> bool:
    """Whether the moments or the parameter itself are rounded stochastically, so that the state has a seed."""
    if o["stochastic_rounding"] and param.dtype == torch.bfloat16:
        return True
    return o["moments"] != "float32" and bool(rule.state(o))


def new_seed(o: Options, number: int) -> Tensor:
    """Return the rounding seed of a parameter as its state keeps it, see `moment_storage.parameter_seed`."""
    return torch.tensor(moment_storage.parameter_seed(o["rounding_seed"], number), dtype=torch.int64, device="cpu")


def saved_state_mismatch(state: Mapping[str, Any], param: Tensor, rule: Rule, o: Options) -> str | None:
    """Return why scales or row steps of a saved state do not belong to its moments, or None if they do."""
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
            return f"{name} has dtype {buffer.dtype} and shape {tuple(buffer.shape)}, which is not a quantized moment"
        if not isinstance(scale, Tensor) or scale.dtype != torch.uint8:
            actual = "none" if scale is None else getattr(scale, "dtype", type(scale).__name__)
            return f"{name} is quantized and needs {scale_name(name)} of torch.uint8; it has {actual}"
        if scale.shape not in (by_rows, by_blocks):
            expected = f"not {by_rows} or {by_blocks}"
            return f"{scale_name(name)} has shape {tuple(scale.shape)}, {expected}, of a parameter {tuple(param.shape)}"
    row_records = {
        ROW_STEPS: (torch.int32, row_shape(param)),
        LAST_STEPS: (torch.int32, row_shape(param)),
        AGING_OPTIONS: (torch.float64, (len(aging_options(rule, defaults(rule))),)),
    }
    for key, (dtype, shape) in row_records.items():
        x = state.get(key)
        if x is not None and not (isinstance(x, Tensor) and x.dtype == dtype and x.shape == shape):
            actual = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            return f"{key} is {actual}, not {dtype} of shape {shape}"
    if (LAST_STEPS in state) != (AGING_OPTIONS in state):
        return f"only one of {LAST_STEPS} and {AGING_OPTIONS} is in it; exact sparse updates need both"
    if LAST_STEPS in state and int(state[LAST_STEPS].max() if param.numel() else 0) > float(state["step"]):
        return f"{LAST_STEPS} has steps after step {float(state['step']):.0f}"
    return None


def state_shapes(table: Tensor, rule: Rule, o: Options) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the state of a table."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in rule.state(o):
        is_shared = becomes_row_moment(table, rule.moments.get(name, "signed"), o)
        shapes[name] = row_shape(table) if is_shared else table.shape
        if o["moments"] == "int8" and not is_shared:
            shapes[scale_name(name)] = (table.shape[0], 1)
    if has_seed(table, rule, o):
        shapes[SEED] = ()
    if o["row_steps"] or counts_updates(o):
        shapes[ROW_STEPS] = row_shape(table)
    if o["sparse_updates"] == "exact" and rule.state(o):
        shapes[LAST_STEPS] = row_shape(table)
    return shapes


def _to_float32(kind: str, buffer: Tensor, scales: Tensor | None) -> Tensor:
    return buffer.float() if scales is None else dequantize_tensor(kind, buffer, scales)


def to_float32_state(state: Any, rule: Rule | None) -> Any:
    """Return a state with one float32 moment for each element, without scales, seeds and row steps."""
    if not isinstance(state, Mapping):
        return state
    kinds = rule.moments if rule is not None else {}
    plain = dict(state)
    if any(name in (SEED, ROW_STEPS) for name in state):
        extra = (SEED, ROW_STEPS, *map(scale_name, kinds))
        plain = {name: value for name, value in state.items() if name not in extra}
        for name, kind in kinds.items():
            if name in plain:
                plain[name] = _to_float32(kind, plain[name], state.get(scale_name(name)))
    if rule is not None and LAST_STEPS in plain:
        catch_up(plain, rule)
    shapes = [plain[name].shape for name in kinds if isinstance(plain.get(name), Tensor) and kinds[name] == "signed"]
    for name in kinds:
        if shapes and isinstance(plain.get(name), Tensor) and plain[name].shape != shapes[0]:
            plain[name] = plain[name].expand(shapes[0]).clone()
    return plain


def storage_refusal(param: Tensor, o: Options, grad: Tensor | None) -> Refusal | None:
    """Return why the moments of a parameter cannot be stored as the options say, or None if they can."""
    option = first_nondefault_option(o)
    by_row = "sparse_updates='exact'" if o["sparse_updates"] == "exact" else "confidence_after"
    if (o["sparse_updates"] == "exact" or counts_updates(o)) and grad is not None and grad.is_sparse:
        if param.is_complex() or grad.sparse_dim() != 1:
            return Refusal.unsupported(f"{by_row} is for real tables whose gradient has one sparse dimension")
        if hasattr(param, "to_local"):
            return Refusal.unsupported(f"{by_row} does not support DTensors")
    if option is None:
        return None
    if param.is_complex() or param.dtype == torch.float64:
        return Refusal.unsupported(f"{option} is for real parameters of at most float32, and this one is {param.dtype}")
    if hasattr(param, "to_local"):
        return Refusal.unsupported(f"{option} does not support DTensors")
    if grad is not None and grad.is_sparse and grad.sparse_dim() != 1:
        return Refusal.unsupported(
            f"{option} supports gradients with one sparse dimension, and this one has {grad.sparse_dim()}"
        )
    return None
