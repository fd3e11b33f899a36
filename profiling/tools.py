"""What both Nsight tools need: find the tool, run it on profiling.target in a clean environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from kernels.errors import UserError
from profiling import run

# What the profiled process keeps of the environment. A profile stores it, and is made to be shared.
_KEEP = ("PATH", "HOME", "TMPDIR", "USER", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "GDN_COMMIT")
_KEEP_PREFIX = ("CUDA", "NVIDIA", "TILELANG")
_INJECTION = "CUDA_INJECTION64_PATH"  # another profiler's library, which Nsight refuses to share a process with


class ToolMissing(UserError):
    """A profiler is not installed: where it was looked for and how to get it."""


class ProfileFailed(UserError):
    """A profiler ran and left nothing usable: what it said and what to do."""


class BadExport(UserError):
    """A profiler's export that can't be trusted: which file, what was found, what to do."""


def find(name: str, product: str, *places: str) -> str:
    """The path of a tool: on PATH, in CUDA_HOME, or in one of the glob patterns `places` (the newest match).

    Raises:
        ToolMissing: it is in none of them.
    """
    installed = (str(path) for place in places for path in Path("/").glob(place.lstrip("/")))
    newest_first = sorted(installed, key=lambda path: [int(part) for part in re.findall(r"\d+", path)], reverse=True)
    cuda_home = os.environ.get("CUDA_HOME")
    for folder in (os.environ.get("PATH", ""), *([f"{cuda_home}/bin"] if cuda_home else []), *newest_first):
        if path := shutil.which(name, path=folder):
            return path
    raise ToolMissing(
        f"{product} ({name}) was expected on PATH, in CUDA_HOME/bin or under {', '.join(places)}, and is in none of "
        "them: install it (it comes with the CUDA toolkit) or add its folder to PATH; without it, `make report` shows "
        "the recorded profiles"
    )


def version(tool: str) -> str:
    """The version number that `tool --version` prints.

    Raises:
        ToolMissing: it prints none, as where a part of its installation is missing.
    """
    try:
        done = subprocess.run([tool, "--version"], capture_output=True, text=True, errors="replace")
        printed = done.stdout + done.stderr
    except OSError as error:
        printed = str(error)
    found = re.search(r"\bversion\s+(\d[\d.]*)", printed, re.IGNORECASE)
    if not found:
        raise ToolMissing(
            f"{tool} --version was expected to print a version, and printed {' '.join(printed.split()) or 'nothing'}: "
            "install the whole of the tool again, or put another installation first on PATH"
        )
    return found[1]


def environment() -> dict[str, str]:
    """The environment of a profiled process: what it needs, and numbers printed without a locale's separators."""
    kept = {key: value for key, value in os.environ.items() if key in _KEEP or key.startswith(_KEEP_PREFIX)}
    kept.pop(_INJECTION, None)
    return kept | {"LC_ALL": "C"}


def profile(command: list[str], variants: tuple[str, ...], case: str) -> str:
    """Run profiling.target under a profiler, its output shown as it comes; return what was printed.

    Raises:
        ProfileFailed: the exit code is not 0; the message carries the tool's errors, or else the last lines.
    """
    target = [sys.executable, "-m", "profiling.target", "--variant", ",".join(variants), "--case", case]
    process = subprocess.Popen(
        [*command, *target],
        cwd=run.ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "TileLang" not in line:  # its compile log
            print("  " + line.rstrip(), flush=True)
    if process.wait():
        said = [line for line in lines if "==ERROR==" in line] or lines
        raise ProfileFailed(
            f"{Path(command[0]).name} ended with exit code {process.returncode}; its last lines were: "
            f"{' | '.join(line.strip() for line in said[-5:])}: correct what they name and run again"
        )
    return "".join(lines)


def attribute(kernel: str, range_name: str, source: str) -> tuple[str, str, str]:
    """(variant, case, phase) of a kernel from the NVTX range around it.

    Raises:
        BadExport: the range is not named variant/case/phase, or the kernel in a core range is not the variant's.
    """
    parts = tuple(range_name.split("/"))
    if len(parts) != 3:
        raise BadExport(
            f"{source}: NVTX ranges named variant/case/phase were expected, found {range_name!r} around {kernel}: "
            "profile with `make ncu` or `make nsys`"
        )
    variant, _, phase = parts
    if phase == "core" and not kernel.startswith(f"{variant}_"):
        raise BadExport(
            f"{source}: only kernels of {variant} were expected inside the range {range_name}, found {kernel}: compile "
            "and warm up outside the range, name the prim_func after the variant, and profile again"
        )
    return parts
