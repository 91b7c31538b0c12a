"""Text in, the same batches out: for every seed and step, on any number of processes."""

import contextlib
import errno
import math
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from parallax import data
from parallax.data import batches, manifest, token_file

seeds = st.integers(0, 2**64 - 1)


# Token files


@pytest.mark.parametrize(
    ("vocabulary", "item"), [(256, 2), (50_257, 2), (65_536, 2), (65_537, 4), (200_000, 4)]
)
def test_a_file_gives_back_what_was_written(tmp_path, vocabulary, item):
    tokens = np.array([0, vocabulary - 1, 7, 7], np.int64)
    data.write(tmp_path / "text.bin", tokens, vocabulary=vocabulary)
    assert (tmp_path / "text.bin").read_bytes() == b"".join(
        int(token).to_bytes(item, "little") for token in tokens
    )
    back = data.read(tmp_path / "text.bin", vocabulary=vocabulary)
    assert isinstance(back, token_file.File)
    np.testing.assert_array_equal(back, tokens)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int64"])
def test_places_that_go_down_are_read_one_by_one(tmp_path, kind):
    """In an unsigned type, 0 - 255 is 1."""
    data.write(tmp_path / "text.bin", np.arange(65_536), vocabulary=65_536)
    back = data.read(tmp_path / "text.bin", vocabulary=65_536)
    last = min(65_535, np.iinfo(kind).max)
    np.testing.assert_array_equal(back[np.array([last, 0, 1, 0], kind)], [last, 0, 1, 0])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "text.bin"
    data.write(path, np.arange(5), vocabulary=5)

    def full_disk(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        data.write(path, np.zeros(9, int), vocabulary=5)
    assert sorted(os.listdir(tmp_path)) == ["text.bin", "text.bin.json"]
    np.testing.assert_array_equal(data.read(path, vocabulary=5), np.arange(5))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([1, 5, 10]), r"text\.bin: needed tokens from 0 to 9, got 10 at index 2"),
        (np.array([1, -5, 10]), r"text\.bin: needed tokens from 0 to 9, got -5 at index 1"),
        (
            np.array([], int),
            r"text\.bin: needed a one-dimensional array of one .* numbers, got int64\[0\]",
        ),
    ],
)
def test_write_refuses(tmp_path, tokens, message):
    with pytest.raises(ValueError, match=message):
        data.write(tmp_path / "text.bin", tokens, vocabulary=10)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("content", "vocabulary", "message"),
    [
        (b"", 256, "one or more whole tokens, each of 2 bytes .*the file has 0 bytes"),
        (b"123", 256, r"whole tokens, each of 2 bytes \(vocabulary 256\); the file has 3 bytes"),
        (b"123456", 70_000, "one or more whole tokens, each of 4 bytes .* has 6 bytes"),
        (b"\x05\x00\x00\x01", 256, "needed tokens from 0 to 255, got 256 at index 1"),
    ],
)
def test_read_refuses(tmp_path, content, vocabulary, message):
    (tmp_path / "text.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.read(tmp_path / "text.bin", vocabulary=vocabulary)


def test_read_names_the_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.bin: needed a token file, found no file"):
        data.read(tmp_path / "absent.bin", vocabulary=256)


@pytest.mark.parametrize(("written", "read"), [(100_000, 50_257), (50_257, 100_000), (256, 50_257)])
def test_a_file_is_read_with_the_vocabulary_that_it_was_written_with(tmp_path, written, read):
    path = tmp_path / "text.bin"
    data.write(path, np.arange(200), vocabulary=written)
    with pytest.raises(
        ValueError,
        match=rf"needed tokens of a vocabulary of {read}; these are of a vocabulary of {written}\.",
    ):
        data.read(path, vocabulary=read)
    content, record = path.read_bytes(), tmp_path / "text.bin.json"
    path.write_bytes(content[:-4])
    with pytest.raises(
        ValueError,
        match=rf"text\.bin: needed a file of {len(content)} bytes \(as text\.bin\.json states\)",
    ):
        data.read(path, vocabulary=written)
    path.write_bytes(content)
    whole = record.read_text()
    record.write_text(whole.replace(str(written), str(read)))
    with pytest.raises(manifest.Damaged, match=r"text\.bin\.json: the manifest is damaged"):
        data.read(path, vocabulary=read)
    manifest.write(record, {"format": 3, "vocabulary": str(written), "bytes": len(content)})
    with pytest.raises(manifest.Damaged, match=r"json: vocabulary: needed a whole number, got '"):
        data.read(path, vocabulary=written)
    record.unlink()
    np.testing.assert_array_equal(data.read(path, vocabulary=written), np.arange(200))


def test_a_write_cut_short_leaves_no_record_of_another_vocabulary(tmp_path, monkeypatch):
    path, record = tmp_path / "text.bin", tmp_path / "text.bin.json"
    texts = {256: np.arange(8), 100_000: np.arange(16)[::-1] * 4000}
    calls = []

    def counted(real, last):
        def call(*given, **options):
            calls.append(real)
            if len(calls) == last:
                raise KeyboardInterrupt
            return real(*given, **options)

        return call

    for last in range(1, 20):
        data.write(path, texts[256], vocabulary=256)
        calls.clear()
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            for name in ("fsync", "replace", "unlink"):
                patched.setattr(os, name, counted(getattr(os, name), last))
            data.write(path, texts[100_000], vocabulary=100_000)
        if record.exists():
            vocabulary = manifest.read(record)["vocabulary"]
            np.testing.assert_array_equal(data.read(path, vocabulary=vocabulary), texts[vocabulary])
    assert last > len(calls) > 5


@pytest.mark.parametrize("vocabulary", [2**40, 2**31 + 1, 0, -3])
def test_a_vocabulary_that_there_cannot_be_is_refused(tmp_path, vocabulary):
    path = tmp_path / "text.bin"
    path.write_bytes(bytes(8))
    with pytest.raises(ValueError, match=r"needs a vocabulary of 1 to 2147483648 tokens, got "):
        data.write(tmp_path / "other.bin", np.array([1, 2]), vocabulary=vocabulary)
    with pytest.raises(ValueError, match=r"needs a vocabulary of 1 to 2147483648 tokens, got "):
        data.read(path, vocabulary=vocabulary)
    assert os.listdir(tmp_path) == ["text.bin"]


def full(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    for write, name in (
        (data.write, "text.bin"),
        (lambda path, tokens, **given: data.shards.write(path, [tokens], **given), "s"),
    ):
        with pytest.raises(
            OSError, match=rf"{name}.*: the tokens were not written: No space left .* Make room"
        ) as refused:
            write(tmp_path / name, np.arange(5), vocabulary=5)
        assert refused.value.errno == errno.ENOSPC


def test_a_full_disk_is_said_of_the_record_alone_where_the_tokens_fit(tmp_path, monkeypatch):
    path, syncs = tmp_path / "text.bin", iter([os.fsync, full])  # of the tokens, of the record

    def sync(file):
        next(syncs)(file)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(
        OSError,
        match=r"text\.bin\.json: the tokens are in text\.bin, but their record was not written: "
        r"No space left .* Make room .* write the tokens again",
    ) as refused:
        data.write(path, np.arange(5), vocabulary=5)
    assert refused.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["text.bin"]
    np.testing.assert_array_equal(data.read(path, vocabulary=5)[:5], np.arange(5))


# Split


@given(n=st.integers(1, 2000), held_out=st.floats(0.001, 0.999))
def test_split_holds_out_the_end(n, held_out):
    assume(int(n * held_out) >= 1)
    train, last = data.split(np.arange(n), held_out)
    np.testing.assert_array_equal(np.concatenate([train, last]), np.arange(n))
    assert len(last) == int(n * held_out)


@pytest.mark.parametrize(
    ("n", "held_out"), [(100, 0.0), (100, 1.0), (100, -0.1), (100, math.nan), (9, 0.1), (0, 0.5)]
)
def test_split_refuses_an_empty_side(n, held_out):
    better = "a larger fraction, or a longer text" if 0 < held_out < 1 else "a number such as 0.1"
    with pytest.raises(
        ValueError,
        match=f"leaves tokens for training and for the held-out part, got {held_out} of {n} "
        rf"tokens\. Use {better}\.$",
    ):
        data.split(np.arange(n), held_out)


# Batches. The text is 0, 1, 2, ...: a token is its own place.


@given(
    n=st.integers(2, 400),
    length=st.integers(1, 40),
    size=st.integers(1, 9),
    step=st.integers(0, 10**9),
    seed=seeds,
)
@example(n=2, length=1, size=1, step=0, seed=0)
def test_a_sequence_is_a_window_of_the_text(n, length, size, step, seed):
    assume(n > length)
    got = data.batch(np.arange(n, dtype=np.uint16), seed=seed, step=step, size=size, length=length)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, got[:, :1] + np.arange(length + 1))
    assert got.min() >= 0
    assert got.max() < n


@given(n=st.integers(2, 400), length=st.integers(1, 40), epoch=st.integers(0, 10**6), seed=seeds)
def test_an_epoch_deals_every_window_once(n, length, epoch, seed):
    assume(n > length)
    tokens, windows = np.arange(n), max(1, n // length - 1)
    starts = data.batch(tokens, seed=seed, step=epoch, size=windows, length=length)[:, 0]
    np.testing.assert_array_equal(np.sort(starts), starts.min() + length * np.arange(windows))
    assert (
        n - windows * length - 1 < 2 * length
    )  # less than two windows' tokens are left out of an epoch


@given(
    n=st.integers(20, 300),
    length=st.integers(1, 19),
    step=st.integers(0, 1000),
    seed=seeds,
    processes=st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_processes_that_read_their_rows_make_the_global_batch(n, length, step, seed, processes):
    tokens, size, each = np.arange(n), 12, 12 // processes
    whole = data.batch(tokens, seed=seed, step=step, size=size, length=length)
    parts = [
        data.batch(
            tokens,
            seed=seed,
            step=step,
            size=size,
            length=length,
            rows=slice(r * each, (r + 1) * each),
        )
        for r in range(processes)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    strided = data.batch(
        tokens, seed=seed, step=step, size=size, length=length, rows=slice(1, None, 5)
    )
    np.testing.assert_array_equal(strided, whole[1::5])


@pytest.mark.sweep(3, "wholes")
@given(steps=st.lists(st.integers(0, 60), min_size=2, max_size=8), seed=seeds)
def test_a_batch_forgets_which_batches_came_before(steps, seed):
    def at(step):
        return data.batch(np.arange(100), seed=seed, step=step, size=3, length=7)

    in_order = {step: at(step) for step in range(61)}
    for step in steps:
        np.testing.assert_array_equal(at(step), in_order[step])
    for step in reversed(steps):
        np.testing.assert_array_equal(at(step), in_order[step])


def test_a_batch_size_regroups_the_same_sequences():
    def run(size, steps):
        return np.concatenate(
            [data.batch(np.arange(100), seed=5, step=s, size=size, length=7) for s in range(steps)]
        )

    np.testing.assert_array_equal(run(2, 30), run(6, 10))
    np.testing.assert_array_equal(run(2, 30), run(60, 1))


def test_seeds_and_epochs_differ_and_offsets_reach_both_ends():
    tokens = np.arange(1003)
    epochs = [data.batch(tokens, seed=1, step=e, size=99, length=10)[:, 0] for e in range(200)]
    assert len({tuple(starts) for starts in epochs}) == 200
    assert {int(starts.min()) for starts in epochs} == set(
        range(13)
    )  # spare = 1003 - 1 - 99 * 10 = 12
    other = data.batch(tokens, seed=2, step=0, size=99, length=10)[:, 0]
    assert tuple(other) not in {tuple(starts) for starts in epochs}


@given(count=st.integers(1, 5000), keys=st.lists(seeds, min_size=8, max_size=8))
@example(count=1, keys=[0] * 8)
@example(count=4, keys=[0] * 8)
@example(count=4097, keys=[1] * 8)
def test_any_count_is_permuted(count, keys):
    numbers = batches.permuted(np.arange(count), count, [np.uint64(key) for key in keys])
    np.testing.assert_array_equal(np.sort(numbers), np.arange(count))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("count", [2, 3, 5, 8, 16, 17])
def test_every_window_is_as_likely_at_every_place(count):
    """Over 4,000 epochs, each window at the first and at the last place, within five standard
    deviations."""
    tokens, epochs = np.arange(count + 1), 4000
    orders = [
        data.batch(tokens, seed=3, step=epoch, size=count, length=1)[:, 0]
        for epoch in range(epochs)
    ]
    orders = np.array(orders) - np.min(orders, axis=1, keepdims=True)
    expected, deviation = epochs / count, math.sqrt(epochs / count * (1 - 1 / count))
    for place in (0, count - 1):
        counts = np.bincount(orders[:, place], minlength=count)
        assert np.abs(counts - expected).max() < 5 * deviation
    pairs = np.bincount(orders[:, 0] * count + orders[:, 1], minlength=count**2)
    expected = epochs / (count * (count - 1))
    assert pairs.reshape(count, count)[~np.eye(count, dtype=bool)].min() > expected - 6 * math.sqrt(
        expected
    )


class Endless:
    """A text of 1e9 windows of 1,024 tokens: a token is its place, modulo a vocabulary."""

    def __len__(self):
        return 1024 * 10**9

    def __getitem__(self, places):
        return places % 50_000


@pytest.mark.parametrize("size", [64, 512])
def test_a_batch_of_a_billion_windows_needs_no_memory_for_them(size):
    options = {"seed": 1, "size": size, "length": 1023}
    data.batch(Endless(), step=0, **options)
    tracemalloc.start()
    try:
        first, later = (data.batch(Endless(), step=step, **options) for step in (0, 12_345_678))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"{size} windows of 1,024 tokens: {most / 1e6:.1f} MB")
    assert most < 10e6
    assert len({*first[:, 0].tolist(), *later[:, 0].tolist()}) > 100


def test_the_deal_is_the_same_on_every_machine():
    """Written down once: a change here changes every run that was begun."""
    starts = data.batch(np.arange(100), seed=42, step=3, size=5, length=8)[:, 0]
    assert starts.tolist() == [58, 50, 82, 66, 42]


def test_tokens_may_lie_in_a_file(tmp_path):
    tokens = np.arange(500)
    data.write(tmp_path / "text.bin", tokens, vocabulary=500)
    file = data.read(tmp_path / "text.bin", vocabulary=500)
    from_file = data.batch(file, seed=0, step=2, size=4, length=16)
    assert type(from_file) is np.ndarray
    np.testing.assert_array_equal(from_file, data.batch(tokens, seed=0, step=2, size=4, length=16))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": -1}, "0 <= seed < .*got seed -1"),
        ({"seed": 2**64}, "0 <= seed < .*got seed 18446744073709551616"),
        ({"step": -1}, "got .*step -1"),
        ({"size": 0}, "got .*size 0"),
        ({"length": 0}, "got .*length 0"),
        (
            {"rows": slice(0, 5)},
            r"rows must select at least one of the 4 sequences and stop at 4 or below; "
            r"got slice\(0, 5, None\).* within 0\.\.4",
        ),
        ({"rows": slice(4, None)}, "rows must select at least one of the 4 sequences"),
        (
            {"length": 20},
            r"needs 21 tokens \(the inputs and the token after them\); the text has 20\. .*a "
            r"length up to 19",
        ),
    ],
)
def test_batch_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        data.batch(np.arange(20), **{"seed": 0, "step": 0, "size": 4, "length": 5} | wrong)


@pytest.mark.parametrize("count", [0, 1])
def test_a_text_without_a_window_is_refused_without_a_length_to_choose(count):
    with pytest.raises(ValueError, match=rf"the text has {count}\. Use a longer text\.$"):
        data.batch(np.arange(count), seed=0, step=0, size=4, length=5)


def test_numbers_and_sources_may_be_numpys_or_lists():
    options = {"seed": 5, "step": 7, "size": 4, "length": 5}
    expected = data.batch(np.arange(20), **options)
    for kind in (np.int8, np.uint64, np.int64, np.array):
        found = data.batch(
            list(range(20)), **{name: kind(value) for name, value in options.items()}
        )
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("token", "kind"), [(2**31, np.uint32), (2**63, np.uint64), (-(2**31) - 1, np.int64)]
)
def test_tokens_that_do_not_fit_are_refused(token, kind):
    tokens = np.full(20, token, kind)
    for make in (
        lambda: data.batch(tokens, seed=0, step=0, size=4, length=5),
        lambda: next(data.held_out_batches(tokens, size=2, length=5)),
    ):
        with pytest.raises(
            ValueError,
            match=f"tokens that fit int32, the type in which devices hold tokens; got {token}",
        ):
            make()


