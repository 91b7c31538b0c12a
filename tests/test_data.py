"""Text in, the same batches out: for every seed and step, on any number of processes."""

import builtins
import contextlib
import errno
import hashlib
import math
import os
import runpy
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from parallax import data
from parallax.data import batches, manifest, token_file

EXAMPLES = Path(__file__).parents[1] / "examples" / "data"
TEXT, RANKS = EXAMPLES / "state_of_the_union.txt", EXAMPLES / "gpt2.tiktoken"
TOKENIZERS = {"bytes": data.bytes_tokenizer, "gpt2": lambda: data.gpt2_tokenizer(RANKS)}

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
            r"text\.bin: needed one dim of one or more whole numbers, got int64\[0\]",
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
        (b"", 256, "one or more tokens of 2 bytes .*the file has 0 bytes"),
        (b"123", 256, r"one or more tokens of 2 bytes \(vocabulary 256\), the file has 3 bytes"),
        (b"123456", 70_000, "one or more tokens of 4 bytes .* has 6 bytes"),
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
        match=rf"needed tokens of a vocabulary of {read}, the file was written with {written}\.",
    ):
        data.read(path, vocabulary=read)
    content, record = path.read_bytes(), tmp_path / "text.bin.json"
    path.write_bytes(content[:-4])
    with pytest.raises(
        ValueError,
        match=rf"text\.bin: needed the {len(content)} bytes that text\.bin\.json speaks of",
    ):
        data.read(path, vocabulary=written)
    path.write_bytes(content)
    whole = record.read_text()
    record.write_text(whole.replace(str(written), str(read)))
    with pytest.raises(manifest.Damaged, match=r"text\.bin\.json: the manifest is damaged"):
        data.read(path, vocabulary=read)
    manifest.write(record, {"vocabulary": str(written), "bytes": len(content)})
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
    with pytest.raises(ValueError, match=r"needs a vocabulary from 1 to 2147483648, got "):
        data.write(tmp_path / "other.bin", np.array([1, 2]), vocabulary=vocabulary)
    with pytest.raises(ValueError, match=r"needs a vocabulary from 1 to 2147483648, got "):
        data.read(path, vocabulary=vocabulary)
    assert os.listdir(tmp_path) == ["text.bin"]


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

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
    with pytest.raises(
        ValueError, match=f"leaves tokens on both sides, got {held_out} of {n} tokens"
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


@given(steps=st.lists(st.integers(0, 60), min_size=2, max_size=8), seed=seeds)
def test_a_batch_forgets_which_batches_came_before(steps, seed):
    def at(step):
        return data.batch(np.arange(100), seed=seed, step=step, size=3, length=7)

    in_order = {step: at(step) for step in range(61)}
    for step in steps:
        np.testing.assert_array_equal(at(step), in_order[step])
    batches._deal.cache_clear()
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


def test_the_deal_is_the_same_on_every_machine():
    """Written down once: a change here changes every run that was begun."""
    starts = data.batch(np.arange(100), seed=42, step=3, size=5, length=8)[:, 0]
    assert starts.tolist() == [18, 82, 10, 50, 2]


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
            r"rows must select some of the 4 sequences, got slice\(0, 5, None\).* within 0\.\.4",
        ),
        ({"rows": slice(4, None)}, "rows must select some of the 4 sequences"),
        (
            {"length": 20},
            r"needs 21 tokens \(length 20 and the next one\), the text has 20\. .*a length up to 19",
        ),
    ],
)
def test_batch_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        data.batch(np.arange(20), **{"seed": 0, "step": 0, "size": 4, "length": 5} | wrong)


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
            ValueError, match=f"tokens that fit int32, as devices hold them, got {token}"
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
        ({}, r"one batch of 4 windows of length 5 needs 21 tokens, the text has 20\. Bring"),
    ],
)
def test_held_out_batches_refuses_before_the_first_batch(wrong, message):
    with pytest.raises(ValueError, match=message):
        data.held_out_batches(np.arange(20), **{"size": 4, "length": 5} | wrong)


# Tokenizers


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@given(text=st.text(max_size=60))
@example(text="")
@example(text="naïve — 漢字 🙂\r\n\t  <|endoftext|>")
def test_decode_undoes_encode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text


@given(data_=st.data())
def test_any_tokens_decode(tokenizer, data_):
    ids = data_.draw(st.lists(st.integers(0, tokenizer.vocabulary - 1), max_size=20))
    assert isinstance(tokenizer.decode(ids), str)


