"""README.md is one page, its first program runs as it stands, and each of its claims names what shows it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "docs" / "index.md", ROOT / "docs" / "comparison.md"]


def test_the_first_program_runs_as_it_stands():
    """Eight devices print what one prints: the loss and the gradient."""
    program = re.search(r"```python\n(import.*?)```", README.read_text(), re.DOTALL).group(1)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    one, eight = ([float(number) for number in re.findall(r"-?\d+\.\d*", line)] for line in _calls(run.stdout))
    assert len(one) == 5
    np.testing.assert_allclose(one, eight, rtol=1e-5)  # float32


def _calls(printed):
    """What each of the two calls printed; the numbers of an array may take several lines."""
    first, second = printed.split("eight devices")
    return first.removeprefix("one device"), second


def test_it_is_one_page():
    lines = README.read_text().splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 100] == []


def test_every_claim_names_a_test_that_is_there():
    """Those under `What is proved`."""
    text = README.read_text()
    claims = text[text.index("## What is proved") : text.index("## What is measured")].split("\n- ")[1:]
    assert len(claims) >= 5
    for claim in claims:
        named = re.findall(r"`tests/(test_\w+\.py)::(test_\w+)`", claim)
        assert named, claim
        for file, name in named:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_ratio_stands_with_the_benchmarks(page):
    """Each ratio of the pages' tables is one of those that benchmarks/README.md has in its own."""
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    measured = measured[measured.index("## The ratios in short") : measured.index("## collectives.py")]
    tables = [line for line in page.read_text().splitlines() if line.startswith("|")]
    ratios = re.findall(r"\b\d+\.\d\d?(?=x)", "\n".join(tables))
    if page.name == "comparison.md":
        ratios = re.findall(r"\b\d\.\d\d\b", "\n".join(tables))
    assert [ratio for ratio in ratios if ratio not in measured] == []
    assert page.name == "index.md" or len(ratios) > 3
