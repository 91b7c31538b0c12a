"""The command line plans, searches, compares, and says what it needs."""

import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import parallax
from parallax import hardware
from parallax.__main__ import main, parser
from parallax.commands.options import HARDWARE, layout_of, model


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "plan --model large --layout data=8,tensor=4,zero=1 --hardware h100",
            ("32 x H100", "tensor", "of peak"),
        ),
        (
            "plan --model tiny --devices 4 --hardware v5e --batch 8 --top 3",
            ("seconds  of peak", "4 x TPU v5e", "algorithms"),
        ),
        (
            "plan --model gpt3 --context 1024 --layout stage=8,tensor=8,microbatches=64 --batch 64",
            ("x 1024 tokens",),
        ),
        (
            "plan --model llama-tiny --layout data=2,tensor=2 --batch 8",
            ("4 x A100: data=2,tensor=2", "of peak", "run beside the work"),
        ),
        (
            "plan --model llama-tiny --devices 4 --batch 8 --top 2 --attention-kernel",
            ("seconds  of peak", "4 x A100", "algorithms"),
        ),
        (
            "plan --layout data=8,zero=1 --islands 2",
            (
                "2 islands of 8 devices, a round every 50 steps",
                "498 MB a round, 9.96 MB a step; as int8 2.57 MB a step",
            ),
        ),
        (  # a device of any island may fail: 256 devices, as in the mesh of the file below
            "plan --layout data=8,zero=1 --islands 32 --failures-per-device-year 0.2",
            ("32 islands of 8 devices", "a failure every 7.1"),
        ),
        (
            f"plan {Path(__file__).parent}/planned_step.py:train --mesh data=256 --hardware v5e "
            "--failures-per-device-year 0.2",
            ("data=256", "collective-permute", "bound by", "a failure every 7.1", "best: a save"),
        ),
    ],
)
def test_prints(arguments, words, capsys):
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        assert main(arguments.split()) == 0
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "plan --layout data=8 --islands 0",
            "Islands need --islands and --every of 1 or more; got --islands 0 --every 50.",
        ),
        (
            "plan --model medium --layout tensor=3",
            "must be a multiple of tensor=3. Use --layout tensor=2, which divides it.",
        ),
        (
            "plan --model xl --layout tensr=8",
            "got 'tensr'. Use --layout tensor=1.",
        ),
        (
            "plan --model xl --layout data=8 --devices 16",
            "data=8 x stage=1 x tensor=1 multiply to 8, and there are 16 devices. Use --layout "
            "data=16 (or --layout data=8 --devices 8).",
        ),
        (
            "plan --model xl --layout tensor=5",
            "rows (rows=50304) must be a multiple of stage=1 x tensor=5. Use --layout tensor=1.",
        ),
        (
            "plan --model tiny --layout stage=5,schedule=1f1b,remat=blocks --batch 16 --devices 6",
            "got 'blocks'. Use --layout stage=2,schedule=one_f_one_b,remat=block,data=3 --batch "
            "18.",
        ),
        (
            "plan --layout data=2 --batch 0",
            "--batch 0 must be a whole number from 1 to 2147483647. Use --layout data=2 --batch 2.",
        ),
        (
            "plan --layout data=2 --devices -3",
            "--devices -3 must be a whole number from 1 to 2147483647. Use --layout data=2 ",
        ),
        ("plan --layers 0", "--layers must be 1 or more; got 0. The model's own value is 12."),
        (
            "plan --devices 0",
            "--devices must be 1 or more; got 0.",
        ),
        (
            "plan --devices 8 --precision bf16",
            "one of full, bfloat16, float16; got 'bf16'. Use --precision bfloat16.",
        ),
        ("plan --model xl", "plan needs --devices, or --layout, or FILE:FUNCTION with --mesh."),
        (
            "plan --mesh data=8",
            "file, as in `plan path/to/file.py:function --mesh data=8`",
        ),
        ("plan nowhere.py:train --mesh data=2", "there is no file 'nowhere.py'."),
        (f"plan {__file__}:nothing --mesh data=2", "has no function 'nothing'."),
        (f"plan {__file__}:nothing", "Use --mesh data=256."),
        (
            f"plan {__file__}:nothing --mesh data=2 --layout data=64 --batch 64 --attention-kernel",
            "does not use --batch --layout --attention-kernel: the file makes the model",
        ),
        (
            "plan --devices 8 --islands 4",
            "--islands 4 needs --layout: a search ranks the layouts of one island.",
        ),
        (f"plan {__file__}:nothing --mesh data=two", "as data=256,tensor=8; got 'data=two'."),
        (f"plan {__file__}:nothing --mesh data=2,data=4", "each named once, and sizes of 1 or"),
        (
            "plan --model xl --devices 8 --hardware abacus",
            "--hardware must be one of v100, a100, h100, h200, b200, v4, v5e, v5p, v6e, tpu7x, "
            "or a slice of TPUs such as v5e:2x4 or v5p:2x2x1; got 'abacus'.",
        ),
        (
            "bisect --layout data=2 --record nowhere.npz",
            "--record needs a file that --save wrote; there is none at nowhere.npz.",
        ),
        (
            f"bisect --layout data=2 --record {__file__}",
            "needed a record that bisect's Record.save wrote; got another file",
        ),
        ("bisect --layout data=2 --save nowhere/run.npz", "--save needs an existing folder; "),
        (
            "compile --target v5e:2x2 --layout data=4 --text nowhere/program.txt",
            "--text needs an existing folder; ",
        ),
    ],
)
def test_what_cannot_be_ends_with_a_sentence(arguments, message, capsys):
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


