"""Texts and pictures as one HTML page, which loads nothing from elsewhere, and reads on a phone and in the dark too."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallax.draw import canvas

LONG = 160  # characters of a line
KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; }
h2 { font-size: 1.1rem; margin-top: 2.5rem; border-bottom: 1px solid #8886; }
nav a { margin-right: 1rem; }
pre { overflow-x: auto; font: 13px/1.4 ui-monospace, monospace; background: #8881; padding: 0.8rem; border-radius: 6px; }
pre.wraps { white-space: pre-wrap; }
img { max-width: 100%; height: auto; background: white; border-radius: 6px; }
@media (max-width: 45em) {
  .picture { overflow-x: auto; }
  .picture img { max-width: min(56rem, 250vw); }
}
"""


def page(path: canvas.Path, title: str, sections: Mapping[str, Sequence[str | Path]]) -> None:
    """Write a page with a heading for each section, and under it what it holds, in order.

    Args:
        path: of the HTML file.
        sections: by their headings: texts, shown as they are, and the paths of pictures (SVG or PNG), which become part of the
            page.

    Raises:
        ValueError: a picture has another suffix than .svg or .png.
    """
    names = {name: f"section-{i}" for i, name in enumerate(sections, 1)}
    links = " ".join(
        f'<a href="#{anchor}">{html.escape(name)}</a>' for name, anchor in names.items()
    )
    body = [
        "\n".join(
            [
                f'<section id="{names[name]}">',
                f"<h2>{html.escape(name)}</h2>",
                *(_shown(part, name) for part in parts),
            ]
        )
        for name, parts in sections.items()
    ]
    lines = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        f"<h1>{html.escape(title)}</h1>\n<nav>{links}</nav>",
        *(f"{section}\n</section>" for section in body),
        "</body>\n</html>\n",
    ]
    Path(path).write_text("\n".join(lines), encoding="utf-8")


def _shown(part: str | Path, name: str) -> str:
    if isinstance(part, str):
        longest = max(map(len, part.splitlines()), default=0)
        wraps = (
            ' class="wraps"' if longest > LONG else ""
        )  # shorter lines may be columns, which stay aligned
        return f"<pre{wraps}>{html.escape(part)}</pre>"
    kind = KINDS.get(part.suffix)
    if kind is None:
        raise ValueError(
            f"draw.page: a picture must be an SVG or a PNG; got {part.name}. Draw it to a path with that suffix."
        )
    image = f'<img alt="{html.escape(name)}" src="data:{kind};base64,{base64.b64encode(part.read_bytes()).decode()}">'
    return f'<div class="picture">{image}</div>'