def test_marks_of_what_is_ignored_go_through():
    tokens = np.where(np.arange(20) % 3, np.arange(20), -100)
    assert (data.batch(tokens, seed=0, step=0, size=4, length=5) == -100).any()


@given(
    n=st.integers(2, 300),
    size=st.integers(1, 6),
    length=st.integers(1, 20),
    limit=st.none() | st.integers(1, 5),
)
def test_held_out_batches_walk_the_text_in_order(n, size, length, limit):
    assume(n > size * length)
    got = list(
        data.held_out_batches(np.arange(n, dtype=np.uint16), size=size, length=length, limit=limit)
    )
    whole = (n - 1) // (size * length)
    assert len(got) == (whole if limit is None else min(whole, limit))
    assert {(part.shape, part.dtype) for part in got} == {((size, length + 1), np.dtype(np.int32))}
    np.testing.assert_array_equal(
        np.concatenate(got)[:, :-1].ravel(), np.arange(len(got) * size * length)
    )
    np.testing.assert_array_equal(
        np.concatenate(got)[:, 1:].ravel(), 1 + np.arange(len(got) * size * length)
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "got size 0, length 5, limit None"),
        ({"length": 0}, "got size 4, length 0, limit None"),
        ({"limit": 0}, "got size 4, length 5, limit 0"),
        ({}, r"one batch of 4 windows of length 5 needs 21 tokens; the text has 20\. Use a longer"),
    ],
)
def test_held_out_batches_refuses_before_the_first_batch(wrong, message):
    with pytest.raises(ValueError, match=message):
        data.held_out_batches(np.arange(20), **{"size": 4, "length": 5} | wrong)
