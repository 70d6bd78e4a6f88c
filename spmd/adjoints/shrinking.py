"""Shrink a dot test that fails to a small one that fails in the same way.

Tries smaller meshes, smaller shapes and simpler parameters of the operator, as long as something smaller fails. What
does not fit together raises and is skipped, so nothing here depends on the meaning of an operator's fields.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from spmd.adjoints.dot_test import DotTest
from spmd.autodiff import tree
from spmd.layout import Layout, P
from spmd.mesh import Mesh, make_mesh
from spmd.operators.base import Operator

__all__ = ["smallest_failure"]

_RUN_LIMIT, _SECONDS_LIMIT = 300, 10.0
"""The most tests that are run, and for how long."""

Axes = Mapping[str, int]


def smallest_failure(test: DotTest, fails: Callable[[DotTest], bool]) -> DotTest:
    """The smallest test found that fails as this one does; the test itself if nothing smaller does.

    Under MPI each process searches on virtual workers, with the same result. It returns a body of the user's unchanged,
    because the body may depend on its process.
    """
    all_here = len(test.mesh.local_workers) == test.mesh.size
    if not all_here and test.operator is None:
        return test
    # Clocks differ between processes.
    deadline = time.monotonic() + (_SECONDS_LIMIT if all_here else math.inf)
    best, runs_left = test, _RUN_LIMIT
    seen: set[str] = set()
    while True:
        for candidate in _candidates(best):
            text = candidate.reproduction()
            if text in seen or _size_key(candidate) >= _size_key(best):
                continue
            seen.add(text)
            runs_left -= 1
            if runs_left < 0 or time.monotonic() > deadline:
                return best
            try:
                if not fails(candidate):
                    continue
            except Exception:  # It does not fit together.
                continue
            best = candidate
            break
        else:
            return best


def _size_key(test: DotTest) -> tuple:
    """The sizes to be minimised, the most important first."""
    mesh = test.mesh
    numbers = sum(math.prod(s) for s in test.shapes)
    text = repr(test.f) if test.operator is not None else ""
    return mesh.size, len(mesh.axes), numbers, sum(map(sum, test.shapes)), _weight(test.f), len(f"{text}{test.specs}")


def _weight(value: Any) -> int:
    """The integers in the parameters of an operator, added up."""
    if isinstance(value, Operator):
        return sum(_weight(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, tuple):
        return sum(map(_weight, value)) + len(value)
    return abs(int(value)) if isinstance(value, int) else 0


def _candidates(test: DotTest) -> Iterator[DotTest]:
    yield from _on_smaller_meshes(test)
    yield from _of_parts(test)
    yield from _of_smaller_shapes(test)
    yield from _of_simpler_parameters(test)
    yield from _of_simpler_specs(test)


def _smaller_numbers(n: int) -> list[int]:
    return sorted({m for m in (1, 2, 3, n // 2, n - 1) if 0 < m < n})


def _replaced_test(test: DotTest, f, shapes, specs, mesh: Mesh | None = None) -> DotTest:
    """The test of another map. An operator between layouts determines its shape and spec."""
    source = getattr(f, "src", None)
    if isinstance(source, Layout):
        shapes, specs = (source.shape,), (source,)
    return replace(test, f=f, shapes=tuple(shapes), specs=tuple(specs), mesh=mesh or test.mesh)


# Meshes


def _on_smaller_meshes(test: DotTest) -> Iterator[DotTest]:
    axes = test.mesh.axes
    smaller: list[dict[str, int]] = []
    if len(axes) > 1:
        smaller += [{n: k for n, k in axes.items() if n != name} for name in axes]
    smaller += [{**axes, name: m} for name, n in axes.items() for m in _smaller_numbers(n)]
    smaller.sort(key=lambda a: (math.prod(a.values()), len(a)))
    for new_axes in smaller:
        mesh = make_mesh(tuple(new_axes.values()), tuple(new_axes), transport="local", scheduler="lockstep")
        names = tuple(getattr(test.f, "axes", ())) if test.operator is not None else tuple(axes)
        n, m = (math.prod(a.get(name, 1) for name in names) for a in (axes, new_axes))
        specs = [_spec_for_axes(spec, new_axes) for spec in test.specs]
        out_specs = tree.map(lambda spec, axes=new_axes: _spec_for_axes(spec, axes), test.out_specs)
        shapes_now = test.shapes
        fitted = tuple(tuple(m if k == n else k for k in shape) for shape in shapes_now)
        for f in _operators_for(test.f, new_axes, n, m):
            for shapes in dict.fromkeys((shapes_now, fitted)):
                new_specs = [_fitted_spec(spec, shape) for spec, shape in zip(specs, shapes, strict=True)]
                yield replace(_replaced_test(test, f, shapes, new_specs, mesh), out_specs=out_specs)


def _spec_for_axes(spec: P | Layout | None, axes: Axes):
    if isinstance(spec, P):
        return _restricted_spec(spec, axes)
    return spec if spec is None else _fitted_layout(spec, spec.shape, {n: axes[n] for n in spec.axes if n in axes})


def _restricted_spec(spec: P, axes: Axes) -> P:
    return P(*(tuple(n for n in names if n in axes) or None for names in spec.dims))


def _fitted_spec(spec: P | Layout | None, shape):
    return _fitted_layout(spec, shape, spec.axes) if isinstance(spec, Layout) else spec


def _fitted_cut(cut: tuple[int, ...], n: int, count: int) -> tuple[int, ...]:
    """Block sizes fitted to another length and number of blocks: the last takes the rest."""
    sizes, rest = [], n
    for k in range(count - 1):
        sizes.append(min(rest, cut[k] if k < len(cut) else 0))
        rest -= sizes[-1]
    return (*sizes, rest)


def _fitted_layout(old: Layout, shape, axes: Axes) -> Layout:
    """A layout fitted to another shape of as many dimensions, and to a mesh of other axes."""
    if old.spec is not None:
        spec = _restricted_spec(old.spec, axes)
        cuts = None
        if not old.balanced:
            counts = [math.prod(axes[n] for n in names) for names in spec.dims]
            cuts = [_fitted_cut(c, n, k) for c, n, k in zip(old.cuts, shape, counts, strict=True)]
        return Layout(shape, spec, axes, cuts, copies=old.copies)
    assert old.workers is not None
    worker_count, counts = math.prod(axes.values()), [len(c) for c in old.cuts]
    counts.append(max(1, len(old.workers) // math.prod(counts)))
    while math.prod(counts) > worker_count:
        counts[counts.index(max(counts))] -= 1
    workers = [w for w in dict.fromkeys((*old.workers, *range(worker_count))) if w < worker_count][: math.prod(counts)]
    cuts = None if old.balanced else [_fitted_cut(c, n, k) for c, n, k in zip(old.cuts, shape, counts, strict=False)]
    return Layout.grid(shape, counts, axes, workers, cuts, copies=old.copies)


def _operators_for(f: Any, axes: Axes, n: int, m: int) -> Iterator[Any]:
    """An operator over n workers as candidates over m workers of these axes."""
    if not isinstance(f, Operator):
        yield f
        return
    names = [field.name for field in fields(f)]
    choices = [_field_choices(name, getattr(f, name), axes, n, m) for name in names]
    if "axes" in names and not choices[names.index("axes")][0]:
        return
    for values in itertools.islice(itertools.product(*choices), 6):
        yield _replaced(f, dict(zip(names, values, strict=True)))


def _replaced(f: Operator, values: dict[str, Any]) -> Any:
    try:
        return replace(f, **values)
    except Exception:  # an operator may check its fields
        return f


def _field_choices(name: str, value: Any, axes: Axes, n: int, m: int) -> list[Any]:
    """Candidates for a field over m workers instead of n."""
    if name == "axes":
        return [tuple(a for a in value if a in axes)]
    if isinstance(value, Operator):
        return list(_operators_for(value, axes, n, m)) or [value]
    if isinstance(value, Layout):
        return [_fitted_layout(value, value.shape, {a: axes[a] for a in value.axes if a in axes})]
    if isinstance(value, P):
        return [_restricted_spec(value, axes)]
    if name in ("root", "to") and isinstance(value, int):
        return [min(value, m - 1)]
    if isinstance(value, tuple) and value and all(isinstance(v, tuple) and len(v) == 2 for v in value):
        if name == "perm":
            restricted = tuple(v for v in value if max(v) < m)
            ring = tuple((k, (k + 1) % m) for k in range(m))
            return list(dict.fromkeys((ring, restricted) if len(value) == n else (restricted, ring)))
        return [value]
    if isinstance(value, tuple) and len(value) == n != m and all(isinstance(v, int) for v in value):
        return [None, _fitted_cut(value, sum(value), m)]
    return [value]


# Parts, shapes, parameters, specs


def _of_parts(test: DotTest) -> Iterator[DotTest]:
    """The operators that an operator is composed of."""
    if test.operator is not None:
        for field in fields(test.operator):
            value = getattr(test.operator, field.name)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Operator):
                    yield _replaced_test(test, part, test.shapes, test.specs)


def _of_smaller_shapes(test: DotTest) -> Iterator[DotTest]:
    for k, shape in enumerate(test.shapes):
        for d in dict.fromkeys((len(shape) - 1, 0)) if shape else ():
            specs = [_spec_without(spec, d) if j == k else spec for j, spec in enumerate(test.specs)]
            ndim = len(shape)
            f = _changed_fields(test.f, lambda v, d=d, ndim=ndim: _without_dimension(v, d, ndim))
            yield _replaced_test(test, f, _with_item(test.shapes, k, shape[:d] + shape[d + 1 :]), specs)
        for d, n in enumerate(shape):
            for m in _smaller_numbers(n):
                new = _with_item(shape, d, m)
                specs = [_fitted_spec(spec, new) if j == k else spec for j, spec in enumerate(test.specs)]
                for keep in (False, True):

                    def cut(v, n=n, m=m, new=new, old=shape, keep=keep):
                        if isinstance(v, Layout) and v.shape == old:
                            return _fitted_layout(v, new, v.axes)
                        if isinstance(v, tuple) and v and all(isinstance(i, int) for i in v) and sum(v) == n:
                            return _fitted_cut(v, m, len(v)) if keep else None
                        return v

                    yield _replaced_test(test, _changed_fields(test.f, cut), _with_item(test.shapes, k, new), specs)


def _with_item(values: tuple, k: int, value: Any) -> tuple:
    new = (*values[:k], value, *values[k + 1 :])
    return type(values)(*new) if hasattr(values, "_fields") else new


def _spec_without(spec: Any, d: int) -> Any:
    """A spec without its dimension d."""
    if isinstance(spec, P):
        return P(*(names or None for j, names in enumerate(spec.dims) if j != d))
    return _without_dimension(spec, d, len(spec.shape)) if spec is not None else None


def _without_dimension(value: Any, d: int, ndim: int) -> Any:
    """A field of an operator on arrays of ndim dimensions, for arrays without dimension d."""
    if isinstance(value, Layout) and len(value.shape) == ndim:
        shape = value.shape[:d] + value.shape[d + 1 :]
        if value.spec is not None:
            return Layout(shape, _spec_without(value.spec, d), value.axes, copies=value.copies)
        counts = [len(c) for j, c in enumerate(value.cuts) if j != d]
        workers = (value.workers or ())[: math.prod(counts)]
        return Layout.grid(shape, counts, value.axes, workers, copies=value.copies)
    if isinstance(value, P):
        return _spec_without(value, d)
    if isinstance(value, tuple) and len(value) == ndim:
        return value[:d] + value[d + 1 :]
    return value


def _changed_fields(f: Any, change) -> Any:
    if not isinstance(f, Operator):
        return f
    own = [field.name for field in fields(f) if field.name != "axes"]
    return _replaced(f, {name: change(getattr(f, name)) for name in own})


def _of_simpler_parameters(test: DotTest) -> Iterator[DotTest]:
    if test.operator is not None:
        for field in fields(test.operator):
            if field.name != "axes":
                for value in _simpler_values(getattr(test.operator, field.name)):
                    f = _replaced(test.operator, {field.name: value})
                    yield _replaced_test(test, f, test.shapes, test.specs)
        for axis in test.operator.axes if len(test.operator.axes) > 1 else ():
            axes = tuple(a for a in test.operator.axes if a != axis)
            yield _replaced_test(test, _replaced(test.operator, {"axes": axes}), test.shapes, test.specs)


def _simpler_values(value: Any) -> Iterator[Any]:
    if isinstance(value, bool | str) or value is None:
        return
    if isinstance(value, int):
        yield from [0, *_smaller_numbers(value)] if value > 0 else [0] if value < 0 else []
    elif isinstance(value, tuple):
        yield None
        if any(isinstance(v, tuple) for v in value):
            yield from (value[:k] + value[k + 1 :] for k in range(len(value)))
        for k, v in enumerate(value):
            yield from (_with_item(value, k, w) for w in _simpler_values(v) if w is not None)
    elif isinstance(value, Operator):
        for field in fields(value):
            if field.name != "axes":
                yield from (_replaced(value, {field.name: v}) for v in _simpler_values(getattr(value, field.name)))
    elif isinstance(value, Layout) and not value.balanced and value.spec is not None:
        yield Layout(value.shape, value.spec, value.axes, copies=value.copies)


def _of_simpler_specs(test: DotTest) -> Iterator[DotTest]:
    for k, spec in enumerate(test.specs):
        simpler: list[Any] = []
        if isinstance(spec, Layout) and spec.spec is not None:
            simpler = [P(*spec.spec.trimmed), Layout(spec.shape, spec.spec, spec.axes)]
        elif isinstance(spec, P):
            simpler = [_restricted_spec(spec, {n: 1 for n in spec.axes if n != name}) for name in spec.axes]
            if test.operator is not None:
                simpler.append(None)
        for new in simpler:
            yield _replaced_test(test, test.f, test.shapes, _with_item(test.specs, k, new))
