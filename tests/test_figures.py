"""Figures: what they draw, that no text overlaps or is clipped, and that they come out the same."""

import itertools
import math

import numpy as np
import pytest
import synthetic
from legible import assert_legible

from analysis import dag, load, plots, plots_ncu, plots_nsys, report, roofline, style
from kernels.problem import SUITES

CHAIN, WIDE, SHORT = "chain_equal", "wide_gva_state", "short_tail_state"
TIMES = {
    "naive": {CHAIN: 400e-6, WIDE: 800e-6},
    "fused": {CHAIN: 200e-6, WIDE: 200e-6},
    "mine": {CHAIN: 100e-6, WIDE: 50e-6},
}
LIBRARIES = ("flashqla", "flashqla_nocp", "fla", "flashinfer", "flashinfer_nocp", "token_loop")
NAMES = ("naive", "fused", "smem", "multibuf", "ws", "rs", "split", "mine")


def everybody(variants):
    """Eight cases for that many variants, each half as fast again as the one before."""
    return {name: {case.name: 1e-3 / 1.5**i for case in SUITES["lab"]} for i, name in enumerate(NAMES[:variants])}


@pytest.fixture
def run(tmp_path):
    return load.load(synthetic.write_run(tmp_path / "run", TIMES, profiled=(WIDE,)))


def test_no_text_of_the_recorded_run_overlaps_or_is_clipped():
    for name, figure in report.figures(load.load(load.DEFAULT)).items():
        assert_legible(figure, name)


@pytest.mark.parametrize("variants", [1, 2, 8])
def test_no_text_overlaps_however_many_rungs_there_are(tmp_path, variants):
    run = load.load(synthetic.write_run(tmp_path / "run", everybody(variants), profiled=(WIDE, SHORT)))
    found = report.figures(run)
    assert len(found) == 9
    for name, figure in found.items():
        assert_legible(figure, name)


def test_the_check_finds_what_overlaps_and_what_is_clipped():
    for x, message in ((0.5, "overlap"), (0.999, "clipped")):
        figure = style.message("")
        figure.text(0.5, 0.5, "one")
        figure.text(x, 0.5, "another")
        with pytest.raises(AssertionError, match=message):
            assert_legible(figure, "figure")


