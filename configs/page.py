"""A report as one HTML file that needs nothing else: headings, paragraphs, tables, and pictures held inside it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from draftsmith.configs.files import atomic_file

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2rem; } p { max-width: 60rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .8rem 0; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #d8dee4; text-align: right; vertical-align: top; }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; } figcaption, .said { color: #59636e; }
"""


class Page:
    """Build top to bottom, then `write`. Every text is escaped; every method returns the page, so that calls chain.

    Example:
        Page("Training of run-1", "draftsmith 0.1").section("Result").text("...").table(["K", "length"], [["3", "2.71"]])
    """

    def __init__(self, title: str, said: str = "") -> None:
        self.title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]
        if said:
            self._parts.append(f'<p class="said">{escape(said)}</p>')

    def section(self, heading: str) -> Page:
        """Begin a section."""
        return self._add(f"<h2>{escape(heading)}</h2>")

    def text(self, paragraph: str) -> Page:
        """One paragraph."""
        return self._add(f"<p>{escape(paragraph)}</p>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, left: bool = False) -> Page:
        """The first column is text, the others are right-aligned numbers unless `left`."""
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>\n" for row in rows)
        mark = ' class="text"' if left else ""
        return self._add(f"<table{mark}><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>")

    def picture(self, png: Path | bytes, caption: str = "") -> Page:
        """A PNG, from a file or its bytes, copied into the page."""
        data = base64.b64encode(png if isinstance(png, bytes) else png.read_bytes()).decode()
        said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        alt = escape(caption or "picture", quote=True)
        return self._add(f'<figure><img alt="{alt}" src="data:image/png;base64,{data}">{said}</figure>')

    def html(self) -> str:
        """The whole document."""
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(self.title)}</title>'
        body = "\n".join(self._parts)
        return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'

    def write(self, file: Path) -> None:
        """Write the document; an older one is replaced whole."""
        with atomic_file(file) as temporary:
            temporary.write_text(self.html(), encoding="utf-8")

    def _add(self, part: str) -> Page:
        self._parts.append(part)
        return self
