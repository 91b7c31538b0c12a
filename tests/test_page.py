"""A page of texts and pictures loads nothing from elsewhere, shows all of them, and a browser draws
it."""

import base64
import re
import shutil
import subprocess
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pytest

from parallax import draw, mesh

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Read(HTMLParser):
    """The texts, pictures and links of a page; a tag that is not closed fails."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.pictures, self.links, self.names, self._open = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.pictures += [attrs["src"]] if tag == "img" else []
        self.links += [attrs["href"]] if tag == "a" else []
        self.names += [attrs["id"]] if "id" in attrs else []
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def written(tmp_path):
    table = draw.mesh(mesh.make(data=4, tensor=2), tmp_path / "mesh.svg")
    draw.mesh(mesh.make(data=8), tmp_path / "mesh.png")
    prose = "a sentence <b>that</b> is & stays what it is " * 10
    sections = {
        "A mesh & more": [table, tmp_path / "mesh.svg"],
        "Another": [tmp_path / "mesh.png", prose],
    }
    draw.page(tmp_path / "page.html", "Title <1>", sections)
    return tmp_path / "page.html", table, prose


def test_a_page_has_all_that_it_was_given_and_loads_nothing(written):
    path, table, prose = written
    text = path.read_text()
    page = Read(text)
    assert {"Title <1>", "A mesh & more", "Another", table, prose} <= set(page.texts)
    assert [picture.partition(";")[0] for picture in page.pictures] == [
        "data:image/svg+xml",
        "data:image/png",
    ]
    kept = base64.b64decode(page.pictures[0].partition("base64,")[2])
    assert kept == (path.parent / "mesh.svg").read_bytes()
    assert page.links == [f"#{name}" for name in page.names]
    assert "http" not in text  # pictures are inside, in base64
    assert text.count('class="wraps"') == 1


def test_a_text_in_place_of_a_list_of_parts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needed a list of parts below 'Bytes'; got one part"):
        draw.page(tmp_path / "page.html", "Title", {"Bytes": "a table"})


def test_a_picture_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must be an SVG or a PNG; got mesh\.pdf"):
        draw.page(tmp_path / "page.html", "", {"": [tmp_path / "mesh.pdf"]})


@pytest.mark.programs
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [412, 1100])
@pytest.mark.parametrize(("scheme", "paper"), [(1, 1.0), (0, 0.07)], ids=["light", "dark"])
def test_a_browser_draws_it(written, width, scheme, paper):
    """Where there is one: the colours of the mesh are on the picture that it makes, and the page is
    light or dark."""
    path, *_ = written
    seen = path.with_suffix(".png")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},1400",
        f"--screenshot={seen}",
    ]
    subprocess.run(
        [*command, f"--blink-settings=preferredColorScheme={scheme}", path.as_uri()],
        check=True,
        timeout=120,
        capture_output=True,
    )
    pixels = matplotlib.image.imread(seen)[..., :3]
    blue = np.asarray([0x00, 0x72, 0xB2]) / 255  # the first of `draw.canvas.COLOURS`
    assert (np.abs(pixels - blue).max(axis=-1) < 0.02).mean() > 0.01
    np.testing.assert_allclose(
        pixels[3, 3], paper, atol=0.02
    )  # the browser's own colours of a page


@pytest.mark.programs
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("width", "wider"), [(412, True), (1100, False)], ids=["phone", "desk"])
def test_a_wide_picture_keeps_its_letters_on_a_phone(tmp_path, width, wider):
    """It is wider than the window, and scrolls; on a wide window it fits. The last of its devices
    are then not seen."""
    draw.mesh(mesh.make(data=1, tensor=8), tmp_path / "mesh.svg")
    draw.page(tmp_path / "page.html", "", {"Mesh": [tmp_path / "mesh.svg"]})
    measure = "<script>document.title = document.querySelector('img').width</script>"
    (tmp_path / "page.html").write_text(
        (tmp_path / "page.html").read_text().replace("</body>", measure + "</body>")
    )
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},1400",
        "--dump-dom",
    ]
    run = subprocess.run(
        [*command, (tmp_path / "page.html").as_uri()],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert (int(re.search(r"<title>(\d+)</title>", run.stdout).group(1)) > width) == wider