@pytest.mark.parametrize("bad", [-1, "vocabulary"])
def test_decode_refuses_what_is_no_token(tokenizer, bad):
    bad = tokenizer.vocabulary if bad == "vocabulary" else bad
    with pytest.raises(
        ValueError,
        match=f"ids to decode: needed tokens from 0 to {tokenizer.vocabulary - 1}, got {bad} at index 1",
    ):
        tokenizer.decode([0, bad])


def test_half_a_pair_of_surrogates_is_refused(tokenizer):
    with pytest.raises(
        ValueError, match=r"half of a pair of surrogates, '.u[0-9a-f]{4}', at character 2\."
    ):
        tokenizer.encode("ab\ud800c")


@pytest.mark.parametrize("blank", [" ", "\n", " \n\t"])
def test_a_million_blanks_are_encoded_or_refused(tokenizer, blank):
    text = "a" + blank * (1_000_000 // len(blank)) + "b"
    if tokenizer.name == "bytes":
        assert tokenizer.decode(tokenizer.encode(text)) == text
        return
    blanks = len(text) - 2
    with pytest.raises(
        ValueError,
        match=rf"cannot encode .*: the longest run, at character 1, has {blanks}\. Shorten",
    ):
        tokenizer.encode(text)


def test_known_tokens():
    gpt2 = data.gpt2_tokenizer(RANKS)
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("We'll  see:\n\n1984!").tolist() == [
        1135,
        1183,
        220,
        766,
        25,
        198,
        198,
        28296,
        0,
    ]
    assert gpt2.decode([50256]) == "<|endoftext|>"
    assert 50256 not in gpt2.encode("<|endoftext|>")
    assert data.bytes_tokenizer().encode("é").tolist() == [0xC3, 0xA9]
    assert data.bytes_tokenizer().decode([0x61, 0xC3]) == "a\ufffd"


def test_a_damaged_vocabulary_is_refused(tmp_path):
    content = bytearray(RANKS.read_bytes())
    content[400_000] ^= 1
    (tmp_path / "gpt2.tiktoken").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"damaged.*needed sha256 306cd27f.*got .*of 835554 bytes.*Copy it again"
    ):
        data.gpt2_tokenizer(tmp_path / "gpt2.tiktoken")


def test_a_missing_vocabulary_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"absent: needed GPT-2's ranks.*examples/data/gpt2\.tiktoken"
    ):
        data.gpt2_tokenizer(tmp_path / "absent")


def test_without_tiktoken_the_message_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "tiktoken":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[examples\]"'):
        data.gpt2_tokenizer(RANKS)


def test_encode_file(tmp_path, tokenizer):
    path, text = tmp_path / "text.txt", "Grüße,\r\nmy fellow citizens"
    path.write_bytes(text.encode())
    np.testing.assert_array_equal(data.encode_file(path, tokenizer), tokenizer.encode(text))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"text\.txt: needed text, the file is empty"),
        (
            "Grüße".encode("latin-1"),
            r"text\.txt: needed UTF-8, got byte 0xfc at offset 2 \(invalid start byte\)",
        ),
        (
            "Grüß".encode()[:-1],
            r"text\.txt: needed UTF-8, got byte 0xc3 at offset 4 \(unexpected end of data\)",
        ),
    ],
)
def test_encode_file_refuses(tmp_path, content, message):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.encode_file(tmp_path / "text.txt", data.bytes_tokenizer())


def test_encode_file_names_the_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt: needed a text file, found no file"):
        data.encode_file(tmp_path / "absent.txt", data.bytes_tokenizer())


# Baselines: the naive versions count in dictionaries, and write the probabilities as the docstrings do.


def chance_alone(train, vocabulary):
    count, distinct = Counter(train), len(set(train))
    return lambda w: (count[w] + distinct / vocabulary) / (len(train) + distinct)


def chance_after(train, vocabulary):
    alone = chance_alone(train, vocabulary)
    together, first = Counter(pairwise(train)), Counter(train[:-1])

    def chance(v, w):
        followers = len({pair for pair in together if pair[0] == v})
        return (
            (together[v, w] + followers * alone(w)) / (first[v] + followers)
            if first[v]
            else alone(w)
        )

    return chance


@st.composite
def texts(draw):
    vocabulary = draw(st.integers(1, 7))
    text = st.lists(st.integers(0, vocabulary - 1), min_size=2, max_size=40)
    return vocabulary, draw(text), draw(text)


