"""How it is computed: the ladder of variants, one file each.

To add a rung, copy a file, rename its kernel and add the name here: every command, table and figure follows.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kernels.errors import UserError

if TYPE_CHECKING:
    import torch

LADDER = ("naive", "fused", "smem", "multibuf", "ws")  # in order: each rung is compared with the one before it


class UnknownVariant(UserError):
    """A name that is not on the ladder."""


def load(name: str) -> ModuleType:
    """The module of a rung; its `gdn_prefill_forward` is the operator. Needs torch and tilelang."""
    _known(name)
    return importlib.import_module(f"variants.{name}")


def label(name: str) -> str:
    """What tables call the rung: the first line of its docstring."""
    return docstring(name).splitlines()[0].removeprefix(f"{name}: ")


def docstring(name: str) -> str:
    """What a rung's file says of it, read without importing it; the rung's name where it says nothing."""
    _known(name)
    source = Path(importlib.util.find_spec(f"variants.{name}").origin).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or name


def dv_tile(B: int, Hv: int, device: torch.device) -> int:
    """Columns of the state that one CTA owns: 64 while every such CTA finds an SM of its own, else 128.

    From a sweep on an H200 (132 SMs), T = 2048, `multibuf` with two stages and A not yet swizzled, one CTA an SM: 64
    takes 31 % less time up to 66 heads, 128 takes 26 % less from 96 on. `smem`, of which two CTAs fit an SM at 64,
    loses 1 to 5 % by this rule from 96 heads on.
    """
    return 64 if 2 * B * Hv <= sm_count(device) else 128


@functools.cache
def sm_count(device: torch.device) -> int:
    """SMs of a device, of a MIG slice where it is one; a full H100 or H200 where there is no GPU to ask."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def select(names: str) -> tuple[str, ...]:
    """The rungs that a command line names: `all`, `last`, or names separated by commas, in ladder order."""
    if names == "all":
        return LADDER
    if names == "last":
        return LADDER[-1:]
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
