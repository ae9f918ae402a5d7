"""The optimizer base class: parameter groups, state and checkpoints as in torch.optim, with steps run by engines."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim import optimizer as torch_optimizer

from ..engines import moment_state, row_layout
from ..engines.base import ParamSlot, Work
from ..engines.cuda.sparse_grad import check_ids
from ..engines.replay import is_replay_enabled
from ..engines.step_plan import PlannedParam, StepPlan, real_local
from ..rules import Rule
from ..rules.defaults import defaults
from ..rules.sparse_updates import AGING_OPTIONS
from . import alignment, options
from . import state_dict as checkpoint
from .alignment import Alignment, Ratio
from .signatures import add_constructor

if TYPE_CHECKING:
    from .explain import Explanation


class Optimizer(torch.optim.Optimizer):
    """An optimizer that consists of a rule, confidence (on or off), and the fastest engine for each parameter.

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
    """Whether an element moves only where momentum and gradient agree in sign; the default of the option."""
    new_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this class that differ from those of the rule."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Options that define this class: they can be neither passed nor loaded with another value."""
    _plan: StepPlan | None
    _counts: dict[Tensor, Tensor]
    """The alignment counters of each parameter."""
    _keeps_grads = False
    """Whether the plan of the present step may keep its gradients."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Everything is checked before any parameter changes.

        Args:
            closure: A function that computes the gradients and returns the loss.

        Returns:
            The result of `closure`, or None.
        """
        if closure is None and not torch.compiler.is_compiling() and self._replay_step():
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(bool(self.defaults["differentiable"])):
            if torch.compiler.is_compiling():
                self._traced_step()
                return loss
            self._check_capture()
            work = self._plan_step()
            for engine, batches in work:
                engine.check(batches)
            for engine, batches in work:
                engine.run(batches)
            self._finish_step()
        return loss

    def step_on_same_grads(self, previous: object = None) -> object:
        """Do the same as `step`, in less time if the gradients are the tensors of the last step with new values.

        Args:
            previous: The result of an earlier call. By passing it, the caller promises that all gradients are the very
                tensors of that call, with the same memory: only values, and ids of sparse gradients, have changed. If
                other steps have been taken since, they are noticed.

        Returns:
            An object for the next call.
        """
        if not self._has_plain_step():
            self.step()  # It may give the parameters other gradients, so the next call must not repeat this step.
            return None
        plan = self._plan
        if previous is not None and plan is not None and plan.last_step is previous:
            self._plan = None  # A plan that does not fit has adopted the changes: next time it would seem to fit.
            if plan.fits(self.param_groups, self.state, unscale=False):
                self._plan = plan
                if plan.repeat():
                    return plan.last_step
        self._keeps_grads = True
        try:
            self.step()
        finally:
            self._keeps_grads = False
        return None if self._plan is None else self._plan.last_step

    def _has_plain_step(self) -> bool:
        """Whether `step` does nothing but the update: no hook, scaler, profiler or method of the user takes part."""
        return type(self).step in _PLAIN_STEPS and not (
            "step" in self.__dict__ or hasattr(self, "grad_scale") or hasattr(self, "found_inf") or self._has_hooks()
        )

    def _has_hooks(self) -> bool:
        """Whether a hook of the step or a profiler is active."""
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or profiler._is_profiler_enabled
            or torch.compiler.is_compiling()
        )

    def _plan_step(self) -> Work:
        """Return the batches of each engine for this step; no batches if a gradient overflowed."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        plan, self._plan = self._plan, None  # If this method raises, the next step makes a new plan.
        unscale = grad_scale is not None
        if plan is None or not plan.fits(self.param_groups, self.state, unscale):
            plan = StepPlan(self.rule, self.param_groups, self.state, unscale)
            self._forget_counts()
        self._add_slots(plan, plan.find_new_params())
        work = plan.make_work(grad_scale)
        self._plan = plan
        if found_inf is not None:
            if any(not engine.skips_overflow for engine, _ in work) and found_inf.item():
                return []
            for _, batches in work:
                for batch in batches:
                    batch.found_inf = found_inf
        return work

    def _add_slots(self, plan: StepPlan, new: list[PlannedParam]) -> None:
        """Check the parameters that need a slot, make their state and choose their engines."""
        names = {}
        for planned in new:
            group = plan.resolve(planned.group_number).source
            position = checkpoint.describe(group, planned.position)
            name = names[planned.param] = f"group {planned.group_number}, parameter {position}"
            _check_grad(planned.param, planned.param.grad, group, name)  # type: ignore[arg-type]
            self._check_state(planned.param, group, name)
        existing = set(self.state) if new else set()
        starts = [0, *accumulate(len(group["params"]) for group in self.param_groups)] if new else []
        try:
            for planned in new:
                group = plan.resolve(planned.group_number).source
                number = starts[planned.group_number] + planned.position
                slot = self._slot(planned.param, group, names[planned.param], number)
                plan.set_slot(planned, slot)
        except RuntimeError:
            for param in set(self.state) - existing:
                del self.state[param]
            raise

    def _finish_step(self) -> None:
        plan = self._plan
        if plan is not None:
            plan.finish(keeps_grads=self._keeps_grads)
            if not plan.is_reusable:
                self._plan = None

    def _replay_step(self) -> bool:
        """Replay the last step if it is recorded and only gradients and numbers have changed."""
        plan = self._plan
        if plan is None or (recorded := plan.replay.ready) is None:
            return False
        if getattr(self, "found_inf", None) is not None or getattr(self, "grad_scale", None) is not None:
            return False
        self._plan = None  # If replaying raises, the next step makes a new plan.
        done = recorded.step(self.param_groups, self.state)
        self._plan = plan
        return done

    def _traced_step(self) -> None:
        """Take a step under torch.compile: traced where the engine allows it, outside of the graph elsewhere."""
        work = _outside_graph(self._plan_step)
        for engine, batches in work:
            _outside_graph(engine.check, batches)
        for engine, batches in work:
            if engine.traceable:
                engine.run(batches)
            else:
                _outside_graph(engine.run, batches)
        _outside_graph(self._finish_step)

    def _check_capture(self) -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        if torch.cuda.is_current_stream_capturing() and not all(g["capturable"] for g in self.param_groups):
            raise RuntimeError(
                f"Attempting CUDA graph capture of step() for an instance of {type(self).__name__} "
                "but param_groups' capturable is False."
            )

    # Construction ----------------------------------------------------------------------------------------------------

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Generate the constructor of a subclass, unless it or one of its bases defines one."""
        super().__init_subclass__(**kwargs)
        is_generated = cls.__init__ is Optimizer.__init__ or hasattr(cls.__init__, "__signature__")
        if hasattr(cls, "rule") and is_generated:
            add_constructor(cls, Optimizer.__init__, cls.rule, cls._default_options())

    @classmethod
    def _default_options(cls) -> dict[str, Any]:
        return {**defaults(cls.rule), "confidence": cls.confidence, **cls.new_defaults, **cls.fixed}

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Reject unknown keyword arguments with a suggestion, which Python's own error message does not have."""
        accepted = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
            for name in given.keys() - accepted.keys():
                raise TypeError(f"{cls.__name__}: {options.describe_unknown(name, set(accepted) - {'self', 'params'})}")
        return super().__new__(cls)

    def __init__(self, params: Any, **given: Any) -> None:
        if not hasattr(type(self), "rule"):
            raise TypeError(f"{type(self).__name__} has no rule: subclass it and set `rule`, see docs/rules.md")
        if isinstance(params, torch.nn.Module) or callable(params):
            kind = type(params).__name__
            raise TypeError(f"params must be an iterable of parameters, got a {kind}: pass model.parameters()")
        is_replay_enabled()  # Raises ValueError for an invalid environment variable.
        self._counts = {}
        self._plan = None
        super().__init__(params, self._complete_options(self._default_options(), given))

    def _patch_step_function(self) -> None:
        """Bypass the wrapper that torch puts around `step` for hooks and profilers if there are none."""
        cls = type(self)
        unhooked = cls.step
        super()._patch_step_function()
        if cls.step is not unhooked:
            cls.step = _bypass_hooks(unhooked, cls.step)  # type: ignore[method-assign]

    @classmethod
    def options_of(cls, **given: Any) -> dict[str, Any]:
        """Return all options of this class, with defaults for those that are not passed, checked as by the constructor.

        Example:
            >>> cadam.CAdam.options_of(lr=0.01)["betas"]
            (0.9, 0.999)
        """
        return cls._complete_options(_defaults_of(cls), given)  # type: ignore[arg-type]

    @classmethod
    def _complete_options(cls, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if name not in defaults:
                raise TypeError(f"{cls.__name__}: {options.describe_unknown(name, defaults)}")
            if name in cls.fixed and value != cls.fixed[name]:
                raise ValueError(f"{cls.__name__} means {name}={cls.fixed[name]}; got {value!r}")
        complete = options.normalize({**defaults, **given, **cls.fixed})
        options.check(cls.rule, complete)
        return complete

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own options. If the group is invalid, the optimizer stays unchanged.

        Args:
            param_group: A dict with ``params`` and, optionally, options that differ from those of the constructor.

        Raises:
            ValueError: If an option or a parameter is invalid.
        """
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            for name in param_group:
                message = options.describe_unknown(name, [*self.defaults, "params"], only_if_close=True)
                if name not in self.defaults and name not in ("params", "param_names") and message:
                    warnings.warn(
                        f"parameter group {len(self.param_groups)}: {message} The entry is kept and has no effect.",
                        stacklevel=2,
                    )
            for name, value in self.fixed.items():
                if param_group.setdefault(name, value) != value:
                    raise ValueError(f"{type(self).__name__} means {name}={value}; got {param_group[name]!r}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.update(options.normalize({name: group[name] for name in self.defaults}))
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
        """Store the state's format and the rule in a group. The optimizer that loads the state dict checks them."""
        group.update({checkpoint.FORMAT_KEY: checkpoint.FORMAT, checkpoint.RULE_KEY: self.rule.name})

    # State -----------------------------------------------------------------------------------------------------------

    def _check_state(self, param: Tensor, group: Mapping[str, Any], name: str) -> None:
        state = self.state.get(param, {})
        for key in self.rule.state(group):
            value = state.get(key, param)
            if not isinstance(value, Tensor):
                problem = f"is {value!r}, not a tensor"
            elif value.shape != param.shape and not (
                moment_state.can_be_row_moment(self.rule.moments.get(key))
                and value.shape == moment_state.row_shape(param)
            ):
                problem = f"has shape {tuple(value.shape)}, the parameter now has {tuple(param.shape)}"
            elif value.device != param.device:
                problem = (
                    f"is on {value.device}, the parameter now on {param.device} "
                    "(optimizer.load_state_dict(optimizer.state_dict()) moves it)"
                )
            else:
                continue
            raise RuntimeError(f"{name}: its state {key} {problem}; no parameter was changed")

    def _slot(self, param: Tensor, group: Mapping[str, Any], name: str, number: int = 0) -> ParamSlot:
        """Return the slot of a parameter with a gradient. Missing state is created.

        Args:
            param: The parameter.
            group: Its group.
            name: How error messages refer to it.
            number: Its position among all parameters, which gives each its own rounding noise.
        """
        state: dict[str, Tensor] = self.state[param]
        if not isinstance(state.get("step"), Tensor):
            state["step"] = _new_step(float(state.get("step", 0.0)), param, group)
        self._complete_state(state, param, param.grad, group, number)
        return ParamSlot(
            real_local(param),
            {buffer: real_local(state[buffer]) for buffer in self.rule.state(group)},
            state["step"],
            self._counter(param) if group["track_alignment"] else None,
            name,
            **moment_state.slot_storage(state, self.rule, group),
        )

    def _preview_slot(self, param: Tensor, group: Mapping[str, Any]) -> ParamSlot:
        """Return the slot that a parameter will have, without creating its state."""
        with torch.no_grad():
            existing = self.state.get(param, {})
            is_planned = any(name not in existing for name in self.rule.state(group))
            state = {name: _local(value) for name, value in existing.items()}
            if is_planned:
                self._complete_state(state, torch.empty_like(_local(param), device="meta"), param.grad, group)
            buffers = {name: real_local(state[name]) for name in self.rule.state(group)}
        step = existing.get("step", _new_step(0.0, param, group))
        storage = moment_state.slot_storage(state, self.rule, group)
        return ParamSlot(real_local(param), buffers, step, None, is_planned=is_planned, **storage)

    def _complete_state(
        self, state: dict[str, Any], param: Tensor, grad: Tensor | None, group: Mapping[str, Any], number: int = 0
    ) -> None:
        rows = grad is not None and grad.is_sparse
        dtype = _buffer_dtype(param, group)
        moment_state.complete_state(state, param, self.rule, group, dtype, rows=rows, number=number)

    @torch.no_grad()
    def reset_rows(self, param: Tensor, rows: Tensor) -> None:
        """Reset the state of some rows of a table, as if they had never been updated.

        Call it when rows of a table are given to other ids. The step count of the table stays as it is; with
        ``row_steps=True`` or ``confidence_after`` the rows count their updates from zero again.

        Args:
            param: The table, with rows first. It must be a parameter of this optimizer.
            rows: Row numbers, one-dimensional.

        Raises:
            ValueError: If the optimizer does not have the parameter, or the gradients of the table are not sparse.
        """
        for buffer, value in self.new_row_state(param):
            buffer.index_copy_(0, rows, value.expand(len(rows), *value.shape[1:]))

    @torch.no_grad()
    def new_row_state(self, param: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the state of a table that consists of rows, with the values of a row that was never updated.

        Args:
            param: The table, with rows first. It must be a parameter of this optimizer.

        Returns:
            Pairs of a tensor of the optimizer's state, with as many rows as the table, and of a tensor with one row.

        Raises:
            ValueError: If the optimizer does not have the parameter, or the gradients of the table are not sparse.
        """
        group = next((g for g in self.param_groups if any(param is other for other in g["params"])), None)
        if group is None:
            raise ValueError(f"this {type(self).__name__} does not have the parameter of shape {tuple(param.shape)}")
        state = self.state.get(param)
        if not state:
            return []
        new: dict[str, Any] = {}
        dtype = _buffer_dtype(param, group)
        moment_state.complete_state(new, param.detach()[:1], self.rule, group, dtype, rows=True)
        new.pop(AGING_OPTIONS, None)  # they are those of all rows
        values = {name: value for name, value in new.items() if value.dim() and name in state}
        for name in values:
            if state[name].shape[:1] != param.shape[:1]:
                raise ValueError(
                    f"{name} does not have a value for each row of a table of shape {tuple(param.shape)}, because its "
                    "gradients are not sparse"
                )
        return [(state[name], value) for name, value in values.items()]

    # Alignment and engines -------------------------------------------------------------------------------------------

    def alignment(self, *, reset: bool = False) -> Alignment:
        """Return the alignment ratio since the last reset: in total, by group and by parameter.

        Counting never waits for the device; reading the counters does.

        Args:
            reset: Whether counting starts again from zero.

        Example:
            >>> print(optimizer.alignment())
        """
        self._raise_delayed_errors()
        named = list(self._named_params())
        ratios = alignment.read(self._counts.get(param) for _, _, param in named)
        groups = [Ratio(0, 0, 0)] * len(self.param_groups)
        for (_, number, _), ratio in zip(named, ratios, strict=True):
            groups[number] += ratio
        if reset:
            for counts in self._counts.values():
                counts.zero_()
        by_name = {name: ratio for (name, _, _), ratio in zip(named, ratios, strict=True)}
        return Alignment(sum(groups, Ratio(0, 0, 0)), tuple(groups), by_name)

    def alignment_counts(self) -> Tensor:
        """Return the sum of all alignment counters as a tensor on the device: elements aligned, touched and seen.

        Nothing waits for the device, so a CUDA graph can capture this. All parameters must be on one device.
        A parameter that replaced another one in its group counts from zero.

        Raises:
            RuntimeError: If no step was taken yet, or `track_alignment` is False.
        """
        params = [param for _, _, param in self._named_params()]
        counts = [self._counter(param) for param in params if param in self._counts]
        if counts:
            return torch.stack(counts).sum(0)
        if params and self._counts:  # All parameters that were updated have been replaced.
            return alignment.new_counts(params[0].device)
        raise RuntimeError("there are no alignment counts: no step was taken yet, or track_alignment is False")

    def explain(self) -> Explanation:
        """Return the engine that updates each parameter, and the reasons why no faster one does.

        Example:
            >>> print(optimizer.explain())
        """
        from .explain import explain

        self._raise_delayed_errors()
        return explain(self)

    def _counter(self, param: Tensor) -> Tensor:
        counts = self._counts.get(param)
        if counts is None:
            counts = self._counts[param] = alignment.new_counts(param.device)
        elif counts.device != param.device:
            counts = self._counts[param] = counts.to(param.device)
        return counts

    def _forget_counts(self) -> None:
        """Delete the counters of parameters that are no longer in a group or in the state."""
        params = (param for group in self.param_groups for param in group["params"])
        present = {*map(id, params), *map(id, self.state)}
        for param in [param for param in self._counts if id(param) not in present]:
            del self._counts[param]

    def _raise_delayed_errors(self) -> None:
        """Raise errors that a step on CUDA could only detect on the device."""
        for name, _, param in self._named_params():
            if param.is_cuda:
                check_ids(param, name)

    def _named_params(self) -> Iterable[tuple[str, int, Tensor]]:
        """Yield the label, the group number and the tensor of every parameter once.

        The label is the name of the parameter, preceded by its position if other parameters have the same name. A
        parameter without a name is labeled by its position.
        """
        seen: set[int] = set()
        occurrences = Counter(name for group in self.param_groups for name in group.get("param_names", ()))
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                if id(param) in seen:  # torch.optim warns about duplicates and accepts them.
                    continue
                seen.add(id(param))
                name, position = names[index] if names else "", f"group{number}.{index}"
                label = f"{position}.{name}" if name else position
                yield (name if occurrences[name] == 1 else label), number, param

    # Checkpoints -----------------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch.optim.

        Second moments that share memory with quantized values are copied, because torch.save refuses tensors of
        different dtypes in one memory.
        """
        hook = self.register_state_dict_post_hook(lambda _, state_dict: _savable(state_dict), prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        return _savable(super().__getstate__())

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this package or of torch.optim. One that does not fit changes nothing.

        Options that say what is computed come from the state dict. Options that say how it is executed (`foreach`,
        `capturable`, ...) and those that define this class, including confidence, keep their values.

        Args:
            state_dict: The result of `state_dict` or of the corresponding optimizer of torch.

        Raises:
            ValueError: If the state dict does not fit; the message names the group and the parameter.
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
        for name, value in self._default_options().items():
            self.defaults.setdefault(name, value)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._mark(group)


def _local(value: Any) -> Any:
    """Return the local shard of a DTensor, and anything else unchanged."""
    return value.to_local() if hasattr(value, "to_local") else value


def _savable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the state of each parameter in a form that torch.save accepts."""
    return {**state_dict, "state": {key: row_layout.savable(entry) for key, entry in state_dict["state"].items()}}


@cache
def _defaults_of(cls: type[Optimizer]) -> Mapping[str, Any]:
    """Return the defaults of a class: those of its constructor, and of its rule."""
    return dict(cls([torch.zeros(1, device="cpu")]).defaults)


def _bypass_hooks(unhooked: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that calls `hooked`, torch's wrapper, only if a hook or a profiler is active.

    Entering the context of the wrapper takes longer than a small step.
    """

    @wraps(unhooked)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._has_hooks():
            return hooked(self, *args, **kwargs)
        return unhooked(self, *args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]
    if unhooked in _PLAIN_STEPS:
        _PLAIN_STEPS.add(step)
    return step


_PLAIN_STEPS = {Optimizer.step}
"""The step of this module, and what `_bypass_hooks` makes of it for each class. Subclasses can have another one."""


@torch._disable_dynamo  # type: ignore[attr-defined]
def _outside_graph(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function outside of any compiled graph."""
    return function(*args)


def _new_step(value: float, param: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return a step count in float32, on the CPU unless it is captured: reading it there does not wait for a device."""
    if group["capturable"]:  # torch.tensor would copy from the host, which a capture does not allow.
        return torch.full((), value, dtype=torch.float32, device=param.device)
    return torch.tensor(value, dtype=torch.float32, device="cpu")  # FakeTensorMode can read it.


def _buffer_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    if group["moments"] == "bfloat16":
        return torch.bfloat16
    if group["state_dtype"] is None:
        return torch.promote_types(param.dtype, torch.float32)
    dtype: torch.dtype = group["state_dtype"]
    return dtype.to_complex() if param.is_complex() else dtype


def unsupported_dtype(param: Tensor) -> str | None:
    """Return why no engine updates parameters of this dtype, or None. Quantized models have such frozen parameters."""
    if param.is_complex() or (param.is_floating_point() and param.dtype.itemsize > 1):
        return None
    return f"a parameter of dtype {param.dtype} cannot be optimized (float16, bfloat16, float32, float64, complex can)"


def _check_grad(param: Tensor, grad: Tensor, group: Mapping[str, Any], name: str) -> None:
    problem = _grad_problem(param, grad, group)
    if problem is not None:
        raise RuntimeError(f"{name}: {problem}; no parameter was changed")


def _grad_problem(param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> str | None:
    dtype_problem = unsupported_dtype(param)
    if dtype_problem is not None:
        return dtype_problem
    if grad.layout not in (torch.strided, torch.sparse_coo):
        return f"the gradient has layout {grad.layout}; dense and sparse_coo are supported"
    if grad.shape != param.shape:
        return f"the gradient has shape {tuple(grad.shape)}, the parameter {tuple(param.shape)}"
    if grad.device != param.device:
        return f"the gradient is on {grad.device}, the parameter on {param.device}"
    if grad.is_complex() != param.is_complex():
        return f"the gradient has dtype {grad.dtype}, the parameter {param.dtype}"
    if grad.is_sparse and group["differentiable"]:
        return "differentiable=True does not support sparse gradients"
    if grad.is_sparse and hasattr(param, "to_local"):
        return (
            "a sparse gradient of a DTensor is not supported; shard tables with cadam.torchrec, or replicate them with "
            "DistributedDataParallel"
        )
    refusal = moment_state.storage_refusal(param, group, grad)
    if refusal is not None:
        return refusal.reason
    if hasattr(param, "to_local") != hasattr(grad, "to_local"):
        return "only one of parameter and gradient is a DTensor"
    return None
