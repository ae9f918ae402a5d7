"""Which TorchRec and FBGEMM this package works with.

Both change their insides from release to release, and FBGEMM loads with one release of torch only. So the versions are
exact, and others are refused when the package is imported, not in the middle of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Versions:
    """Releases that go together."""

    torch: str
    fbgemm: str
    torchrec: str

    @property
    def install(self) -> str:
        return (
            f"pip install torch=={self.torch} fbgemm-gpu-cpu=={self.fbgemm} '.[torchrec]' && "
            f"pip install --no-deps torchrec=={self.torchrec}  "
            f"(in a clone of cadam's repository; fbgemm-gpu=={self.fbgemm} instead of fbgemm-gpu-cpu for CUDA)"
        )


TESTED = (Versions("2.13.0", "1.8.0", "1.8.0"), Versions("2.11.0", "1.6.0", "1.6.1"))


def problem() -> str | None:
    """What is missing or does not go with the torch that is installed, with what to install; None if all is there."""
    torch = _installed("torch")
    wanted = next((versions for versions in TESTED if versions.torch == torch), TESTED[0])
    wrong = [
        f"{name} {found or 'is not installed'} (needs {needed})"
        for name, found, needed in (
            ("torch", torch, wanted.torch),
            ("fbgemm-gpu-cpu or fbgemm-gpu", _installed("fbgemm-gpu-cpu") or _installed("fbgemm-gpu"), wanted.fbgemm),
            ("torchrec", _installed("torchrec"), wanted.torchrec),
        )
        if found != needed
    ]
    if not wrong:
        return None
    return f"cadam.torchrec cannot be used: {', '.join(wrong)}. Install: {wanted.install}"


def _installed(package: str) -> str | None:
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return None
