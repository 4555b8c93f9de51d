"""What `make docs` needs beside mkdocs.yml: pages that lie outside this folder, and docstrings as they are written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from griffe import Class, Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    ROOT / "CHANGELOG.md": "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md": "CONTRIBUTING.md",
    **{path: f"spec/{path.name}" for path in sorted(ROOT.glob("allocator/spec/*.*"))},
}
"""Files that the site has, and where. A link in the repository can't lead through a symbolic link, so there is none in
docs/: the pages stay where they are, links say where, and are rewritten here."""


def on_files(files: Files, config: MkDocsConfig) -> None:
    for path, place in ELSEWHERE.items():
        files.append(File.generated(config, place, abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave docs/, or come from outside of it. One to a file that the site lacks becomes its text."""
    here = Path(page.file.abs_src_path or "").resolve()

    def moved(match: re.Match[str]) -> str:
        text, target, anchor = match.groups(default="")
        path = (here.parent / target).resolve()
        place = ELSEWHERE.get(path)
        if place is None and (ROOT / "docs") in path.parents:
            place = str(path.relative_to(ROOT / "docs"))
        if place is None:
            return text if path.exists() else match[0]  # which strict mode refuses
        return f"[{text}]({os.path.relpath(place, Path(page.file.src_uri).parent)}{anchor})"

    return re.sub(r"\[([^]]+)\]\(((?:\.\./)*[\w./-]+)(#[\w-]+)?\)", moved, markdown)


class AsWritten(Extension):
    """Our docstrings describe parameters in aligned columns, a name and what it is. A table shows them.

    So what a class's own docstring describes is not shown once more as `self.name = name`.
    """

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(as_table, obj.docstring.value.split("\n\n")))

    def on_class(self, *, cls: Class, **_: Any) -> None:
        for name, member in list(cls.members.items()):
            if member.labels == {"instance-attribute"} and member.docstring is None:
                cls.del_member(name)


def as_table(paragraph: str) -> str:
    """A paragraph whose lines are all `name   description`, or begin in the column of the descriptions."""
    lines = paragraph.split("\n")
    first = re.match(r"( *)(\S.*?) {2,}(?=\S)", lines[0])
    if first is None:
        return paragraph
    column = first.end()
    rows: list[tuple[str, str]] = []
    for line in lines:
        name, description = line[:column].strip(), line[column:]
        if not description or line[column - 1] != " " or (not name and not rows):
            return paragraph
        if name:
            rows.append((name, description))
        else:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {description.strip()}")
    return "\n".join(
        ["| | |", "| --- | --- |", *(f"| {cell(name, code=True)} | {cell(text)} |" for name, text in rows)]
    )


def cell(text: str, code: bool = False) -> str:
    text = text.replace("|", "\\|")
    return f"`{text}`" if code else text
