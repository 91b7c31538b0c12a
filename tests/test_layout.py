"""Sizes that do not fit are refused, with a sentence that names the nearest that do."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.layout import Layout

FITTING = {"layers": 12, "heads": 12, "hidden": 48, "rows": 48, "batch": 48, "tokens": 48}
sizes = st.integers(1, 12)
layouts = st.builds(Layout, data=sizes, stage=sizes, tensor=sizes, microbatches=sizes) | st.builds(
    lambda data, stage, tensor, groups, chunks: Layout(data, stage, tensor, groups * stage, chunks),
    *(sizes, st.integers(2, 6), sizes, st.integers(1, 4), st.integers(2, 4)),
)
layouts |= st.builds(Layout, stage=sizes, tensor=st.integers(2, 12), sequence=st.just(True))


def test_axes_are_what_a_mesh_is_made_of():
    layout = Layout(data=2, stage=3, tensor=4, microbatches=6, chunks=2)
    assert layout.axes == {"data": 2, "stage": 3, "tensor": 4}
    assert layout.devices == 24
    assert Layout().axes == {"data": 1, "stage": 1, "tensor": 1}
    with pytest.raises(AttributeError):
        layout.data = 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": 0}, "Layout needs data of 1 or more; got 0."),
        ({"stage": -1}, "Layout needs stage of 1 or more; got -1."),
        ({"tensor": 0}, "Layout needs tensor of 1 or more; got 0."),
        ({"microbatches": 0}, "Layout needs microbatches of 1 or more; got 0."),
        ({"chunks": 0}, "Layout needs chunks of 1 or more; got 0."),
        ({"zero": 4}, "Layout needs zero to be one of 0, 1, 2, 3; got 4."),
        ({"precision": "half"}, "Layout needs precision to be one of full, bfloat16, float16; got 'half'."),
        (
            {"remat": "all"},
            "Layout needs remat to be one of none, gathers, attention, products, block, stage; got 'all'.",
        ),
        ({"zero": 2}, "Layout: zero=2 splits state over replicas; got data=1. Take zero=0, or more replicas."),
        ({"sequence": True}, "Layout: sequence=True splits tokens over the tensor axis; got tensor=1. Take sequence=False."),
        ({"remat": "stage"}, "Layout: remat='stage' is for pipelines; got stage=1. Take remat='block'."),
        (
            {"remat": "gathers", "data": 2, "zero": 2},
            "Layout: remat='gathers' gathers again what sequence=True or zero=3 gathered, and neither is on. Take remat='none'.",
        ),
        ({"chunks": 2}, "Layout: chunks=2 interleave the layers of several stages; got stage=1. Take chunks=1."),
        (
            {"stage": 4, "microbatches": 6, "chunks": 2},
            "Layout: with chunks=2 the microbatches must be a multiple of the stages; got microbatches=6 and stage=4. "
            "Take microbatches=8 or microbatches=4.",
        ),
        (
            {"stage": 4, "microbatches": 3, "chunks": 2},
            "Layout: with chunks=2 the microbatches must be a multiple of the stages; got microbatches=3 and stage=4. "
            "Take microbatches=4.",
        ),
    ],
)
def test_a_layout_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Layout(**arguments)


@pytest.mark.parametrize(
    ("layout", "sizes", "message"),
    [
        (Layout(tensor=5), {}, "Layout: the model's heads (heads=12) must divide by tensor=5. Take tensor=4, which divides it."),
        (
            Layout(tensor=4),
            {"hidden": 42},
            "Layout: the feed-forward's hidden units (hidden=42) must divide by tensor=4. Take tensor=3, which divides it.",
        ),
        (
            Layout(stage=5, microbatches=5, chunks=2),
            {},
            "Layout: the model's layers (layers=12) must divide by stage x chunks=10. Take layers=20 or layers=10.",
        ),
        (
            Layout(stage=4, tensor=3),
            {"rows": 50},
            "Layout: the vocabulary's padded rows (rows=50) must divide by stage x tensor=12. "
            "Pad the vocabulary to a multiple of 12.",
        ),
        (
            Layout(data=4, microbatches=16),
            {},
            "Layout: the batch's sequences (batch=48) must divide by data x microbatches=64. Take batch=64.",
        ),
        (
            Layout(tensor=4, sequence=True),
            {"tokens": 50},
            "Layout: with sequence=True the tokens of a sequence (tokens=50) must divide by tensor=4. "
            "Take tokens=52 or tokens=48.",
        ),
        (
            Layout(tensor=5, sequence=True),
            {"heads": 7},
            "Layout: the model's heads (heads=7) must divide by tensor=5. Take tensor=1 with sequence=False, which divides it.",
        ),
    ],
)
def test_a_model_or_batch_that_does_not_divide(layout, sizes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layout.check(**FITTING | sizes)


def misfits(layout, layers, heads, hidden, rows, batch, tokens) -> set[str]:
    """What does not divide, as the axes' definitions have it."""
    sizes = {"layers": layers, "heads": heads, "hidden": hidden, "rows": rows, "batch": batch, "tokens": tokens}
    by = {
        "tokens": layout.tensor if layout.sequence else 1,
        "layers": layout.stage * layout.chunks,
        "rows": layout.stage * layout.tensor,
        "batch": layout.data * layout.microbatches,
    }
    return {name for name, size in sizes.items() if size % by.get(name, layout.tensor)}


def proposals(layout, sizes, message):
    """The layouts and sizes that a message proposes."""
    if multiple := re.search(r"Pad the vocabulary to a multiple of (\d+)\.$", message):
        yield layout, sizes | {"rows": -(-sizes["rows"] // int(multiple[1])) * int(multiple[1])}
    for name, size in re.findall(r"(\w+)=(\d+)", message.partition(" Take ")[2]):
        if name in sizes:
            yield layout, sizes | {name: int(size)}
        else:
            off = {"sequence": False} if "sequence=False" in message else {}
            yield dataclasses.replace(layout, **{name: int(size)}, **off), sizes


@given(layouts, st.fixed_dictionaries({name: st.integers(1, 60) for name in FITTING}))
def test_what_a_refusal_proposes_is_right(layout, sizes):
    """A size is refused exactly where it does not divide, and each proposal mends it and breaks nothing."""
    before = misfits(layout, **sizes)
    try:
        layout.check(**sizes)
    except ValueError as error:
        refused = re.search(r"\((\w+)=", str(error))[1]
        assert refused in before
        cured = list(proposals(layout, sizes, str(error)))
        assert cured
        for proposal in cured:
            after = misfits(proposal[0], **proposal[1])
            mended = {"heads", "hidden"} if refused in ("heads", "hidden") else {refused}
            # Another split of the heads splits the vocabulary and the tokens otherwise; that is the next message.
            assert after <= before - mended | ({"rows", "tokens"} if proposal[0] != layout else set())
    else:
        assert not before


@given(stages=st.integers(2, 12), microbatches=st.integers(1, 40), chunks=st.integers(2, 4))
def test_refused_microbatches_come_with_the_nearest_that_fit(stages, microbatches, chunks):
    try:
        Layout(stage=stages, microbatches=microbatches, chunks=chunks)
    except ValueError as error:
        assert microbatches % stages
        for size in re.findall(r"microbatches=(\d+)", str(error).partition(" Take ")[2]):
            assert Layout(stage=stages, microbatches=int(size), chunks=chunks).microbatches == int(size)
            assert 0 < abs(int(size) - microbatches) < stages
    else:
        assert microbatches % stages == 0
