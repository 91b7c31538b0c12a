"""The example in four processes, which talk over gloo, as in one process and on one device."""

import json

import pytest
from faults import SCRIPT, Running
from flags import quick

EXAMPLE = SCRIPT.parent.parent / "examples" / "gpt2.py"
SMALL = [
    "--layers=2",
    "--width=32",
    "--heads=2",
    "--length=16",
    "--steps=6",
    "--evaluate-every=3",
    "--evaluate-tokens=512",
]
EXACT = 1e-11  # float64; sums in another order
pytestmark = [pytest.mark.programs, pytest.mark.long]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function that runs the example in float64, and returns the numbers of each step and what it
    printed."""

    def train(processes, *options):
        folder = tmp_path_factory.mktemp("example")
        options = [*SMALL, "--dropout=0.1", "--out", folder / "out", *options]
        launcher = {"launcher": "one process"} if processes == 1 else {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAX_ENABLE_X64", "1")
            patch.setenv("JAX_PLATFORMS", "cpu")
            job = Running(
                folder,
                *options,
                processes=processes,
                program=EXAMPLE,
                flags=quick(),
                **launcher,
            )
        with job:
            code, printed = job.wait(), job.printed()
        path = folder / "out" / "metrics.jsonl"
        return (
            code,
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [],
            printed,
        )

    return train


@pytest.fixture(scope="module")
def four_processes(train):
    return train(4)


def test_four_processes_tell_of_themselves_once(four_processes):
    code, records, printed = four_processes
    assert code == 0, printed
    assert printed.count("processes    4 processes\n") == 1
    assert printed.count("step 6/6") == 1
    assert printed.count("held-out loss ") == 1
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "layout",
    [["--devices=8"], ["--devices=1", "--microbatches=2"]],
    ids=["one process, eight devices", "one device"],
)
def test_four_processes_compute_what_one_does(four_processes, train, layout):
    code, records, printed = train(1, *layout)
    assert code == 0, printed
    for one, four in zip(records, four_processes[1], strict=True):
        for name in ("loss", "gradient_norm", "held_out"):
            assert one.get(name, 0) == pytest.approx(four.get(name, 0), rel=EXACT, abs=0)


def test_a_mistake_is_told_once(train):
    code, _, printed = train(4, "--layers=3")
    assert code == 2
    assert (
        printed.count(
            "error: Layout: the model's layers (--layers 3) must be a multiple of --stage 2 x "
            "--chunks 1."
        )
        == 1
    )
    assert "Traceback" not in printed
