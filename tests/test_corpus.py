"""The texts of the examples: tokens and back again, and what counting predicts."""

import builtins
import hashlib
import math
import runpy
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parallax import data

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import corpus

EXAMPLES = Path(__file__).parents[1] / "examples" / "data"
TEXT, RANKS = EXAMPLES / "state_of_the_union.txt", EXAMPLES / "gpt2.tiktoken"
TOKENIZERS = {"bytes": corpus.bytes_tokenizer, "gpt2": lambda: corpus.gpt2_tokenizer(RANKS)}


# Tokenizers


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.mark.sweep(3, "wholes")
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
        match=f"ids to decode: needed tokens from 0 to {tokenizer.vocabulary - 1}, got {bad} "
        f"at index 1",
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
        match=rf"cannot encode .*\. The longest run, at character 1, has {blanks} characters\. "
        "Shorten",
    ):
        tokenizer.encode(text)


def test_known_tokens():
    gpt2 = corpus.gpt2_tokenizer(RANKS)
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
    assert corpus.bytes_tokenizer().encode("é").tolist() == [0xC3, 0xA9]
    assert corpus.bytes_tokenizer().decode([0x61, 0xC3]) == "a\ufffd"


def test_a_damaged_vocabulary_is_refused(tmp_path):
    content = bytearray(RANKS.read_bytes())
    content[400_000] ^= 1
    (tmp_path / "gpt2.tiktoken").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"damaged.*needed sha256 306cd27f.*got .*of 835554 bytes.*Copy it again"
    ):
        corpus.gpt2_tokenizer(tmp_path / "gpt2.tiktoken")


def test_a_missing_vocabulary_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"GPT-2's token ranks.*absent does.*examples/data/gpt2\.tiktoken"
    ):
        corpus.gpt2_tokenizer(tmp_path / "absent")


def test_without_tiktoken_the_message_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "tiktoken":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[examples\]"'):
        corpus.gpt2_tokenizer(RANKS)


def test_encode_file(tmp_path, tokenizer):
    path, text = tmp_path / "text.txt", "Grüße,\r\nmy fellow citizens"
    path.write_bytes(text.encode())
    np.testing.assert_array_equal(corpus.encode_file(path, tokenizer), tokenizer.encode(text))


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
        corpus.encode_file(tmp_path / "text.txt", corpus.bytes_tokenizer())


def test_encode_file_names_the_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt: needed a text file, found no file"):
        corpus.encode_file(tmp_path / "absent.txt", corpus.bytes_tokenizer())


# Baselines: the naive versions count in dictionaries, and write the probabilities as the docstrings
# do.


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
    assert corpus.unigram(*arrays, vocabulary) == pytest.approx(one, rel=1e-12, abs=1e-12)
    assert corpus.bigram(*arrays, vocabulary) == pytest.approx(two, rel=1e-12, abs=1e-12)


@given(texts())
def test_chances_add_to_one(drawn):
    """Each next token held out alone: the exponentials of minus its nats are the whole
    distribution."""
    vocabulary, train, held_out = drawn
    train, before = np.array(train), held_out[0]
    one = sum(
        math.exp(-corpus.unigram(train, np.array([w]), vocabulary)) for w in range(vocabulary)
    )
    two = sum(
        math.exp(-corpus.bigram(train, np.array([before, w]), vocabulary))
        for w in range(vocabulary)
    )
    assert one == pytest.approx(1, rel=1e-12)
    assert two == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("baseline", [corpus.unigram, corpus.bigram])
def test_baselines_refuse(baseline):
    good = np.array([1, 2, 3])
    with pytest.raises(ValueError, match="train: needed tokens from 0 to 3, got 4 at index 1"):
        baseline(np.array([1, 4, 2]), good, 4)
    with pytest.raises(ValueError, match="held_out: needed tokens from 0 to 3, got 9 at index 0"):
        baseline(good, np.array([9, 1]), 4)
    with pytest.raises(ValueError, match="train: needed a one-dimensional array of one or more"):
        baseline(np.array([], int), good, 4)
    if baseline is corpus.bigram:
        with pytest.raises(ValueError, match="two tokens or more in held_out, got 1"):
            baseline(good, np.array([1]), 4)


def test_a_file_is_counted_as_an_array_is(tmp_path):
    text = np.random.default_rng(0).integers(0, 300, 1000)
    data.write(tmp_path / "text.bin", text, vocabulary=300)
    train, held_out = data.split(data.read(tmp_path / "text.bin", vocabulary=300))
    assert corpus.unigram(train, held_out, 300) == corpus.unigram(text[:900], text[900:], 300)
    assert corpus.bigram(train, held_out, 300) == corpus.bigram(text[:900], text[900:], 300)


# The shipped text


@pytest.mark.parametrize(
    ("name", "tokens", "one", "two"),
    [("bytes", 2_724_836, 3.1949, 2.4860), ("gpt2", 557_297, 7.0145, 5.6497)],
)
def test_what_counting_predicts_of_the_shipped_text(name, tokens, one, two):
    tokenizer = TOKENIZERS[name]()
    encoded = corpus.encode_file(TEXT, tokenizer)
    train, held_out = data.split(encoded)
    assert len(encoded) == tokens
    assert corpus.unigram(train, held_out, tokenizer.vocabulary) == pytest.approx(one, abs=1e-4)
    assert corpus.bigram(train, held_out, tokenizer.vocabulary) == pytest.approx(two, abs=1e-4)


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
        address = (
            f"[Delivered at 9:04 p.m.]\n\n{name}\u00a0 one \n\n\n\n[Applause] stays "
            f"[See APP Note.]\n\n"
        )
        (tmp_path / "data" / "speeches" / f"{name}.txt").write_text(address, encoding="utf-8")
    runpy.run_path(str(EXAMPLES / "make_state_of_the_union.py"))["main"](
        tmp_path, tmp_path / "made.txt"
    )
    made = (tmp_path / "made.txt").read_text(encoding="utf-8")
    assert made == "first one\n\n[Applause] stays\n\nsecond one\n\n[Applause] stays\n"
