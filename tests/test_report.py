import csv
import gzip
import random
import re
import statistics

import pytest
import synthetic

from analysis import load, prose, report
from kernels.errors import UserError
from profiling import schema

CASE = "chain_equal"
TIMES = {"naive": {CASE: 4e-4}, "fused": {CASE: 1e-4}}
HEADLINE = "fused is 4.00 times as fast as naive"
FIGURES = ("dag", "ladder", "resources", "roofline", "shares", "stalls", "steps", "timeline", "utilisation")
TABLES = ("attempts", "cases", "changes", "counters", "formulations", "ladder", "preprocessing", "rungs", "timeline")
FILES = {
    "report.pdf",
    *(f"figures/{name}.{kind}" for name in FIGURES for kind in ("svg", "pdf", "png")),
    *(f"tables/{name}.{kind}" for name in TABLES for kind in ("md", "csv", "tex")),
}


@pytest.fixture
def folder(tmp_path):
    return synthetic.write_run(tmp_path / "run", TIMES, profiled=(CASE,))


@pytest.fixture
def readme(tmp_path, monkeypatch):
    """A README of our own instead of the repository's."""
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nThe end.\n", encoding="utf-8")
    monkeypatch.setattr(report, "README", path)
    return path


@pytest.fixture
def command(tmp_path, monkeypatch, folder):
    """The report's command line on the synthetic run; returns its output folder."""

    def call():
        monkeypatch.setattr("sys.argv", ["report", "--run", str(folder), "--out", str(tmp_path / "out")])
        report.main()
        return tmp_path / "out"

    return call


@pytest.fixture(autouse=True)
def remarks(tmp_path, monkeypatch):
    """Remarks of our own instead of the user's."""
    path = tmp_path / "remarks.md"
    monkeypatch.setattr(prose, "REMARKS", path)
    return path


def content(run):
    return report.content(run, report.parts(run))


def files(out):
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}


