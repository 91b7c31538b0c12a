"""The examples stay short, use public names only, and say how they are run and what they cost."""

import re
from collections.abc import Iterator

from doc_pages import ROOT

EXAMPLES = ROOT / "examples"
GALLERY = [
    "linear_regression",
    "lenet",
    "tensor_parallel_vae",
    "gpt2_ddp_profile",
    "three_ways_to_split",
    "wrong_on_purpose",
    "custom_training",
    "lora",
    "experts",
    "long_context",
    "inside_jit",
    "islands",
    "resnet",
    "pipeline",
]


def check_programs_of_the_gallery() -> Iterator[str]:
    """A docstring with the command, then an estimate; at most 260 lines, of public names."""
    for name in (*GALLERY, "01_a_ring"):
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        docstring, _, code = text.partition('\n"""\n')
        if text.count("\n") > 260:
            yield f"{name}.py has {text.count(chr(10))} lines; needed 260 at most"
        if not docstring.startswith('"""') or f"Run: python examples/{name}.py" not in docstring:
            yield f"{name}.py does not begin with a docstring that says how it is run"
        if not code.startswith("\n# Estimate: "):
            yield f"{name}.py has no '# Estimate: ' after its docstring"
        if re.search(r"(?<!\bos)\._", text):
            yield f"{name}.py uses a private name"


def check_from_scratch_takes_nothing_of_the_kit() -> Iterator[str]:
    """It builds everything by itself, in 280 lines."""
    text = (EXAMPLES / "from_scratch.py").read_text(encoding="utf-8")
    if len(text.splitlines()) > 280 or "parallax" in text:
        yield "from_scratch.py needs 280 lines at most, and takes nothing of parallax"
