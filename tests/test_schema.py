"""The tidy table: what it accepts, what it refuses and how it says so."""

import pytest

from profiling import schema


def rows(**changes):
    values = dict(
        run="r", gpu="NVIDIA H200", tool="bench", variant="naive", case="chain_equal", phase="core",
        metric="latency_graph", unit="second", value=1.5e-4,
    )  # fmt: skip
    return [schema.row(**{**values, **changes})]


def test_a_table_survives_writing_and_reading(tmp_path):
    frame = schema.table(rows() + rows(sample=1, value=0.123456789e-3) + rows(tool="ncu", kernel="k", metric="m"))
    path = tmp_path / "measurements.csv"
    schema.write(frame, path)
    again = schema.read(path)
    assert list(again.columns) == schema.COLUMNS
    assert again["value"].tolist() == [1.5e-4, 0.123456789e-3, 1.5e-4]
    assert again["kernel"].tolist() == ["", "", "k"]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tool": "gprof"}, "tool must be one of bench, ncu, nsys"),
        ({"phase": "warmup"}, "phase must be one of core, preprocess, cumsum, A, full"),
        ({"unit": "ms"}, "unit must be one of second, byte, ratio, count"),
        ({"value": float("nan")}, "finite"),
        ({"value": float("inf")}, "finite"),
        ({"value": -1.0}, "at least 0"),
        ({"value": "fast"}, "finite"),
        ({"unit": "ratio", "value": 1.2}, "a ratio lies between 0 and 1"),
        ({"sample": 0}, "stands in the table already"),
        ({"sample": 1, "gpu": "NVIDIA H100"}, "one run on one GPU was expected"),
        ({"sample": 1, "run": "another"}, "one run on one GPU was expected"),
    ],
)
def test_a_bad_row_is_refused_with_file_row_and_rule(changes, rule):
    with pytest.raises(schema.BadTable, match=rule) as refused:
        schema.table(rows() + rows(**{"sample": 1, **changes}), "some.csv")
    assert "some.csv" in str(refused.value)
    if "expected" not in rule:
        assert "some.csv, row 3" in str(refused.value)  # as an editor numbers it: the head is row 1


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "No columns to parse"),
        ("a,b\n1,2\n", "the columns run, gpu"),
        (",".join(schema.COLUMNS) + "\n", "holds no measurement"),
        (",".join(schema.COLUMNS) + "\nr,g,bench,naive,c,core,,m,second,0,1.5e-4x\n", "1.5e-4x"),
        (",".join(schema.COLUMNS) + "\nr,g,bench,naive,c,core,,m,second,0\n", r"row 2|could not|value"),
    ],
)
def test_empty_foreign_and_damaged_files_are_refused(tmp_path, content, found):
    path = tmp_path / "measurements.csv"
    path.write_text(content)
    with pytest.raises(schema.BadTable, match=found) as refused:
        schema.read(path)
    assert str(path) in str(refused.value)


def test_a_packed_table_is_the_same_one_every_time_and_comes_before_a_plain_one(tmp_path):
    frame = schema.table(rows())
    assert schema.stored(tmp_path) == tmp_path / "measurements.csv"
    path = tmp_path / "measurements.csv.gz"
    schema.write(frame, path)
    once = path.read_bytes()
    schema.write(frame, path)
    assert path.read_bytes() == once
    assert schema.stored(tmp_path) == path
    assert schema.read(path).equals(frame)


@pytest.mark.parametrize("damage", [lambda packed: packed[:40], lambda packed: b"run,gpu\n", lambda packed: b""])
def test_a_damaged_packed_table_is_refused(tmp_path, damage):
    path = tmp_path / "measurements.csv.gz"
    schema.write(schema.table(rows()), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(schema.BadTable, match="a CSV in the tidy layout was expected") as refused:
        schema.read(path)
    assert str(path) in str(refused.value)


def test_a_missing_file_says_which_command_makes_one(tmp_path):
    with pytest.raises(schema.BadTable, match="no such file; make one with `make bench`"):
        schema.read(tmp_path / "measurements.csv")
