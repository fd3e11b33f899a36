"""The process that Nsight profiles: compile and warm up first, then one NVTX range per variant, case and phase.

    python -m profiling.target --variant naive,fused --case wide_gva_state

Ranges are named variant/case/phase in the domain `gdn`; nothing but the phase's own launches happens inside.
"""

from __future__ import annotations

import argparse

import nvtx
import torch

import variants
from kernels import problem
from kernels.errors import UserError, command
from kernels.preprocess import core_inputs
from profiling import run
from profiling.ranges import DOMAIN, range_name

WARMUPS = 3


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--case", required=True)
    options = parser.parse_args()
    run.require_gpu()
    for case in problem.select(options.case):
        inputs = problem.make_inputs(case)
        for name in variants.select(options.variant):
            forward = variants.core_forward(name)
            for _ in range(WARMUPS):
                _forward(forward, core_inputs(inputs), name, case)
            torch.cuda.synchronize()
            with nvtx.annotate(range_name(name, case.name, "preprocess"), domain=DOMAIN):
                core = core_inputs(inputs)
            torch.cuda.synchronize()
            with nvtx.annotate(range_name(name, case.name, "core"), domain=DOMAIN):
                _forward(forward, core, name, case)
            torch.cuda.synchronize()


def _forward(forward, core, name: str, case: problem.Case) -> None:
    try:
        forward(*core)
    except problem.UnsupportedCase as reason:
        raise UserError(f"{name} does not support {case.name}: {reason}; leave one of them out") from None


if __name__ == "__main__":
    main()
