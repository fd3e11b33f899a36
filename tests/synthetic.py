"""Run folders made up for tests: rows with known medians, as the project's commands would have written them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from kernels.markers import CHUNKS, MARKERS
from profiling import run, schema, spans
from profiling.metrics import METRICS

GPU = "NVIDIA H200"
RUN = "20260101T000000Z-h200-0123456789"
CEILINGS = {"flops_per_second": 8e14, "bytes_per_second": 4e12}
NUDGES = (-0.002, -0.001, 0.0, 0.001, 0.002)  # of the samples, relative to their median: a spread of 0.1 %
KERNELS = {"naive": ["naive_uw_kernel", "naive_state_kernel", "naive_output_kernel"]}  # others have one, by name
LIBRARIES = ("fla", "flashqla", "flashinfer", "token_loop")  # variants of these names are public libraries, no rungs
PHASES = {"core": 1, "cumsum": 0.1, "A": 0.4, "full": 1.5}  # what each takes, in core's times
PEAK = 3 * 2**20  # bytes: of the first implementation of a full forward; the next takes twice as much, and so on
STALLS = {"stall_long_scoreboard": 4.0, "stall_wait": 1.5, "stall_barrier": 3.0, "stall_misc": 0.1}

Times = dict[str, dict[str, float]]  # seconds of the graph clock, by variant and case


def timed(times: Times, phase: str) -> list[str]:
    """Who has a phase: of the rungs all a core, the last one A and full too; FLA and FlashQLA all, FlashInfer full."""
    rungs = [name for name in times if name not in LIBRARIES]
    ours = {"core": rungs, "cumsum": []}.get(phase, rungs[-1:])
    lacking = {"core": ("flashinfer",), "full": ()}.get(phase, LIBRARIES[2:])
    return [*ours, *(name for name in times if name in LIBRARIES and name not in lacking)]


def info(times: Times, skipped: list[tuple[str, str, str]], phases: tuple[str, ...] = ("core",)) -> dict:
    """A run.json; `skipped` lists (variant, case, reason)."""
    cases = {case for by_case in times.values() for case in by_case}
    return {
        "run": RUN,
        "created": "2026-01-01T00:00:00Z",
        "commit": "0123456789",
        "gpu": {"name": GPU, "slug": "h200", "sm_count": 132, "l2_bytes": 50 * 2**20, "driver": "570.1"},
        "clocks": {
            "max": {"sm_mhz": "1980", "memory_mhz": "3201"},
            "seen": [{"case": case, "sm_mhz": "1755", "memory_mhz": "3201"} for case in sorted(cases)],
        },
        "versions": {"python": "3.12.0", "torch": "2.11.0", "tilelang": "0.1.15"},
        "variants": {name: f"the idea of {name}" for name in times if name not in LIBRARIES},
        "peers": {name: f"the library {name}" for name in times if name in LIBRARIES},
        "planned": [
            {"case": case, "phase": phase, "variants": timed(times, phase)}
            for case in sorted(cases)
            for phase in phases
        ],
        "skipped": [
            dict(zip(("variant", "case", "reason"), skip, strict=True)) | {"phase": phase}
            for skip in skipped
            for phase in phases
        ],
        "ceilings": CEILINGS,
        "protocol": {"graph": "median of 5 replays", "eager": "median of 5 calls"},
    }


def rows(times: Times, profiled: tuple[str, ...], phases: tuple[str, ...] = ("core",)) -> list[dict]:
    """The benchmark's rows of every time, eager twice the graph; both profilers' rows of the cases in `profiled`."""
    found = []
    for phase in phases:
        for number, variant in enumerate(timed(times, phase), 1):
            for case, time in times[variant].items():
                where = (RUN, GPU, "bench", variant, case, phase)
                found += [schema.row(*where, f"error_{name}", "ratio", 3e-3) for name in schema.CHECKED[phase]]
                for metric, factor in (("latency_graph", 1), ("latency_eager", 2)):
                    values = [PHASES[phase] * factor * time * (1 + nudge) for nudge in NUDGES]
                    found += [schema.row(*where, metric, "second", value, sample=i) for i, value in enumerate(values)]
                if phase == "full":
                    found.append(schema.row(*where, "peak_memory", "byte", number * PEAK))
                if phase == "core" and case in profiled:
                    found += _profile(variant, case, time)
    return found


def _profile(variant: str, case: str, time: float) -> list[dict]:
    """Kernels that share the time evenly, with a tenth of the span idle; each moves 30 MB and computes 6 GFLOP.

    The host needs 50 µs a phase; the GPU begins 20 µs after a range opens, and idles before its last kernel.
    """
    found, kernels = [], KERNELS.get(variant, [f"{variant}_kernel"])
    counters = {
        name: {"ratio": 0.5, "count": 128.0, "byte": 2.0**16}[metric.unit]
        for name, metric in METRICS.items()
        if metric.unit != "second" and not name.startswith("stall_")
    }
    counters |= {"duration": time / len(kernels), "dram_read": 20e6, "dram_write": 10e6, "tensor_flops": 6e9, **STALLS}
    counters |= {"waves": 0.5, "limit_registers": 1, "limit_shared_memory": 1}
    for kernel in kernels:
        where = (RUN, GPU, "ncu", variant, case, "core")
        found += [schema.row(*where, name, METRICS[name].unit, value, kernel) for name, value in counters.items()]
    for phase, launches in (("preprocess", ["kkt_inverse_kernel"]), ("core", kernels)):
        where = (RUN, GPU, "nsys", variant, case, phase)
        for i, kernel in enumerate(launches):
            start = 20e-6 + time * i / len(launches) + (time / 0.9 - time if 0 < i == len(launches) - 1 else 0)
            found.append(schema.row(*where, "duration", "second", time / len(launches), kernel, i))
            found.append(schema.row(*where, "start", "second", start, kernel, i))
        found.append(schema.row(*where, "projected", "second", time / 0.9))
        found.append(schema.row(*where, "host", "second", 50e-6))
    return found


def write_run(
    folder: Path,
    times: Times,
    skipped: list[tuple[str, str, str]] | tuple = (),
    profiled: tuple[str, ...] = (),
    phases: tuple[str, ...] = ("core",),
) -> Path:
    """Write run.json and measurements.csv into a new folder and return it."""
    folder.mkdir(parents=True)
    run.write_info(folder, info(times, list(skipped), phases))
    run.add_rows(folder, rows(times, profiled, phases))
    return folder


# A trace that a machine of our own would leave: the roles of real markers, with made-up durations, wait for each other.
DURATIONS = {"issue": 40, "drain": 260, "matmul": 380, "compute": 170, "copy": 110}
LATENCY = 20  # cycles from an arrival to the end of the wait for it


def clocks(markers, chunks: int, durations: dict[str, int] | None = None, origin: int = 10**12) -> np.ndarray:
    """The buffer of kernels.markers.build_traced after `chunks` chunks; durations by a marker's verb or whole text.

    A wait ends LATENCY after the last arrival at its barrier that is about the same chunk. What the loops do not arrive
    at, since it comes before them, is there from the start.
    """
    durations = DURATIONS | (durations or {})
    buffer = np.zeros((CHUNKS, MARKERS), dtype=np.int64)
    programs = {
        role: [(c, i, m) for c in range(chunks) for i, m in enumerate(markers) if m.role == role]
        for role in dict.fromkeys(m.role for m in markers)
    }
    time = dict.fromkeys(programs, 0)
    arrived: dict[tuple[str, int], list[int]] = {}
    while any(programs.values()):
        moved = False
        for role, program in programs.items():
            while program:
                c, i, marker = program[0]
                verb, _, name = marker.text.partition(" ")
                about = c + marker.ahead
                end = time[role]
                if verb == "wait":
                    sources = [m for m in markers if m.text == f"arrive {name}" and 0 <= about - m.ahead < chunks]
                    there = arrived.get((name, about), [])
                    if len(there) < len(sources):
                        break
                    end = max(end, *there, 0) + LATENCY
                elif verb == "arrive":
                    arrived.setdefault((name, about), []).append(end)
                else:
                    end += durations.get(marker.text, durations[verb])
                if c < CHUNKS:
                    buffer[c, i] = origin + time[role]
                time[role] = end
                program.pop(0)
                moved = True
        assert moved, {role: program[0] for role, program in programs.items() if program}
    return buffer


def write_trace(folder: Path, variant: str, case: str, markers, **how) -> Path:
    """Add the trace of these markers to a run's folder, as `make record PART=trace` would."""
    info, chunks = run.read_info(folder), how.pop("chunks", 32)
    events = spans.decode(markers, clocks(markers, chunks, **how))
    where = {"run": RUN, "gpu": GPU, "tool": "trace", "variant": variant, "case": case}
    frame = pd.DataFrame(where, index=events.index).join(events)
    spans.write(frame, spans.stored(folder, variant, case))
    known = {"variant": variant, "case": case, "commit": "0123456789", "driver": "570.1", "dv_tile": 64}
    known |= {"chunks": chunks, "recorded": int(events["chunk"].max()) + 1, "untraced_s": 1e-4, "traced_s": 1.05e-4}
    run.write_info(folder, info | {"trace": [*info.get("trace", []), known]})
    return folder
