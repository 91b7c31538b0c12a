"""Many files read as one array: the same batches; and what is wrong with a file is said before the
first step, or in a line."""

import copy
import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_manifests import PATHS, SPECIAL, seal, special, unseal

from parallax import data
from parallax.data import manifest, shards, token_file, tokens

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
    assert all(isinstance(part, token_file.File) for part in found.parts)


def test_a_piece_may_be_a_buffer_that_is_filled_again(tmp_path):
    def pieces():
        buffer = np.empty(4, np.int64)
        for k in range(4):
            buffer[:] = k
            yield buffer

    shards.write(tmp_path, pieces(), vocabulary=300, shard_tokens=8)
    found = shards.read(tmp_path, vocabulary=300)
    np.testing.assert_array_equal(found[np.arange(16)], np.repeat(np.arange(4), 4))


def test_files_are_read_in_the_order_of_their_numbers(tmp_path, monkeypatch):
    """As text, 100000.bin is before 10001.bin."""
    numbered = lambda cut: zip((10_000, 10_001, 100_000), cut, strict=True)
    monkeypatch.setattr(shards, "enumerate", numbered, raising=False)
    shards.write(tmp_path, [TOKENS[:30]], vocabulary=300, shard_tokens=10)
    found = shards.read(tmp_path, vocabulary=300)
    np.testing.assert_array_equal(found[np.arange(30)], TOKENS[:30])


@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 10**6),
    rows=st.tuples(st.integers(0, 7), st.integers(1, 8)),
)
def test_batches_are_those_of_one_array(folder, seed, step, rows):
    assume(rows[0] < rows[1])
    given_ = {"seed": seed, "step": step, "size": 8, "length": 12, "rows": slice(*rows)}
    found = data.batch(shards.read(folder, vocabulary=300), **given_)
    np.testing.assert_array_equal(found, data.batch(TOKENS, **given_))


def test_places_outside_are_refused(folder):
    found = shards.read(folder, vocabulary=300)
    for places in ([0, 1000], [-1, 3]):
        with pytest.raises(IndexError, match=r"the tokens 0 to 999; got indices from -?\d+ to \d+"):
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
        ("short", r"00003\.bin: needed a file of 300 bytes, found 298 bytes"),
        ("bit", r"00003\.bin: needed bytes with the hash \w+\.\.\., found other bytes"),
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


@pytest.mark.parametrize("kind", ["uint8", "int16", "uint64"])
def test_places_may_be_of_any_integer_type(folder, kind):
    places = np.array([120, 0, 1, 0], kind)
    np.testing.assert_array_equal(shards.read(folder, vocabulary=300)[places], TOKENS[places])


@pytest.mark.parametrize(("rank", "processes"), [(1, 1), (3, 3), (-1, 2), (0, 0)])
def test_ranks_are_counted_from_0(folder, rank, processes):
    """Ranks from 1 on would never check the first shard."""
    with pytest.raises(
        ValueError, match=rf"rank from 0 to processes - 1; got rank={rank} and .*={processes}\."
    ):
        shards.read(folder, vocabulary=300, rank=rank, processes=processes)


def test_mistakes_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="a vocabulary of 256; these are of a vocabulary of 300"):
        shards.read(folder, vocabulary=256)
    with pytest.raises(ValueError, match="holds shards already"):
        shards.write(folder, [TOKENS], vocabulary=300)
    with pytest.raises(ValueError, match="shard_tokens of 1 or more; got 0"):
        shards.write(tmp_path / "a", [TOKENS], vocabulary=300, shard_tokens=0)
    with pytest.raises(ValueError, match="needs one token or more"):
        shards.write(tmp_path / "b", [], vocabulary=300)
    with pytest.raises(ValueError, match="needed tokens from 0 to 99"):
        shards.write(tmp_path / "c", [TOKENS], vocabulary=100)
    with pytest.raises(manifest.Damaged, match="needed a manifest, found no file"):
        shards.read(tmp_path / "c", vocabulary=100)


