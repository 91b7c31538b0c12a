"""One AdamW step of Llama 3's 8 B compiles for 64 devices, and needs and sends what its plan
says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallax.models import llama

ROOT = Path(__file__).resolve().parent.parent
NEAR = 0.4  # of the peak of memory, as tests/test_trace.py has it for the worst of its layouts


@pytest.mark.programs
@pytest.mark.long
def test_a_step_of_8_billion_parameters_over_64_devices_is_what_its_plan_says():
    """A minute and a half of processor time; no array is made."""
    command = [sys.executable, str(ROOT / "tests" / "eight_billion.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    print(json.dumps(found, indent=2))
    foretold, program = found["foretold"], found["program"]
    assert found["parameters"] == llama.B8.parameters == 8_030_261_248
    assert foretold["arguments"] == program["arguments"]
    assert foretold["sent"] == program["sent"]
    assert foretold["sent"]["context"] > 0
    peak = lambda of: of["arguments"] + of["temporaries"]
    assert abs(peak(foretold) / peak(program) - 1) < NEAR
    assert not found["conditional"]
