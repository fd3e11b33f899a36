"""What holds of a real trace, whoever recorded it."""

import pytest

from analysis import roles


def assert_holds_together(trace: roles.Trace) -> None:
    """Spans that tile a role's loop, roles that keep pace, a clock that a Hopper SM has, a path as long as the window.

    That a wait ends after what it waits for is checked where `Trace.spans` is made.
    """
    known, loops = trace.info, {}
    last = known["recorded"] - 8
    for role, own in trace.spans.groupby("role"):
        steady = own[own["chunk"].between(8, last - 1)]
        begin, end = steady["start"].iloc[0], own[own["chunk"] == last]["start"].iloc[0]
        assert steady["cycles"].sum() == pytest.approx(end - begin, rel=0.02)
        loops[role] = (end - begin) / (last - 8)
    assert max(loops.values()) == pytest.approx(min(loops.values()), rel=0.02)  # all go through the same chunks
    clock = loops.popitem()[1] * known["recorded"] / known["traced_s"]
    assert 0.8e9 < clock < 2.1e9  # Hz
    assert known["traced_s"] / known["untraced_s"] < 1.25  # beyond that it is another kernel that is seen
    assert roles.steps(trace, 16, 20)["cycles"].sum() == pytest.approx(roles.pace(trace, 16, 20)[1], rel=0.02)
