"""`python -m variants`: kernels are compiled into a cache, each once, by as many processes as there are cores."""

import os
import re
import subprocess
import sys
from pathlib import Path

from kernels import build, preprocess, problem

ROOT = Path(__file__).resolve().parent.parent


def test_every_kernel_is_compiled_once_into_the_cache_with_its_facts(tmp_path):
    """On this case the public functions choose `rs`, which is on the ladder too."""
    words = [sys.executable, "-m", "variants", "--variant", "fused,rs", "--case", "q16_64_2048"]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"TILELANG_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^(\w+)_kernel +(\d+) +0 ", done.stdout, re.MULTILINE)
    names = ["prepare", "fused", "rs", "refuse_growth", "l2norm"]
    assert [name for name, _ in printed] == names
    assert len(list(tmp_path.glob("*/*/kernels/*/device_kernel.cu"))) == len(names)
    (source,) = build.kernels_of(preprocess.on_core_inputs, (problem.CASES["q16_64_2048"],))
    (facts,) = build.facts(source)
    assert dict(printed)["prepare"] == str(facts.registers)
