"""The optimizer: parameter groups, state and checkpoints as torch.optim has them; each step goes to the engines."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim import optimizer as torchs

from ..engines import quantization, row_layout
from ..engines.base import Engine, KernelBatch, ParamSlot, Refusal, RefusalKind
from ..engines.cuda.sparse import check_ids
from ..engines.selection import choose
from ..engines.step_plan import Plan, real_local, real_local_grad
from ..rules import Rule
from ..rules.defaults import defaults
from ..rules.update import Update
from . import alignment, options
from . import state_dict as checkpoint
from .alignment import Alignment, Ratio
from .signatures import add_constructor


class Optimizer(torch.optim.Optimizer):
    """An optimizer made of a rule, confidence on or off, and the engine that serves each parameter best.

    `cadam.CAdam` and the other classes of `cadam.optim.classes` are its subclasses. For a rule of your own, write a
    subclass with the attributes `rule` and `confidence`; its constructor is generated with the options of the rule and
    those that all optimizers share.

    Example:
        >>> class Mine(cadam.Optimizer):
        ...     rule = MY_RULE
        ...     confidence = True
    """

    rule: ClassVar[Rule]
    """The update rule."""
    confidence: ClassVar[bool] = True
    """Whether an element moves only where momentum and gradient agree in sign."""
    new_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this class that differ from those of the rule."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Options that define this class: they can be neither passed nor loaded with another value."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Generate the constructor of a subclass, unless it or one of its bases defines one."""
        super().__init_subclass__(**kwargs)
        is_generated = cls.__init__ is Optimizer.__init__ or hasattr(cls.__init__, "__signature__")
        if hasattr(cls, "rule") and is_generated:
            add_constructor(cls, Optimizer.__init__, cls.rule, cls._default_options())

    @classmethod
    def _default_options(cls) -> dict[str, Any]:
        return {**defaults(cls.rule), **cls.new_defaults, **cls.fixed}

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Reject unknown keyword arguments with a suggestion, which Python's own error message does not have."""
        accepted = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
            for name in given.keys() - accepted.keys():
                raise TypeError(f"{cls.__name__}: {options.unknown(name, set(accepted) - {'self', 'params'})}")
        return super().__new__(cls)

    def __init__(self, params: Any, **given: Any) -> None:
        if not hasattr(type(self), "rule"):
            raise TypeError(f"{type(self).__name__} has no rule: subclass it and set `rule`, see docs/rules.md")
        if isinstance(params, torch.nn.Module) or callable(params):
            what = type(params).__name__
            raise TypeError(f"params must be an iterable of parameters, got a {what}: pass model.parameters()")
        options.switch("CADAM_REPLAY")
        self._counts: dict[Tensor, Tensor] = {}
        self._plan: Plan | None = None
        super().__init__(params, self._completed(self._default_options(), given))

    def _patch_step_function(self) -> None:
        """Torch wraps `step` of each class for hooks and profilers; where there are none, the wrapper is passed by."""
        cls = type(self)
        unhooked = cls.step
        super()._patch_step_function()
        if cls.step is not unhooked:
            cls.step = _past_hooks(unhooked, cls.step)  # type: ignore[method-assign]

    @classmethod
    def options_of(cls, **given: Any) -> dict[str, Any]:
        """All options, some of them given: completed and checked as the constructor does it."""
        return cls._completed(_defaults_of(cls), given)  # type: ignore[arg-type]

    @classmethod
    def _completed(cls, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if name not in defaults:
                raise TypeError(f"{cls.__name__}: {options.unknown(name, defaults)}")
            if name in cls.fixed and value != cls.fixed[name]:
                raise ValueError(f"{cls.__name__} stands for {name}={cls.fixed[name]}; got {value!r}")
        complete = options.normal({**defaults, **given, **cls.fixed})
        options.check(cls.rule, complete)
        return complete

    # Groups -----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own options. A group that is refused leaves the optimizer as it was."""
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            for name in param_group:
                message = options.unknown(name, [*self.defaults, "params"], only_if_close=True)
                if name not in self.defaults and name not in ("params", "param_names") and message:
                    warnings.warn(
                        f"parameter group {len(self.param_groups)}: {message} It is kept, and changes nothing.",
                        stacklevel=2,
                    )
            for name, value in self.fixed.items():
                if param_group.setdefault(name, value) != value:
                    raise ValueError(f"{type(self).__name__} stands for {name}={value}; got {param_group[name]!r}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.update(options.normal({name: group[name] for name in self.defaults}))
        try:
            options.check(self.rule, group)
            for position, param in enumerate(group["params"]):
                if param.layout != torch.strided:
                    raise ValueError(
                        f"{type(self).__name__} requires dense parameter tensors (their gradients may be sparse): "
                        f"parameter {checkpoint.describe(group, position)} has layout {param.layout}"
                    )
        except (ValueError, RuntimeError, TypeError):
            del self.param_groups[-1]
            raise
        self._mark(group)

    def _mark(self, group: dict[str, Any]) -> None:
        """Note in a group what its state is, for whoever loads it."""
        group.update({checkpoint.FORMAT_KEY: checkpoint.FORMAT, checkpoint.RULE_KEY: self.rule.name})

    # Step -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; `closure`, if given, computes the loss anew and is returned."""
        if closure is None and not torch.compiler.is_compiling() and self._replay_step():
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(bool(self.defaults["differentiable"])):
            if torch.compiler.is_compiling():
                self._traced_step()
            else:
                self._refuse_capture()
                work = self._work()
                for engine, batches in work:
                    engine.check(batches)
                for engine, batches in work:
                    engine.run(batches)
                self._release()
        return loss

    def _replay_step(self) -> bool:
        """Replay the last step if one is recorded and only gradients and numbers changed."""
        plan = self._plan
        if plan is None or (ready := plan.replay.ready) is None:
            return False
        if getattr(self, "found_inf", None) is not None or getattr(self, "grad_scale", None) is not None:
            return False
        self._plan = None  # what raises leaves no plan behind
        done = ready.step(self.param_groups, self.state)
        self._plan = plan
        return done

    def _traced_step(self) -> None:
        """A step that becomes part of a compiled graph where the engine can, and breaks the graph elsewhere."""
        work = _outside_graph(self._work)
        for engine, batches in work:
            _outside_graph(engine.check, batches)
        for engine, batches in work:
            if engine.traceable:
                engine.run(batches)
            else:
                _outside_graph(engine.run, batches)
        _outside_graph(self._release)

    def _work(self) -> list[tuple[Engine, list[KernelBatch]]]:
        """This step's batches by engine, none after an overflow. Everything is checked before anything is changed."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        plan, self._plan = self._plan, None  # what raises leaves no plan behind that has seen half of the news
        if plan is None or not plan.renew(self.param_groups, self.state, grad_scale):
            if plan is not None:
                plan.release()
            plan = self._new_plan(grad_scale)
        self._plan = plan
        work = plan.work
        if found_inf is not None:
            if any(not engine.skips_overflow for engine, _ in work) and found_inf.item():
                return []
            for _, batches in work:
                for batch in batches:
                    batch.found_inf = found_inf
        return work

    def _release(self) -> None:
        """Release the gradients: they are as large as the parameters, and the user may be about to drop them."""
        plan = self._plan
        if plan is not None:
            if plan.lasting:
                plan.record(self.param_groups, self.state)
            else:
                self._plan = None
            plan.release()

    def _new_plan(self, grad_scale: Tensor | None) -> Plan:
        names: list[dict[Tensor, str]] = []  # of each group's parameters with gradients
        for number, group in enumerate(self.param_groups):
            names.append({})
            if any(param.grad is not None for param in group["params"]):
                options.check_kinds(self.rule, group, f"group {number}")
            for position, param in enumerate(group["params"]):
                if param.grad is not None:
                    name = f"group {number}, parameter {checkpoint.describe(group, position)}"
                    _check_grad(param, param.grad, group, name)
                    self._check_state(param, group, name)
                    names[-1][param] = name
        self._forget_counts()
        known = set(self.state)
        try:
            slots = [
                {param: self._slot(param, group, name) for param, name in named.items()}
                for group, named in zip(self.param_groups, names, strict=True)
            ]
            return Plan.of(self.rule, self.confidence, self.param_groups, slots, self.state, grad_scale)
        except RuntimeError:
            for param in set(self.state) - known:
                del self.state[param]
            raise

    def _check_state(self, param: Tensor, group: Mapping[str, Any], name: str) -> None:
        state = self.state.get(param, {})
        for key in self.rule.state(group):
            value = state.get(key, param)
            if not isinstance(value, Tensor):
                problem = f"is {value!r}, not a tensor"
            elif value.shape != param.shape and not (
                quantization.may_share(self.rule.moments.get(key)) and value.shape == quantization.by_row(param)
            ):
                problem = f"has shape {tuple(value.shape)}, the parameter now has {tuple(param.shape)}"
            elif value.device != param.device:
                problem = (
                    f"is on {value.device}, the parameter now on {param.device} "
                    "(optimizer.load_state_dict(optimizer.state_dict()) takes it along)"
                )
            else:
                continue
            raise RuntimeError(f"{name}: its state {key} {problem}; no parameter was changed")

    def _slot(self, param: Tensor, group: Mapping[str, Any], name: str) -> ParamSlot:
        state = self._state(param, group)
        return ParamSlot(
            real_local(param),
            {name: real_local(state[name]) for name in self.rule.state(group)},
            state["step"],
            self._counter(param) if group["track_alignment"] else None,
            name,
            **quantization.storage(state, self.rule, group),
        )

    def _preview(self, param: Tensor, group: Mapping[str, Any]) -> ParamSlot:
        """The slot as it will be, without making the state."""
        with torch.no_grad():
            like, known = real_local(param), self.state.get(param, {})
            planned = any(name not in known for name in self.rule.state(group))
            full = dict(known)
            if planned:
                self._complete(full, torch.empty_like(like, device="meta"), param.grad, group)
            state = {name: real_local(full[name]) for name in self.rule.state(group)}
        step = known.get("step", _new_step(0.0, param, group))
        return ParamSlot(like, state, step, None, planned=planned, **quantization.storage(full, self.rule, group))

    def _state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """The state of one parameter; what is missing starts now."""
        state: dict[str, Tensor] = self.state[param]
        if not isinstance(state.get("step"), Tensor):
            state["step"] = _new_step(float(state.get("step", 0.0)), param, group)
        self._complete(state, param, param.grad, group)
        return state

    def _complete(self, state: dict[str, Any], param: Tensor, grad: Tensor | None, group: Mapping[str, Any]) -> None:
        rows = grad is not None and grad.is_sparse
        dtype = _buffer_dtype(param, group)
        number = len(self.state)  # of one that is new, which is the last
        if quantization.needs_seed(state, self.rule, group):  # perhaps one of many that were loaded
            number = next((n for n, other in enumerate(self.state.values(), 1) if other is state), number)
        quantization.complete(state, param, self.rule, group, dtype, rows=rows, number=number)

    def _counter(self, param: Tensor) -> Tensor:
        counts = self._counts.get(param)
        if counts is None:
            counts = self._counts[param] = alignment.new_counts(param.device)
        elif counts.device != param.device:
            counts = self._counts[param] = counts.to(param.device)
        return counts

    def _forget_counts(self) -> None:
        """Drop the counters of parameters that are no longer in a group or in the state, as torch drops these."""
        params = (param for group in self.param_groups for param in group["params"])
        present = {*map(id, params), *map(id, self.state)}
        for param in [param for param in self._counts if id(param) not in present]:
            del self._counts[param]

    def _refuse_capture(self) -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        if torch.cuda.is_current_stream_capturing() and not all(g["capturable"] for g in self.param_groups):
            raise RuntimeError(
                f"Attempting CUDA graph capture of step() for an instance of {type(self).__name__} "
                "but param_groups' capturable is False."
            )

    # Telemetry --------------------------------------------------------------------------------------------

    def alignment(self, *, reset: bool = False) -> Alignment:
        """The alignment ratio since the last reset. Reading waits for the device; counting never does."""
        self._report()
        names = [name for name, _, _ in self._named()]
        params = [param for _, _, param in self._named()]
        ratios = alignment.read(self._counts.get(param) for param in params)
        groups = [Ratio(0, 0, 0)] * len(self.param_groups)
        for (_, number, _), ratio in zip(self._named(), ratios, strict=True):
            groups[number] += ratio
        if reset:
            for counts in self._counts.values():
                counts.zero_()
        return Alignment(sum(groups, Ratio(0, 0, 0)), tuple(groups), dict(zip(names, ratios, strict=True)))

    def alignment_counts(self) -> Tensor:
        """The counters behind `alignment()`, summed and left on the device: elements aligned, touched, seen.

        Nothing waits for the device, so a CUDA graph can hold it. All parameters must be on one device.
        """
        counts = [self._counts[param] for _, _, param in self._named() if param in self._counts]
        if not counts:
            raise RuntimeError("nothing is counted: no step was taken yet, or track_alignment is False")
        return torch.stack(counts).sum(0)

    def explain(self) -> Explanation:
        """Which engine runs each parameter, and why no faster one does."""
        self._report()
        rows = []
        last = {} if self._plan is None else self._plan.sparse_grads()
        for name, number, param in self._named():
            group, grad = self.param_groups[number], param.grad
            if grad is not None:
                layout = "sparse" if grad.is_sparse else "dense"
            elif param not in last:
                layout = "none yet, taken as dense"
            else:
                layout = f"none now, {'sparse' if last[param] else 'dense'} in the last step"
                grad = _no_rows(param) if last[param] else None
            fixed = _fixed_by_dtype(param)
            if fixed is not None:
                engine, passed_over = "none", {"any": Refusal.unsupported(fixed)}
            else:
                seen = None if grad is None else real_local_grad(grad, param)
                update = Update.of(self.rule, self.confidence, group)
                slot = self._preview(param, group)
                choice = choose(update, slot, seen, group)
                engine, passed_over = choice.engine.name, choice.passed_over
            about = name, tuple(param.shape), param.dtype, param.device, layout, engine, passed_over
            stored = () if fixed is not None else (quantization.mixed_scales(slot), quantization.described(slot, group))
            rows.append(Explained(*about, *stored))
        by_kernels = any(row.engine in ("cuda", "cuda-rows") for row in rows)
        return Explanation(rows, self._replay_status() if by_kernels else None)

    def _replay_status(self) -> str:
        if self._plan is None:
            return "not replayed: no step was taken yet, or none that another can be like"
        replay = self._plan.replay
        return f"not replayed: {replay.reason}" if replay.ready is None else "replayed"

    def _report(self) -> None:
        """Raise what a step could only find out on the device."""
        for name, _, param in self._named():
            if param.is_cuda:
                check_ids(param, name)

    def _named(self) -> Iterable[tuple[str, int, Tensor]]:
        """Every parameter once, by its name; by its place if it has none; by both if another is called the same."""
        seen: set[int] = set()
        often = Counter(name for group in self.param_groups for name in group.get("param_names", ()))
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for position, param in enumerate(group["params"]):
                if id(param) in seen:  # torch.optim warns of it, and goes on
                    continue
                seen.add(id(param))
                name, place = names[position] if names else "", f"group{number}.{position}"
                yield (name if often[name] == 1 else f"{place}.{name}" if name else place), number, param

    # Checkpoints ------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def state_dict(self) -> dict[str, Any]:
        """As torch.optim has it. Second moments that lie in one memory with codes are copies: torch.save wants that."""
        before_other_hooks = self.register_state_dict_post_hook(lambda _, found: _savable(found), prepend=True)
        try:
            return super().state_dict()
        finally:
            before_other_hooks.remove()

    def __getstate__(self) -> dict[str, Any]:
        return _savable(super().__getstate__())

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state dict, ours or torch.optim's. One that does not fit changes nothing.

        Options that say what is computed come from the state dict; how it runs (`foreach`, `capturable`, ...)
        and what this class stands for, confidence before all, stay as they are.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"expected an optimizer's state dict, got {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, state = checkpoint.read(state_dict, self.param_groups, self.rule, self.fixed, _new_step, _buffer_dtype)
        self.__setstate__({"state": state, "param_groups": groups})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.state = defaultdict(dict, self.state)
        self._counts, self._plan = {}, None
        for name, value in defaults(self.rule).items():
            self.defaults.setdefault(name, value)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._mark(group)


def _savable(found: dict[str, Any]) -> dict[str, Any]:
    """The same with the state of each parameter as torch.save takes it."""
    return {**found, "state": {key: row_layout.savable(entry) for key, entry in found["state"].items()}}


@cache
def _defaults_of(cls: type[Optimizer]) -> Mapping[str, Any]:
    """The options of a class where none is given: what its constructor says, beside those of its rule."""
    return dict(cls([torch.zeros(1, device="cpu")]).defaults)


@dataclass(frozen=True)
class Explained:
    """How one parameter is served."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    gradient: str
    engine: str
    passed_over: Mapping[str, Refusal]
    warning: str | None = None
    """What is not well with how its moments are stored."""
    storage: str = ""
    """How they are stored, if not as one float32 for each element."""


class Explanation(list[Explained]):
    """A list of `Explained`, printed as a table.

    Attributes:
        steps: whether steps on CUDA are replayed, so that one call launches them, or why not. None elsewhere.
    """

    def __init__(self, rows: Iterable[Explained], steps: str | None = None) -> None:
        super().__init__(rows)
        self.steps = steps

    def __str__(self) -> str:
        lines = []
        for row in self:
            kind = f"{list(row.shape)} {str(row.dtype).removeprefix('torch.')} {row.device}"
            stored = f", {row.storage}" if row.storage else ""
            lines.append(f"{row.name}: {kind}, gradient {row.gradient}{stored}: {row.engine}")
            # That an engine is for other devices or gradients explains nothing here.
            reasons = {k: v for k, v in row.passed_over.items() if v.kind is not RefusalKind.NOT_APPLICABLE}
            lines.extend(f"    not {engine}: {reason}" for engine, reason in reasons.items())
            if row.warning is not None:
                lines.append(f"    warning: {row.warning}")
        if self.steps is not None:
            lines.append(f"Steps are {self.steps}")
        return "\n".join(lines)


def _past_hooks(unhooked: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
    """`unhooked` where nobody looks on, else `hooked`: the profiler's context takes longer than a small step."""

    @wraps(unhooked)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torchs._global_optimizer_pre_hooks
            or torchs._global_optimizer_post_hooks
            or profiler._is_profiler_enabled
            or torch.compiler.is_compiling()
        ):
            return hooked(self, *args, **kwargs)
        return unhooked(self, *args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]
    return step


@torch._disable_dynamo  # type: ignore[attr-defined]
def _outside_graph(function: Callable[..., Any], *args: Any) -> Any:
    """Call it outside of any compiled graph."""
    return function(*args)


def _new_step(value: float, param: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A step count, float32 as torch's: on the CPU, where reading it costs nothing, unless it is to be captured."""
    if group["capturable"]:  # not torch.tensor: that would copy from the host, which a capture does not allow
        return torch.full((), value, dtype=torch.float32, device=param.device)
    return torch.tensor(value, dtype=torch.float32, device="cpu")  # of which a FakeTensorMode knows the value


def _buffer_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    if group["moments"] == "bfloat16":
        return torch.bfloat16
    if group["state_dtype"] is None:
        return torch.promote_types(param.dtype, torch.float32)
    dtype: torch.dtype = group["state_dtype"]
    return dtype.to_complex() if param.is_complex() else dtype


def _no_rows(param: Tensor) -> Tensor:
    """A sparse gradient with no rows."""
    ids, values = torch.empty((1, 0), dtype=torch.int64), torch.empty((0, *param.shape[1:]), dtype=param.dtype)
    return torch.sparse_coo_tensor(ids, values, param.shape, device=param.device)


def _fixed_by_dtype(param: Tensor) -> str | None:
    """Why no engine moves a parameter of this dtype: quantized models hold such, frozen, beside those they train."""
    if param.is_complex() or (param.is_floating_point() and param.dtype.itemsize > 1):
        return None
    return f"a parameter of dtype {param.dtype} cannot be optimized (float16, bfloat16, float32, float64, complex can)"


def _check_grad(param: Tensor, grad: Tensor, group: Mapping[str, Any], name: str) -> None:
    def refuse(problem: str) -> RuntimeError:
        return RuntimeError(f"{name}: {problem}; no parameter was changed")

    fixed = _fixed_by_dtype(param)
    if fixed is not None:
        raise refuse(fixed)
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise refuse(f"the gradient has layout {grad.layout}; dense and sparse_coo are supported")
    if grad.shape != param.shape:
        raise refuse(f"the gradient has shape {tuple(grad.shape)}, the parameter {tuple(param.shape)}")
    if grad.device != param.device:
        raise refuse(f"the gradient is on {grad.device}, the parameter on {param.device}")
    if grad.is_complex() != param.is_complex():
        raise refuse(f"the gradient has dtype {grad.dtype}, the parameter {param.dtype}")
    if grad.is_sparse and group["differentiable"]:
        raise refuse("differentiable=True does not support sparse gradients")
    if grad.is_sparse and hasattr(param, "to_local"):
        raise refuse(
            "a sparse gradient of a DTensor is not supported; shard tables with cadam.torchrec, or replicate them with "
            "DistributedDataParallel"
        )
    refusal = quantization.storage_refusal(param, group, grad)
    if refusal is not None:
        raise refuse(refusal.reason)
    if hasattr(param, "to_local") != hasattr(grad, "to_local"):
        raise refuse("only one of parameter and gradient is a DTensor")
