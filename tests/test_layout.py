"""What does not fit is refused, with a sentence whose every proposal works; layouts travel as text
and as JSON."""

import ast
import dataclasses
import json
import math
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parallax import mesh, validate
from parallax.layout import Layout
from parallax.models import recipe
from parallax.schedule import gpipe, one_f_one_b_lockstep, zero_bubble_lockstep

FITTING = {
    "layers": 12,
    "heads": 12,
    "hidden": 48,
    "rows": 48,
    "batch": 48,
    "tokens": 48,
    "experts": 12,
}
FIELDS = {field.name: field.default for field in dataclasses.fields(Layout)}


def test_axes_are_what_a_mesh_is_made_of():
    layout = Layout(data=2, stage=3, tensor=4, microbatches=6, chunks=2)
    assert layout.axes == {"data": 2, "stage": 3, "tensor": 4}
    assert layout.devices == 24
    assert layout.replicas == 2
    assert layout.global_batch(5) == 60
    assert layout.sequences(60) == 5
    assert Layout(context=4, tensor=2).axes == {"data": 1, "stage": 1, "context": 4, "tensor": 2}
    assert Layout(context=4, data=2).devices == 8
    groups = Layout(replica=3, data=2, zero=1, microbatches=5)
    assert groups.axes == {"replica": 3, "data": 2, "stage": 1, "tensor": 1}
    assert (groups.replicas, groups.global_batch(4), groups.sequences(120)) == (6, 120, 4)
    assert (groups.batch_axes, layout.batch_axes) == (("replica", "data"), ("data",))
    assert Layout().axes == {"data": 1, "stage": 1, "tensor": 1}
    mixed = Layout(data=2, expert=4, tensor=2, microbatches=3)
    assert mixed.axes == {"data": 2, "expert": 4, "stage": 1, "tensor": 2}
    assert (mixed.batch_axes, mixed.global_batch(5), mixed.sequences(120)) == (
        ("data", "expert"),
        120,
        5,
    )
    with pytest.raises(AttributeError):
        layout.data = 4


def test_a_model_that_says_nothing_of_experts_has_none_to_split():
    sizes = {name: size for name, size in FITTING.items() if name != "experts"}
    Layout().check(sizes)
    with pytest.raises(
        ValueError,
        match=r"the model's experts \(experts=1\) must be a multiple of expert=2\. Use expert=1, "
        r"which",
    ):
        Layout(expert=2).check(sizes)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, stage=2, tensor=2),
        Layout(context=4, tensor=2),
        Layout(replica=2, data=2, tensor=2, zero=1),
    ],
    ids=str,
)
def test_groups_are_those_of_the_mesh(layout):
    ids = np.vectorize(lambda device: device.id)(mesh.make(**layout.axes).devices)
    for device in range(8):
        place = layout.coordinates(device)
        assert ids[tuple(place.values())] == device
        for names in (("data",), ("stage", "tensor"), ("data", "stage", "tensor"), ()):
            along = tuple(slice(None) if name in names else place[name] for name in layout.axes)
            assert layout.group(device, *names) == np.ravel(ids[along]).tolist()
    with pytest.raises(ValueError, match=r"devices 0 to 7; got device=8\."):
        layout.coordinates(8)
    with pytest.raises(
        ValueError, match=r"has the axes replica, data, expert, stage, context, tensor; got 'dat'\."
    ):
        layout.group(0, "dat")


