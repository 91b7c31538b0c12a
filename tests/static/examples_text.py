"""The examples stay short, use public names only, and begin with an estimate and with how they are
run."""

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
]
ESTIMATE = "# On the back of the envelope: "


def check_programs_of_the_gallery() -> Iterator[str]:
    """Fewer than 160 lines, of public names."""
    for name in GALLERY:
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        if text.count("\n") >= 160:
            yield f"{name}.py has {text.count(chr(10))} lines; needed fewer than 160"
        if not text.startswith(ESTIMATE):
            yield f"{name}.py does not begin with {ESTIMATE!r}"
        if f"Run: python examples/{name}.py" not in text:
            yield f"{name}.py does not say how it is run"
        if re.search(r"(?<!\bos)\._", text):
            yield f"{name}.py uses a private name"


def check_the_first_example() -> Iterator[str]:
    """Shorter still."""
    text = (EXAMPLES / "01_a_ring.py").read_text(encoding="utf-8")
    if text.count("\n") >= 80 or not text.startswith(ESTIMATE):
        yield "01_a_ring.py needs fewer than 80 lines, and to begin with its estimate"


def check_from_scratch_takes_nothing_of_the_kit() -> Iterator[str]:
    """It builds everything by itself, in 260 lines."""
    text = (EXAMPLES / "from_scratch.py").read_text(encoding="utf-8")
    if len(text.splitlines()) > 260 or "parallax" in text:
        yield "from_scratch.py needs 260 lines at most, and takes nothing of parallax"
