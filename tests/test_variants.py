"""The ladder's registry."""

from pathlib import Path

import pytest

import variants


def test_the_ladder_is_the_files_of_the_folder():
    files = {path.stem for path in Path(variants.__file__).parent.glob("*.py")} - {"__init__", "__main__"}
    assert set(variants.LADDER) == files


@pytest.mark.parametrize("name", variants.LADDER)
def test_a_rung_has_a_label_and_the_operator(name):
    label = variants.label(name)
    assert label
    assert not label.startswith(name)
    assert callable(variants.load(name).gdn_prefill_forward)


def test_select_keeps_ladder_order_and_refuses_unknown_names():
    assert variants.select("all") == variants.LADDER
    assert variants.select("fused,naive") == ("naive", "fused")
    with pytest.raises(variants.UnknownVariant, match=r"one of naive, fused.*found 'faster'.*LADDER"):
        variants.select("naive,faster")
