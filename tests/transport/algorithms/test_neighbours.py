"""What members learn hop by hop, against the lengths of all: each knows what its plan needs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.errors import LayoutError
from spmd.operators.halo_geometry import BOUNDARIES, Dimension, halo_pieces
from spmd.transport.algorithms.neighbours import Near, NearLengths
from spmd.transport.call import Group

BLOCKS_MAX = 9


def learnt(lengths, near: Near) -> tuple[list[tuple[int, ...]], dict[tuple[int, int], int]]:
    """What all members of a line learn, and the messages from one to another. Each hop they must agree on who tells."""
    n = len(lengths)
    members = [NearLengths(n, k, length, near) for k, length in enumerate(lengths)]
    messages: dict[tuple[int, int], int] = {}
    while any(m.sends or m.sources for m in members):
        sends = [m.sends for m in members]
        for k, m in enumerate(members):
            assert sorted(m.sources) == [s for s in range(n) if k in sends[s]], f"member {k} of {lengths}, {near}"
            assert all(abs(k - t) % n in (1, n - 1) for t in sends[k])
        for k, m in enumerate(members):
            m.take({s: sends[s][k] for s in m.sources})
        for s, told in enumerate(sends):
            for t in told:
                messages[s, t] = messages.get((s, t), 0) + 1
    return [m.lengths for m in members], messages


def near_of(pairs, boundary: str) -> Near:
    n = len(pairs)
    return Dimension(Group(("x",), (n,), tuple(range(n)), 0), pairs, boundary).near(0)


def described(pieces, k: int):
    """What a member does: its own pieces, its gaps, and what it sends and receives."""
    ranges = {t: (m.ranges, sorted(p[:3] for p in m.pieces)) for t, m in pieces.outgoing(k).items()}
    return pieces.length(k), pieces.pieces(k), pieces.gaps(k), pieces.keeps(k), ranges, pieces.incoming(k)


def check(sizes, pairs, boundary: str) -> None:
    near = near_of(pairs, boundary)
    if near.reach <= 0:
        return
    views, _ = learnt(sizes, near)
    whole = halo_pieces(sizes, pairs, boundary)
    for k, view in enumerate(views):
        assert all(known in (length, near.far) for known, length in zip(view, sizes, strict=True))
        own = halo_pieces(view, pairs, boundary)
        assert described(own, k) == described(whole, k), f"block {k} of {sizes}, {pairs}, {boundary}: learnt {view}"
        assert (sum(view) == 0) == (sum(sizes) == 0)


def fitting(sizes, pairs):
    return tuple(w if sum(w) + n >= 0 else (0, 0) for n, w in zip(sizes, pairs, strict=True))


@given(st.data(), st.sampled_from(BOUNDARIES), st.booleans())
@settings(max_examples=250)
def test_members_know_what_their_plans_need(data, boundary, wide):
    sizes = tuple(data.draw(st.lists(st.integers(0, 7 if wide else 3), min_size=2, max_size=BLOCKS_MAX)))
    width = st.integers(-3, 9 if wide else 4)
    one = data.draw(st.booleans())
    pairs = (data.draw(st.tuples(width, width)),) * len(sizes)
    if not one:
        pairs = tuple(data.draw(st.tuples(width, width)) for _ in sizes)
    if not sum(sizes) and boundary not in ("none", "zero"):
        boundary = "zero"
    check(sizes, fitting(sizes, pairs), boundary)


def test_all_small_lines():
    for n in (2, 3, 4):
        for sizes in itertools.product((0, 1, 2, 4) if n < 4 else (0, 1, 3), repeat=n):
            for pair, boundary in itertools.product(((1, 1), (2, 0), (0, 3), (4, -1), (-1, 2)), BOUNDARIES):
                if sum(sizes) or boundary in ("none", "zero"):
                    check(sizes, fitting(sizes, (pair,) * n), boundary)


def test_next_neighbours_are_enough_where_no_halo_reaches_across_a_block():
    for n, boundary in itertools.product((2, 3, 8, 100), BOUNDARIES):
        views, messages = learnt((5,) * n, near_of(((3, 2),) * n, boundary))
        ring = boundary == "periodic" and n > 2
        assert messages == {(k, j % n): 1 for k in range(n) for j in (k - 1, k + 1) if ring or 0 <= j < n}
        for k, view in enumerate(views):
            assert sum(length == 5 for length in view) == len({j % n for j in (k - 1, k, k + 1) if ring or 0 <= j < n})


def test_short_blocks_are_asked_beyond():
    views, messages = learnt((5, 5, 1, 1, 5, 5, 5), Near(0, 3, False, 99))
    assert views[2] == (99, 5, 1, 1, 5, 99, 99)
    assert views[1] == (5, 5, 1, 1, 5, 99, 99)  # a halo of 3 of block 4 reaches across blocks 2 and 3
    assert views[0] == (5, 5, 99, 99, 99, 99, 99)
    assert messages[1, 2] == 1
    assert messages[2, 1] == 3
    assert max(messages.values()) == 3


def test_a_line_without_entries_is_known_to_all():
    for ring in (False, True):
        views, _ = learnt((0,) * 5, Near(0, 1, ring, 99))
        assert views == [(0,) * 5] * 5


def test_an_array_that_is_trimmed_too_far_says_so():
    pieces = halo_pieces((4, 1), ((0, 0), (-1, -1)), "zero")
    assert pieces.length(0) == 4
    with pytest.raises(LayoutError, match="for block 1"):
        pieces.length(1)
