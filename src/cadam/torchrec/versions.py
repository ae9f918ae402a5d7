"""The versions of TorchRec and FBGEMM that this package supports.

Both change their internals between releases, and FBGEMM loads with one release of torch only. The versions are
therefore exact, and others are rejected at import instead of in the middle of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Versions:
    """Releases that work together."""

    torch: str
    fbgemm: str
    torchrec: str

    @property
    def install_command(self) -> str:
        """The command that installs these releases."""
        return (
            f"pip install torch=={self.torch} fbgemm-gpu-cpu=={self.fbgemm} '.[torchrec]' && "
            f"pip install --no-deps torchrec=={self.torchrec}  "
            f"(in a clone of cadam's repository; fbgemm-gpu=={self.fbgemm} instead of fbgemm-gpu-cpu for CUDA)"
        )


TESTED = (Versions("2.13.0", "1.8.0", "1.8.0"), Versions("2.11.0", "1.6.0", "1.6.1"))


def find_problem() -> str | None:
    """Describe which packages are missing or do not fit the installed torch, and how to install them.

    Returns:
        The message, or None if all packages fit.
    """
    torch = _installed_version("torch")
    required = next((versions for versions in TESTED if versions.torch == torch), TESTED[0])
    fbgemm = _installed_version("fbgemm-gpu-cpu") or _installed_version("fbgemm-gpu")
    packages = (
        ("torch", torch, required.torch),
        ("fbgemm-gpu-cpu or fbgemm-gpu", fbgemm, required.fbgemm),
        ("torchrec", _installed_version("torchrec"), required.torchrec),
    )
    wrong = [
        f"{name} {installed or 'is not installed'} (needs {needed})"
        for name, installed, needed in packages
        if installed != needed
    ]
    if not wrong:
        return None
    return f"cadam.torchrec cannot be used: {', '.join(wrong)}. Install: {required.install_command}"


def _installed_version(package: str) -> str | None:
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return None
