"""Cold start: how long the first call takes where nothing is compiled yet, and how many kernels that compiles; and how
long it takes where another process has compiled them, into a cache.

    python -m profiling.coldstart [--case wide_gva_state] [--out FOLDER]

The last rung and every public library run the full forward, each in a process of its own with empty caches, then in
another one with what the first left there. All start at once, so they share the machine's cores. Importing is not
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import variants
from kernels import peers, problem
from kernels.errors import UserError, command
from profiling import bench, run, schema

# Where each compiler keeps what it made: the variable that names the folder, and a pattern with one match per kernel.
_CACHES = {
    "TILELANG_CACHE_DIR": "*/*/kernels/*/device_kernel.cu",
    "TRITON_CACHE_DIR": "*/*.cubin",
    "CUTE_DSL_DUMP_DIR": "*.cubin",
}
_SWITCHES = {"CUTE_DSL_KEEP": "cubin"}  # CuTe's compiler keeps kernels in memory only, unless told to write them
_NOT_COMPARED = ("flashqla_nocp", "flashinfer_nocp", "token_loop")  # the same library again, or nothing to compile


class ColdStartFailed(UserError):
    """A first call ended with an error: whose, and what it said."""


def measure(case: problem.Case, folder: Path, info: dict) -> list[dict]:
    """Rows of schema.COLD_METRICS, added to `folder`.

    Raises:
        ColdStartFailed: the rung's first call ended with an error; that of a library is left out with a note.
    """
    ours = variants.LADDER[-1]
    found, _ = peers.find()
    names = (ours, *(name for name in found if name not in _NOT_COMPARED))
    info["protocol"]["cold start"] = (
        f"first call of the full forward less a second one, {len(names)} processes at once on {os.cpu_count()} cores, "
        "each with empty caches, then each with those that it has filled; imports not counted"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            for path in _caches(scratch, name).values():
                Path(path).mkdir(parents=True)
        cold = _first_calls(names, case, scratch)
        compiled = {
            name: sum(len(list(Path(_caches(scratch, name)[each]).glob(kernel))) for each, kernel in _CACHES.items())
            for name in cold
        }
        cached = _first_calls(tuple(cold), case, scratch)
    rows = []
    for name in cached:
        where = (info["run"], info["gpu"]["name"], "bench", name, case.name, "full")
        values = dict(zip(schema.COLD_METRICS, (cold[name], cached[name], compiled[name]), strict=True))
        rows += [schema.row(*where, metric, schema.COLD_METRICS[metric], value) for metric, value in values.items()]
        print(f"  {name:<16}{cold[name]:>8.1f} s{cached[name]:>8.1f} s cached{compiled[name]:>6} kernels")
    run.add_rows(folder, rows)
    run.write_info(folder, info)
    return rows


def _caches(scratch: str, name: str) -> dict[str, str]:
    return {variable: str(Path(scratch, name, variable)) for variable in _CACHES}


def _first_calls(names: tuple[str, ...], case: problem.Case, scratch: str) -> dict[str, float]:
    """Seconds of everybody's first call, all at once, with the caches that are there; without those that failed.

    Raises:
        ColdStartFailed: the last rung did.
    """
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "profiling.coldstart", "--case", case.name, "--first-call", name],
            cwd=run.ROOT,
            env=os.environ | _caches(scratch, name) | _SWITCHES,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for name in names
    }
    printed = {name: process.communicate()[0].strip().splitlines() for name, process in started.items()}
    seconds = {}
    for name, process in started.items():
        if process.returncode == 0:
            seconds[name] = json.loads(printed[name][-1])["seconds"]
            continue
        said = " | ".join(printed[name][-3:])
        if name == variants.LADDER[-1]:
            raise ColdStartFailed(f"the first call of {name} was expected to succeed, and said {said}")
        print(f"  {name} is left out: {said}")
    return seconds


def _first_call(name: str, case: problem.Case) -> float:
    """Seconds of the first call less those of the second."""
    implementation = (bench.implementations(variants.LADDER[-1:])["full"] | _full_peers())[name]
    inputs = problem.make_inputs(case)
    # FLA's tuning is part of its first call.
    torch.cuda.synchronize()
    times = []
    for _ in range(2):
        start = time.perf_counter()
        implementation.forward(*implementation.convert(inputs))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[0] - times[1]


def _full_peers() -> dict[str, problem.Implementation]:
    return {name: phases["full"] for name, phases in peers.find()[0].items()}


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="wide_gva_state", help="one case")
    parser.add_argument("--out", help="a new folder; results/<time>-coldstart if left out")
    parser.add_argument("--first-call", help=argparse.SUPPRESS)  # what each of the processes does
    options = parser.parse_args()
    cases = problem.select(options.case)
    if len(cases) > 1:
        raise problem.UnknownCase(f"one case was expected, found {len(cases)} in {options.case!r}: name one of them")
    run.require_gpu()
    (case,) = cases
    if options.first_call:
        print(json.dumps({"seconds": _first_call(options.first_call, case)}))
        return
    folder = run.new_folder("coldstart", options.out)
    ours = variants.LADDER[-1]
    measure(case, folder, run.describe({ours: variants.label(ours)}))
    print(f"\nrows: {folder}")


if __name__ == "__main__":
    main()
