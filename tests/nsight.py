"""The Nsight tools of Debian's non-free component, unpacked without installing them: oracles for tests on any machine.

They export, import and list metrics without a GPU. Debian does not enable non-free by default, so the package is
fetched through a source list of our own, which leaves the machine's untouched.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parent.parent / "build" / "nsight"
SOURCES = Path("/etc/apt/sources.list.d")
# Newest first: trixie has Nsight Compute 2024.1 and Nsight Systems 2023.4, bookworm 2022.3 and 2022.4.
SUITES = ("trixie", "bookworm")
# So that a machine without network skips soon, and a download may still take its time.
APT = ("-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20")
SECONDS = 300  # of one command


class _Unavailable(Exception):
    """Why a package can't be had here."""


def unpacked(package: str) -> Path:
    """The folder of `nsight-compute` or `nsight-systems` as dpkg -x leaves it; fetched once, kept in build/nsight.

    Skips the calling test, saying why, where the package can't be had.
    """
    found = _fetched(package)
    if isinstance(found, str):
        pytest.skip(f"{package} of Debian can't be had here: {found}")
    return found


@functools.cache
def _fetched(package: str) -> Path | str:
    """The unpacked folder, or the reason why there is none; asked once per test run."""
    folder = CACHE / package
    if folder.exists():
        return folder
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"it is for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    CACHE.mkdir(parents=True, exist_ok=True)
    reasons = []
    for suite in SUITES:
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=f".{package}-") as scratch:
            try:
                _fetch(package, suite, Path(scratch))
            except _Unavailable as reason:
                reasons.append(f"{suite}: {reason}")
                continue
            if not folder.exists():  # another test run may have been faster
                Path(scratch, "unpacked").rename(folder)
            return folder
    return "; ".join(reasons)


def _fetch(package: str, suite: str, scratch: Path) -> None:
    """Download `package` of a Debian suite and unpack it into scratch/unpacked.

    Raises:
        _Unavailable: no Debian source is configured, or apt-get or dpkg failed.
    """
    for folder in ("parts", "lists/partial", "cache/archives/partial"):
        (scratch / folder).mkdir(parents=True)
    (scratch / "parts" / "nsight.sources").write_text(_source(suite))
    own = {
        "Etc::SourceList": "/dev/null",
        "Etc::SourceParts": scratch / "parts",
        "State::Lists": scratch / "lists",
        "Cache": scratch / "cache",
    }
    apt = ["apt-get", "--quiet=2", *APT, *(word for key, path in own.items() for word in ("-o", f"Dir::{key}={path}"))]
    _run([*apt, "update"], scratch)
    # What talks to a GPU is in a package of its own, and with it the program behind the script `ncu`.
    _run([*apt, "download", package, f"{package}-target"], scratch)
    for archive in scratch.glob("*.deb"):
        _run(["dpkg", "-x", str(archive), str(scratch / "unpacked")], scratch)


def _source(suite: str) -> str:
    """The machine's own Debian source, narrowed to the non-free component of one suite."""
    for path in sorted(SOURCES.glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            if "debian-archive-keyring" in stanza and "-security" not in stanza:
                stanza = re.sub(r"(?m)^Suites:.*", f"Suites: {suite}", stanza)
                return re.sub(r"(?m)^Components:.*", "Components: non-free", stanza).strip() + "\n"
    raise _Unavailable(f"no .sources file of Debian in {SOURCES}")


def _run(command: list[str], folder: Path) -> None:
    environment = os.environ | {"LC_ALL": "C"}
    try:
        subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=SECONDS
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr or error.stdout).strip().splitlines()[-1:] or ["no message"]
        raise _Unavailable(f"{command[0]} ended with exit code {error.returncode}: {last[0]}") from None
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise _Unavailable(str(error)) from None
