"""The rows of ids as tensors, so that torch.export can trace a model with features of the kind `id`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from ..data.kind import MISSING_ID, SHARED_ID_ROW
from .id_features import IdFeatures


class FrozenIds(nn.Module):
    """Replaces ids by rows with a binary search. Ids cannot be added.

    Args:
        ids: the features to copy.
        device: the device of the tensors.
    """

    def __init__(self, ids: IdFeatures, device: torch.device) -> None:
        super().__init__()
        self.names = list(ids.assignments)
        for number, assignment in enumerate(ids.assignments.values()):
            known, rows = assignment.index.items()
            # The missing id is the smallest one, and its row is 0.
            order = np.argsort(known.view(np.int64))
            keys = np.concatenate([[MISSING_ID], known.view(np.int64)[order]])
            values = np.concatenate([[0], rows[order] + SHARED_ID_ROW])
            self.register_buffer(f"keys{number}", torch.from_numpy(keys).to(device))
            self.register_buffer(f"rows{number}", torch.from_numpy(values).to(device))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the features with rows instead of ids."""
        replaced = dict(features)
        for number, name in enumerate(self.names):
            keys, rows, ids = getattr(self, f"keys{number}"), getattr(self, f"rows{number}"), features[name]
            position = torch.searchsorted(keys, ids).clamp_max(len(keys) - 1)
            replaced[name] = torch.where(keys[position] == ids, rows[position], SHARED_ID_ROW)
        return replaced


@contextmanager
def frozen_ids(model: nn.Module) -> Iterator[None]:
    """Replace the ids of a model by `FrozenIds` inside a with block."""
    owners = [module for module in model.modules() if isinstance(getattr(module, "ids", None), IdFeatures)]
    originals = [owner.ids for owner in owners]
    try:
        for owner, original in zip(owners, originals, strict=True):
            assert isinstance(original, IdFeatures)
            owner.ids = FrozenIds(original, next(owner.parameters()).device)
        yield
    finally:
        for owner, original in zip(owners, originals, strict=True):
            owner.ids = original
