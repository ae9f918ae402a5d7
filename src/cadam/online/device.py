"""The device that a model runs on."""

from __future__ import annotations

import torch

from .models.model_file import UsageError


def select_device(name: str | None) -> torch.device | None:
    """Return the device that ``--device`` names. A CUDA device with a number becomes torch's current one.

    Args:
        name: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for CUDA where it is available; None if no device was given.

    Raises:
        UsageError: if there is no such device.
    """
    if name is None:
        return None
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        is_without_cuda = torch.version.cuda is None and torch.version.hip is None
        raise UsageError(
            f"--device {name}: this torch was built without CUDA. Install one with CUDA (https://pytorch.org), or give "
            "--device cpu"
            if is_without_cuda
            else f"--device {name}: torch finds no CUDA device. Check that nvidia-smi lists one and that "
            "CUDA_VISIBLE_DEVICES does not hide it, or give --device cpu"
        )
    if device.index is not None:
        count = torch.cuda.device_count()
        if device.index >= count:
            raise UsageError(f"--device {name}: the last CUDA device of this machine is cuda:{count - 1}")
        torch.cuda.set_device(device)
    return device
