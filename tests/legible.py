"""Whether a figure can be read: no text overlaps another or is clipped."""

import itertools

from matplotlib.text import Text

from analysis import style


def undrawn_ticks(figure):
    """Tick labels that matplotlib keeps but does not draw, since they lie outside of the axis."""
    hidden = set()
    for axes in figure.axes:
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    hidden |= {id(tick.label1), id(tick.label2)}
        if not axes.axison:
            hidden |= {id(label) for label in (*axes.get_xticklabels(), *axes.get_yticklabels())}
    return hidden


def assert_legible(figure, name):
    with style.look():
        figure.draw_without_rendering()
        hidden = undrawn_ticks(figure)
        boxes = [
            (text.get_text().strip(), Text.get_window_extent(text))
            for text in figure.findobj(Text)
            if text.get_visible() and text.get_text().strip() and id(text) not in hidden
        ]
    assert boxes, name
    frame = figure.bbox
    for text, box in boxes:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= frame.x1 + 1 and box.y1 <= frame.y1 + 1
        assert inside, f"{name}: {text!r} is clipped"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 1 or high <= 1, f"{name}: {one!r} and {other!r} overlap"
