"""Stores a text in several token files with a manifest, for a text that is too large for one file.
The files are read as one long array. To make a batch, only the windows of the batch are read.

    folder/manifest.json    the vocabulary, the dtype of a token, and for each shard the number of
                            its tokens, its size in bytes and its hash
    folder/00000.bin ...    tokens as `data.write` stores them

`read` raises an error if a shard is missing, cut short or damaged, and the error names the shard.
So a run fails before its first step, and not at step 40,000. `manifest.need(condition, place, what,
value)` raises `Damaged` if the condition is false.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Integer

from parallax import argument_checks
from parallax.data import manifest
from parallax.data.token_file import File
from parallax.data.tokens import Tokens, check_header, header, opened, store, stored_as, verify

MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Shards:
    """Tokens in several files. `len(shards)` and `shards[places]` give the same results as for one
    array of all tokens.

    `data.batch` takes the shards, and returns the same batches as for one array of all tokens. A
    file is opened only when its tokens are read. Indexing raises `IndexError` for an index below 0
    or after the last token, and for indices that are no whole numbers. It can also raise the errors
    of `token_file.File`, which reads the tokens.

    Attributes:
        parts: the tokens of each file, in order.
        vocabulary: all tokens are below this number.
    """

    parts: tuple[File, ...]
    vocabulary: int

    @property
    def starts(self) -> np.ndarray:
        """The index, in the whole text, of the first token of each file, and then the number of all
        tokens: `[files + 1]`."""
        return np.cumsum([0, *map(len, self.parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, places: Integer[np.ndarray, "..."]) -> Integer[np.ndarray, "..."]:
        """Returns the tokens at the indices `places` of the whole text. They are read file by
        file."""
        starts = self.starts
        places = np.asarray(places)
        if places.dtype.kind not in "iu":
            raise IndexError(
                f"the text: needed an array of whole numbers as places, got {places.dtype}. For a "
                "mask, pass np.flatnonzero(mask)."
            )
        if places.size and not 0 <= places.min() <= places.max() < starts[-1]:
            raise IndexError(
                f"the text has the tokens 0 to {starts[-1] - 1}; "
                f"got indices from {places.min()} to {places.max()}."
            )
        places = places.astype(np.int64)  # in NumPy, uint64 minus int64 is float64
        tokens = np.empty(places.shape, self.parts[0].dtype)
        # For each place, the index of the last file that starts at or before the place.
        part_of_place = np.searchsorted(starts, places, side="right") - 1
        for part in np.unique(part_of_place):
            inside = part_of_place == part
            tokens[inside] = self.parts[part][places[inside] - starts[part]]
        return tokens


def write(
    folder: str | Path,
    pieces: Iterable[Tokens],
    *,
    vocabulary: SupportsIndex,
    shard_tokens: SupportsIndex = 1 << 27,
) -> None:
    """Stores the `pieces` of a text, one after another, in files of `shard_tokens` tokens each; the
    last file may be shorter.

    At any time, memory holds no more of the text than the tokens of one file and one of the
    `pieces`. The manifest is written last, so `read` refuses a folder that was not written to the
    end.

    Raises `ValueError` if a token is outside the vocabulary, if there are no tokens, or if the
    folder already has a manifest.
    """
    folder = Path(folder)
    vocabulary, size = argument_checks.whole_numbers(
        "shards.write", vocabulary=vocabulary, shard_tokens=shard_tokens
    )
    if (folder / MANIFEST).exists():
        raise ValueError(
            f"{folder} holds shards already. Choose another folder, or remove this one."
        )
    if size < 1:
        raise ValueError(f"shards.write needs shard_tokens of 1 or more; got {size}.")
    folder.mkdir(parents=True, exist_ok=True)
    # By the name of a file: the number of its tokens, and its [size in bytes, hash].
    counts, files = {}, {}
    for number, shard in enumerate(_cut(pieces, size)):
        name = f"{number:05d}.bin"
        files[name] = store(folder / name, shard, vocabulary)
        counts[name] = len(shard)
    if not counts:
        raise ValueError(
            f"shards.write needs one token or more for {folder}, got none. Pass pieces with tokens."
        )
    manifest.write(folder / MANIFEST, header(vocabulary) | {"tokens": counts, "files": files})


def read(
    folder: str | Path,
    *,
    vocabulary: SupportsIndex,
    rank: SupportsIndex = 0,
    processes: SupportsIndex = 1,
    check_bytes: bool = True,
) -> Shards:
    """Returns the shards that `write` stored in `folder`. First checks the sizes of all shards, and
    the bytes of the shards `rank`, `rank` + `processes`, and so on.

    If each process of a job passes its rank and the number of processes, the processes together
    check every byte once before step 0. By default each process that calls `read` checks all bytes
    itself. A restarted run may pass `check_bytes=False`; then only sizes are checked.

    Raises:
        manifest.Damaged: a shard or the manifest is missing, or differs from the file that was
            written; the message names the file.
        ValueError: the shards were made for another vocabulary or in another format, or hold a
            number that is no token; or `rank` is not from 0 to `processes` - 1.
    """
    vocabulary, rank, processes = argument_checks.whole_numbers(
        "shards.read", vocabulary=vocabulary, rank=rank, processes=processes
    )
    if not 0 <= rank < processes:
        raise ValueError(
            f"shards.read needs a rank from 0 to processes - 1; got rank={rank} and "
            f"processes={processes}. Pass the rank of this process, counted from 0."
        )
    folder = Path(folder)
    # `item` is the dtype of a token.
    record, item = manifest.read(folder / MANIFEST), stored_as(vocabulary)
    check_header(record, folder / MANIFEST, folder, vocabulary)
    # By the name of a file: `files` has its [size in bytes, hash], `counts` the number of tokens.
    files = manifest.files(folder / MANIFEST, record.get("files"))
    counts = _counts(folder / MANIFEST, record.get("tokens"), files, item)
    manifest.check_sizes(folder, files)
    # `opened` returns a `File`, which reads tokens when it is indexed.
    # The manifest has the names in the order of texts, in which 100000.bin is before 10001.bin.
    names = sorted(counts, key=lambda name: (len(name), name))
    parts = tuple(opened(folder / name, item, counts[name]) for name in names)
    if check_bytes:
        hashes = [files[name][1] for name in names]
        with ThreadPoolExecutor(manifest.THREADS) as pool:
            checks = [
                pool.submit(verify, part, vocabulary, stored=stored)
                for part, stored in itertools.islice(
                    zip(parts, hashes, strict=True), rank, None, processes
                )
            ]
        for check in checks:
            check.result()  # raises the check's error
    return Shards(parts, vocabulary)


def _counts(path: Path, value: Any, files: dict[str, list], item: np.dtype) -> dict[str, int]:
    """Returns `value`, the entry `tokens` of the manifest at `path`: the number of tokens in each
    file. Raises `Damaged` if the numbers do not agree with the sizes in `files`. `files` has the
    [size in bytes, hash] of each file by name. `item` is the dtype of a token.
    """
    well_formed = (
        isinstance(value, dict)
        and value.keys() == files.keys()
        and all(type(count) is int for count in value.values())
    )
    manifest.need(well_formed, f"{path}: tokens", "a number for each file", value)
    for name, count in value.items():
        stored, remainder = divmod(files[name][0], item.itemsize)
        manifest.need(
            count == stored and not remainder,
            f"{path}: tokens: {name}",
            f"the {stored} tokens of its file",
            count,
        )
    return value


def _cut(pieces: Iterable[Tokens], size: int) -> Iterator[np.ndarray]:
    """Joins the pieces, and yields arrays of `size` tokens. The last array may be shorter."""
    waiting, count = [], 0  # the pieces that are not yielded yet, and the number of their tokens
    for piece in pieces:
        waiting.append(np.array(piece))  # a copy, since a reader may fill one buffer again
        count += len(piece)
        if count >= size:
            joined = np.concatenate(waiting)
            yield from (joined[at : at + size] for at in range(0, count - size + 1, size))
            waiting, count = [joined[count - count % size :]], count % size
    if count:
        yield np.concatenate(waiting)
