"""Many files read as one array: the same batches; and what is wrong with a file is said before the first step."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parallax import data
from parallax.data import manifest, shards

TOKENS = np.random.default_rng(0).integers(0, 300, 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "shards"
    shards.write(folder, np.split(TOKENS, [10, 200, 201, 650]), vocabulary=300, shard_tokens=150)
    return folder


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    size=st.integers(1, 50),
    vocabulary=st.sampled_from([300, 70_000]),
)
@settings(max_examples=40)
def test_any_cut_of_the_text_reads_as_the_text(tmp_path_factory, lengths, size, vocabulary):
    pieces = np.split(TOKENS[: sum(lengths)], np.cumsum(lengths)[:-1])
    folder = tmp_path_factory.mktemp("cut")
    shards.write(folder, iter(pieces), vocabulary=vocabulary, shard_tokens=size)
    found = shards.read(folder, vocabulary=vocabulary)
    assert len(found) == sum(lengths)
    np.testing.assert_array_equal(found[np.arange(len(found))], TOKENS[: sum(lengths)])
    assert [len(part) for part in found.parts[:-1]] == [size] * (len(found.parts) - 1)
    assert all(isinstance(part, np.memmap) for part in found.parts)


@given(seed=st.integers(0, 2**64 - 1), step=st.integers(0, 10**6), rows=st.tuples(st.integers(0, 7), st.integers(1, 8)))
def test_batches_are_those_of_one_array(folder, seed, step, rows):
    assume(rows[0] < rows[1])
    given_ = {"seed": seed, "step": step, "size": 8, "length": 12, "rows": slice(*rows)}
    found = data.batch(shards.read(folder, vocabulary=300), **given_)
    np.testing.assert_array_equal(found, data.batch(TOKENS, **given_))


def test_places_outside_are_refused(folder):
    found = shards.read(folder, vocabulary=300)
    for places in ([0, 1000], [-1, 3]):
        with pytest.raises(IndexError, match=r"the places 0 to 999; got -?\d+ to \d+"):
            found[np.array(places)]
    assert found[np.zeros((0, 3), int)].shape == (0, 3)


def damaged(folder, copy, kind):
    shards.write(copy, [TOKENS], vocabulary=300, shard_tokens=150)
    path = copy / ("manifest.json" if kind == "manifest" else "00003.bin")
    content = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
    elif kind == "short":
        path.write_bytes(content[:-2])
    else:
        content[100] ^= 4
        path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"00003\.bin: needed a file of 300 bytes, found no file"),
        ("short", r"00003\.bin: needed 300 bytes, the file has 298"),
        ("bit", r"00003\.bin: needed sha256 \w+\.\.\., the file has other bytes"),
        ("manifest", r"manifest\.json: the manifest is damaged"),
    ],
)
def test_damage_is_refused_by_name(folder, tmp_path, kind, message):
    damaged(folder, tmp_path / "copy", kind)
    with pytest.raises(manifest.Damaged, match=message):
        shards.read(tmp_path / "copy", vocabulary=300)


def test_processes_check_the_bytes_of_each_shard_once(folder, tmp_path):
    damaged(folder, tmp_path / "copy", "bit")
    refused = []
    for rank in range(3):
        try:
            shards.read(tmp_path / "copy", vocabulary=300, rank=rank, processes=3)
        except manifest.Damaged:
            refused.append(rank)
    assert refused == [0]  # 00003 is the fourth


def test_mistakes_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="a vocabulary of 256, the shards were made for 300"):
        shards.read(folder, vocabulary=256)
    with pytest.raises(ValueError, match="holds shards already"):
        shards.write(folder, [TOKENS], vocabulary=300)
    with pytest.raises(ValueError, match="shard_tokens of 1 or more; got 0"):
        shards.write(tmp_path / "a", [TOKENS], vocabulary=300, shard_tokens=0)
    with pytest.raises(ValueError, match="needs a token or more"):
        shards.write(tmp_path / "b", [], vocabulary=300)
    with pytest.raises(ValueError, match="needed tokens from 0 to 99"):
        shards.write(tmp_path / "c", [TOKENS], vocabulary=100)
    with pytest.raises(manifest.Damaged, match="needed a manifest, found no file"):
        shards.read(tmp_path / "c", vocabulary=100)