def test_the_same_run_gives_the_same_files(folder, tmp_path):
    run = load.load(folder)
    first = report.write(run, tmp_path / "first")
    second = report.write(run, tmp_path / "second")
    assert files(tmp_path / "first") == FILES
    assert [path.relative_to(tmp_path / "first") for path in first] == [
        path.relative_to(tmp_path / "second") for path in second
    ]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    assert (tmp_path / "first" / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_report_without_profiles(tmp_path):
    run = load.load(synthetic.write_run(tmp_path / "run", TIMES))
    report.write(run, tmp_path / "out")
    profilers = ("changes", "counters", "preprocessing", "timeline")
    left_out = {f"tables/{name}.{kind}" for name in profilers for kind in ("md", "csv", "tex")}
    left_out |= {
        name for name in FILES if name.startswith("figures/") and name.split("/")[1][:3] not in ("dag", "lad", "ste")
    }
    assert files(tmp_path / "out") == FILES - left_out


def test_every_table_is_also_markdown_latex_and_numbers(folder, tmp_path):
    report.write(load.load(folder), tmp_path / "out")
    for name in TABLES:
        path = tmp_path / "out" / "tables" / name
        assert path.with_suffix(".md").read_text(encoding="utf-8").startswith("**")
        assert r"\toprule" in path.with_suffix(".tex").read_text(encoding="utf-8")
    rows = list(csv.DictReader((tmp_path / "out" / "tables" / "ladder.csv").read_text().splitlines()))
    assert [(row["case"], row["variant"], float(row["speedup"])) for row in rows] == [
        (CASE, "naive", 1),
        (CASE, "fused", 4),
    ]


def test_a_stage_has_what_was_said_measured_and_counted(folder, remarks):
    remarks.write_text("# fused\n\nWhat *I* saw.\n", encoding="utf-8")
    naive, fused = content(load.load(folder))["stages"]
    assert (fused["name"], fused["label"]) == ("fused", "the idea of fused")
    assert fused["docstring"] == prose.docstring("fused")
    assert "It is 4.00× ±0% as fast as naive" in fused["effect"]
    assert "The longest wait is long scoreboard" in fused["bottleneck"]
    assert fused["moved"]["title"] == f"From naive to fused: what moved most on {CASE}"
    assert [span["text"] for span in fused["remarks"][0]["spans"]] == ["What ", "I", " saw."]
    assert naive["moved"] is None
    assert naive["remarks"] == []


def test_remarks_survive_and_awkward_ones_do_not_break_the_layout(folder, remarks, tmp_path):
    awkward = "# naive\n\n#panic() $x_1$ @nowhere `#raw` \\ ] [ * <label> 100%\n\n1. one\n   - two\n\n```\n#{}\n```\n"
    remarks.write_text(awkward, encoding="utf-8")
    report.write(load.load(folder), tmp_path / "out")
    assert remarks.read_text(encoding="utf-8") == awkward


def test_libraries_have_their_section_where_a_run_has_them(tmp_path):
    times = {**TIMES, "fla": {CASE: 2e-4}}
    with_peers = content(load.load(synthetic.write_run(tmp_path / "with", times)))
    without = content(load.load(synthetic.write_run(tmp_path / "without", TIMES)))
    assert [table["title"] for table in with_peers["peers"]] == [
        "Core: fused against the best library",
        "Core, µs",
        "Largest relative L2 error against the FP64 recurrence",
    ]
    assert without["peers"] == []
    assert [stage["name"] for stage in with_peers["stages"]] == ["naive", "fused"]


def test_phases_and_memory_have_tables_where_a_run_has_them(tmp_path):
    packed = {name: {CASE: time, "v2_8_8x4096": time} for name, time in (("ws", 1e-4), ("fla", 2e-4))}
    run = load.load(synthetic.write_run(tmp_path / "run", packed, phases=tuple(schema.CHECKED)))
    names = {path.relative_to(tmp_path / "out").as_posix() for path in report.write(run, tmp_path / "out")}
    assert {f"tables/{name}.{kind}" for name in ("phases", "memory") for kind in ("md", "csv", "tex")} <= names
    rows = list(csv.DictReader((tmp_path / "out" / "tables" / "phases.csv").open(encoding="utf-8")))
    assert [row["phase"] for row in rows if row["case"] == "v2_8_8x4096"] == [
        "A", "core", "full", "cumsum", "A", "core", "full",
    ]  # fmt: skip
    printed = [table["title"] for table in report.content(run, report.parts(run))["peers"]]
    assert "Where the time of the full forward goes" in printed
    assert "Peak memory beyond inputs and outputs, MiB" in printed
    assert "over lab and 2.00× as fast over varlen" in report.results(run)


def test_another_run_leaves_the_readme_alone(command, readme, capsys):
    before = readme.read_text(encoding="utf-8")
    out = command()
    assert readme.read_text(encoding="utf-8") == before
    printed = capsys.readouterr().out
    assert HEADLINE in printed
    assert all(str(out / name) in printed for name in FILES)
    assert str(readme) not in printed


def test_the_recorded_run_fills_the_readme(command, readme, folder, monkeypatch):
    monkeypatch.setattr(report, "DEFAULT", folder)
    out = command()
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"# Title\n\n{report.BEGIN}\n\n{HEADLINE}")
    assert text.endswith(f"{report.END}\n\nThe end.\n")
    assert "old" not in text
    assert (out / "tables" / "ladder.md").read_text(encoding="utf-8").split("\n\n")[1] in text
    command()
    assert readme.read_text(encoding="utf-8") == text


def test_a_failure_leaves_what_was_there(command, readme, folder, monkeypatch):
    monkeypatch.setattr(report, "DEFAULT", folder)
    before = readme.read_text(encoding="utf-8")

    def fail(*_):
        raise UserError("no PDF today")

    monkeypatch.setattr(report.publish, "write_pdf", fail)
    with pytest.raises(SystemExit, match="no PDF today"):
        command()
    assert readme.read_text(encoding="utf-8") == before
    assert list((folder.parent / "out").iterdir()) == []


