"""Real images for the examples: the handwritten digits that come with scikit-learn, or
the files of MNIST or Fashion-MNIST."""

import gzip
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HELD_OUT = 357  # of scikit-learn's 1,797 digits; 1,440 are left to train on


class Digits(NamedTuple):
    """The images, [number, height, width], with pixels from 0 (dark) to 1 (bright), and
    the labels of the images, from 0 to 9."""

    images: np.ndarray
    labels: np.ndarray

    def batch(self, seed: int, step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the `size` images of a step, and their labels.

        An epoch has `len(labels) // size` steps. Each epoch takes the images in a new
        random order.
        """
        epoch, place = divmod(step, len(self.labels) // size)
        rows = np.random.default_rng((seed, epoch)).permutation(len(self.labels))[
            place * size : (place + 1) * size
        ]
        return self.images[rows], self.labels[rows]


def load(folder: Path | None = None) -> tuple[Digits, Digits]:
    """Returns the digits to train on and the held-out digits. By default they are the
    8 x 8 digits of scikit-learn; with a `folder`, the images of its four IDX files.

    Raises:
        ImportError: `folder` is None, and scikit-learn is not installed.
        ValueError: a file is missing from the folder, or is not a whole IDX file.
    """
    if folder is not None:
        return _idx(folder, "train"), _idx(folder, "t10k")
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            'The digits come with scikit-learn: pip install -e ".[examples]".'
        ) from error
    found: Any = load_digits()
    mixed = np.random.default_rng(0).permutation(len(found.target))
    images, labels = (
        (found.images / 16).astype(np.float32)[mixed],
        found.target.astype(np.int32)[mixed],
    )
    return Digits(images[HELD_OUT:], labels[HELD_OUT:]), Digits(
        images[:HELD_OUT], labels[:HELD_OUT]
    )


def _idx(folder: Path, part: str) -> Digits:
    images = (
        _read(folder / f"{part}-images-idx3-ubyte", dims=3).astype(np.float32) / 255
    )
    return Digits(
        images, _read(folder / f"{part}-labels-idx1-ubyte", dims=1).astype(np.int32)
    )


def _read(path: Path, dims: int) -> np.ndarray:
    """Returns the array in an IDX file of bytes.

    Such a file holds two zero bytes, the type code 8 (unsigned bytes), the number of
    dims, the size of each dim in four bytes, and then the numbers of the array.
    """
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and not packed.exists():
        raise ValueError(
            f"{path}: needed this file or {packed.name}; found neither file. Give the "
            "folder of the four IDX files."
        )
    content = (
        path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    )
    shape = np.frombuffer(content[4 : 4 + 4 * dims], ">u4")
    if content[:4] != bytes([0, 0, 8, dims]) or len(content) != 4 + 4 * dims + np.prod(
        shape, dtype=np.int64
    ):
        raise ValueError(
            f"{path}: needed an IDX file of bytes in {dims} dims, got a file of "
            "another kind or a part of a file. Copy it again."
        )
    return np.frombuffer(content[4 + 4 * dims :], np.uint8).reshape(shape)
