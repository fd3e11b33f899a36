"""Text that people wrote, as blocks for the report's template: docstrings of variants, remarks, attempts.

A block is a dict of strings and lists, never markup, so that nothing in it can break the layout:

    {"kind": "paragraph", "spans": [{"text": "…", "styles": ["strong", "emphasis", "code"]}]}
    {"kind": "code", "text": "…"}
    {"kind": "list", "ordered": False, "items": [[block, …], …]}

Of Markdown this reads paragraphs, headings, bold, italics, code, links, lists and code blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import dedent

import mistune
import pandas as pd

import variants
from kernels.errors import UserError
from profiling.run import ROOT

REMARKS = ROOT / "analysis" / "remarks.md"  # the user's own, a heading per stage; need not be there
ATTEMPTS = ROOT / "analysis" / "attempts.md"
COLUMNS = ["stage", "tried", "measured", "verdict"]  # of the table in ATTEMPTS

_parse = mistune.create_markdown(renderer="ast", plugins=["table"])
# How paragraphs of a variant's docstring begin (DESIGN of a variant file: what changed, why, memory, roles, barriers).
_LEAD = re.compile(r"(Since|Hypothesis|Shared memory|No roles|Roles|Registers|Barriers|Buffers)\b[^:.]*[:.]")


class BadProse(UserError):
    """A Markdown file that the report can't take over as it is."""


def docstring(variant: str) -> list[dict]:
    """What a variant's file says of it, but for its label; empty where it is not on this checkout's ladder.

    Indented lines keep their layout; the words that say what a paragraph is about are bold.
    """
    if variant not in variants.LADDER:
        return []
    _, _, body = variants.docstring(variant).partition("\n")
    blocks = []
    for indented, lines in groupby(body.split("\n"), key=lambda line: line.startswith(" ") if line else None):
        if indented:
            blocks.append({"kind": "code", "text": dedent("\n".join(lines))})
        elif indented is not None:
            blocks.append({"kind": "paragraph", "spans": _led(" ".join(lines))})
    return blocks


def remarks(path: Path, stages: list[str]) -> dict[str, list[dict]]:
    """The user's remarks by stage; empty where there is no such file.

    Raises:
        BadProse: a heading of the first level names no stage, text stands above the first, or Markdown is used that
            is not read here.
    """
    if not path.exists():
        return {}
    known = [*dict.fromkeys((*stages, *variants.LADDER))]
    found: dict[str, list[dict]] = {}
    for token in _tokens(path):
        if token["type"] == "heading" and token["attrs"]["level"] == 1:
            name = _plain(token["children"], path)
            if name not in known:
                raise BadProse(
                    f"{path}: headings that name a stage ({', '.join(known)}) were expected, found {name!r}: write "
                    "remarks on a stage under a line such as `# ws`"
                )
            blocks = found.setdefault(name, [])
        elif not found:
            raise BadProse(
                f"{path}: a heading that names a stage, such as `# ws`, was expected first, found "
                f"{token['type'].replace('_', ' ')}: put the text under its stage"
            )
        else:
            blocks += _blocks([token], path)
    return found


def attempts(path: Path) -> pd.DataFrame:
    """The attempts that were rejected, a row each: the columns COLUMNS as plain text.

    Raises:
        BadProse: the file is missing or holds no such table.
    """
    if not path.exists():
        raise BadProse(f"{path}: the table of rejected attempts was expected, found no such file: restore it")
    tables = [token for token in _tokens(path) if token["type"] == "table"]
    rows = [
        [_plain(cell["children"], path) for cell in row]
        for table in tables
        for row in (table["children"][0]["children"], *(row["children"] for row in table["children"][1]["children"]))
    ]
    if len(tables) != 1 or [name.lower() for name in rows[0]] != COLUMNS:
        raise BadProse(
            f"{path}: one Markdown table with the columns {', '.join(COLUMNS)} was expected, found "
            f"{len(tables)}{' with ' + ', '.join(rows[0]) if rows else ''}: give every row these four cells, and write "
            "\\| for a bar inside one"
        )
    return pd.DataFrame(rows[1:], columns=COLUMNS)


def _tokens(path: Path) -> list[dict]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadProse(f"{path}: text in UTF-8 was expected, found {error}: save it as UTF-8") from None
    return [token for token in _parse(text) if token["type"] not in ("blank_line", "thematic_break")]


def _blocks(tokens: list[dict], path: Path) -> list[dict]:
    blocks = []
    for token in tokens:
        kind = token["type"]
        if kind in ("paragraph", "block_text"):
            blocks.append({"kind": "paragraph", "spans": list(_spans(token["children"], path))})
        elif kind == "heading":
            blocks.append({"kind": "paragraph", "spans": list(_spans(token["children"], path, ("strong",)))})
        elif kind == "block_code":
            blocks.append({"kind": "code", "text": token["raw"].rstrip("\n")})
        elif kind == "list":
            items = [_blocks(item["children"], path) for item in token["children"]]
            blocks.append({"kind": "list", "ordered": token["attrs"]["ordered"], "items": items})
        elif kind != "blank_line":
            raise _unread(kind, path)
    return blocks


def _spans(tokens: list[dict], path: Path, styles: tuple[str, ...] = ()) -> Iterator[dict]:
    for token in tokens:
        kind = token["type"]
        if kind in ("text", "inline_html"):
            yield {"text": token["raw"], "styles": styles}
        elif kind == "codespan":
            yield {"text": token["raw"], "styles": (*styles, "code")}
        elif kind in ("softbreak", "linebreak"):
            yield {"text": " ", "styles": styles}
        elif kind in ("strong", "emphasis"):
            yield from _spans(token["children"], path, (*styles, kind))
        elif kind == "link":
            yield from _spans(token["children"], path, styles)
            if _plain(token["children"], path) != token["attrs"]["url"]:
                yield {"text": f" ({token['attrs']['url']})", "styles": styles}
        else:
            raise _unread(kind, path)


def _plain(tokens: list[dict], path: Path) -> str:
    return "".join(span["text"] for span in _spans(tokens, path))


def _unread(kind: str, path: Path) -> BadProse:
    return BadProse(
        f"{path}: paragraphs, headings, bold, italics, code, links, lists and code blocks were expected, found "
        f"{kind.replace('_', ' ')}: write it with these"
    )


def _led(text: str) -> list[dict]:
    """Spans of a docstring's paragraph: its lead in bold, what stands between backticks as code."""
    lead = _LEAD.match(text)
    end = lead.end() if lead else 0
    return [
        {"text": piece, "styles": (*styles, *(("code",) if i % 2 else ()))}
        for part, styles in ((text[:end], ("strong",)), (text[end:], ()))
        for i, piece in enumerate(part.split("`"))
        if piece
    ]
