"""Device code as a library for the CPU, with what CUDA gives it emulated (warp.hpp)."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def library(source: str, folder: Path) -> ctypes.CDLL:
    """C++ that includes warp.hpp, compiled in `folder`; the test is skipped where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("g++, which nvcc needs too, is not on PATH")
    (folder / "calls.cpp").write_text(source)
    words = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{HERE}", "-o", folder / "calls.so"]
    subprocess.run([*words, folder / "calls.cpp"], check=True)
    return ctypes.CDLL(folder / "calls.so")


def pointer(array) -> ctypes.c_void_p:
    """Where a numpy array's data lies."""
    return array.ctypes.data_as(ctypes.c_void_p)
