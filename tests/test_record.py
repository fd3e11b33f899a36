"""The recorded run: what needs no GPU."""

import shutil

import pytest
import synthetic

import variants
from kernels import problem
from profiling import bench, record, run, schema


def test_rows_are_read_again_from_the_exports_of_a_folder(tmp_path, monkeypatch):
    folder = tmp_path / "own"
    shutil.copytree(run.RECORDED / "h200", folder)
    table = schema.stored(folder)
    recorded = schema.read(table)
    # As an older commit left it, which did not read when kernels start.
    schema.write(recorded[~recorded["metric"].isin(["start", "host"])], table)
    monkeypatch.setattr("sys.argv", ["record", "--part", "rows", "--out", str(folder)])
    record.main()
    assert table.read_bytes() == schema.stored(run.RECORDED / "h200").read_bytes()


def test_a_folder_of_ones_own_is_never_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["record", "--replace", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        record.main()
    assert "name a new folder" in capsys.readouterr().err
    assert tmp_path.exists()


def test_the_benchmark_has_every_rung_on_lab_and_the_last_one_on_every_other_suite(tmp_path, monkeypatch):
    calls = []

    def measured(names, cases, folder, info, with_peers):
        calls.append((names, cases, with_peers))
        if len(calls) == 1:
            run.add_rows(folder, synthetic.rows({"ws": {"chain_equal": 1e-4}}, ()))

    monkeypatch.setattr(bench, "bench", measured)
    record._bench(variants.LADDER, tmp_path / "own", {"run": synthetic.RUN}, replace=False)
    lab, *others = (problem.SUITES[name] for name in ("lab", "qwen", "varlen"))
    last = variants.LADDER[-1:]
    assert calls == [(variants.LADDER, lab, True), *((last, cases, True) for cases in others)]
    assert schema.read(schema.stored(tmp_path / "own"))["variant"].unique().tolist() == ["ws"]
