"""Reading CIFAR-10 from its official files, which may be damaged, and the digits of scikit-learn."""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from cadam_paper.images import data

ROWS = 20


class Python2(pickle._Pickler):
    """A pickler that writes strings and bytes like Python 2, which created the official files."""

    # The type stubs of these attributes are wrong or missing.
    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(pickle._Pickler.dispatch)
    write: Callable[[bytes], None]
    memoize: Callable[[object], None]

    def save_string(self, text: str | bytes) -> None:
        raw = text.encode("latin1") if isinstance(text, str) else text
        self.write(b"T" + struct.pack("<i", len(raw)) + raw)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_string


def batches() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    return {
        name: (random.integers(256, size=(ROWS, 3072), dtype=np.uint8), np.arange(ROWS) % 10) for name in data.BATCHES
    }


def as_binary(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()


def as_python(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Python2(file, 2).dump({"batch_label": "a batch", "labels": labels.tolist(), "data": pixels})
    return file.getvalue()


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, bytes]]:
    """Small files in both formats, whose MD5 hashes replace the official ones."""
    contents_by_folder = {}
    formats = []
    for format_, write in zip(data.FORMATS, (as_binary, as_python), strict=True):
        contents = {f"{name}{format_.suffix}": write(*batch) for name, batch in batches().items()}
        contents_by_folder[format_.folder] = contents
        formats.append(replace(format_, batches={n: hashlib.md5(c).hexdigest() for n, c in contents.items()}))
    monkeypatch.setattr(data, "FORMATS", tuple(formats))
    return contents_by_folder


FOLDERS = [format_.folder for format_ in data.FORMATS]


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def pack(path: Path, folder: str, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", [0, 1])
def test_all_formats_give_the_same_images(
    files: dict[str, dict[str, bytes]], tmp_path: Path, form: int, packed: bool
) -> None:
    format_ = data.FORMATS[form]
    if packed:
        pack(tmp_path / format_.archive, format_.folder, files[format_.folder])
    else:
        write(tmp_path / format_.folder, files[format_.folder])
    images = data.read_cifar10(tmp_path)
    expected = batches()
    train = np.concatenate([expected[name][0] for name in data.BATCHES[:-1]]).reshape(-1, 3, 32, 32)
    assert torch.equal(images.train, torch.from_numpy(train))
    assert torch.equal(images.test, torch.from_numpy(expected["test_batch"][0].reshape(-1, 3, 32, 32)))
    assert images.train_labels.tolist() == [*range(10)] * (5 * ROWS // 10)
    assert (images.classes, images.channels) == (10, 3)
    assert images.train.dtype == torch.uint8
    pixels = images.train.double()
    torch.testing.assert_close(images.mean.double(), pixels.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(images.std.double(), pixels.std((0, 2, 3), correction=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_error_names_a_damaged_file(files: dict[str, dict[str, bytes]], tmp_path: Path, folder: str) -> None:
    contents = dict(files[folder])
    name = next(name for name in contents if "3" in name)
    contents[name] = contents[name][:-1] + bytes([contents[name][-1] ^ 1])
    write(tmp_path / folder, contents)
    with pytest.raises(data.DamagedImagesError, match=f"{name} is damaged.*MD5"):
        data.read_cifar10(tmp_path)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_error_names_a_missing_file(files: dict[str, dict[str, bytes]], tmp_path: Path, folder: str) -> None:
    contents = dict(files[folder])
    name = next(name for name in contents if name.startswith("test"))
    del contents[name]
    write(tmp_path / folder, contents)
    with pytest.raises(data.DamagedImagesError, match=f"{name} is missing"):
        data.read_cifar10(tmp_path)


def test_a_truncated_archive_is_reported(files: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    format_ = data.FORMATS[0]
    archive = pack(tmp_path / format_.archive, format_.folder, files[format_.folder])
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(data.DamagedImagesError, match=format_.archive):
        data.read_cifar10(archive)


def test_a_pickle_that_calls_functions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (str(tmp_path / "touched"),)

    with pytest.raises(pickle.UnpicklingError, match="refers to"):
        data._read_python(pickle.dumps(Evil()))
    assert not (tmp_path / "touched").exists()


def test_a_missing_data_set_is_reported_with_the_expected_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"cifar-10-binary\.tar\.gz"):
        data.read_cifar10(tmp_path)
    monkeypatch.setenv("CADAM_DATA", str(tmp_path))
    missing = data.CIFAR10.missing()
    assert missing is not None
    assert str(tmp_path) in missing
    assert "python -m cadam_paper.images.data" in missing


def test_an_option_is_not_accepted_as_a_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cadam_paper.images.data", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "usage: python -m cadam_paper.images.data FOLDER" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_download_is_checked_before_it_gets_its_final_name(
    files: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    format_ = data.FORMATS[0]
    site = tmp_path / "site"
    site.mkdir()
    archive = pack(site / format_.archive, format_.folder, files[format_.folder])
    reported: list[str] = []
    with pytest.raises(data.DamagedImagesError, match=format_.md5):
        data.download_cifar10(tmp_path / "here", site.as_uri(), reported.append)
    assert list((tmp_path / "here").iterdir()) == []
    right = replace(format_, md5=hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(data, "FORMATS", (right, *data.FORMATS[1:]))
    data.download_cifar10(tmp_path / "here", site.as_uri(), reported.append)
    monkeypatch.setenv("CADAM_DATA", str(tmp_path / "here"))
    assert data.CIFAR10.missing() is None
    assert len(data.read_cifar10(data.CIFAR10.location()).train) == 5 * ROWS
    assert any(format_.archive in line for line in reported)


@pytest.mark.skipif(data.CIFAR10.missing() is not None, reason="CIFAR-10 is not in $CADAM_DATA")
def test_the_real_cifar10() -> None:
    images = data.read_cifar10(data.CIFAR10.location())
    assert images.train.shape == (50_000, 3, 32, 32)
    assert images.test.shape == (10_000, 3, 32, 32)
    assert torch.bincount(images.train_labels).tolist() == [5000] * 10
    assert torch.bincount(images.test_labels).tolist() == [1000] * 10
    torch.testing.assert_close(images.mean / 255, torch.tensor([0.4914, 0.4822, 0.4465]), rtol=0, atol=1e-4)


def test_digits_are_real_and_split() -> None:
    images = data.read_digits()
    assert (len(images.train), len(images.test)) == (1437, 360)
    assert images.train.shape[1:] == (1, data.DIGITS_SIZE, data.DIGITS_SIZE)
    assert torch.bincount(images.train_labels).min() > 100
    assert images.train.max() > 200


def test_missing_scikit_learn_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\./paper\[images\]'"):
        data.read_digits()