def lightness(colour):
    """CIE L* of an sRGB colour."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 116 * sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) ** (1 / 3) - 16


def test_colours_darken_along_the_ladder():
    ladder = [style.colour(name) for name in NAMES]
    assert min(lightness(a) - lightness(b) for a, b in itertools.pairwise(ladder)) > 5


def test_a_variant_has_its_colour_and_hatch_in_every_run():
    assert style.colour("mine") == style.colour("another") == style.OTHER
    for name in LIBRARIES:
        assert style.colour(name) not in {style.OTHER, *style.RUNGS.values()}
    looks = {name: (style.fill(name)["facecolor"], style.fill(name)["hatch"]) for name in (*NAMES, *LIBRARIES)}
    assert len(set(looks.values())) == len(looks)


def test_labels_are_set_apart_and_stay_near():
    assert style.apart([1.0, 5.0, 3.0], 1) == [1.0, 5.0, 3.0]
    assert style.apart([2.0, 2.0, 9.0], 1) == pytest.approx([1.5, 2.5, 9.0])
    places = style.apart([0.0, 0.1, 0.2, 0.3], 1)
    assert np.diff(places) == pytest.approx([1, 1, 1])
    assert np.mean(places) == pytest.approx(0.15)


def test_the_ladder_shows_every_rung_on_every_case(tmp_path):
    run = load.load(synthetic.write_run(tmp_path / "run", everybody(3)))
    above, below = plots.ladder_figure(run).subfigs
    assert len(above.axes[0].patches) == 3
    assert len(below.axes) == 8
    assert all(len(axes.patches) == 3 and axes.get_xlim()[0] == 0 for axes in below.axes)


def test_the_ladder_says_what_was_skipped(tmp_path):
    times = TIMES | {"fused": {WIDE: 200e-6}}
    run = load.load(synthetic.write_run(tmp_path / "run", times, skipped=[("fused", CHAIN, "too long")]))
    found = [text.get_text().strip() for axes in plots.ladder_figure(run).axes for text in axes.texts]
    assert found.count("skipped") == 1
    (axes,) = plots.steps_figure(run).axes  # a gap in the line of that case, not a step to nowhere
    assert np.isnan(axes.patches[0].get_data().values).tolist() == [False, True, False]


def test_steps_are_the_speedups(run):
    (axes,) = plots.steps_figure(run).axes
    lines = [stairs.get_data().values for stairs in axes.patches]
    assert lines == [
        pytest.approx([1, 2, 4]),
        pytest.approx([1, 4, 16]),
        pytest.approx([1, math.sqrt(8), 8]),  # the mean
    ]


def test_the_roofline_by_hand(run):
    points = roofline.points(run, WIDE).set_index("variant")
    # naive: three kernels of 6 GFLOP and 30 MB each in 800 us; the others one.
    assert points.loc["naive", ["flops", "bytes", "seconds"]].tolist() == pytest.approx([18e9, 90e6, 800e-6])
    assert points.loc["naive", "intensity"] == pytest.approx(200)
    assert points.loc["naive", "rate"] == pytest.approx(22.5e12)
    assert points["roof"].tolist() == pytest.approx([8e14] * 3)  # 200 FLOP/byte x 4 TB/s is the arithmetic ceiling
    assert points.loc["naive", "roof_share"] == pytest.approx(22.5e12 / 8e14)
    assert roofline.roof(100, run.ceilings) == pytest.approx(4e14)
    assert roofline.points(run, CHAIN).empty


def test_bars_of_the_counters_begin_at_zero_and_have_the_rungs_colours(run):
    for figure in (plots_ncu.stalls_figure(run, WIDE), plots_ncu.utilisation_figure(run, WIDE)):
        assert [axes.get_title(loc="left") for axes in figure.axes] == list(TIMES)
        for axes in figure.axes:
            assert axes.get_xlim()[0] == 0
            assert {bar.get_x() for bar in axes.patches} == {0}
    stalls = plots_ncu.stalls_figure(run, WIDE).axes[0]
    assert [bar.get_width() for bar in stalls.patches] == [4.0, 3.0, 1.5, 0.1]


def test_the_timeline_shows_kernels_where_they_ran(run):
    (axes,) = plots_nsys.timeline_figure(run, WIDE).axes
    bars = sorted((round(bar.get_x(), 3), round(bar.get_width(), 3)) for bar in axes.patches if bar.get_y() < 0.5)
    # naive, in us: two ranges of 50; preprocessing 20 to 820; the core's range opens then.
    assert bars[:3] == [(0, 50), (20, 800), (820, 50)]
    assert bars[3:] == [
        (840, 266.667),
        (1106.667, 266.667),
        (1462.222, 266.667),  # after a gap of a tenth of the span
    ]
    assert "idles 88.89 µs between the launches of naive's core" in figure_title(plots_nsys.timeline_figure(run, WIDE))


def figure_title(figure):
    return figure.get_suptitle().replace("\n", " ")


def test_figures_without_their_profile_say_how_to_add_it(tmp_path):
    run = load.load(synthetic.write_run(tmp_path / "run", TIMES))
    assert set(report.figures(run)) == {"ladder", "steps", "dag"}
    for figure, part in (
        (roofline.figure(run), "ncu"),
        (plots_ncu.stalls_figure(run, None), "ncu"),
        (plots_ncu.utilisation_figure(run, None), "ncu"),
        (plots_ncu.resources_figure(run, None), "ncu"),
        (plots_nsys.timeline_figure(run, None), "nsys"),
        (plots_nsys.shares_figure(run), "nsys"),
    ):
        assert f"make {part}" in " ".join(figure.texts[0].get_text().split())


def test_the_dag_has_one_chain():
    (axes,) = dag.figure().axes
    dark = [
        arrow for arrow in axes.texts if getattr(arrow, "arrow_patch", None) and arrow.arrow_patch.get_linewidth() > 1
    ]
    assert len(dark) == 2 * 2 + 1  # into Vnew and into S of two chunks, and on to the next
    assert all(arrow.xy[1] == 1.0 for arrow in dark)


def test_figures_come_out_the_same(run, tmp_path):
    files = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        files.append(
            [path for stem, figure in report.figures(run).items() for path in style.save(figure, tmp_path / name, stem)]
        )
    assert [path.suffix for path in files[0]] == [".svg", ".pdf", ".png"] * 9
    for first, second in zip(*files, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name
