"""A timeline from inside the kernel: what every role of one CTA does when, in SM clock cycles.

    python -m profiling.trace [--variant last] [--case wide_gva_state] [--chunks 16:20] [--out FOLDER]

Runs the variants as they are and as traced builds (kernels.markers) on the same tensors: both must give the same bits,
and the ratio of their times is what tracing costs. Leaves trace/<variant>-<case>.csv.gz (profiling.spans) with every
chunk that was recorded, and what is known of it in run.json under `trace`. analysis.trace explains a folder of these;
--chunks is what it will look at, and is checked here before anything runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

import variants
from kernels import build, problem
from kernels.errors import UserError, command
from kernels.markers import CHUNKS, MARKERS
from kernels.preprocess import core_inputs
from kernels.problem import CHUNK, Case
from profiling import run, spans
from profiling.bench import timed

ROUNDS, WARMUPS, CALLS = 10, 2, 10  # samples of either build, by turns; calls in a row, so that the host is ahead


class NoMarkers(UserError):
    """A variant that can't be traced."""


class TraceDisturbs(UserError):
    """A traced build computes something else."""


def recordable(name: str, case: Case) -> int:
    """The most chunks that a trace of this variant on this case holds, found without a GPU; fewer where a CTA has a
    segment of the sequence.

    Raises:
        NoMarkers: none of the variant's kernels has markers, or several have.
        UserError: the variant does not support the case.
    """
    _marked(_launches(name, build.meta_inputs(case), case, traced=True), name)
    return min(-(-case.sequences[0] // CHUNK), CHUNKS) - 1  # the last one has no end, see profiling.spans


def record(name: str, case: Case, folder: Path, info: dict, now: dict) -> dict:
    """Trace a variant on a case into `folder`; return, and add to info["trace"], what is known of the trace.

    `info` is the run's, `now` what profiling.run.describe says here and now. Known are variant and case; commit and
    driver, which may be others than the run's; chunks of the first sequence, and how many were recorded; dv_tile, the
    columns of dv that the CTA owns; traced_s and untraced_s, seconds of a call with and without tracing.

    Raises:
        NoMarkers, BadTable: see `recordable` and profiling.spans.decode.
        TraceDisturbs: the traced build gives other results.
    """
    arguments = core_inputs(problem.make_inputs(case))
    plain = _launches(name, arguments, case, traced=False)
    traced = _launches(name, arguments, case, traced=True)
    marked = _marked(traced, name)
    buffer = torch.zeros(CHUNKS, MARKERS, dtype=torch.int64, device=arguments[0].device)
    calls = {"untraced": _runnable(plain, ()), "traced": _runnable(traced, (buffer,))}
    samples: dict[str, list[float]] = {each: [] for each in calls}
    for i in range(-WARMUPS, ROUNDS):
        for each, call in calls.items():
            seconds = timed(lambda call=call: [call() for _ in range(CALLS)]) / CALLS
            if i >= 0:
                samples[each].append(seconds)
    for one, other in zip(plain, traced, strict=True):
        pairs = zip(one.arguments, other.arguments, strict=True)
        if not all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor)):
            raise TraceDisturbs(
                f"{name} on {case.name}: the same results with and without tracing were expected, found others: a "
                "marker stands where it changes the kernel; leave out those that were added last"
            )
    events = spans.decode(marked.source.markers, buffer.cpu().numpy())
    frame = pd.DataFrame(
        {"run": info["run"], "gpu": info["gpu"]["name"], "tool": "trace", "variant": name, "case": case.name},
        index=events.index,
    ).join(events)
    spans.write(frame, spans.stored(folder, name, case.name))
    known = {
        "variant": name,
        "case": case.name,
        "commit": now["commit"],
        "driver": now["gpu"]["driver"],
        "chunks": -(-case.sequences[0] // CHUNK),
        "recorded": int(events["chunk"].max()) + 1,
        "dv_tile": marked.source.dv_tile,
        "untraced_s": statistics.median(samples["untraced"]),
        "traced_s": statistics.median(samples["traced"]),
    }
    info.setdefault("trace", []).append(known)
    return known


def _launches(name: str, arguments: tuple, case: Case, traced: bool) -> list[build.Launch]:
    try:
        return build.launches_of(variants.core_forward(name), arguments, traced)
    except problem.UnsupportedCase as reason:
        raise UserError(f"{name} does not support {case.name}: {reason}; leave one of them out") from None


def _marked(launches: list[build.Launch], name: str) -> build.Launch:
    """A launch of the one kernel that has markers. Of its launches, one at most runs CTA 0 through the loop."""
    found = {launch.source.name: launch for launch in launches if launch.source.markers}
    if len(found) != 1:
        raise NoMarkers(
            f"variants/{name}.py: one kernel with markers was expected, found {len(found)} of {len(launches)}: mark "
            "the steps of its loop over chunks as kernels/markers.py says, or trace a variant that has them, such as "
            f"VARIANT={variants.LADDER[-1]}"
        )
    return found.popitem()[1]


def _runnable(launches: list[build.Launch], trace: tuple) -> Callable[[], None]:
    """A function that launches these kernels again, with the same arguments."""
    kernels = [
        (build.compile_into_cache(each.source), (*each.arguments, *(trace if each.source.markers else ())))
        for each in launches
    ]

    def call() -> None:
        for kernel, arguments in kernels:
            kernel(*arguments)

    return call


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="last", help="last, or names separated by commas")
    parser.add_argument("--case", default="wide_gva_state", help="suites and cases separated by commas")
    parser.add_argument("--chunks", default=spans.WINDOW, help="the chunks to look at, first:end")
    parser.add_argument("--out", help="a new folder; results/<time>-trace if left out")
    options = parser.parse_args()
    names, cases = variants.select(options.variant), problem.select(options.case)
    for name in names:
        for case in cases:
            spans.window(options.chunks, recordable(name, case))
    run.require_gpu()
    folder = run.new_folder("trace", options.out)
    info = run.describe({name: variants.label(name) for name in names})
    for name in names:
        for case in cases:
            record(name, case, folder, info, info)
            print(f"traced {name} on {case.name}", flush=True)
    run.write_info(folder, info)
    print(f"rows and environment: {folder}")


if __name__ == "__main__":
    main()