# What a manifest may say


@pytest.fixture
def own(tmp_path):
    shards.write(tmp_path / "own", [TOKENS], vocabulary=300, shard_tokens=150)
    return tmp_path / "own"


def text(folder):
    path = folder / "text.bin"
    data.write(path, TOKENS, vocabulary=300)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format": 4},
            "json: it is of format 4, and this program reads format 3. Use the version of the "
            "package that wrote this file",
        ),
        ({"format": "2"}, "needed the number of a format, got '2'"),
        ({"format": 1}, "json: it is of format 1, and this program reads format 3"),
        ({"format": None}, "needed the number of a format, got None"),
        ({"format": True}, "needed the number of a format, got True"),
        ({"dtype": "uint32"}, "dtype: needed uint16, as vocabulary 300 asks, got 'uint32'"),
        ({"dtype": None}, "dtype: needed uint16, as vocabulary 300 asks, got None"),
    ],
)
def test_another_format_and_another_type_are_refused(own, tmp_path, changes, message):
    path = text(tmp_path)
    files = (
        (own / "manifest.json", lambda: shards.read(own, vocabulary=300)),
        (tokens.record_of(path), lambda: data.read(path, vocabulary=300)),
    )
    for record, read in files:
        manifest.write(record, manifest.read(record) | changes)
        with pytest.raises(ValueError, match=message):
            read()


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_leads_out_is_refused(own, name):
    record = unseal(own / "manifest.json")
    for entry in ("files", "tokens"):
        record[entry][name] = record[entry].pop("00000.bin")
    seal(own / "manifest.json", record)
    with pytest.raises(
        manifest.Damaged,
        match=r"files: needed names of files inside the folder|other: needed a file of 300 ",
    ):
        shards.read(own, vocabulary=300)


def test_a_link_that_leads_out_is_refused(own, tmp_path):
    (own / "00001.bin").rename(tmp_path / "outside")
    (own / "00001.bin").symlink_to(tmp_path / "outside")
    with pytest.raises(
        manifest.Damaged,
        match=r"00001\.bin: needed a file inside the folder, found a link that leads out of the "
        r"folder",
    ):
        shards.read(own, vocabulary=300)


def test_four_bytes_a_token_declared_as_two_are_refused(tmp_path):
    """Sizes and hashes may be right, and all halves below the vocabulary."""
    content = TOKENS.astype("<u4").tobytes()
    message = (
        "needed tokens of 2 bytes .vocabulary 300., found that every second number is at most 0"
    )
    (tmp_path / "text.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.read(tmp_path / "text.bin", vocabulary=300)
    np.testing.assert_array_equal(data.read(tmp_path / "text.bin", vocabulary=70_000), TOKENS)
    zeros = np.stack([TOKENS, 0 * TOKENS], 1).reshape(-1)  # a text like that
    data.write(tmp_path / "text.bin", zeros, vocabulary=300)
    np.testing.assert_array_equal(data.read(tmp_path / "text.bin", vocabulary=300), zeros)


def test_what_is_no_token_is_refused_where_the_hash_is_right(own):
    content = TOKENS[:150].astype("<u2")
    content[77] = 300
    (own / "00000.bin").write_bytes(content.tobytes())
    record = unseal(own / "manifest.json")
    record["files"] |= manifest.hashes(own, ["00000.bin"])
    seal(own / "manifest.json", record)
    with pytest.raises(
        ValueError, match=r"00000\.bin: needed tokens from 0 to 299, got 300 at index 77"
    ):
        shards.read(own, vocabulary=300)


def test_an_index_is_that_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "CHUNK", 64)
    content = TOKENS.astype("<u2")
    content[777] = 65_535
    (tmp_path / "text.bin").write_bytes(content.tobytes())
    with pytest.raises(ValueError, match="needed tokens from 0 to 299, got 65535 at index 777"):
        data.read(tmp_path / "text.bin", vocabulary=300)


