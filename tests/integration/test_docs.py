"""Every code block of every page is run or checked, and every link leads somewhere. CONTRIBUTING.md has the rules."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvproof.cli import command_line

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for folder in ("*.md", "docs/**/*.md", "allocator/spec/*.md")
    for path in sorted(ROOT.glob(folder))
}
SHOWN = {"text", "tla", "diff", "c", "yaml"}
"""Languages of blocks that are only looked at."""
FOREIGN = {"cd", "cp", "export", "git", "pip", "vllm"}
"""First words of commands in `sh` blocks that are none of ours."""
NOT_RUN = re.compile(r"<!-- not run: .+ -->")
EXITS = re.compile(r" +# exits with (\d+)$")


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int  # of the fence, from 1
    language: str
    title: str
    """A file's name, under which the block is saved in the page's folder."""
    text: str
    runs: bool

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> Iterator[Block]:
    lines = text.split("\n")
    fence = re.compile(r"^( *)(`{3,})(.*)$")
    at = 0
    while at < len(lines):
        if opening := fence.match(lines[at]):
            indent, ticks, info = opening.groups()
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == ticks)
            described = re.fullmatch(r'(\w*)(?: title="([^"]+)")?', info.strip())
            assert described, f"{page}:{at + 1}: {info!r} is not a language, or a language and a title"
            body = [line.removeprefix(indent) for line in lines[at + 1 : end]]
            runs = not NOT_RUN.fullmatch(lines[at - 1].strip())
            yield Block(page, at + 1, described[1], described[2] or "", "\n".join(body) + "\n", runs)
            at = end
        at += 1


# ---- a page's blocks, in order


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", PAGES)
def test_blocks(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file saved twice within a second is read twice
    namespace: dict[str, Any] = {"__name__": "__main__"}
    before = set(sys.modules)
    try:
        for block in blocks_of(page, PAGES[page].read_text(encoding="utf-8")):
            if block.title:
                (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / block.title).write_text(block.text, encoding="utf-8")
            if block.language == "python":
                run_python(block, namespace)
            elif block.language == "console":
                run_console(block, tmp_path)
            elif block.language == "sh":
                check_shell(block)
            elif block.language == "json":
                for line in block.text.splitlines() if block.title.endswith(".jsonl") else [block.text]:
                    json.loads(line)
            elif block.language == "toml":
                tomllib.loads(block.text)
            else:
                assert block.language in SHOWN, f"{block.where}: unknown language {block.language!r}"
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("nanovllm") or str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]  # the next page may have one of that name


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    code = "\n" * block.line + block.text  # so that tracebacks show the page
    if block.runs:
        exec(compile(code, str(ROOT / block.page), "exec"), namespace)
        return
    for node in ast.walk(ast.parse(code, block.where)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvproof"):
            module = importlib.import_module(node.module or "")
            absent = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert not absent, f"{block.where}: {node.module} has no {absent}"


def run_console(block: Block, folder: Path) -> None:
    environment = os.environ | {
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
    }
    assert block.text.startswith("$ "), f"{block.where}: a console block begins with a command"
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, expected = re.fullmatch(r"((?:.*\\\n)*.*)\n([\s\S]*)", part).groups()  # type: ignore[union-attr]
        code = int(match[1]) if (match := EXITS.search(command)) else 0
        if not block.runs:
            continue
        shell = ["bash", "-c", command]
        done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        printed = done.stdout + done.stderr
        assert done.returncode == code, f"{block.where}: {command!r} exits with {done.returncode}\n{printed}"
        if not matches(expected, printed):
            pytest.fail(f"{block.where}: {command!r} prints\n{printed}\ninstead of\n{expected}")


def matches(expected: str, printed: str) -> bool:
    """`...` alone on a line stands for any lines, within a line for any text in it."""
    pattern = ""
    for line in trimmed(expected):
        pattern += r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*?") + r"\n"
    return re.fullmatch(pattern, "".join(line + "\n" for line in trimmed(printed))) is not None


def trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").split("\n")] if text.strip() else []


# ---- commands that are not run


def check_shell(block: Block) -> None:
    elsewhere = False
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        command: list[str] = []
        for token in [*lexer, ";"]:
            if set(token) <= set("&|;"):
                if command:
                    elsewhere = elsewhere or command[0] == "cd"
                    reason = trouble(command, elsewhere)
                    assert not reason, f"{block.where}: {line!r}: {reason}"
                command = []
            elif command or not re.match(r"\w+=", token):  # a variable in front
                command.append(token)


def trouble(command: list[str], elsewhere: bool) -> str | None:
    """What is wrong with a command in a `sh` block; None if nothing is. No file is missed that is `elsewhere`."""
    word, *arguments = command
    if word == "kvproof":
        return unparsable(arguments)
    if word == "make":
        return next((f"no target {name}" for name in arguments if "=" not in name and name not in targets()), None)
    if word in ("python", "pytest", "$KVPROOF_VLLM_PYTHON"):
        if arguments[:1] == ["-m"]:
            word, *arguments = arguments[1:]
            if not (word == "pytest" or exists(word)):
                return f"no module {word}"
        files = [argument.partition("::")[0] for argument in arguments if argument.endswith(".py") or "/" in argument]
        return next((f"no file {file}" for file in files if not (elsewhere or (ROOT / file).exists())), None)
    if word == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.findall(r"kvproof\[([\w,-]+)\]", " ".join(arguments))
        return next((f"no extra {name}" for name in ",".join(named).split(",") if name and name not in extras), None)
    if word in FOREIGN or (ROOT / word).is_file():
        return None
    return f"{word} is neither ours nor on the list of others"


def unparsable(arguments: list[str]) -> str | None:
    try:
        command_line().parse_args(arguments)
    except SystemExit as leave:
        return f"kvproof {' '.join(arguments)}: refused" if leave.code else None
    return None


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def exists(module: str) -> bool:
    """Without an import, which may need what is not here. Not for modules of others, about which we know nothing."""
    if not module.startswith("kvproof."):
        return False
    _, package, *rest = module.split(".")
    spec = importlib.util.find_spec(f"kvproof.{package}")
    if spec is None or spec.submodule_search_locations is None:
        return False
    path = Path(spec.submodule_search_locations[0], *rest)
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


# ---- links


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    """As one browses the repository; `make docs` checks those of the site, and all anchors."""
    text = re.sub(r"^ *(```+)[\s\S]*?^ *\1$", "", PAGES[page].read_text(encoding="utf-8"), flags=re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        if not re.match(r"https?:|#", target):
            assert (PAGES[page].parent / target.partition("#")[0]).exists(), f"{page} links to {target}"


# ---- the checks themselves notice what is wrong


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("```\nmake test\n```", "unknown language ''"),
        ("```bash\nmake test\n```", "unknown language 'bash'"),
        ('```python no-run="why"\n```', "is not a language"),
        ("```sh\nmake nothing\n```", "no target nothing"),
        ("```sh\nmake test && make nothing\n```", "no target nothing"),
        ("```sh\nkvproof fuzz --nothing  # a remark\n```", "refused"),
        ("```sh\nkvproof fuzz \\\n    --examples none\n```", "refused"),
        ("```sh\npytest tests/unit/test_nothing.py\n```", "no file"),
        ("```sh\nX=1 python -m kvproof.fuzz.nothing\n```", "no module"),
        ("```sh\npip install 'kvproof[nothing]'\n```", "no extra nothing"),
        ("```sh\nrm -rf /\n```", "neither ours"),
        ("```json\n{,}\n```", "Expecting property name"),
        ("```toml\n=\n```", "Invalid"),
        ("```python\nassert False\n```", "AssertionError"),
        ("<!-- not run: no GPU -->\n```python\nfrom kvproof.allocator import Nothing\n```", "has no ['Nothing']"),
        ("<!-- not run: no GPU -->\n```python\ndef\n```", "invalid syntax"),
        ("```console\n$ exit 3\n```", "exits with 3"),
        ("```console\n$ true  # exits with 1\n```", "exits with 0"),
        ("```console\n$ echo one; echo two\none\n```", "prints"),
        ("```console\n$ echo one\ntwo\n```", "prints"),
        ("```console\nkvproof\n```", "begins with a command"),
    ],
)
def test_what_is_wrong_is_noticed(text: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    monkeypatch.setitem(PAGES, "page.md", page)
    with pytest.raises((Exception, pytest.fail.Exception)) as error:
        test_blocks("page.md", tmp_path, monkeypatch)
    assert what in f"{error.typename}: {error.value}"


def test_dots_stand_for_anything() -> None:
    assert matches("a\n...\nb ... d\n", "a\nx\ny\nb c d\n\n")
    assert matches("a\n...\n", "a\n")
    assert not matches("a\n...\nb\n", "a\nx\n")
    assert not matches("b ... d\n", "b c\nd\n")
