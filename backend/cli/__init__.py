"""The `kvproof` command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvproof.allocator import KvproofError
from kvproof.cli import backends, bench, fuzz, generate, replay

USAGE_ERROR = 2
EXTRAS = {"torch": "torch", "numpy": "torch", "gguf": "models", "tokenizers": "models", "safetensors": "models",
          "jinja2": "models", "hypothesis": "fuzz", "atheris": "fuzz-atheris", "pytest": "test",
          "pytest_benchmark": "test"}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Answers a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def command_line() -> Parser:
    """The parser of all commands, which runs none of them."""
    parser = Parser(prog="kvproof", description="A paged KV-cache engine backend with a verified block allocator.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, backends, replay, fuzz, bench):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 done, 1 failed or refused, 2 unusable options, 130 interrupted."""
    args = command_line().parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except KvproofError as error:
        print(f"kvproof {args.command}: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        print(
            f"kvproof {args.command}: error: this needs {error.name}: pip install 'kvproof[{EXTRAS[error.name]}]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(f"kvproof {args.command}: interrupted", file=sys.stderr)
        return 130