def test_the_schedule_is_a_table():
    same = lambda a, b: (
        [x.tolist() for x in a.lanes.values()] == [x.tolist() for x in b.lanes.values()]
    )
    table = lambda **fields: recipe.schedule_of(Layout(**fields), recipe.Compute())
    assert same(table(stage=4, microbatches=8), one_f_one_b_lockstep(4, 8))
    assert same(table(stage=4, microbatches=8, chunks=2), one_f_one_b_lockstep(4, 8, 2))
    assert same(table(stage=4, microbatches=8, schedule="gpipe"), gpipe(4, 8))
    assert same(
        table(stage=4, microbatches=8, chunks=2, schedule="zero_bubble_lockstep"),
        zero_bubble_lockstep(4, 8, 2),
    )
    assert table(microbatches=3).stages == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": 0}, "Layout needs data of 1 or more; got 0. Use data=1."),
        ({"stage": -1}, "Layout needs stage of 1 or more; got -1. Use stage=1."),
        ({"processes": 0}, "Layout needs processes of 1 or more; got 0. Use processes=1."),
        ({"data": 2, "zero": 4}, "Layout needs zero to be one of 0, 1, 2, 3; got 4. Use zero=3."),
        (
            {"precision": "bf16"},
            "Layout needs precision to be one of full, bfloat16, float16; got 'bf16'. Use "
            "precision='bfloat16'.",
        ),
        (
            {"remat": "blocks"},
            "Layout needs remat to be one of none, gathers, attention, products, block, stage; "
            "got 'blocks'. Use remat='block'.",
        ),
        (
            {"schedule": "1f1b"},
            "Layout needs schedule to be one of one_f_one_b_lockstep, gpipe, "
            "zero_bubble_lockstep, one_f_one_b, zero_bubble; got '1f1b'. Use "
            "schedule='one_f_one_b_lockstep'.",
        ),
        (
            {"zero": 2},
            "Layout: zero=2 splits state over replicas; got data=1. Use zero=0 (or data=2).",
        ),
        (
            {"sequence": True},
            "Layout: sequence=True splits tokens over the tensor axis; got tensor=1. Use "
            "sequence=False (or tensor=2).",
        ),
        (
            {"tensor": 2, "split_sends": True},
            "Layout: split_sends=True splits the sends from stage to stage over the tensor axis; "
            "got stage=1. Use split_sends=False (or stage=2).",
        ),
        (
            {"stage": 2, "tensor": 2, "sequence": True, "split_sends": True},
            "Layout: split_sends=True has nothing to split: sequence=True splits the sends by "
            "tokens. Use split_sends=False.",
        ),
        (
            {"replica": 2, "data": 2},
            "Layout: replica=2 has copies of the state that ZeRO splits over data, but zero=0 "
            "splits nothing. Use replica=1 (or zero=1).",
        ),
        (
            {"remat": "stage"},
            "Layout: remat='stage' is for pipelines; got stage=1. Use remat='block' (or stage=2).",
        ),
        (
            {"remat": "gathers", "data": 2, "zero": 2},
            "Layout: remat='gathers' repeats the gathers of sequence or ZeRO-3, and neither "
            "is on. Use remat='none'.",
        ),
        (
            {"chunks": 2},
            "Layout: chunks=2 interleave the layers of several stages; got stage=1. Use chunks=1.",
        ),
        (
            {"schedule": "gpipe"},
            "Layout: schedule='gpipe' orders the jobs of several stages; got stage=1. Use "
            "schedule='one_f_one_b_lockstep' (or stage=2).",
        ),
        (
            {"stage": 2, "chunks": 2, "microbatches": 2, "schedule": "gpipe"},
            "Layout: schedule='gpipe' has one chunk per stage; got chunks=2. Use "
            "schedule='one_f_one_b_lockstep'.",
        ),
        (
            {"data": 6, "processes": 4},
            "Layout: each process must have as many devices as the others; got processes=4 for 6 "
            "devices. Use processes=3.",
        ),
        (
            {"stage": 4, "microbatches": 6, "chunks": 2},
            "Layout: with chunks=2 the microbatches must be a multiple of the stages; got "
            "microbatches=6 and stage=4. Use microbatches=8 (or microbatches=4).",
        ),
        (
            {"stage": 4, "microbatches": 3, "chunks": 2},
            "Layout: with chunks=2 the microbatches must be a multiple of the stages; got "
            "microbatches=3 and stage=4. Use microbatches=4.",
        ),
        (
            {"schedule": "{x}"},
            "Layout needs schedule to be one of one_f_one_b_lockstep, gpipe, "
            "zero_bubble_lockstep, one_f_one_b, zero_bubble; got '{x}'. Use "
            "schedule='one_f_one_b_lockstep'.",
        ),
        ({"data": 2**20 + 1}, "Layout needs data of 1048576 or less; got 1048577. Use data=1."),
        (
            {"data": 0, "zero": 2},
            "Layout needs data of 1 or more; got 0. Use data=1,zero=0.",
        ),
    ],
)
def test_a_layout_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Layout(**arguments)


