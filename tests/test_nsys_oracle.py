"""The reader against nsys's own reports, which Debian's nsys computes from the same sqlite on any machine."""

import csv
import gzip
import os
import random
import subprocess
from collections import Counter

import pytest
from nsight import unpacked
from nsys_exports import OURS, PROCESS, START_END, THREAD, VERSIONS, Export

from kernels import problem
from profiling import nsys, nsys_export, run, tools
from profiling.ranges import DOMAIN, range_name

RECORDED = run.RECORDED / "h200"
SPANS, KERNELS = "nvtx_gpu_proj_sum", "nvtx_kern_sum"
NEIGHBOUR = THREAD + (1 << 24)  # a thread of another process


@pytest.fixture(scope="module")
def tool():
    """The path of nsys; skips where it can't be had, or not with reports of these names."""
    path = str(next(unpacked("nsight-systems").glob("usr/lib/*/nsight-systems/target-linux-x64/nsys")))
    known = subprocess.run([path, "stats", "--help-reports"], capture_output=True, text=True).stdout
    if missing := [name for name in (SPANS, KERNELS) if name not in known]:
        pytest.skip(f"nsys {tools.version(path)} has no report {' or '.join(missing)}; those of 2022 had other names")
    return path


def report(tool, name, database):
    """The rows of one of nsys's reports, as dicts by column."""
    done = subprocess.run(
        [tool, "stats", "--quiet", "--format=csv", f"--report={name}", str(database)], capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if "," in line]
    assert lines, done.stdout + done.stderr
    return list(csv.DictReader(lines))


def assert_equal_to_the_reports(tool, database, expected):
    """Our rows, summed up as the reports do, are the reports' rows of our domain; all times in ns."""
    durations, launches, spans = Counter(), Counter(), Counter()
    for row in nsys_export.read(database, "r", expected):
        name = f"{DOMAIN}:{range_name(row['variant'], row['case'], row['phase'])}"
        ns = round(row["value"] * 1e9)
        if row["metric"] == "projected":
            spans[name] += ns
        elif row["metric"] == "duration":
            durations[name, row["kernel"]] += ns
            launches[name, row["kernel"]] += 1
    ours = {f"{DOMAIN}:{name}" for name in expected}
    theirs = [row for row in report(tool, SPANS, database) if row["Range"] in ours]
    assert {row["Range"]: int(row["Total Proj Time (ns)"]) for row in theirs} == spans
    theirs = [row for row in report(tool, f"{KERNELS}:base", database) if row["NVTX Range"] in ours]
    keys = [(row["NVTX Range"], row["Kernel Name"]) for row in theirs]
    assert {key: int(row["Total Time (ns)"]) for key, row in zip(keys, theirs, strict=True)} == durations
    assert {key: int(row["Kern Inst"]) for key, row in zip(keys, theirs, strict=True)} == launches


def test_the_recorded_trace_gives_what_nsys_reports(tool, tmp_path):
    database = tmp_path / "trace.sqlite"
    database.write_bytes(gzip.decompress((RECORDED / "nsys" / "trace.sqlite.gz").read_bytes()))
    expected = nsys.expected_ranges(tuple(run.read_info(RECORDED)["variants"]), problem.SUITES["lab"])
    assert_equal_to_the_reports(tool, database, expected)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seed", range(3))
def test_synthetic_traces_give_what_nsys_reports(tool, tmp_path, version, seed):
    database = tmp_path / "synthetic.sqlite"
    assert_equal_to_the_reports(tool, database, synthetic(database, version, random.Random(seed)))


def synthetic(path, version, rng):
    """Write ranges of ours on two threads, and all that must not count, with launches across every edge.

    Returns the names of our ranges.
    """
    export = Export(path, version)
    export.gpu()
    for name, number, thread in (("gdn", OURS, THREAD), ("theirs", 2, THREAD), ("theirs", OURS, NEIGHBOUR)):
        export.domain(name, number, thread)
    names, correlation = [], 0
    for number in range(60):
        name = f"naive/case{number}/{rng.choice(('preprocess', 'core'))}"
        thread = THREAD + rng.randrange(2)
        start, length = 1_000_000_000 + 10_000 * number, rng.randrange(2000, 8000)
        end = start + length
        kind = {"eventType": START_END} if rng.random() < 0.3 else {}
        export.range(name, start, end, inline=rng.random() < 0.3, globalTid=thread, **kind)
        export.range(name, start - 500, end + 500, globalTid=thread, domainId=2)  # around ours, and in another domain
        export.range(name, start, end, globalTid=NEIGHBOUR)
        names.append(name)
        # One launch that is inside, then some that may lie in, out or across, of this thread, another, or a process.
        for place in (length // 2, *(rng.randrange(-1000, length + 1000) for _ in range(8))):
            correlation += 1
            caller = thread if place == length // 2 else rng.choice((thread, thread, THREAD, THREAD + 1, NEIGHBOUR))
            export.call(correlation, start + place, start + place + rng.randrange(1, 200), thread=caller)
            process = caller & ~0xFFFFFF
            other = PROCESS if process != PROCESS else NEIGHBOUR & ~0xFFFFFF
            begin = start + rng.randrange(5000, 50_000)
            kinds = ["KERNEL"] if place == length // 2 else ["KERNEL", "KERNEL", "GRAPH", "MEMCPY", "MEMSET"]
            kind = rng.choice(kinds)
            if f"CUPTI_ACTIVITY_KIND_{kind}" in export.required and kind != "KERNEL":
                export.operation(kind, correlation, begin, begin + rng.randrange(1, 5000), process)
                continue
            for node in range(3 if kind == "GRAPH" else 1):  # nodes of a graph share the call
                kernel = rng.choice(("naive_uw_kernel", "naive_state_kernel"))
                export.kernel(
                    kernel, correlation, begin + 700 * node, begin + 700 * node + rng.randrange(1, 900), process
                )
            export.kernel("foreign_kernel", correlation, begin, begin + 9000, other)  # the same number, elsewhere
    export.close()
    return tuple(names)


def test_a_trace_that_nsys_can_t_import_here_is_explained(tool, tmp_path, monkeypatch):
    # Debian keeps the importer where this unpacked nsys does not look for it: a failed import, and a real .qdstrm.
    def profile(command, *_):
        subprocess.run([*command, "true"], env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, check=True)

    monkeypatch.setattr(tools, "profile", profile)
    with pytest.raises(tools.ProfileFailed, match=r"left trace\.qdstrm: .*libdw\.so\.1") as refused:
        nsys.collect(tool, ("naive",), problem.SUITES["lab"], tmp_path)
    assert "importer failed" in str(refused.value)
    with pytest.raises(tools.BadExport, match="found nsys's raw trace"):
        nsys_export.read(tmp_path / "nsys" / "trace.qdstrm", "r", ())
