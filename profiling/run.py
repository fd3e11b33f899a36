"""A run: one folder with run.json, measurements.csv and the profilers' exports, all from one GPU.

`describe` says where numbers come from. It names the GPU, the driver, versions and the commit, and nothing
that identifies a host, a user or a path, so that a run can be shared as it is.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

import pandas as pd

from kernels.errors import UserError
from profiling import schema

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"  # every command's own runs, one new folder each
RECORDED = Path(__file__).resolve().parent / "recorded"  # committed runs, by GPU

_REQUIRED = ("run", "gpu", "commit", "versions", "variants", "protocol", "planned")


class BadRun(UserError):
    """A run folder that is incomplete, of another GPU, or in the way."""


class NoGPU(UserError):
    """A command needs a CUDA GPU and there is none."""


def require_gpu() -> None:
    """Raises NoGPU where torch sees no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise NoGPU(
            "a CUDA GPU was expected (Hopper, such as H100 or H200), and torch finds none: run this on a machine with "
            "one; without it, `make report` shows the recorded run and `make compile` builds every kernel"
        )


def describe(variants: dict[str, str]) -> dict:
    """The content of run.json for a run that starts now; `variants` maps names to labels, in ladder order."""
    import torch

    require_gpu()
    gpu = torch.cuda.get_device_properties(0)
    slug = gpu.name.lower().removeprefix("nvidia ").replace(" ", "-")
    now = datetime.datetime.now(datetime.timezone.utc)
    commit = _commit()
    return {
        "run": f"{now:%Y%m%dT%H%M%SZ}-{slug}-{commit}",
        "created": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "commit": commit,
        "gpu": {
            "name": gpu.name,
            "slug": slug,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "sm_count": gpu.multi_processor_count,
            "memory_bytes": gpu.total_memory,
            "l2_bytes": gpu.L2_cache_size,
            "driver": smi("driver_version"),
        },
        "clocks": {"max": clocks(maximum=True), "seen": []},
        "versions": {
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{name: version(name) for name in ("torch", "tilelang", "apache-tvm-ffi", "nvtx")},
        },
        "variants": variants,
        "planned": [],
        "skipped": [],
        "ceilings": {},
        "protocol": {},
    }


def smi(field: str) -> str:
    """One field of nvidia-smi for the first GPU; "unknown" where the tool is missing or does not say."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--id=0", f"--query-gpu={field}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else "unknown"


def clocks(maximum: bool = False) -> dict[str, str]:
    """SM and memory clock in MHz as nvidia-smi sees them now, or the highest they can be."""
    kind = "clocks.max" if maximum else "clocks"
    return {"sm_mhz": smi(f"{kind}.sm"), "memory_mhz": smi(f"{kind}.mem")}


def new_folder(tool: str, out: str | None) -> Path:
    """A fresh folder for a run: `out`, or results/<UTC time>-<tool>. An existing one is never written into.

    Raises:
        BadRun: `out` exists and is not empty.
    """
    stamp = f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%SZ}"
    folder = Path(out) if out else RESULTS / f"{stamp}-{tool}"
    if folder.exists() and any(folder.iterdir()):
        raise BadRun(
            f"{folder}: a new or empty folder was expected, found files in it: choose another OUT or remove it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_info(folder: Path, info: dict) -> None:
    """Write run.json."""
    (folder / "run.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


def read_info(folder: Path) -> dict:
    """Read run.json.

    Raises:
        BadRun: it is missing, not JSON, or lacks a required entry.
    """
    path = Path(folder) / "run.json"
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadRun(f"{path}: no such file; a folder written by `make bench` or `make record` was expected") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadRun(f"{path}: JSON was expected, found {error}: measure again") from None
    missing = [name for name in _REQUIRED if name not in info]
    if missing:
        raise BadRun(f"{path}: lacks {', '.join(missing)}: measure again")
    return info


def add_rows(folder: Path, rows: list[dict]) -> pd.DataFrame:
    """Add rows to the folder's table, replacing none, and return the whole of it."""
    path = schema.stored(folder)
    frame = schema.table(rows, str(path))
    if path.exists():
        frame = pd.concat([schema.read(path), frame], ignore_index=True)
    schema.write(frame, path)
    return frame


def _commit() -> str:
    """The short commit of the working tree, marked where files differ from it.

    Where the tree was copied without its repository, as to a cluster's GPU node, GDN_COMMIT says it.
    """

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short=10", "HEAD")
    if not commit:
        return os.environ.get("GDN_COMMIT", "unknown")
    return commit + ("-modified" if git("status", "--porcelain", "--untracked-files=no") else "")


def version(package: str) -> str:
    """The installed version of a package, or that there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