@pytest.mark.parametrize(
    ("layout", "sizes", "message"),
    [
        (
            Layout(tensor=5),
            {},
            "Layout: the model's heads (heads=12) must be a multiple of tensor=5. Use tensor=4, "
            "which divides it.",
        ),
        (
            Layout(tensor=4),
            {"hidden": 42},
            "Layout: the feed-forward's hidden units (hidden=42) must be a multiple of tensor=4. "
            "Use tensor=3, which divides it.",
        ),
        (
            Layout(stage=4, microbatches=4, chunks=2),
            {},
            "Layout: the model's layers (layers=12) must be a multiple of stage=4 x chunks=2. Use "
            "layers=16 (or layers=8).",
        ),
        (
            Layout(stage=4, tensor=3),
            {"rows": 50},
            "Layout: the vocabulary's padded rows (rows=50) must be a multiple of stage=4 x "
            "tensor=3. Use rows=60, the vocabulary padded to a multiple of 12 (or "
            "stage=1,tensor=2).",
        ),
        (
            Layout(data=4, microbatches=16),
            {},
            "Layout: the batch's sequences (batch=48) must be a multiple of data=4 x "
            "microbatches=16. Use batch=64.",
        ),
        (
            Layout(replica=2, data=2, zero=2, microbatches=16),
            {},
            "Layout: the batch's sequences (batch=48) must be a multiple of replica=2 x data=2 x "
            "microbatches=16. Use batch=64.",
        ),
        (
            Layout(tensor=4, sequence=True),
            {"tokens": 50},
            "Layout: with sequence=True the tokens of a sequence (tokens=50) must be a multiple of "
            "tensor=4. Use tokens=52 (or tokens=48).",
        ),
        (
            Layout(tensor=5, sequence=True),
            {"heads": 7},
            "Layout: the model's heads (heads=7) must be a multiple of tensor=5. Use "
            "tensor=1,sequence=False, which divides it.",
        ),
        (
            Layout(data=4),
            {"devices": 6},
            "Layout: data=4 x stage=1 x tensor=1 multiply to 4, and there are 6 devices. Use "
            "data=6.",
        ),
        # data=8 alone is nearer than batch=9, which would need data=8 and batch=16.
        (
            Layout(data=3),
            {"devices": 8, "batch": 8},
            "Layout: the batch's sequences (batch=8) must be a multiple of data=3 x "
            "microbatches=1. Use data=8.",
        ),
        (
            Layout(data=4),
            {"devices": 10},
            "Layout: data=4 x stage=1 x tensor=1 multiply to 4, and there are 10 devices. Use "
            "data=10,batch=50.",
        ),
        (
            Layout(data=4),
            {"processes": 2},
            "Layout: it has processes=1, and the run has 2 processes. Use processes=2.",
        ),
        (
            Layout(data=4),
            {"processes": 3},
            "Layout: it has processes=1, and the run has 3 processes. Use data=3,processes=3.",
        ),
        (
            Layout(),
            {
                "processes": 3,
                "layers": 1,
                "heads": 1,
                "hidden": 4,
                "rows": 1,
                "batch": 7,
                "tokens": 1,
            },
            "Layout: it has processes=1, and the run has 3 processes. Use "
            "data=3,processes=3,batch=9.",
        ),
        (
            Layout(data=4),
            {"devices": 4, "processes": 3},
            "Layout: each process must have as many devices as the others; the run has 4 devices "
            "and 3 processes. Start 2 processes, or use 6 devices.",
        ),
        (
            Layout(data=2),
            {"batch": -4, "devices": 2},
            "Layout: batch=-4 must be a whole number from 1 to 2147483647. Use batch=2.",
        ),
        (
            Layout(expert=8),
            {},
            "Layout: the model's experts (experts=12) must be a multiple of expert=8. Use "
            "expert=6, which divides it.",
        ),
        (
            Layout(data=2, expert=2, microbatches=16),
            {},
            "Layout: the batch's sequences (batch=48) must be a multiple of data=2 x expert=2 x "
            "microbatches=16. Use batch=64.",
        ),
        (
            Layout(context=4),
            {"tokens": 1020},
            "Layout: the tokens of a sequence (tokens=1020) must be a multiple of 2 x context=4. "
            "Use tokens=1024 (or tokens=1016).",
        ),
        (
            Layout(context=2, tensor=3, sequence=True),
            {"tokens": 40},
            "Layout: the tokens of a sequence (tokens=40) must be a multiple of 2 x context=2 x "
            "tensor=3. Use tokens=48 (or tokens=36).",
        ),
        (
            Layout(context=3, data=2),
            {"devices": 12},
            "Layout: data=2 x stage=1 x context=3 x tensor=1 multiply to 6, and there are 12 "
            "devices. Use data=4.",
        ),
        (
            Layout(tensor=4),
            {"devices": 10},
            "Layout: data=1 x stage=1 x tensor=4 multiply to 4, and there are 10 devices. Use "
            "data=5,tensor=2,batch=50.",
        ),
        (
            Layout(stage=4, tensor=3, microbatches=4),
            {"devices": 6},
            "Layout: data=1 x stage=4 x tensor=3 multiply to 12, and there are 6 devices. Use "
            "stage=2.",
        ),
        (
            Layout(),
            {"heads": 0},
            "Layout: heads=0 must be a whole number from 1 to 2147483647. Use heads=1.",
        ),
    ],
)
def test_a_model_batch_or_machine_that_does_not_fit(layout, sizes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layout.check(FITTING | sizes)


def wrong(fields, sizes) -> bool:
    """Whether a layout does not fit, as the axes' definitions have it."""
    f = fields
    devices = f["replica"] * f["data"] * f["expert"] * f["stage"] * f["context"] * f["tensor"]
    known = all(f[name] in values for name, values in validate.CHOICES.items())
    if not known or min(f[name] for name in validate.COUNTS) < 1 or devices % f["processes"]:
        return True
    pipelined = f["stage"] > 1
    idle = (
        (f["chunks"] > 1 or f["remat"] == "stage" or f["schedule"] != "one_f_one_b_lockstep")
        and not pipelined,
        f["schedule"] in ("gpipe", "one_f_one_b") and f["chunks"] > 1,
        f["zero"] > 0 and f["data"] * f["context"] == 1,
        f["replica"] > 1 and f["zero"] == 0,
        f["sequence"] and f["tensor"] == 1,
        f["split_sends"] and (f["sequence"] or f["stage"] == 1 or f["tensor"] == 1),
        f["remat"] == "gathers" and not f["sequence"] and f["zero"] < 3,
        f["chunks"] > 1 and f["microbatches"] % f["stage"] > 0,
    )
    split = f["tensor"] if f["sequence"] else 1
    by = {
        "heads": f["tensor"],
        "hidden": f["tensor"],
        "tokens": split if f["context"] == 1 else f["context"] * math.lcm(2, split),
        "layers": f["stage"] * f["chunks"],
        "rows": f["stage"] * f["tensor"],
        "batch": f["replica"] * f["data"] * f["expert"] * f["microbatches"],
        "experts": f["expert"],
    }
    machine = {"devices": devices, "processes": f["processes"]}
    return (
        any(idle)
        or any(sizes[name] % by[name] for name in by if name in sizes)
        or any(sizes[name] != machine[name] for name in machine if name in sizes)
    )


def proposals(message):
    """The changes that a message proposes."""
    for change in re.findall(r"\w+=['\w]+(?:,\w+=['\w]+)*", message.rpartition(" Use ")[2]):
        yield {
            name: ast.literal_eval(text)
            for name, _, text in (part.partition("=") for part in change.split(","))
        }


def refused(fields, sizes) -> str | None:
    """The message of our `ValueError`, if there is one; any other error passes through."""
    try:
        layout = Layout(**fields)
        if sizes:
            layout.check(sizes)
    except ValueError as error:
        return str(error)
    return None


small = st.integers(1, 12)
any_counts = dict.fromkeys(validate.COUNTS, st.integers(-1, 12)) | {
    "processes": st.sampled_from([1, 1, 2, 3])
}


def any_choice(known):
    """A known choice, twice as often as one that may be unknown."""
    unknown = "other" if isinstance(known[0], str) else known[-1]
    return st.sampled_from([*known, *known, known[0], unknown])


any_fields = st.fixed_dictionaries(
    any_counts | {name: any_choice(known) for name, known in validate.CHOICES.items()}
)
good_fields = st.fixed_dictionaries(
    {"data": small, "stage": small, "tensor": small, "microbatches": small},
    optional={
        "context": small,
        "expert": small,
        "sequence": st.booleans(),
        "zero": st.integers(0, 3),
        "remat": st.sampled_from(validate.CHOICES["remat"]),
    },
)
model_sizes = st.fixed_dictionaries({name: st.integers(1, 60) for name in FITTING})
machines = (
    st.just({})
    | st.fixed_dictionaries({"processes": st.integers(1, 4)})
    | st.builds(
        lambda each, processes: {"devices": each * processes, "processes": processes},
        st.integers(1, 12),
        st.integers(1, 2),
    )
)


@pytest.mark.sweep
@settings(max_examples=60)  # each is refused
@given(
    fields=any_fields | good_fields,
    sizes=st.just({}) | st.builds(dict.__or__, model_sizes, machines),
)
def test_what_a_refusal_proposes_works(fields, sizes):
    """Refused exactly where it does not fit, by our error; and each proposal, taken, fits in every
    respect."""
    fields = FIELDS | fields
    sizes = (
        {} if refused(fields, {}) else sizes
    )  # a layout that cannot be, is refused before it sees a model
    message = refused(fields, sizes)
    assert (message is not None) == wrong(fields, sizes)
    assume(message is not None)
    proposed = list(proposals(message))
    assert proposed, message
    for change in proposed:
        after = fields | {name: value for name, value in change.items() if name in FIELDS}
        others = sizes | {name: value for name, value in change.items() if name not in FIELDS}
        assert refused(after, others) is None, (message, change)
        assert not wrong(after, others)


@given(stages=st.integers(2, 12), microbatches=st.integers(1, 40), chunks=st.integers(2, 4))
def test_refused_microbatches_come_with_the_nearest_that_fit(stages, microbatches, chunks):
    message = refused({"stage": stages, "microbatches": microbatches, "chunks": chunks}, {})
    assert (message is not None) == (microbatches % stages > 0)
    for change in proposals(message or ""):
        assert 0 < abs(change["microbatches"] - microbatches) < stages


# As text


@given(fields=any_fields)
def test_text_and_json_come_back(fields):
    change = validate.repaired(fields, {}, {})
    layout = Layout(**fields | change)
    assert Layout.parse(str(layout)) == Layout.from_json(layout.to_json()) == layout


def test_text_is_short():
    assert str(Layout()) == ""
    assert (
        str(Layout(data=2, tensor=4, sequence=True, remat="block"))
        == "data=2,tensor=4,sequence=True,remat=block"
    )
    assert Layout.parse(" data = 2, sequence=true,tensor=2,") == Layout(
        data=2, tensor=2, sequence=True
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "data",
            "Layout.parse needs parts like data=2, set apart by commas; got 'data'. Use data=1.",
        ),
        (
            "tensor=2,sequence",
            "Layout.parse needs parts like .*; got 'sequence'. Use tensor=2,sequence=True.",
        ),
        (
            "dta=2,zero=1",
            "Layout has the fields replica, data, expert, .*; got 'dta'. Use data=2,zero=1.",
        ),
        ("{x}=2", "Layout has the fields replica, data, expert, .*; got '{x}'. Use "),
        ("data=two", "Layout needs data to be a whole number; got 'two'. Use data=1."),
        ("data=2,data=4", "Layout.parse: data is given twice, as 2 and 4. Use data=4."),
        (
            "sequence=yes",
            "Layout needs sequence to be True or False; got 'yes'. Use sequence=False.",
        ),
        (
            "tensor=2,zero=1",
            r"Layout: zero=1 splits state over replicas; got data=1. Use tensor=2,zero=0 \(or "
            r"tensor=2,zero=1,data=2\).",
        ),
    ],
)
def test_text_that_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Layout.from_json: .* Use the text of to_json, such as {"),
        ("[1]", r"Layout.from_json needs an object; got \[1\]. Use one such as {"),
        ('{"data": 2.5}', 'Layout needs data to be a whole number; got 2.5. Use {"data": 1}.'),
        ('{"data": true}', 'Layout needs data to be a whole number; got True. Use {"data": 1}.'),
        ('{"remat": 1}', 'Layout needs remat to be a word; got 1. Use {"remat": "none"}.'),
        (
            '{"dta": 2, "zero": 1}',
            'Layout has the fields replica, data, .*; got \'dta\'. Use {"data": 2, "zero": 1}.',
        ),
        ('{"data": 2, "data": 4}', "Layout.from_json: data is given twice, as 2 and 4. Use the"),
        ("[" * 100_000, "Layout.from_json: .* Use the text of to_json, such as {"),
    ],
)
def test_json_that_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        Layout.from_json(text)


