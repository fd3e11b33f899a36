import csv

import pytest
import synthetic

from analysis import load, plots, report, style, tables
from kernels.errors import UserError

CASE = "chain_equal"
TIMES = {"naive": {CASE: 4e-4}, "fused": {CASE: 1e-4}}
HEADLINE = "fused is 4.00 times as fast as naive"
FILES = {
    "1_speedup.html",
    "1_speedup.ipynb",
    "ladder.csv",
    "ladder.md",
    "ladder.tex",
    "ladder_figure.pdf",
    "ladder_figure.png",
    "ladder_figure.svg",
    "report.pdf",
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


def test_the_same_run_gives_the_same_files(folder, tmp_path):
    run = load.load(folder)
    first = report.write(run, tmp_path / "first")
    second = report.write(run, tmp_path / "second")
    assert {path.name for path in first} == {path.name for path in (tmp_path / "first").iterdir()} == FILES
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    assert (tmp_path / "first" / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_report_without_profiles(tmp_path):
    run = load.load(synthetic.write_run(tmp_path / "run", TIMES))
    svg, *_ = style.save(plots.ladder_figure(run), tmp_path, "ladder_figure")
    report.write_pdf(run, svg, tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_the_csv_holds_cases_and_mean(folder):
    rows = list(csv.DictReader(report.ladder_csv(load.load(folder)).splitlines()))
    assert [(row["case"], row["variant"]) for row in rows] == [
        (CASE, "naive"),
        (CASE, "fused"),
        (tables.GEOMEAN, "naive"),
        (tables.GEOMEAN, "fused"),
    ]
    assert [float(row["speedup"]) for row in rows] == [1, 4, 1, 4]


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
    assert (out / "ladder.md").read_text(encoding="utf-8") in text
    command()
    assert readme.read_text(encoding="utf-8") == text


def test_a_failure_leaves_what_was_there(command, readme, folder, monkeypatch):
    monkeypatch.setattr(report, "DEFAULT", folder)
    before = readme.read_text(encoding="utf-8")

    def fail(*_):
        raise UserError("no notebook today")

    monkeypatch.setattr(report.notebooks, "execute", fail)
    with pytest.raises(SystemExit, match="no notebook today"):
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