# What is read, and how often


def test_a_file_that_is_cut_short_later_gives_a_line(own, tmp_path):
    """Mapped, it ended the process by SIGBUS."""
    path = text(tmp_path)
    found, of_text = shards.read(own, vocabulary=300), data.read(path, vocabulary=300)
    for each in (path, own / "00004.bin"):
        os.truncate(each, 0)
    np.testing.assert_array_equal(found[np.arange(600)], TOKENS[:600])
    for source, name, size in ((found, "00004", 300), (of_text, "text", 2000)):
        line = (
            rf"{name}\.bin: the file was cut short or written to after this run first opened it; "
            rf"it had {size} bytes then, and has 0 bytes now\."
        )
        with pytest.raises(manifest.Damaged, match=line):
            source[np.array([599, 600, 601][1:] if source is found else [599, 600])]


def test_a_file_that_is_written_over_later_gives_a_line(own):
    """In the same size, it gave numbers that were never checked."""
    found = shards.read(own, vocabulary=300)
    with (own / "00001.bin").open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(
        manifest.Damaged,
        match=r"00001\.bin: the file was cut short or written to after this run first opened it",
    ):
        found[np.array([150])]
    np.testing.assert_array_equal(found[np.arange(150)], TOKENS[:150])


def test_more_shards_than_a_process_may_open_are_read(tmp_path):
    """In a process of its own, since the limit is the process's."""
    shards.write(tmp_path / "many", [TOKENS[:300]], vocabulary=300, shard_tokens=1)
    program = f"""
import resource
import numpy as np
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from parallax.data import shards
found = shards.read({str(tmp_path / "many")!r}, vocabulary=300)
print(int(found[np.arange(300)].sum()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == f"{TOKENS[:300].sum()}\n", done.stderr


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["manifest.json", "00001.bin"])
def test_only_regular_files_are_read_up_to_a_size(own, name, kind):
    (own / name).unlink(missing_ok=True)
    special(kind, own / name)
    with pytest.raises(manifest.Damaged, match=rf"{name}: needed "):
        shards.read(own, vocabulary=300)


def test_a_manifest_that_would_not_be_read_again_is_not_written(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"a manifest has 33554398 bytes at most; got 3355\d{4}\. Store less in it\.",
    ):
        manifest.write(tmp_path / "manifest.json", {"note": "x" * (32 << 20)})
    line = {"note": "x" * ((32 << 20) - manifest.SEAL - len('{"note": ""}'))}
    manifest.write(tmp_path / "manifest.json", line)
    assert manifest.read(tmp_path / "manifest.json") == line


def test_a_name_that_is_too_long_is_refused(own):
    record = unseal(own / "manifest.json")
    for entries in (record["files"], record["tokens"]):
        entries["x" * 300 + ".bin"] = entries.pop("00004.bin")
    seal(own / "manifest.json", record)
    with pytest.raises(
        manifest.Damaged, match=r"x{300}\.bin: needed a file of 300 bytes, found none"
    ):
        shards.read(own, vocabulary=300)


@given(st.integers(65_537, 4_000_000), st.integers(16, 400), st.integers(0, 2**32))
def test_four_bytes_a_token_without_a_record_are_refused(tmp_path_factory, vocabulary, count, seed):
    """Where the vocabulary asked for has room for every half too."""
    path = tmp_path_factory.mktemp("text") / "text.bin"
    path.write_bytes(
        np.random.default_rng(seed).integers(0, vocabulary, count).astype("<u4").tobytes()
    )
    with pytest.raises(
        ValueError,
        match=r"needed tokens of 2 bytes .vocabulary 65536., found that every second number is at "
        r"most \d+",
    ):
        data.read(path, vocabulary=65_536)


@given(st.integers(2, 60_000), st.integers(16, 400), st.integers(0, 2**32))
def test_two_bytes_a_token_without_a_record_are_read(tmp_path_factory, vocabulary, count, seed):
    path = tmp_path_factory.mktemp("text") / "text.bin"
    text = np.random.default_rng(seed).integers(0, vocabulary, 2 * count).astype("<u2")
    text[1] = 1
    path.write_bytes(text.tobytes())
    np.testing.assert_array_equal(data.read(path, vocabulary=vocabulary), text)


def test_an_error_of_the_disk_names_the_file(own, monkeypatch):
    found = shards.read(own, vocabulary=300)

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(
        OSError, match=r"00001\.bin: the tokens cannot be read: Input/output error\."
    ) as refused:
        found[np.array([200])]
    assert refused.value.errno == errno.EIO


@pytest.fixture
def reads(monkeypatch):
    """The files that were read, as they are."""
    read, found = os.preadv, []

    def preadv(descriptor, *rest):
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        return read(descriptor, *rest)

    monkeypatch.setattr(os, "preadv", preadv)
    return found


def test_bytes_are_read_once_or_not_at_all(own, tmp_path, reads):
    path = text(tmp_path)
    both = lambda **options: (
        shards.read(own, vocabulary=300, **options),
        data.read(path, vocabulary=300, **options),
    )
    both()
    assert len(reads) == 8
    reads.clear()
    both(check_bytes=False)
    assert not reads
    for changed in (path, own / "00005.bin"):
        changed.write_bytes(changed.read_bytes()[::-1])
        message = rf"{changed.name}: needed bytes with the hash \w+\.\.\., found other bytes"
        with pytest.raises(manifest.Damaged, match=message):
            both()
        both(check_bytes=False)


@given(
    places=st.lists(st.integers(0, 99), max_size=12),
    runs=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 10)), max_size=4),
    cut=st.tuples(st.integers(0, 50), st.integers(51, 100)),
)
@settings(max_examples=60)
def test_a_file_is_indexed_as_an_array(tmp_path_factory, places, runs, cut):
    path = tmp_path_factory.mktemp("file") / "text.bin"
    data.write(path, TOKENS[:100], vocabulary=300)
    file, array = data.read(path, vocabulary=300), TOKENS[:100]
    asked = np.array(
        [*places, *(place for start, size in runs for place in range(start, start + size))], int
    )
    np.testing.assert_array_equal(file[asked], array[asked])
    np.testing.assert_array_equal(
        file[np.stack([asked, asked[::-1]])], array[np.stack([asked, asked[::-1]])]
    )
    start, stop = cut
    part = file[start:stop]
    assert isinstance(part, token_file.File)
    np.testing.assert_array_equal(part, array[start:stop])
    np.testing.assert_array_equal(part[3:][:-2], array[start:stop][3:][:-2])
    inside = asked[asked < stop - start]
    np.testing.assert_array_equal(part[inside], array[start:stop][inside])
    if len(part) < 100:
        with pytest.raises(
            IndexError, match=rf"the text has the tokens 0 to {len(part) - 1}; got "
        ):
            part[np.array([0, len(part)])]


def test_a_file_is_split_counted_and_copied_as_an_array_is(tmp_path):
    file = data.read(text(tmp_path), vocabulary=300)
    _, held_out = data.split(file, 0.1)
    for given_, wanted in zip(
        data.held_out_batches(held_out, size=2, length=8),
        data.held_out_batches(TOKENS[900:], size=2, length=8),
        strict=True,
    ):
        np.testing.assert_array_equal(given_, wanted)
    for other in (pickle.loads(pickle.dumps(held_out)), copy.deepcopy(held_out)):
        np.testing.assert_array_equal(other, TOKENS[900:])
    for wrong in (slice(0, 9, 2), np.array([0.5]), np.ones(1000, bool)):
        with pytest.raises(
            IndexError,
            match=r"needed a slice of step 1, got 2|needed whole numbers as places, got ",
        ):
            file[wrong]