def test_names_that_are_no_fields_or_sizes():
    assert not Layout.admits(pipeline=4)
    with pytest.raises(ValueError, match=r"takes the sizes .*; got 'device'\. Use 'devices'"):
        Layout.parse("data=2", {"device": 8})


def test_text_may_come_with_numpys_sizes():
    assert Layout.parse("data=2", {"devices": np.int64(2)}) == Layout(data=2)
    with pytest.raises(ValueError, match="and there are 3 devices"):
        Layout.parse("data=2", {"devices": np.int64(3)})


@settings(max_examples=150)
@given(fields=any_fields, data=st.data())
def test_what_a_text_or_json_is_refused_with_is_one_that_works(fields, data):
    """Whole: the proposal takes the place of what was given."""
    written = {name: fields[name] for name in data.draw(st.sets(st.sampled_from(sorted(fields))))}
    if data.draw(st.booleans()):
        written["dat"] = written.pop("data", 2)
    for read, text, proposal in (
        (Layout.parse, validate.as_text(written), r"[\w=,]+|''"),
        (Layout.from_json, json.dumps(written), r"{.*?}"),
    ):
        message = refused_text(read, text)
        for each in re.findall(rf"(?:^|or )({proposal})(?=,? |\.$)", message.partition(" Use ")[2]):
            assert refused_text(read, each.strip("'")) == "", message
        assert ("Use" in message) == bool(message)


def refused_text(read, text) -> str:
    """The message of our `ValueError`; empty where there is none."""
    try:
        read(text)
    except ValueError as error:
        return str(error)
    return ""
