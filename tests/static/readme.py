"""README.md is one page, and each of its claims names what shows it."""

import re
from collections.abc import Iterator

from doc_pages import ROOT
from pages import functions

README = ROOT / "README.md"
PAGES = [README, ROOT / "docs" / "index.md", ROOT / "docs" / "comparison.md"]


def check_it_is_one_page() -> Iterator[str]:
    """At most 110 lines of at most 100 characters."""
    lines = README.read_text(encoding="utf-8").splitlines()
    if len(lines) > 110:
        yield f"README.md has {len(lines)} lines; needed 110 at most"
    for number, line in enumerate(lines, start=1):
        if len(line) > 100:
            yield f"README.md:{number} has {len(line)} characters; needed 100 at most"


def check_every_claim_names_a_test_that_is_there() -> Iterator[str]:
    """Those under `What is proved`."""
    text = README.read_text(encoding="utf-8")
    claims = text[text.index("## What is proved") : text.index("## What is measured")].split(
        "\n- "
    )[1:]
    if len(claims) < 5:
        yield f"README.md has {len(claims)} claims under `What is proved`; needed 5"
    for claim in claims:
        named = re.findall(r"`tests/(test_\w+\.py)::(test_\w+)`", claim)
        if not named:
            yield f"README.md: a claim names no test: {claim}"
        for file, name in named:
            if name not in functions(ROOT / "tests" / file):
                yield f"README.md names {file}::{name}, which is not there"


def check_every_ratio_stands_with_the_benchmarks() -> Iterator[str]:
    """Each ratio of the pages' tables is one of those that benchmarks/README.md has in its own."""
    measured = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    measured = measured[
        measured.index("## The ratios in short") : measured.index("## collectives.py")
    ]
    for page in PAGES:
        tables = "\n".join(
            line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")
        )
        pattern = r"\b\d\.\d\d\b" if page.name == "comparison.md" else r"\b\d+\.\d\d?(?=x)"
        ratios = re.findall(pattern, tables)
        if page.name != "index.md" and len(ratios) <= 3:
            yield f"{page.name} has {len(ratios)} ratios in its tables; needed more than 3"
        for ratio in ratios:
            if ratio not in measured:
                yield f"{page.name} has the ratio {ratio}, and benchmarks/README.md does not"
