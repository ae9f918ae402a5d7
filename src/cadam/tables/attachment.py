"""The connection of a table to its optimizer: it adds new chunks and resets the moments of reused rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..optim.optimizer import Optimizer
from .chunks import split_rows

ResetRows = Callable[[Tensor, Tensor], None]
"""A function of a parameter and row numbers that resets the optimizer state of these rows."""


class Attachment:
    """Keeps an optimizer in step with the chunks of a table.

    New chunks are inserted into the parameter group of the table, after its other chunks. This is the order of
    `model.parameters()`, so a state dict fits an optimizer that is created later. In a separate group they would break
    learning rate schedulers, which keep a list with one entry for each group.

    The reference to the optimizer is weak. So if a program creates another optimizer and does not attach it, the table
    is not attached any more, and training raises an error. With the old optimizer, new chunks would not be trained.

    Args:
        optimizer: The optimizer that updates the chunks.
        chunks: The present chunks, all of them in one parameter group.
        finish_step: Called after each step of the optimizer.
        reset: Resets the state of rows; None for optimizers whose state is known.

    Raises:
        ValueError: If the optimizer does not have the chunks, or its state is not known and `reset` is None.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chunks: list[nn.Parameter],
        finish_step: Callable[[], None],
        reset: ResetRows | None,
    ) -> None:
        self._optimizer, self.chunks = weakref.ref(optimizer), list(chunks)
        if reset is None:
            known_reset(optimizer)
        self._reset = reset
        params, _, first = self._find_first_chunk()
        present = params[first : first + len(chunks)]
        if list(map(id, present)) != list(map(id, chunks)):
            raise ValueError("the chunks of a table must follow each other in one parameter group")
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_: finish_step()),
            optimizer.register_load_state_dict_pre_hook(self._check_saved_groups),
        ]

    def find_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer, or None if it does not exist any more."""
        return self._optimizer()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which must exist."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def detach(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def set_chunks(self, chunks: list[nn.Parameter]) -> None:
        """Replace the table's parameters in the optimizer. The state of chunks that remain is kept."""
        params, names, first = self._find_first_chunk()
        own = slice(first, first + len(self.chunks))
        params[own] = chunks
        if names is not None:
            prefix = names[first].removesuffix("0")
            names[own] = [f"{prefix}{number}" for number in range(len(chunks))]
        for chunk in self.chunks:
            if not any(chunk is other for other in chunks):
                self.optimizer.state.pop(chunk, None)
        self.chunks = list(chunks)

    def replace_state(self, chunk: nn.Parameter, replace: Callable[[Tensor], Tensor]) -> bool:
        """Replace the tensors of the optimizer's state that have a value for each row of a chunk.

        Returns:
            Whether the chunk has a state.
        """
        state = self.optimizer.state.get(chunk, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == chunk.shape[0]:
                state[name] = replace(value)
        return bool(state)

    def reset_rows(self, rows: Tensor) -> None:
        """Reset the state of rows of the table."""
        reset = self._reset or known_reset(self.optimizer)
        for number, _, local in split_rows(rows, [len(chunk) for chunk in self.chunks]):
            reset(self.chunks[number], local)

    def _find_first_chunk(self) -> tuple[list[Tensor], list[str] | None, int]:
        """Return the parameters of the group that has the first chunk, their names, and the position of the chunk."""
        for group in self.optimizer.param_groups:
            for position, param in enumerate(group["params"]):
                if param is self.chunks[0]:
                    return group["params"], group.get("param_names"), position
        raise ValueError(
            f"the {type(self.optimizer).__name__} does not have the parameters of this table: pass model.parameters() "
            "or table.parameters() to it"
        )

    def _check_saved_groups(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        saved, present = (
            [len(group["params"]) for group in groups]
            for groups in (state_dict.get("param_groups", ()), optimizer.param_groups)
        )
        if len(saved) == len(present) and saved != present:
            raise ValueError(
                f"the saved optimizer has parameter groups of {saved} parameters and this one of {present}: load the "
                "state dict of the model first, which gives its tables the chunks that they had"
            )


def known_reset(optimizer: torch.optim.Optimizer) -> ResetRows:
    """Return the function that resets the state of rows in an optimizer.

    Raises:
        ValueError: If it is not known how the optimizer keeps the state of a row.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer.reset_rows
    if isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups):
        return lambda param, rows: None
    if isinstance(optimizer, torch.optim.SparseAdam):

        def reset(param: Tensor, rows: Tensor) -> None:
            for name in ("exp_avg", "exp_avg_sq"):
                if name in optimizer.state.get(param, {}):
                    optimizer.state[param][name].index_fill_(0, rows, 0)

        return reset
    raise ValueError(
        f"how {type(optimizer).__name__} keeps the state of a row is not known. Use an optimizer of cadam, SparseAdam "
        "or SGD without momentum, or pass reset=function, which is called with a parameter and row numbers and resets "
        "the optimizer's state of these rows"
    )
