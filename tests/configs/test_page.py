"""A report page is one file: well-formed, every text escaped, pictures inside it."""

from __future__ import annotations

import base64
from html.parser import HTMLParser

from draftsmith.configs.page import Page

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Reader(HTMLParser):
    """Collects texts and picture sources, and checks that tags nest."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.sources = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_a_page_holds_everything_it_shows_and_no_text_becomes_markup(tmp_path):
    (tmp_path / "one.png").write_bytes(PNG)
    evil = '<script>alert("x")</script>'
    page = Page(f"Run {evil}", "said").section("Result").text(f"a < b & {evil}")
    page.table(["K", evil], [["3", 2.71], ["4", evil]], left=True).picture(tmp_path / "one.png", 'a "caption"').picture(
        PNG
    )
    page.write(tmp_path / "report.html")
    reader = Reader()
    reader.feed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert reader.open == []
    assert [evil in text for text in reader.texts].count(True) == 5  # title, h1, p, th, td
    assert len(reader.sources) == 2
    for source in reader.sources:
        assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == PNG
    assert not list(tmp_path.glob(".*"))
