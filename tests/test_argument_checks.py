"""What is no number, no token and no text at all is refused in a sentence that says what was
needed.

In a process of its own: here beartype would refuse it first.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUP = """
import jax.numpy as jnp
import numpy as np
from parallax import cross_entropy, data, rules, tensor
from parallax.data import shards
from parallax.layout import Layout
from parallax.models.sampling import filtered
from parallax.run import metrics, spikes
FITTING = {"layers": 12, "heads": 12, "hidden": 48, "rows": 48, "batch": 48, "tokens": 48}
TOKENS = np.arange(20)
def batch(tokens=TOKENS, **given):
    return data.batch(tokens, **{"seed": 0, "step": 0, "size": 4, "length": 5} | given)
"""
LOGITS = "tensor.cross_entropy(jnp.zeros((3, 3, 8)), "  # of a batch with as many rows as tokens
# Of a time-major x, or of weights of another batch
MEAN = "cross_entropy.mean(jnp.ones((3, 2, 4)), jnp.ones((8, 4)), "
CASES = {
    f"{MEAN}jnp.zeros((2, 3), int), ())": (
        r"cross_entropy\.mean needs targets of shape \(3, 2\), one for each position of an array "
        r"of shape \(3, 2, 4\); got \(2, 3\)"
    ),
    f"{MEAN}jnp.zeros((3, 2), int), (), weights=jnp.ones((2, 3)))": (
        r"cross_entropy\.mean needs weights of shape \(3, 2\)"
    ),
    f"{LOGITS}jnp.zeros(3, int), ())": (
        r"tensor\.cross_entropy needs targets of shape \(3, 3\), one for each position of an array "
        r"of shape \(3, 3, 8\); got \(3,\)\. If one row is meant for the whole batch, use "
        r"jnp\.broadcast_to\."
    ),
    f"{LOGITS}jnp.zeros((3, 3), int), (), weights=jnp.ones(3))": (
        r"tensor\.cross_entropy needs weights of shape \(3, 3\), one for each position of an array "
        r"of shape \(3, 3, 8\); got \(3,\)"
    ),
    **{
        f"filtered(jnp.asarray([[1.0, 5, 3], [0, 1, 2.5]]), {options})": (
            r"sampling\.filtered needs the logits of one token, of one dim; got shape \[2, 3\]\. "
            r"For many, use jax\.vmap\."
        )
        for options in ("0.0", "top_k=1", "top_k=3", "top_p=0.5")
    },
    **{
        f"batch({name}={value})": (
            rf"data\.batch needs a whole number as {name}; got {re.escape(shown)}\. Give an int"
        )
        for name in ("seed", "step", "size", "length")
        for value, shown in (
            ("1.9", "1.9"),
            ("1.0", "1.0"),
            ("'1'", "'1'"),
            ("None", "None"),
            ("np.float32(1)", "np.float32"),
        )
        if shown != "np.float32"
    },
    **{
        f"rules.fsdp('data', size=8, keep={{'blocks.**': {dims}}})": (
            rf"fsdp\('data'\) needs a tuple of dims, such as \(0,\), in `keep`; got "
            rf"{re.escape(dims)} for 'blocks\.\*\*'\."
        )
        for dims in ("0", "(True,)", "'0'")
    },
    "rules.fsdp(['data'], size=8)": (
        r"fsdp needs the name of a mesh axis, or a tuple of names; got \['data'\]\."
    ),
    "batch(step=np.float32(1))": r"a whole number as step; got np\.float32\(1\.0\)",
    "batch(TOKENS / 2)": r"array of whole numbers; the windows .* are float64\[4, 6\]",
    "batch(TOKENS > 3)": r"array of whole numbers; the windows .* are bool\[4, 6\]",
    "batch(np.ones((20, 2), int))": r"from the text are int64\[4, 6, 2\]",
    "batch([0.5] * 20)": r"from the text are float64\[4, 6\]",
    "list(data.held_out_batches(TOKENS / 2, size=2, length=5))": r"the text are float64\[2, 6\]",
    "data.held_out_batches(TOKENS, "
    "size=2, length=5, limit=1.5)": r"held_out_batches needs a whole number as limit; got 1\.5",
    "data.held_out_batches(TOKENS, "
    "size=1.0, length=5)": r"held_out_batches needs a whole number as size; got 1\.0",
    "data.placed(TOKENS, None, seed=0, "
    "step=0, size=8.0, length=5)": r"data\.placed needs a whole number as size; got 8\.0",
    "data.Prefetched(print, 0.5, 3)": r"Prefetched needs a whole number as start; got 0\.5",
    "data.Prefetched(print, 0, 3.0)": r"Prefetched needs a whole number as stop; got 3\.0",
    "data.Prefetched(print, 0, 3, "
    "ahead=1.5)": r"Prefetched needs a whole number as ahead; got 1\.5",
    "data.write('a.bin', TOKENS, "
    "vocabulary=256.0)": r"data\.write needs a whole number as vocabulary; got 256\.0",
    "data.write('a.bin', TOKENS / 2, "
    "vocabulary=256)": r"one-dimensional array of one or more whole numbers, got float64\[20\]",
    "data.write('a.bin', ['a', 'b'], "
    "vocabulary=256)": r"one-dimensional array of one or more whole numbers, got <U1\[2\]",
    "data.read('a.bin', "
    "vocabulary='256')": r"a token file needs a whole number as vocabulary; got '256'",
    "shards.write('a', "
    "[TOKENS], vocabulary=256.5)": r"shards\.write needs a whole number as vocabulary; got 256\.5",
    "shards.read('a', "
    "vocabulary=256, processes=2.0)": r"shards\.read needs a whole number as processes; got 2\.0",
    **{
        f"shards.Shards((TOKENS,), 256)[{places}]": (
            rf"needed an array of whole numbers as places, got {kind}\. For a mask, pass"
        )
        for places, kind in (
            ("np.array([0.9, 1.9])", "float64"),
            ("np.array([True, False, True])", "bool"),
            ("2:9", "object"),
        )
    },
    "metrics.Clock(productive='steps')": (
        r"Clock needs a tuple of names as `productive`; got 'steps'\. Pass \('steps',\)\."
    ),
    "spikes.Spikes(2.0, 2.5)": r"Spikes needs a whole number as budget; got 2\.5",
    "Layout(data='2')": r"Layout needs data to be a whole number; got '2'\. Use data=2\.",
    "Layout(data=2.0)": r"Layout needs data to be a whole number; got 2\.0\. Use data=2\.",
    "Layout(data=None)": r"Layout needs data to be a whole number; got None\. Use data=1\.",
    "Layout(data=True)": r"Layout needs data to be a whole number; got True\. Use data=1\.",
    "Layout(data=2, zero=1.0)": r"Layout needs zero to be a whole number; got 1\.0\. Use zero=1\.",
    "Layout(tensor=2, sequence='yes')": (
        r"Layout needs sequence to be True or False; got 'yes'\. Use sequence=True\."
    ),
    "Layout(remat=['block'])": (
        r"Layout needs remat to be a word; got \['block'\]\. Use remat='none'\."
    ),
    "Layout(data=10**400)": (
        r"Layout needs data of 1048576 or less; got 10{39}\.\.\. \(401 characters\)\. "
        r"Use data=1\."
    ),
    "Layout().check(FITTING "
    "| {'batch': "
    "'48'})": r"Layout: batch='48' must be a whole number from 1 to 2147483647\. Use batch=1\.",
    "Layout(data=4).check(FITTING | {'processes': 3})": (
        r"the run has 3 processes\. Use data=3,processes=3\."
    ),
}
NUMPYS = {
    "Layout.from_json(Layout(data=np.int64(2), tensor=np.int8(2), "
    "sequence=np.True_).to_json()).sequence": "True",
    "type(Layout(data=np.int64(2)).data)": "<class 'int'>",
    "Layout(data=np.int64(2)).check({name: np.int32(size) for name, size in "
    "FITTING.items()})": "None",
}
RUN = """
import json, sys
for case in json.load(sys.stdin):
    try:
        found = repr(eval(case))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    print(json.dumps([case, found]))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SETUP}{RUN}"]
    folder = tmp_path_factory.mktemp("given")
    done = subprocess.run(
        command,
        input=json.dumps([*CASES, *NUMPYS]),
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not [*folder.iterdir()]
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.programs
@pytest.mark.parametrize("case", CASES)
def test_a_sentence_says_what_was_needed(refusals, case):
    said = refusals[case]
    assert re.search(f"^(Value|Index)Error: .*{CASES[case]}", said, re.DOTALL), said


@pytest.mark.programs
@pytest.mark.parametrize("case", NUMPYS)
def test_numpys_numbers_are_pythons(refusals, case):
    assert refusals[case] == NUMPYS[case]
