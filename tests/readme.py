"""What the README and the guides tell a reader to type: their code blocks, taken apart."""

from __future__ import annotations

import re
import shlex
from functools import cache

import exports as x

GUIDES = (
    "README.md",
    *sorted(f"docs/{path.name}" for path in (x.REPOSITORY / "docs").glob("*.md")),
)

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@cache
def text_of(page):
    return (x.REPOSITORY / page).read_text(encoding="utf-8")


def blocks(page, language):
    """List the texts of the blocks of a language."""
    return [text for name, text in _BLOCK.findall(text_of(page)) if name == language]


def typed(page):
    """List what the console blocks of a page tell to type: one command each, lines that go on joined."""
    lines = []
    for block in blocks(page, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                lines.append(line[2:])
            elif lines[-1].endswith("\\"):
                lines[-1] = f"{lines[-1][:-1].rstrip()} {line.strip()}"
    return lines


def calls_of_nsan(command):
    """Split a command line of the shell, and give the arguments of each nsan in it."""
    words = shlex.split(command, comments=True)
    calls = [[]]
    for word in words:
        if word == "&&":
            calls.append([])
        else:
            calls[-1].append(word)
    return [call[1:] for call in calls if call[0] == "nsan"]


def questions():
    """List the table of questions of the README: what is asked, and what is to be run."""
    return re.findall(r"^\| (.+?) \| `(nsan [^`]+)` \|$", text_of("README.md"), re.MULTILINE)
