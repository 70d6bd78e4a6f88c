"""The documentation site builds without a warning, and no link in it is broken."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from loaded import load

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        folder / "trees",
        "docs",
        folder / "html",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "html"


class Page(HTMLParser):
    """The targets of links, the ids, and the pictures without an alternative text, of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.without_text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "img":
            self.links.append(values["src"])
            if not values.get("alt"):
                self.without_text.append(values["src"])


def test_links_lead_to_pages_and_places(site):
    pages = {path: Page(path.read_text()) for path in site.glob("**/*.html")}
    assert len(pages) > 40
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (parts.fragment and target in pages and parts.fragment not in pages[target].ids):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_names_of_other_libraries_are_listed_with_what_to_write(site):
    from spmd.spellings import INSTEAD, KEYWORDS, UNKNOWN_KEYWORDS, VALUES

    text = unescape(re.sub(r"<[^>]+>", "", (site / "reference" / "renamed.html").read_text()))
    words = set(re.findall(r"[\w.+-]+", text))
    spellings = {name for names in INSTEAD.values() for name in names} | UNKNOWN_KEYWORDS.keys() | VALUES.keys()
    spellings |= {word for line in (*KEYWORDS, *VALUES.values()) for word in line.split() if word != "cuda:0"}
    assert not spellings - words
    mends = {mend for names in INSTEAD.values() for mend in names.values()}
    assert not {mend for mend in mends if mend.partition(": ")[0] not in text}


def test_pictures_have_alternative_texts(site):
    assert not {
        str(path): page.without_text for path in site.glob("**/*.html") if (page := Page(path.read_text())).without_text
    }


def test_versions_are_published_beside_each_other(tmp_path):
    module = load(ROOT / "docs" / "tools" / "publish.py")
    built, pages = tmp_path / "site", tmp_path / "pages"
    built.mkdir()
    with pytest.raises(SystemExit, match="build the site first"):
        module.publish(built, pages, "latest")
    (built / "index.html").write_text("one")
    for name in ("latest", "v0.9", "v0.10"):
        names = module.publish(built, pages, name)
    assert names == json.loads((pages / "versions.json").read_text()) == ["v0.10", "v0.9", "latest"]
    assert "v0.10/index.html" in (pages / "index.html").read_text()
    (built / "index.html").write_text("two")
    module.publish(built, pages, "latest")
    assert [(pages / n / "index.html").read_text() for n in names] == ["one", "one", "two"]