FIELDS = {
    "data": [1, 2, 3, 4, 8, 0],
    "stage": [1, 2, 4, 5],
    "tensor": [1, 2, 3, 4],
    "microbatches": [1, 2, 3, 4, 8],
    "chunks": [1, 2, 3],
    "zero": [0, 1, 3, 4],
    "sequence": ["True", "yes"],
    "remat": ["none", "block", "blocks", "stage"],
    "schedule": ["gpipe", "one_f_one_b_lockstep", "zero_bubble_lockstep", "1f1b"],
    "processes": [1, 2, 3],
    "dta": ["2"],
    "precision": ["bf16"],
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("part", range(4))
def test_what_is_proposed_for_a_wrong_layout_works(part):
    """Each proposal, typed after the words that were refused, passes the same check."""
    generator, wrong, seen = random.Random(part), 0, 0
    while wrong < 100:
        chosen = [
            name
            for name in FIELDS
            if generator.random() < (0.05 if name in ("dta", "precision") else 0.4)
        ]
        words = [
            "plan",
            "--layout",
            ",".join(f"{name}={generator.choice(FIELDS[name])}" for name in chosen),
        ]
        for flag, values in {
            "--model": ["tiny", "small", "xl"],
            "--batch": [16, 31, 64],
            "--devices": ["", 6, 8, 16],
        }.items():
            words += [flag, str(value)] if (value := generator.choice(values)) else []
        if (message := refused(words)) is None:
            continue
        wrong += 1
        for each in proposals(message):
            seen += 1
            assert each.startswith("--")
            assert (again := refused([*words, *each.split()])) is None, (
                f"{words}\n{message}\n{again}"
            )
    print(f"{wrong} wrong layouts, {seen} proposals")


def proposals(message):
    """What a refusal says to take: the first, up to its reason, and what else there is, in
    brackets."""
    first, *others = re.split(r" \(or ", message.rpartition(" Use ")[2].removesuffix("."))
    return [
        first.split(", the nearest")[0].split(", which ")[0],
        *(other.removesuffix(")") for other in others),
    ]


def refused(words):
    """The message by which the command line refuses a layout; None if it does not."""
    options = parser().parse_args(words)
    try:
        layout_of(options, model(options).config, options.devices)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("plan --model xl --devices 64 --hardware a100", marks=pytest.mark.long),
    ],
)
def test_the_page_on_planning_shows_what_it_prints(command, capsys):
    """Under the page's JAX; another keeps other arrays for the backward pass (of a GELU five, not
    six), so the words alone."""
    shown = (Path(__file__).parent.parent / "docs" / "planning.md").read_text()
    assert main(command.split()) == 0
    printed = capsys.readouterr().out.rstrip()
    if jax.__version__ == "0.10.2":
        assert printed in shown
    else:
        words = lambda text: set(re.findall(r"[a-zA-Z]{3,}", text))
        assert len(words(printed) - words(shown)) <= 3  # the best layouts may be others


def test_help_shows_defaults_and_imports_no_jax(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    printed = capsys.readouterr().out
    assert "sequences in the global batch (default: 512)" in printed
    assert "None" not in printed
    program = (
        "import sys; from parallax.__main__ import parser; parser(); assert 'jax' not in "
        "sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"parallax {parallax.__version__}\n"


def test_the_command_line_knows_the_chips_of_the_plan():
    assert ", ".join(hardware.KNOWN) == HARDWARE


def test_what_is_told_to_install_can_be_installed():
    """Nothing is released: an extra is installed from the repository, and is one that it has."""
    root = Path(__file__).parent.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for folder, pattern in (
        ("parallax", "*.py"),
        ("examples", "*.py"),
        ("benchmarks", "*.py"),
        ("docs", "*.md"),
    ):
        for path in (root / folder).rglob(pattern):
            text = path.read_text()
            assert "parallax-jax[" not in text, path
            found = set(re.findall(r"""pip install -e ['"]\.\[([\w-]+)\]""", text))
            assert found <= extras.keys(), path
