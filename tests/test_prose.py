"""What people wrote, as blocks: docstrings, remarks, attempts."""

import json

import pytest

import variants
from analysis import prose
from kernels.errors import UserError


def text(blocks):
    """All words of some blocks, one after the other."""
    words = []
    for block in blocks:
        if block["kind"] == "paragraph":
            words.append("".join(span["text"] for span in block["spans"]))
        elif block["kind"] == "code":
            words.append(block["text"])
        else:
            words += [text(item) for item in block["items"]]
    return "\n".join(words)


def styled(blocks):
    return [(span["text"], *span["styles"]) for block in blocks for span in block["spans"]]


@pytest.fixture
def remarks(tmp_path):
    def read(content):
        path = tmp_path / "remarks.md"
        path.write_text(content, encoding="utf-8")
        return prose.remarks(path, ["naive", "mine"])

    return read


@pytest.mark.parametrize("name", variants.LADDER)
def test_nothing_of_a_docstring_is_lost(name):
    _, _, body = variants.docstring(name).partition("\n")
    assert text(prose.docstring(name)).split() == body.replace("`", "").split()


def test_a_docstring_s_leads_are_bold_and_its_tables_keep_their_layout():
    blocks = prose.docstring("ws")
    bold = [span["text"] for block in blocks for span in block.get("spans", []) if "strong" in span["styles"]]
    assert {"Hypothesis:", "Roles, by warp:", "Shared memory, 198 KiB:"} <= set(bold)
    (barriers,) = [block["text"] for block in blocks if block["kind"] == "code" and "kq_full" in block["text"]]
    lines = variants.docstring("ws").splitlines()
    assert all(f"    {line}" in lines for line in barriers.splitlines())


def test_a_variant_that_is_not_on_this_ladder_says_nothing():
    assert prose.docstring("mine") == []


def test_remarks_by_stage(remarks):
    found = remarks(
        "# naive\n\nOne *two* **three `four`**\nfive [six](http://x).\n\n# mine\n\n- a\n  1. b\n\n```\nc  d\n```\n"
    )
    assert list(found) == ["naive", "mine"]
    assert styled(found["naive"]) == [
        ("One ",),
        ("two", "emphasis"),
        (" ",),
        ("three ", "strong"),
        ("four", "strong", "code"),
        (" ",),
        ("five ",),
        ("six",),
        (" (http://x)",),
        (".",),
    ]
    outer, code = found["mine"]
    assert (outer["ordered"], outer["items"][0][1]["ordered"]) == (False, True)
    assert code == {"kind": "code", "text": "c  d"}


def test_markup_of_other_languages_stays_text(remarks):
    awkward = r'#let x = 1 $a_b$ @ref <b>bold</b> \textbf{y} "quoted" ~ a\_b'
    blocks = remarks(f"# naive\n\n{awkward}\n\n## A heading below\n")["naive"]
    assert text(blocks[:1]) == awkward.replace(r"\_", "_")
    assert styled(blocks[1:]) == [("A heading below", "strong")]
    json.dumps(blocks)  # which is how the template gets them


def test_no_remarks_are_fine(tmp_path):
    assert prose.remarks(tmp_path / "remarks.md", []) == {}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("# faster\n\ntext", r"name a stage \(naive, mine, .*ws.*\) were expected, found 'faster'"),
        ("text\n\n# naive", "a heading that names a stage.* was expected first, found paragraph"),
        ("# naive\n\n![a](b.png)", "found image"),
        ("# naive\n\n| a | b |\n|---|---|\n| 1 | 2 |", "found table"),
        ("# naive\n\n<div>x</div>", "found block html"),
    ],
)
def test_what_the_report_cannot_take_over_is_refused(remarks, content, found):
    with pytest.raises(UserError, match=f"remarks.md: .*{found}"):
        remarks(content)


def test_remarks_in_another_encoding_are_refused(tmp_path):
    path = tmp_path / "remarks.md"
    path.write_bytes("# naive\n\nµ".encode("latin-1"))
    with pytest.raises(UserError, match="UTF-8"):
        prose.remarks(path, [])


def test_the_attempts_of_this_repository():
    frame = prose.attempts(prose.ATTEMPTS)
    assert list(frame.columns) == prose.COLUMNS
    assert set(frame["stage"]) <= {*variants.LADDER, "preprocessing"}
    assert frame.map(bool).all(axis=None)


def test_an_attempt_that_a_user_adds(tmp_path):
    path = tmp_path / "attempts.md"
    added = "| mine | a \\| b | 12.5 | no |\n"
    path.write_text(prose.ATTEMPTS.read_text(encoding="utf-8") + added, encoding="utf-8")
    assert prose.attempts(path).iloc[-1].tolist() == ["mine", "a | b", "12.5", "no"]


@pytest.mark.parametrize(
    "content",
    [
        "# Nothing",
        "| Stage | Tried |\n|---|---|\n| a | b |",
        "| Stage | Tried | Measured | Verdict |\n|---|---|---|---|\n| a | b |\n",
    ],
)
def test_attempts_without_their_table_are_refused(tmp_path, content):
    path = tmp_path / "attempts.md"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"attempts.md: one Markdown table with the columns stage, tried, measured"):
        prose.attempts(path)
    with pytest.raises(UserError, match="restore it"):
        prose.attempts(tmp_path / "nowhere.md")
