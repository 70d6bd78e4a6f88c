"""Integers only: block sizes, specs, layouts that tile, and plans against a brute-force oracle on sets of entries."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.errors import LayoutError, SpecError
from spmd.layout import Layout, P, block_bounds, block_sizes, offsets
from spmd.mesh import Mesh
from spmd.plan import Move, plan

AXES = {"x": 2, "y": 3}

# Block sizes


@pytest.mark.parametrize(
    ("n", "parts", "sizes"),
    [
        (7, 3, (3, 2, 2)),
        (6, 3, (2, 2, 2)),
        (2, 3, (1, 1, 0)),
        (0, 2, (0, 0)),
        (5, 1, (5,)),
        (5, (), (5,)),
        (7, (2, 2), (2, 2, 2, 1)),
        (5, (2, 3), (1, 1, 1, 1, 1, 0)),
        (10, (2, 3), (2, 2, 1, 2, 2, 1)),
        (9, (3, 2), (2, 1, 2, 1, 2, 1)),
        (1, (2, 2, 2), (1, 0, 0, 0, 0, 0, 0, 0)),
    ],
)
def test_block_sizes_by_hand(n, parts, sizes):
    assert block_sizes(n, parts) == sizes


@given(n=st.integers(0, 60), p=st.integers(1, 9))
def test_the_first_n_mod_p_blocks_have_one_more(n, p):
    sizes = block_sizes(n, p)
    assert sizes == tuple(n // p + (k < n % p) for k in range(p))
    assert sizes == tuple(len(a) for a in np.array_split(np.arange(n), p))


@given(n=st.integers(0, 60), parts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_several_axes_split_one_after_the_other(n, parts):
    blocks = [np.arange(n)]
    for p in parts:
        blocks = [part for block in blocks for part in np.array_split(block, p)]
    assert block_sizes(n, parts) == tuple(len(b) for b in blocks)
    assert offsets(block_sizes(n, parts)) == (0, *np.cumsum([len(b) for b in blocks]))
    for k, b in enumerate(blocks):
        start, stop = block_bounds(n, parts, k)
        assert list(range(start, stop)) == list(b)


# Specs


def test_specs_are_equal_up_to_whole_dimensions_at_the_end():
    assert P("x") == P("x", None) == P(("x",), None, None)
    assert P() == P(None) == P(None, None)
    assert len({P("x"), P("x", None), P(("x",))}) == 1
    different = [P(), P("x"), P("y"), P(None, "x"), P(("x", "y")), P(("y", "x")), P("x", "y"), P("y", "x")]
    assert len(set(different)) == len(different)
    assert all((a == b) is (a is b) for a, b in itertools.product(different, different))
    assert P("x") != ("x",)
    assert P("x") != "x"


def test_specs_are_written_as_they_are_made():
    for text in ("P()", "P('x')", "P(None, 'x')", "P(('x', 'y'), None)", "P('x', ('y', 'z'))"):
        assert repr(eval(text)) == text
    assert repr(P(["x", "y"])) == "P(('x', 'y'))"
    assert repr(P(("x",))) == "P('x')"


def test_specs_are_values():
    """Equal ones are most often one object, so none of them may change; each is pickled by its dimensions."""
    assert P("x", None) is P("x", None) is not P("x")
    assert P(["x", "y"]) == P(("x", "y"))
    with pytest.raises(AttributeError, match=r"P\('x'\) does not change"):
        P("x").dims = (("y",),)
    with pytest.raises(AttributeError, match=r"P\('x'\) does not change"):
        del P("x").dims
    for spec in (P(), P(None, "x"), P(("x", "y"), None)):
        for same in (pickle.loads(pickle.dumps(spec)), copy.copy(spec), copy.deepcopy(spec)):
            assert (same, same.dims, hash(same)) == (spec, spec.dims, hash(spec))

    class Named(P):
        pass

    assert type(Named("x")) is type(copy.copy(Named("x"))) is Named
    assert type(P("x")) is P


def test_specs_as_sequences():
    spec = P(("x", "y"), None, "z")
    assert list(spec) == [("x", "y"), (), ("z",)]
    assert len(spec) == 3
    assert spec.axes == ("x", "y", "z")
    assert len(P("x", None)) == 2


# Layouts


def test_a_layout_by_hand():
    layout = Layout((5, 4), P("y", None), AXES)
    assert layout.size == 6
    assert layout.cuts == ((2, 2, 1), (4,))
    assert layout.balanced
    assert layout.varying == {"y"}
    assert [layout.coordinates(w) for w in (0, 1, 3, 5)] == [
        {"x": 0, "y": 0},
        {"x": 0, "y": 1},
        {"x": 1, "y": 0},
        {"x": 1, "y": 2},
    ]
    assert layout.boxes[4] == ((2, 4), (0, 4))
    assert layout.slices(5) == (slice(4, 5), slice(0, 4))
    assert layout.block_shape(5) == (1, 4)
    assert layout.owners == (0, 1, 2, 0, 1, 2)


def test_the_order_of_axes_on_a_dimension_matters():
    one, other = Layout((6,), P(("x", "y")), AXES), Layout((6,), P(("y", "x")), AXES)
    assert [b[0][0] for b in one.boxes] == [0, 1, 2, 3, 4, 5]
    assert [b[0][0] for b in other.boxes] == [0, 2, 4, 1, 3, 5]
    assert one != other


def test_layouts_with_equal_content_are_equal():
    one = Layout((5, 4), P("y"), AXES)
    assert one == Layout([5, 4], P("y", None), dict(AXES), [(2, 2, 1), None])
    assert hash(one) == hash(Layout((5, 4), P("y", None), AXES))
    others = [
        Layout((4, 5), P("y"), AXES),
        Layout((5, 4), P("x"), AXES),
        Layout((5, 4), P("y"), {"y": 3, "x": 2}),
        Layout((5, 4), P("y"), AXES, [(1, 2, 2), None]),
    ]
    assert all(one != other for other in others)
    assert len({one, *others}) == 5


def test_a_layout_is_written_with_its_cuts_where_they_are_uneven():
    assert repr(Layout((5,), P("x"), AXES)) == "Layout((5,), P('x'), {'x': 2, 'y': 3})"
    uneven = Layout((5,), P("x"), AXES, [(1, 4)])
    assert not uneven.balanced
    assert repr(uneven) == "Layout((5,), P('x'), {'x': 2, 'y': 3}, cuts=((1, 4),))"


@pytest.mark.parametrize("cut", [(1, 3), (5,), (2, 2, 1), (6, -1)])
def test_cuts_that_do_not_fit(cut):
    with pytest.raises(LayoutError, match="2 sizes that add to 5"):
        Layout((5,), P("x"), AXES, [cut])


def test_a_layout_checks_its_spec():
    with pytest.raises(SpecError, match="at most 1 entry"):
        Layout((5,), P("x", "y"), AXES)
    with pytest.raises(SpecError, match="axis 'z'"):
        Layout((5,), P("z"), AXES)


# Drawn layouts


@st.composite
def meshes(draw) -> dict[str, int]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 12))
    return dict(zip("xyz", sizes, strict=False))


@st.composite
def layouts(draw, axes: dict[str, int], shape: tuple[int, ...]) -> Layout:
    """Any spec, with balanced blocks or any cuts."""
    names = draw(st.permutations(sorted(axes)))
    places = [draw(st.integers(-1, len(shape) - 1)) for _ in names]
    spec = P(*(tuple(n for n, p in zip(names, places, strict=True) if p == d) for d in range(len(shape))))
    balanced = Layout(shape, spec, axes)
    if draw(st.booleans()):
        return balanced
    cuts = []
    for length, blocks in zip(shape, balanced.cuts, strict=True):
        marks = sorted(draw(st.lists(st.integers(0, length), min_size=len(blocks) - 1, max_size=len(blocks) - 1)))
        cuts.append([b - a for a, b in zip([0, *marks], [*marks, length], strict=True)])
    return Layout(shape, spec, axes, cuts)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def entries(box) -> list[tuple[int, ...]]:
    """The entries of a box of the global index space."""
    return list(itertools.product(*(range(start, stop) for start, stop in box)))


@given(st.data())
def test_boxes_tile_the_index_space(data):
    shape, axes = data.draw(shapes), data.draw(meshes())
    layout = data.draw(layouts(axes, shape))
    held = [e for w in set(layout.owners) for e in entries(layout.boxes[w])]
    assert sorted(held) == entries([(0, n) for n in shape])  # each once, by one owner
    for w, owner in enumerate(layout.owners):
        assert layout.boxes[w] == layout.boxes[owner]
        assert layout.positions(w) == layout.positions(owner)
        assert owner <= w
        mine, other = layout.coordinates(w), layout.coordinates(owner)
        assert all(mine[n] == other[n] for n in layout.varying)
        assert all(other[n] == 0 for n in axes if n not in layout.varying)
        assert layout.block_shape(w) == np.empty(shape)[layout.slices(w)].shape
        assert [stop - start for start, stop in layout.boxes[w]] == list(layout.block_shape(w))
    assert len(set(layout.owners)) == math.prod(axes[n] for n in layout.varying)


@given(st.data())
def test_block_shapes_give_the_layout_back(data):
    shape, axes = data.draw(shapes), data.draw(meshes())
    layout = data.draw(layouts(axes, shape))
    found = Layout.of_blocks([layout.block_shape(w) for w in range(layout.size)], layout.spec, axes, "here")
    assert found == layout
    assert hash(found) == hash(layout)
    assert found.balanced == all(
        c == block_sizes(n, [axes[a] for a in names])
        for n, c, names in zip(shape, layout.cuts, layout.spec.dims, strict=True)
    )


@given(st.data())
def test_blocks_that_do_not_join_are_refused(data):
    axes = data.draw(meshes())
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    layout = data.draw(layouts(axes, shape))
    blocks = [layout.block_shape(w) for w in range(layout.size)]
    worker, d = data.draw(st.integers(0, layout.size - 1)), data.draw(st.integers(0, len(shape) - 1))
    blocks[worker] = (*blocks[worker][:d], blocks[worker][d] + 1, *blocks[worker][d + 1 :])
    alone = [w for w in range(layout.size) if layout.positions(w)[d] == layout.positions(worker)[d]] == [worker]
    if alone:  # the only block at this place: it may have any length
        assert Layout.of_blocks(blocks, layout.spec, axes, "here").shape[d] == shape[d] + 1
    else:
        with pytest.raises(LayoutError, match=rf"^here, laid out by(.|\n)*equal lengths in dimension {d}"):
            Layout.of_blocks(blocks, layout.spec, axes, "here")


def test_blocks_of_different_rank_are_refused():
    with pytest.raises(LayoutError, match=r"as many dimensions") as caught:
        Layout.of_blocks([(2, 3), (2,)], P("x"), {"x": 2}, "here")
    assert "shape [2, 3] on worker 0 (x=0), and one of shape [2] on worker 1 (x=1)" in str(caught.value)


# Plans


def test_a_transposition_by_hand():
    rows, columns = Layout((2, 4), P("x"), {"x": 2}), Layout((2, 4), P(None, "x"), {"x": 2})
    assert plan(rows, columns) == (
        Move(0, 0, ((0, 1), (0, 2))),
        Move(1, 0, ((1, 2), (0, 2))),
        Move(0, 1, ((0, 1), (2, 4))),
        Move(1, 1, ((1, 2), (2, 4))),
    )


def test_a_copy_is_taken_from_oneself_or_from_the_least_busy():
    axes = {"x": 2, "y": 2}
    everywhere = Layout((4,), P(), axes)
    assert all(m.source == m.target for m in plan(everywhere, Layout((4,), P(("x", "y")), axes)))
    halves = Layout((4,), P("x"), axes)  # workers 0, 1 hold the first half, 2, 3 the second
    assert [(m.source, m.target) for m in plan(halves, everywhere)] == [
        (0, 0),
        (2, 0),
        (1, 1),
        (3, 1),
        (1, 2),
        (2, 2),
        (0, 3),
        (3, 3),
    ]
    columns = Layout((4, 4), P(None, "x"), axes)
    for target in (Layout((4, 4), P("x"), axes), Layout((4, 4), P("y"), axes), Layout((4, 4), P(), axes)):
        sent = [m.source for m in plan(columns, target) if m.source != m.target]
        assert sorted(sent) == [0, 1, 2, 3]


@settings(max_examples=150)
@given(st.data())
def test_every_entry_comes_once_from_one_who_has_it(data):
    shape, axes = data.draw(shapes), data.draw(meshes())
    source, target = data.draw(layouts(axes, shape)), data.draw(layouts(axes, shape))
    moves = plan(source, target)
    for t in range(target.size):
        received = [e for m in moves if m.target == t for e in entries(m.box)]
        assert sorted(received) == entries(target.boxes[t])
    for m in moves:
        held = set(entries(source.boxes[m.source]))
        assert entries(m.box), "an empty move"
        assert set(entries(m.box)) <= held
        # What a worker has it does not get from others.
        if m.source != m.target:
            assert not set(entries(m.box)) & set(entries(source.boxes[m.target]))
    assert list(moves) == sorted(moves, key=lambda m: (m.target, m.source, m.box))
    # One message per pair at most, and none at all where nothing changes.
    pairs = [(m.source, m.target) for m in moves]
    assert len(set(pairs)) == len(pairs)
    if source == target:
        assert all(s == t for s, t in pairs)


@given(st.data())
def test_carrying_out_a_plan_changes_the_layout(data):
    shape, axes = data.draw(shapes), data.draw(meshes())
    source, target = data.draw(layouts(axes, shape)), data.draw(layouts(axes, shape))
    whole = np.arange(math.prod(shape)).reshape(shape)
    blocks = [np.full(target.block_shape(t), -1) for t in range(target.size)]
    for m in plan(source, target):
        given_block = whole[source.slices(m.source)]

        def inside(layout: Layout, worker: int, box=m.box):
            origin = [start for start, _ in layout.boxes[worker]]
            return tuple(slice(a - o, b - o) for (a, b), o in zip(box, origin, strict=True))

        blocks[m.target][inside(target, m.target)] = given_block[inside(source, m.source)]
    for t, block in enumerate(blocks):
        np.testing.assert_array_equal(block, whole[target.slices(t)])


def test_a_plan_between_different_arrays_is_refused():
    with pytest.raises(LayoutError, match="the same global shape"):
        plan(Layout((4,), P("x"), AXES), Layout((5,), P("x"), AXES))
    with pytest.raises(LayoutError, match="the same workers"):
        plan(Layout((4,), P("x"), AXES), Layout((4,), P("x"), {"x": 2}))
    with pytest.raises(LayoutError, match="in one order"):
        plan(Layout((4,), P("x"), AXES), Layout((4,), P("x"), dict(reversed(AXES.items()))))


def test_plans_are_made_once():
    one, other = (Layout((4, 2), P("x"), AXES) for _ in range(2))
    target = Layout((4, 2), P(None, "x"), AXES)
    assert plan(one, target) is plan(other, target)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout((3.0,), P("x"), {"x": 2}), r"argument shape\n  got:    \(3\.0,\)"),
        (lambda: Layout((-3,), P("x"), {"x": 2}), "integers of at least 0"),
        (lambda: Layout(3, P("x"), {"x": 2}), "argument shape"),
        (lambda: Layout((3,), "x", {"x": 2}), "argument spec"),
        (lambda: Layout((3,), P("x"), {"x": 0}), r"argument axes\n  got:    \[0\]"),
        (lambda: Layout((3,), P("x"), Mesh(x=2)), r"mesh\.axes"),
        (lambda: Layout((3,), P("x"), {"x": 2}, [(1.5, 1.5)]), "argument cuts, dimension 0"),
        (lambda: Layout((3,), P("x"), {"x": 2}, 5), "one for each of 1"),
        (lambda: Layout.grid((3.0,), (2,), {"x": 2}), "argument shape"),
        (lambda: Layout.grid((3,), 2, {"x": 2}), "argument grid"),
        (lambda: Layout.grid((3,), (2,), {"x": 2}, [0, 1.0]), "argument workers"),
    ],
)
def test_what_is_no_layout_is_refused(make, words):
    with pytest.raises((LayoutError, SpecError), match=words):
        make()


def test_numbers_are_plain_integers_whatever_was_asked_before():
    """What is kept of an earlier question has the type of that: a float would find its way into every later layout."""
    with pytest.raises(TypeError):
        block_sizes(997.0, 3)
    assert all(type(n) is int for n in block_sizes(np.int64(997), 3))
    assert all(type(n) is int for n in block_sizes(997, 3))
    layout = Layout(np.array([997, 4]), P("x"), {"x": np.int64(3)})
    assert repr(layout) == "Layout((997, 4), P('x', None), {'x': 3})"
    grid = Layout.grid((np.int64(997),), np.array([2]), {"x": 3}, np.array([2, 0]))
    assert repr(grid) == "Layout.grid((997,), (2,), {'x': 3}, (2, 0))"
