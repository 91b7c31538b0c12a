"""The example where a bit turns in one device's copy: it is named, and the run ends with the
numbers of one without a fault."""

import json
import re
from pathlib import Path

import flags
import pytest
from faults import SCRIPT, Running

PROGRAM = SCRIPT.with_name("flipping_gpt2.py")
SMALL = [
    *(
        "--layers=2",
        "--width=32",
        "--heads=2",
        "--length=16",
        "--steps=12",
        "--evaluate-every=6",
        "--evaluate-tokens=512",
    ),
    *("--data=8", "--microbatches=1", "--checkpoint-every=8", "--fingerprint-every=3"),
]
LOSSES = ("step", "loss", "gradient_norm", "held_out")
pytestmark = [pytest.mark.programs, pytest.mark.long]


def train(folder: Path, *options: str, faults=(), processes=1) -> tuple[int, list[tuple], str]:
    """The exit code of the example, the numbers of each step, and what it printed."""
    launcher = {"launcher": "one process"} if processes == 1 else {}
    told = [*faults, "--", *SMALL, "--out", folder / "out", *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        job = Running(
            folder,
            *told,
            processes=processes,
            program=PROGRAM,
            flags=flags.of_users(),
            **launcher,
        )
    with job:
        code, printed = job.wait(), job.printed()
    records = [
        json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    return code, [tuple(record.get(name) for name in LOSSES) for record in records], printed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The numbers of a run without a fault, which is compared all the same."""
    code, records, printed = train(tmp_path_factory.mktemp("undisturbed"))
    assert code == 0, printed
    assert "arrays are compared every 3 steps and before each save\n" in printed
    assert "holds other bits" not in printed
    assert len(records) == 12
    return records


def told(printed: str) -> list[tuple[str, ...]]:
    """The step, the device and the leaf of each line that tells of copies which differ."""
    line = (
        r"step (\d+): device (\d+) \(process (\d)\) holds other bits of (\S+) than 7 of "
        r"the 8 .*The run goes back to its last"
    )
    return re.findall(line, printed)


def test_a_run_goes_back_and_ends_as_if_nothing_had_been(undisturbed, tmp_path):
    """Faults before the first checkpoint, found by the comparison before a save, and after it; in a
    parameter and a moment."""
    faults = ["2:5:model.wpe:12", "4:3:mu.wpe:27", "7:6:model.wpe:30"]
    code, records, printed = train(tmp_path, faults=faults)
    assert code == 0, printed
    found = told(printed)
    assert [(step, device) for step, device, _, _ in found] == [("3", "5"), ("4", "3"), ("8", "6")]
    assert found[0][3] == "model.wpe"
    assert found[1][3].endswith("mu.wpe")
    assert printed.count("restored step 4") == 1
    assert records == undisturbed


def test_past_the_budget_it_stops_and_the_same_command_goes_on(undisturbed, tmp_path):
    code, records, printed = train(
        tmp_path, "--rollback-budget=1", faults=["6:2:model.wpe:12", "6:2:model.wpe:12"]
    )
    assert code == 1
    assert "Traceback" not in printed
    assert len(told(printed)) == 1
    line = (
        "error: step 6: device 2 (process 0) holds other bits of model.wpe than 7 of the 8 "
        "devices that should hold the same. "
    )
    assert (
        line
        + "Copies differed at the steps [6, 6], and --rollback-budget is 1. Leave that device out."
        in printed
    )
    code, records, printed = train(tmp_path)
    assert code == 0, printed
    assert "restored step 4" in printed
    assert records == undisturbed


def test_a_bit_that_makes_the_loss_not_finite_is_told_as_what_it_is(undisturbed, tmp_path):
    """Before the learning rate is blamed, for a held-out loss or for steps that were skipped past
    their budget."""
    faults = ["5:2:model.norm.weight:30", "9:4:model.norm.weight:30"]
    code, records, printed = train(
        tmp_path, "--skip-budget=1", "--fingerprint-every=50", faults=faults
    )
    assert code == 0, printed
    assert [(step, device) for step, device, _, _ in told(printed)] == [("6", "2"), ("11", "4")]
    assert "learning-rate" not in printed
    assert records == undisturbed


@pytest.mark.programs
@pytest.mark.long
def test_in_two_processes_all_go_back_together(tmp_path):
    """The device is the second process's; one tells of it."""
    code, expected, printed = train(tmp_path / "undisturbed", processes=2)
    assert code == 0, printed
    code, records, printed = train(tmp_path / "disturbed", faults=["7:5:model.wpe:12"], processes=2)
    assert code == 0, printed
    assert [(step, process) for step, _, process, _ in told(printed)] == [("8", "1")]
    assert records == expected
    code, _, printed = train(
        tmp_path / "stopped", "--rollback-budget=0", faults=["7:5:model.wpe:12"], processes=2
    )
    assert code == 1
    assert re.search(
        r"error: step 8: device \d+ \(process 1\) holds other bits of model\.wpe", printed
    )
    assert "Traceback" not in printed
