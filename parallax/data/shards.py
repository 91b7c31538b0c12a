"""A text too large for one file: token files with a manifest, read as one long array, of which a batch reads its windows.

    folder/manifest.json    the number of its format (`tokens`), the vocabulary, the type of a token; for each shard its tokens,
                            bytes and sha256
    folder/00000.bin ...    tokens as `data.write` stores them, with nothing else, so the format's number is in the manifest alone

A shard that is missing, cut short or damaged is refused by name before the first step, not met at step 40,000.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import SupportsIndex

import numpy as np
from jaxtyping import Integer

from parallax import argument_checks
from parallax.data import manifest
from parallax.data.token_file import File
from parallax.data.tokens import FORMAT, Tokens, check_dtype, opened, store, stored_as, verify

MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Shards:
    """Tokens in several files: `len(shards)`, and `shards[places]` for places as one array of all.

    It is what `data.batch` takes, and gives the batches that the tokens in one array would. Raises `IndexError` for a place
    that they do not have, and as `token_file.File` does.

    Attributes:
        parts: the tokens of each file, in order.
        vocabulary: all tokens are below this one.
    """

    parts: tuple[File, ...]
    vocabulary: int

    @property
    def starts(self) -> np.ndarray:
        """The place of each part's first token, and the end: `[parts + 1]` whole numbers."""
        return np.cumsum([0, *map(len, self.parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, places: Integer[np.ndarray, "..."]) -> Integer[np.ndarray, "..."]:
        if places.size and not 0 <= places.min() <= places.max() < len(self):
            raise IndexError(
                f"shards hold the places 0 to {len(self) - 1}; got {places.min()} to {places.max()}."
            )
        found = np.empty(places.shape, self.parts[0].dtype)
        of = np.searchsorted(self.starts, places, side="right") - 1
        for part in np.unique(of):
            inside = of == part
            found[inside] = self.parts[part][places[inside] - self.starts[part]]
        return found


def write(
    folder: str | Path,
    pieces: Iterable[Tokens],
    *,
    vocabulary: SupportsIndex,
    shard_tokens: SupportsIndex = 1 << 27,
) -> None:
    """Store the `pieces` of a text, one after another, in files of `shard_tokens` tokens each (the last has what is left).

    Holds one shard and one piece in memory. The manifest comes last: a folder whose writing was cut short is refused.

    Raises `ValueError` for tokens outside the vocabulary, no tokens at all, or a folder that has a manifest already.
    """
    folder = Path(folder)
    vocabulary, each = argument_checks.whole_numbers(
        "shards.write", vocabulary=vocabulary, shard_tokens=shard_tokens
    )
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder} holds shards already. Choose another folder, or remove it.")
    if each < 1:
        raise ValueError(f"shards.write needs shard_tokens of 1 or more; got {each}.")
    folder.mkdir(parents=True, exist_ok=True)
    tokens, files = {}, {}
    for number, shard in enumerate(_cut(pieces, each)):
        name = f"{number:05d}.bin"
        files[name] = store(folder / name, shard, vocabulary)
        tokens[name] = len(shard)
    if not tokens:
        raise ValueError(
            f"shards.write needs a token or more for {folder}, got none. Bring more text."
        )
    record = {
        "format": FORMAT,
        "vocabulary": vocabulary,
        "dtype": stored_as(vocabulary).name,
        "tokens": tokens,
        "files": files,
    }
    manifest.write(folder / MANIFEST, record)


def read(
    folder: str | Path,
    *,
    vocabulary: SupportsIndex,
    rank: SupportsIndex = 0,
    processes: SupportsIndex = 1,
) -> Shards:
    """The shards that `write` stored in `folder`, checked: all sizes, and the bytes of every `processes`-th one from `rank` on.

    So the processes of a job together check every byte once before step 0 (2 GB/s a core), and one alone checks all. What was
    found good is remembered beside each shard, as `tokens.verify` says.

    Raises:
        manifest.Damaged: a shard, or the manifest, is missing or is not what was written; the message names the file.
        ValueError: the shards were made for another vocabulary, or by a later program, or hold what is no token.
    """
    vocabulary, rank, processes = argument_checks.whole_numbers(
        "shards.read", vocabulary=vocabulary, rank=rank, processes=processes
    )
    folder = Path(folder)
    place = folder / MANIFEST
    record = manifest.read(place)
    stated = manifest.number_of_format(record, place, FORMAT) > 1
    for name in ("vocabulary", "tokens", "files"):
        manifest.need(name in record, place, f"an entry {name}", ", ".join(record))
    if record["vocabulary"] != vocabulary:
        raise ValueError(
            f"{folder}: needed tokens of a vocabulary of {vocabulary}, the shards were made for {record['vocabulary']}. "
            "Give the tokenizer that made them, or make them again."
        )
    if stated:
        check_dtype(record, place, vocabulary)
    files, tokens = manifest.files(place, record["files"]), record["tokens"]
    sound = (
        isinstance(tokens, dict)
        and tokens.keys() == files.keys()
        and all(type(count) is int for count in tokens.values())
    )
    manifest.need(sound, f"{place}: tokens", "a number for each file", tokens)
    item = stored_as(vocabulary)
    for name, count in tokens.items():
        wanted, rest = divmod(files[name][0], item.itemsize)
        manifest.need(
            count == wanted and not rest,
            f"{place}: tokens: {name}",
            f"the {wanted} tokens of its file",
            count,
        )
    manifest.check_sizes(folder, files)
    parts = tuple(opened(folder / name, item, count) for name, count in tokens.items())
    sha256 = (files[name][1] for name in tokens)
    mine = itertools.islice(zip(parts, sha256, strict=True), rank, None, processes)
    with ThreadPoolExecutor(manifest.THREADS) as pool:
        list(pool.map(lambda of: verify(of[0], vocabulary, sha256=of[1], stated=stated), mine))
    return Shards(parts, vocabulary)


def _cut(pieces: Iterable[Tokens], size: int) -> Iterator[np.ndarray]:
    held, count = [], 0
    for piece in pieces:
        held.append(piece)
        count += len(piece)
        if count >= size:
            whole = np.concatenate(held)
            yield from (whole[at : at + size] for at in range(0, count - size + 1, size))
            held, count = [whole[count - count % size :]], count % size
    if count:
        yield np.concatenate(held)
