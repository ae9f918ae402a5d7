"""Which TorchRec and FBGEMM this package works with.

Both change their insides from release to release, and FBGEMM loads with one release of torch only. So the versions are
exact, and others are refused when the package is imported, not in the middle of a run.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TORCH, FBGEMM, TORCHREC = "2.13.0", "1.8.0", "1.8.0"
INSTALL = (
    f"pip install torch=={TORCH} fbgemm-gpu-cpu=={FBGEMM} 'cadam[torchrec]' && "
    f"pip install --no-deps torchrec=={TORCHREC}  (fbgemm-gpu=={FBGEMM} instead of fbgemm-gpu-cpu for CUDA)"
)


def problem() -> str | None:
    """What is missing or of another version, with what to install; None if all is there."""
    found = {
        "torch": _installed("torch"),
        "fbgemm-gpu-cpu or fbgemm-gpu": _installed("fbgemm-gpu-cpu") or _installed("fbgemm-gpu"),
        "torchrec": _installed("torchrec"),
    }
    wanted = dict(zip(found, (TORCH, FBGEMM, TORCHREC), strict=True))
    wrong = [
        f"{name} {found[name] or 'is not installed'} (needs {wanted[name]})"
        for name in found
        if found[name] != wanted[name]
    ]
    if not wrong:
        return None
    return f"cadam.torchrec cannot be used: {', '.join(wrong)}. Install: {INSTALL}"


def _installed(package: str) -> str | None:
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return None
