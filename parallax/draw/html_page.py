"""Writes texts and pictures as one HTML file that loads no other files. The page suits phones and
dark mode.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallax.draw import canvas

LONG = 160  # a text with a longer line is prose, and is wrapped; other texts may be tables
KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; }
h2 { font-size: 1.1rem; margin-top: 2.5rem; border-bottom: 1px solid #8886; }
nav a { margin-right: 1rem; }
pre { overflow-x: auto; font: 13px/1.4 ui-monospace, monospace; }
pre { background: #8881; padding: 0.8rem; border-radius: 6px; }
pre.wraps { white-space: pre-wrap; }
img { max-width: 100%; height: auto; background: white; border-radius: 6px; }
@media (max-width: 45em) {
  pre { white-space: pre-wrap; }
  .picture { overflow-x: auto; }
  .picture img { max-width: min(56rem, 250vw); }
}
"""


def page(path: canvas.Path, title: str, sections: Mapping[str, Sequence[str | Path]]) -> None:
    """Writes a page with a heading for each section, and below the heading the parts of the
    section.

    Args:
        path: the HTML file to write.
        title: the title of the page.
        sections: for each heading, the parts below it, in order. A part is a text, or the
            `pathlib.Path` of an SVG or PNG picture, which is embedded.

    Raises:
        ValueError: a picture's suffix is neither .svg nor .png, or the parts of a section are one
            text or one path instead of a list.
    """
    links, body = [], []
    for i, (name, parts) in enumerate(sections.items(), 1):
        if isinstance(parts, str | Path):  # each character of a text would be a part
            raise ValueError(
                f"draw.page: needed a list of parts below {name!r}; got one part. Write it in a "
                "list."
            )
        links.append(f'<a href="#section-{i}">{html.escape(name)}</a>')
        shown = "\n".join(_html(part, name) for part in parts)
        heading = f"<h2>{html.escape(name)}</h2>"
        body.append(f'<section id="section-{i}">\n{heading}\n{shown}\n</section>')
    lines = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        f"<h1>{html.escape(title)}</h1>\n<nav>{' '.join(links)}</nav>",
        *body,
        "</body>\n</html>\n",
    ]
    Path(path).write_text("\n".join(lines), encoding="utf-8")


def _html(part: str | Path, name: str) -> str:
    """Returns `part`, a text or the path of a picture, as HTML. The bytes of a picture are
    embedded. `name` is the heading of the section, and describes the picture. Raises `ValueError`
    if the picture is neither SVG nor PNG.
    """
    if isinstance(part, str):
        longest = max(map(len, part.splitlines()), default=0)
        wraps = ' class="wraps"' if longest > LONG else ""
        return f"<pre{wraps}>{html.escape(part)}</pre>"
    kind = KINDS.get(part.suffix)
    if kind is None:
        raise ValueError(
            f"draw.page: a picture must be an SVG or a PNG; got {part.name}. "
            "Draw the picture to a path that ends in .svg or .png."
        )
    content = base64.b64encode(part.read_bytes()).decode()
    image = f'<img alt="{html.escape(name)}" src="data:{kind};base64,{content}">'
    return f'<div class="picture">{image}</div>'