@pytest.mark.parametrize(
    "text", ["no markers", report.BEGIN, f"{report.END} {report.BEGIN}", f"{report.BEGIN}{report.END}{report.END}"]
)
def test_a_readme_without_its_markers_is_refused_first(command, readme, folder, monkeypatch, text):
    monkeypatch.setattr(report, "DEFAULT", folder)
    readme.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"README\.md: one line <!-- results:begin --> and after it one line"):
        command()
    assert readme.read_text(encoding="utf-8") == text
    assert not (folder.parent / "out").exists()


# Every number traces to rows of the tidy table


def rows_of_the_recorded_run():
    path = schema.stored(load.DEFAULT)
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def printed_numbers(content, rows):
    """(where it stands, the printed text, the number from the tidy table's rows alone) of what the PDF prints."""

    def values(**wanted):
        return [float(row["value"]) for row in rows if all(row[name] == word for name, word in wanted.items())]

    def median(case, variant, clock):
        return statistics.median(
            values(tool="bench", phase="core", case=case, variant=variant, metric=f"latency_{clock}")
        )

    ladder, found = content["ladder"]["rows"], []
    case, before = "", None
    first = ladder[0][1]
    for start, variant, graph, eager, speedup, step, _ in ladder:
        case, before = start or case, None if start else before
        time = median(case, variant, "graph")
        found += [
            ((case, variant, "graph"), graph, time * 1e6),
            ((case, variant, "eager"), eager, median(case, variant, "eager") * 1e6),
        ]
        if before:
            found += [
                ((case, variant, "speedup"), speedup, median(case, first, "graph") / time),
                ((case, variant, "step"), step, median(case, before, "graph") / time),
            ]
        before = variant
    cases = [row[0] for row in ladder if row[0]]
    for variant, _, time, *_ in content["rungs"]["rows"]:
        mean = statistics.geometric_mean([median(name, variant, "graph") for name in cases])
        found.append((("rungs", variant), time, mean * 1e6))
    for table in content["counters"]:
        case = re.search(r": (\w+)", table["title"])[1]
        names = [
            "duration",
            "sm_throughput",
            "dram_throughput",
            "tensor_pipe",
            "occupancy",
            "registers",
            "shared_memory",
        ]
        scales = [1e6, 100, 100, 100, 100, 1, 2**-10]
        for _, kernel, _, *cells in table["rows"]:
            if kernel == "all kernels":
                continue
            for name, scale, cell in zip(names, scales, cells, strict=False):
                (value,) = values(tool="ncu", case=case, kernel=kernel, metric=name)
                found.append(((case, kernel, name), cell, value * scale))
            moved = sum(
                values(tool="ncu", case=case, kernel=kernel, metric=f"dram_{way}")[0] for way in ("read", "write")
            )
            found.append(((case, kernel, "DRAM, MB"), cells[7], moved / 1e6))
    for start, variant, phase, _, kernels, span, host, _ in content["timeline"]["rows"]:
        case = start or case
        where = {"tool": "nsys", "case": case, "variant": variant, "phase": phase}
        found += [
            ((case, variant, phase, "kernels"), kernels, sum(values(**where, metric="duration")) * 1e6),
            ((case, variant, phase, "span"), span, values(**where, metric="projected")[0] * 1e6),
            ((case, variant, phase, "host"), host, values(**where, metric="host")[0] * 1e6),
        ]
    return found


def test_ten_numbers_at_random_come_from_rows_of_the_tidy_table():
    printed = content(load.load(load.DEFAULT))
    found = printed_numbers(printed, rows_of_the_recorded_run())
    assert len(found) > 300
    for where, text, expected in random.sample(found, 10):
        number = re.match(r"[\d.]+", text)[0]
        # The last printed digit may be off by half, and a share is printed with one decimal.
        half = 0.5 * 10.0 ** -len(number.partition(".")[2])
        assert float(number) == pytest.approx(expected, abs=half * 1.001), where
