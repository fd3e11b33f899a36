"""How it is computed: the ladder of variants, one file each.

To add a rung, copy a file, rename its kernel and add the name here: every command, table and figure follows.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from kernels.errors import UserError

LADDER = ("naive", "fused")  # in order: each rung is compared with the one before it


class UnknownVariant(UserError):
    """A name that is not on the ladder."""


def load(name: str) -> ModuleType:
    """The module of a rung; its `gdn_prefill_forward` is the operator. Needs torch and tilelang."""
    _known(name)
    return importlib.import_module(f"variants.{name}")


def label(name: str) -> str:
    """What tables call the rung: the first line of its docstring, read without importing it."""
    _known(name)
    source = Path(importlib.util.find_spec(f"variants.{name}").origin).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or name).splitlines()[0].removeprefix(f"{name}: ")


def select(names: str) -> tuple[str, ...]:
    """The rungs that a command line names: `all`, or names separated by commas, in ladder order."""
    if names == "all":
        return LADDER
    wanted = names.split(",")
    for name in wanted:
        _known(name)
    return tuple(name for name in LADDER if name in wanted)


def _known(name: str) -> None:
    if name not in LADDER:
        raise UnknownVariant(
            f"a variant was expected to be one of {', '.join(LADDER)}, found {name!r}: "
            "choose one of them, or add its file to variants/ and its name to LADDER in variants/__init__.py"
        )
