"""The setting of torch that decides whether it checks the ids of new sparse tensors."""

from __future__ import annotations

import torch


def disable_sparse_checks() -> None:
    """Choose explicitly that torch does not check new sparse tensors, which is its default.

    Without an explicit choice, torch 2.11 and 2.12 print a warning for the first sparse gradient of a process, even if
    ``check_invariants=False`` is passed (https://github.com/pytorch/pytorch/issues/184610). The setting is global, so
    only processes of the command line call this function, before any code of a user's model file.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
