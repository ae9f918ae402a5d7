"""The image data sets: CIFAR-10 from its official files, and the handwritten digits of scikit-learn.

All pixels are stored on the device, as bytes. This command downloads CIFAR-10 into the folder `data`::

    python -m cadam_paper.images.data data
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import tarfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cadam.statistics.intervals import Array

from ..harness.experiment import Data

SITE = "https://www.cs.toronto.edu/~kriz"
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
"""Names of CIFAR-10's files: five batches of training images and one of test images."""


class DamagedImagesError(ValueError):
    """Raised if a file of a data set is missing or differs from the published one."""


@dataclass(frozen=True)
class CifarFormat:
    """A file format in which CIFAR-10 is published."""

    archive: str
    """The name of the archive."""
    md5: str
    """The MD5 hash of the archive."""
    folder: str
    """The folder inside the archive."""
    suffix: str
    """The suffix of the names of its files."""
    batches: Mapping[str, str]
    """MD5 hashes by file name."""
    read: Callable[[bytes], tuple[Array, Array]]
    """Returns the pixels and the labels of a file from its content."""

    @property
    def files(self) -> list[str]:
        """The names of the files."""
        return [f"{name}{self.suffix}" for name in BATCHES]


def _read_binary(content: bytes) -> tuple[Array, Array]:
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return records[:, 1:], records[:, 0]


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler that accepts only NumPy arrays, lists and strings.

    A pickle file can make Python call any function. This class raises an error for every function or class except
    those that NumPy arrays need.
    """

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"dtype": np.dtype, "ndarray": np.ndarray, "_reconstruct": _reconstruct}
        if module.partition(".")[0] == "numpy" and name in allowed:
            return allowed[name]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which CIFAR-10 files do not need")


def _reconstruct(kind: type, shape: tuple[int, ...], dtype: bytes) -> Array:
    """Create an empty array for unpickling, as `numpy.core.multiarray._reconstruct` does. Its values are set later."""
    empty: Array = np.ndarray.__new__(kind, shape, np.dtype(dtype.decode()))
    return empty


def _read_python(content: bytes) -> tuple[Array, Array]:
    batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    return np.asarray(batch[b"data"], np.uint8), np.asarray(batch[b"labels"], np.uint8)


FORMATS = (
    CifarFormat(
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
        ".bin",
        {
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
        _read_binary,
    ),
    CifarFormat(
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        "cifar-10-batches-py",
        "",
        {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
        _read_python,
    ),
)


# Images --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Training and test images as bytes of shape (n, channels, height, width), and their labels.

    `mean` and `std` are the mean and the standard deviation of the training pixels of each channel.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    mean: Tensor
    std: Tensor
    classes: int

    @classmethod
    def of(cls, train: tuple[Array, Array], test: tuple[Array, Array]) -> Images:
        """Create the data set from (images, labels) arrays, and compute the exact mean and standard deviation."""
        pixels = train[0]
        if pixels.ndim != 4:
            raise ValueError(f"images must be (n, channels, height, width), got {pixels.shape}")
        count = pixels.size // pixels.shape[1]
        values = np.arange(256, dtype=np.int64)
        counts = np.stack([np.bincount(channel.ravel(), minlength=256) for channel in pixels.swapaxes(0, 1)])
        mean = counts @ values / count
        std = np.sqrt(counts @ values**2 / count - mean**2)
        return cls(
            torch.from_numpy(np.ascontiguousarray(pixels)),
            torch.from_numpy(train[1].astype(np.int64)),
            torch.from_numpy(np.ascontiguousarray(test[0])),
            torch.from_numpy(test[1].astype(np.int64)),
            torch.tensor(mean, dtype=torch.float32),
            torch.tensor(std, dtype=torch.float32),
            1 + int(max(train[1].max(), test[1].max())),
        )

    def to(self, device: torch.device) -> Images:
        """Return a copy with all tensors on a device."""
        tensors: dict[str, Any] = {k: value.to(device) for k, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    @property
    def channels(self) -> int:
        """The number of color channels."""
        return self.train.shape[1]


@lru_cache(maxsize=2)
def load(name: str, device: torch.device) -> Images:
    """Load a data set by name to a device. The result is cached for the lifetime of the process."""
    if name == CIFAR10.name:
        return read_cifar10(CIFAR10.location()).to(device)
    if name == DIGITS.name:
        return read_digits().to(device)
    raise ValueError(f"there is no data set {name!r}; the data sets are {CIFAR10.name} and {DIGITS.name}")


# CIFAR-10 ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cifar10(Data):
    """CIFAR-10 in any of its published formats, as an archive or as unpacked files."""

    def location(self) -> Path:
        """Return the path of the archive or of the folder with the files, or $CADAM_DATA if there is neither."""
        root = Path(os.environ.get("CADAM_DATA", "data"))
        return next((path for path in _candidate_paths(root) if _format_at(path) is not None), root)

    def missing(self) -> str | None:
        """Return how to get the data if they are missing, otherwise None."""
        root = self.location()
        if _format_at(root) is not None:
            return None
        names = [name for format_ in FORMATS for name in (format_.archive, format_.folder)]
        return (
            f"{self.name} ({self.size}) is not in {root}, which contains none of {', '.join(names)}. "
            f"`python -m cadam_paper.images.data {root}` downloads it from {self.source}; "
            "or set CADAM_DATA to the folder that contains it"
        )


def _candidate_paths(root: Path) -> list[Path]:
    return [root, *(root / format_.folder for format_ in FORMATS), *(root / format_.archive for format_ in FORMATS)]


def _format_at(path: Path) -> CifarFormat | None:
    """Return the format in which a path contains CIFAR-10, or None if it does not contain CIFAR-10."""
    for format_ in FORMATS:
        if path.name == format_.archive and path.is_file():
            return format_
        if any((path / name).is_file() for name in format_.files):
            return format_
    return None


def read_cifar10(root: Path) -> Images:
    """Read CIFAR-10 from an official archive or from the folder of its files.

    Raises:
        FileNotFoundError: If neither an archive nor its files are found.
        DamagedImagesError: If a file is missing or its MD5 hash is wrong.
    """
    located = [(path, format_) for path in _candidate_paths(root) if (format_ := _format_at(path)) is not None]
    if not located:
        names = " or ".join(format_.archive for format_ in FORMATS)
        raise FileNotFoundError(f"there is no CIFAR-10 at {root}: neither {names} nor the files that they contain")
    path, format_ = located[0]
    contents = _read_archive(path, format_) if path.is_file() else _read_folder(path, format_)
    batches = []
    for name in format_.files:
        file = f"{path}: {name}"
        if name not in contents:
            raise DamagedImagesError(f"{file} is missing")
        digest = hashlib.md5(contents[name], usedforsecurity=False).hexdigest()
        if digest != format_.batches[name]:
            raise DamagedImagesError(
                f"{file} is damaged ({len(contents[name]):,} bytes): its MD5 hash is {digest} instead of "
                f"{format_.batches[name]}; download it again from {SITE}/{format_.archive}"
            )
        pixels, labels = format_.read(contents[name])
        batches.append((pixels.reshape(-1, 3, 32, 32), labels))
    pixels, labels = (np.concatenate(parts) for parts in zip(*batches[:-1], strict=True))
    return Images.of((pixels, labels), batches[-1])


def _read_folder(folder: Path, format_: CifarFormat) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in format_.files if (folder / name).is_file()}


def _read_archive(archive: Path, format_: CifarFormat) -> dict[str, bytes]:
    """Read the files of an archive by name, without writing them to the disk."""
    contents = {}
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                name = Path(member.name).name
                if member.isfile() and name in format_.files:
                    file = packed.extractfile(member)
                    assert file is not None
                    contents[name] = file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DamagedImagesError(
            f"{archive} is damaged ({error}); download it again from {SITE}/{format_.archive}"
        ) from error
    return contents


def download_cifar10(folder: Path, site: str = SITE, report: Callable[[str], None] = print) -> Path:
    """Download the binary archive of CIFAR-10 into a folder.

    The file gets its final name only after its MD5 hash was checked.

    Args:
        folder: The target folder, which is created if necessary.
        site: The address of the folder to download from.
        report: Called with a line of progress after each tenth of the file.

    Returns:
        The path of the archive.

    Raises:
        DamagedImagesError: If the MD5 hash of the downloaded file is wrong.
    """
    format_ = FORMATS[0]
    folder.mkdir(parents=True, exist_ok=True)
    archive, part = folder / format_.archive, folder / f".{format_.archive}.part"
    digest, done, reported_tenths = hashlib.md5(usedforsecurity=False), 0, 0
    try:
        with urllib.request.urlopen(f"{site}/{format_.archive}", timeout=60) as source, part.open("wb") as target:
            total = int(source.headers.get("Content-Length", 0))
            while chunk := source.read(1 << 20):
                target.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if total and done * 10 // total > reported_tenths:
                    reported_tenths = done * 10 // total
                    report(f"{format_.archive}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")
        if digest.hexdigest() != format_.md5:
            raise DamagedImagesError(
                f"{site}/{format_.archive} has the MD5 hash {digest.hexdigest()} instead of {format_.md5}"
            )
        part.replace(archive)
    finally:
        part.unlink(missing_ok=True)
    return archive


CIFAR10 = Cifar10("CIFAR-10", "", f"{SITE}/cifar.html", "170 MB")


# Digits --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digits(Data):
    """The data set of handwritten digits that is part of scikit-learn."""

    def missing(self) -> str | None:
        """Return how to get the data if they are missing, otherwise None."""
        if find_spec("sklearn") is not None:
            return None
        return f"{self.name} are part of {self.source}: in a clone of the project, pip install './paper[images]'"


DIGITS = Digits("digits", "", "scikit-learn", "in its package")
DIGITS_SIZE, DIGITS_TEST = 10, 360


def read_digits() -> Images:
    """Load the 1,797 digits of scikit-learn, enlarged from 8x8 to 10x10 pixels so that they can be rotated."""
    missing = DIGITS.missing()
    if missing:
        raise ModuleNotFoundError(missing)
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.from_numpy(digits.images).float()[:, None] * (255 / 16)
    large = torch.nn.functional.interpolate(small, size=DIGITS_SIZE, mode="bilinear")
    order = np.random.default_rng(0).permutation(len(large))
    pixels, labels = large.round().byte().numpy()[order], digits.target[order]
    return Images.of((pixels[DIGITS_TEST:], labels[DIGITS_TEST:]), (pixels[:DIGITS_TEST], labels[:DIGITS_TEST]))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m cadam_paper.images.data FOLDER")
    try:
        print(f"done: {download_cifar10(Path(sys.argv[1]))}")
    except (OSError, DamagedImagesError) as error:
        advice = f"you can put an archive from {SITE}/cifar.html into the folder yourself"
        sys.exit(f"CIFAR-10 could not be downloaded: {error}; {advice}")