@given(texts())
def test_baselines_equal_counting_in_dictionaries(drawn):
    vocabulary, train, held_out = drawn
    alone, after = chance_alone(train, vocabulary), chance_after(train, vocabulary)
    one = -np.mean([math.log(alone(w)) for w in held_out])
    two = -np.mean([math.log(after(v, w)) for v, w in pairwise(held_out)])
    arrays = np.array(train), np.array(held_out, np.uint16)
    assert data.unigram(*arrays, vocabulary) == pytest.approx(one, rel=1e-12, abs=1e-12)
    assert data.bigram(*arrays, vocabulary) == pytest.approx(two, rel=1e-12, abs=1e-12)


@given(texts())
def test_chances_add_to_one(drawn):
    """Each next token held out alone: the exponentials of minus its nats are the whole distribution."""
    vocabulary, train, held_out = drawn
    train, before = np.array(train), held_out[0]
    one = sum(math.exp(-data.unigram(train, np.array([w]), vocabulary)) for w in range(vocabulary))
    two = sum(
        math.exp(-data.bigram(train, np.array([before, w]), vocabulary)) for w in range(vocabulary)
    )
    assert one == pytest.approx(1, rel=1e-12)
    assert two == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("baseline", [data.unigram, data.bigram])
def test_baselines_refuse(baseline):
    good = np.array([1, 2, 3])
    with pytest.raises(ValueError, match="train: needed tokens from 0 to 3, got 4 at index 1"):
        baseline(np.array([1, 4, 2]), good, 4)
    with pytest.raises(ValueError, match="held_out: needed tokens from 0 to 3, got 9 at index 0"):
        baseline(good, np.array([9, 1]), 4)
    with pytest.raises(ValueError, match="train: needed one dim of one or more whole numbers"):
        baseline(np.array([], int), good, 4)
    if baseline is data.bigram:
        with pytest.raises(ValueError, match="two tokens or more in held_out, got 1"):
            baseline(good, np.array([1]), 4)


# The shipped text


@pytest.mark.parametrize(
    ("name", "tokens", "one", "two"),
    [("bytes", 2_724_836, 3.1949, 2.4860), ("gpt2", 557_297, 7.0145, 5.6497)],
)
def test_what_counting_predicts_of_the_shipped_text(name, tokens, one, two):
    tokenizer = TOKENIZERS[name]()
    encoded = data.encode_file(TEXT, tokenizer)
    train, held_out = data.split(encoded)
    assert len(encoded) == tokens
    assert data.unigram(train, held_out, tokenizer.vocabulary) == pytest.approx(one, abs=1e-4)
    assert data.bigram(train, held_out, tokenizer.vocabulary) == pytest.approx(two, abs=1e-4)


@pytest.mark.parametrize(
    ("file", "licence"),
    [(TEXT, "STATE_OF_THE_UNION_LICENSE.md"), (RANKS, "GPT2_TIKTOKEN_LICENSE.md")],
    ids=lambda x: Path(x).name,
)
def test_the_licence_names_the_shipped_bytes(file, licence):
    assert hashlib.sha256(file.read_bytes()).hexdigest() in (EXAMPLES / licence).read_text(
        encoding="utf-8"
    )


def test_how_the_shipped_text_was_made(tmp_path):
    (tmp_path / "data" / "speeches").mkdir(parents=True)
    table = "fileid,year,date,sotu_type,is_sotu\n" + "".join(
        f"{name},{year},{year}-01-0{day},{kind},{sotu}\n"
        for name, year, day, kind, sotu in [
            ("second", 1950, 2, "spoken", True),
            ("first", 1950, 1, "spoken", True),
            ("letter", 1950, 3, "written", True),
            ("radio", 1950, 4, "spoken", False),
            ("old", 1933, 1, "spoken", True),
        ]
    )
    (tmp_path / "data" / "metadata.csv").write_text(table, encoding="utf-8")
    for name in ("first", "second"):
        address = f"[Delivered at 9:04 p.m.]\n\n{name}\u00a0 one \n\n\n\n[Applause] stays [See APP Note.]\n\n"
        (tmp_path / "data" / "speeches" / f"{name}.txt").write_text(address, encoding="utf-8")
    runpy.run_path(str(EXAMPLES / "make_state_of_the_union.py"))["main"](
        tmp_path, tmp_path / "made.txt"
    )
    made = (tmp_path / "made.txt").read_text(encoding="utf-8")
    assert made == "first one\n\n[Applause] stays\n\nsecond one\n\n[Applause] stays\n"
