"""From a dot test that fails to a small one that fails in the same way.

Tries smaller meshes, smaller shapes and simpler parameters of the operator, as long as something smaller fails. What
does not fit together raises, and is passed over, so that nothing here needs to know what an operator's fields mean.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from spmd.adjoints.dot import DotTest
from spmd.autodiff import tree
from spmd.layout import Layout, P
from spmd.mesh import Mesh, make_mesh
from spmd.operators.base import Operator

__all__ = ["smallest_like"]

_RUNS, _SECONDS = 300, 10.0
"""How much is tried."""

Axes = Mapping[str, int]


def smallest_like(test: DotTest, fails: Callable[[DotTest], bool]) -> DotTest:
    """The smallest test found that fails as this one does; the test itself if nothing smaller does.

    Under MPI each process looks by itself, on virtual workers, and finds the same. Bodies of one's own may hold on to
    their processes, and stay as they are there.
    """
    alone = len(test.mesh.local_workers) == test.mesh.size
    if not alone and test.operator is None:
        return test
    # Clocks differ between processes.
    deadline = time.monotonic() + (_SECONDS if alone else math.inf)
    best, left = test, _RUNS
    seen: set[str] = set()
    while True:
        for candidate in _candidates(best):
            text = candidate.reproduction()
            if text in seen or _measure(candidate) >= _measure(best):
                continue
            seen.add(text)
            left -= 1
            if left < 0 or time.monotonic() > deadline:
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


def _measure(test: DotTest) -> tuple:
    """What is to be made small, the most important first."""
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


def _less(n: int) -> list[int]:
    """Smaller numbers to try, the smallest first."""
    return sorted({m for m in (1, 2, 3, n // 2, n - 1) if 0 < m < n})


def _with(test: DotTest, f, shapes, specs, mesh: Mesh | None = None) -> DotTest:
    """The test of something else; what an operator between layouts takes is laid out as it says."""
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
    smaller += [{**axes, name: m} for name, n in axes.items() for m in _less(n)]
    smaller.sort(key=lambda a: (math.prod(a.values()), len(a)))
    for new in smaller:
        mesh = make_mesh(tuple(new.values()), tuple(new), transport="local", scheduler="lockstep")
        over = tuple(getattr(test.f, "axes", ())) if test.operator is not None else tuple(axes)
        n, m = (math.prod(a.get(name, 1) for name in over) for a in (axes, new))
        specs = [_spec_over(spec, new) for spec in test.specs]
        promised = tree.map(lambda spec, new=new: _spec_over(spec, new), test.out_specs)
        same = test.shapes
        fitted = tuple(tuple(m if k == n else k for k in shape) for shape in same)
        for f in _over(test.f, new, n, m):
            for shapes in dict.fromkeys((same, fitted)):
                laid = [_laid(spec, shape) for spec, shape in zip(specs, shapes, strict=True)]
                yield replace(_with(test, f, shapes, laid, mesh), out_specs=promised)


def _spec_over(spec: P | Layout | None, axes: Axes):
    if isinstance(spec, P):
        return _spec(spec, axes)
    return spec if spec is None else _layout(spec, spec.shape, {n: axes[n] for n in spec.axes if n in axes})


def _spec(spec: P, axes: Axes) -> P:
    return P(*(tuple(n for n in names if n in axes) or None for names in spec.dims))


def _laid(spec: P | Layout | None, shape):
    return _layout(spec, shape, spec.axes) if isinstance(spec, Layout) else spec


def _cut(cut: tuple[int, ...], n: int, count: int) -> tuple[int, ...]:
    """Sizes of blocks made to fit another length and number: the last takes the rest."""
    sizes, left = [], n
    for k in range(count - 1):
        sizes.append(min(left, cut[k] if k < len(cut) else 0))
        left -= sizes[-1]
    return (*sizes, left)


def _layout(old: Layout, shape, axes: Axes) -> Layout:
    """A layout made to fit another shape of as many dimensions, and a mesh of other axes."""
    if old.spec is not None:
        spec = _spec(old.spec, axes)
        cuts = None
        if not old.balanced:
            counts = [math.prod(axes[n] for n in names) for names in spec.dims]
            cuts = [_cut(c, n, k) for c, n, k in zip(old.cuts, shape, counts, strict=True)]
        return Layout(shape, spec, axes, cuts, copies=old.copies)
    assert old.workers is not None
    total, counts = math.prod(axes.values()), [len(c) for c in old.cuts]
    counts.append(max(1, len(old.workers) // math.prod(counts)))
    while math.prod(counts) > total:
        counts[counts.index(max(counts))] -= 1
    workers = [w for w in dict.fromkeys((*old.workers, *range(total))) if w < total][: math.prod(counts)]
    cuts = None if old.balanced else [_cut(c, n, k) for c, n, k in zip(old.cuts, shape, counts, strict=False)]
    return Layout.grid(shape, counts, axes, workers, cuts, copies=old.copies)


def _over(f: Any, axes: Axes, n: int, m: int) -> Iterator[Any]:
    """An operator over n workers made one over m of these axes, in each way that suggests itself."""
    if not isinstance(f, Operator):
        yield f
        return
    names = [field.name for field in fields(f)]
    choices = [_fitted(name, getattr(f, name), axes, n, m) for name in names]
    if "axes" in names and not choices[names.index("axes")][0]:
        return
    for values in itertools.islice(itertools.product(*choices), 6):
        yield _replaced(f, dict(zip(names, values, strict=True)))


def _replaced(f: Operator, values: dict[str, Any]) -> Any:
    try:
        return replace(f, **values)
    except Exception:  # Some check their fields; this one is tried in vain.
        return f


def _fitted(name: str, value: Any, axes: Axes, n: int, m: int) -> list[Any]:
    """What a field may be over m workers instead of n."""
    if name == "axes":
        return [tuple(a for a in value if a in axes)]
    if isinstance(value, Operator):
        return list(_over(value, axes, n, m)) or [value]
    if isinstance(value, Layout):
        return [_layout(value, value.shape, {a: axes[a] for a in value.axes if a in axes})]
    if isinstance(value, P):
        return [_spec(value, axes)]
    if name == "root" and isinstance(value, int):
        return [min(value, m - 1)]
    if isinstance(value, tuple) and value and all(isinstance(v, tuple) and len(v) == 2 for v in value):
        if name == "perm":
            kept = tuple(v for v in value if max(v) < m)
            ring = tuple((k, (k + 1) % m) for k in range(m))
            return list(dict.fromkeys((ring, kept) if len(value) == n else (kept, ring)))
        return [value]
    if isinstance(value, tuple) and len(value) == n != m and all(isinstance(v, int) for v in value):
        return [None, _cut(value, sum(value), m)]
    return [value]


# Parts, shapes, parameters, specs


def _of_parts(test: DotTest) -> Iterator[DotTest]:
    """Of an operator that is made of others: each by itself."""
    if test.operator is not None:
        for field in fields(test.operator):
            value = getattr(test.operator, field.name)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Operator):
                    yield _with(test, part, test.shapes, test.specs)


def _of_smaller_shapes(test: DotTest) -> Iterator[DotTest]:
    for k, shape in enumerate(test.shapes):
        for d in dict.fromkeys((len(shape) - 1, 0)) if shape else ():
            specs = [_without(spec, d) if j == k else spec for j, spec in enumerate(test.specs)]
            ndim = len(shape)
            f = _reshaped(test.f, lambda v, d=d, ndim=ndim: _one_less(v, d, ndim))
            yield _with(test, f, _put(test.shapes, k, shape[:d] + shape[d + 1 :]), specs)
        for d, n in enumerate(shape):
            for m in _less(n):
                new = _put(shape, d, m)
                specs = [_laid(spec, new) if j == k else spec for j, spec in enumerate(test.specs)]
                for keep in (False, True):

                    def cut(v, n=n, m=m, new=new, old=shape, keep=keep):
                        if isinstance(v, Layout) and v.shape == old:
                            return _layout(v, new, v.axes)
                        if isinstance(v, tuple) and v and all(isinstance(i, int) for i in v) and sum(v) == n:
                            return _cut(v, m, len(v)) if keep else None
                        return v

                    yield _with(test, _reshaped(test.f, cut), _put(test.shapes, k, new), specs)


def _put(values: tuple, k: int, value: Any) -> tuple:
    new = (*values[:k], value, *values[k + 1 :])
    return type(values)(*new) if hasattr(values, "_fields") else new  # a named one keeps its names


def _without(spec: Any, d: int) -> Any:
    """A spec without its dimension d."""
    if isinstance(spec, P):
        return P(*(names or None for j, names in enumerate(spec.dims) if j != d))
    return _one_less(spec, d, len(spec.shape)) if spec is not None else None


def _one_less(value: Any, d: int, ndim: int) -> Any:
    """A field of an operator on arrays of ndim dimensions, for arrays without dimension d."""
    if isinstance(value, Layout) and len(value.shape) == ndim:
        shape = value.shape[:d] + value.shape[d + 1 :]
        if value.spec is not None:
            return Layout(shape, _without(value.spec, d), value.axes, copies=value.copies)
        counts = [len(c) for j, c in enumerate(value.cuts) if j != d]
        workers = (value.workers or ())[: math.prod(counts)]
        return Layout.grid(shape, counts, value.axes, workers, copies=value.copies)
    if isinstance(value, P):
        return _without(value, d)
    if isinstance(value, tuple) and len(value) == ndim:
        return value[:d] + value[d + 1 :]
    return value


def _reshaped(f: Any, change) -> Any:
    """An operator with each field changed."""
    if not isinstance(f, Operator):
        return f
    own = [field.name for field in fields(f) if field.name != "axes"]
    return _replaced(f, {name: change(getattr(f, name)) for name in own})


def _of_simpler_parameters(test: DotTest) -> Iterator[DotTest]:
    if test.operator is not None:
        for field in fields(test.operator):
            if field.name != "axes":
                for value in _simpler(getattr(test.operator, field.name)):
                    f = _replaced(test.operator, {field.name: value})
                    yield _with(test, f, test.shapes, test.specs)
        for axis in test.operator.axes if len(test.operator.axes) > 1 else ():
            axes = tuple(a for a in test.operator.axes if a != axis)
            yield _with(test, _replaced(test.operator, {"axes": axes}), test.shapes, test.specs)


def _simpler(value: Any) -> Iterator[Any]:
    if isinstance(value, bool | str) or value is None:
        return
    if isinstance(value, int):
        yield from [0, *_less(value)] if value > 0 else [0] if value < 0 else []
    elif isinstance(value, tuple):
        yield None
        if any(isinstance(v, tuple) for v in value):
            yield from (value[:k] + value[k + 1 :] for k in range(len(value)))
        for k, v in enumerate(value):
            yield from (_put(value, k, w) for w in _simpler(v) if w is not None)
    elif isinstance(value, Operator):
        for field in fields(value):
            if field.name != "axes":
                yield from (_replaced(value, {field.name: v}) for v in _simpler(getattr(value, field.name)))
    elif isinstance(value, Layout) and not value.balanced and value.spec is not None:
        yield Layout(value.shape, value.spec, value.axes, copies=value.copies)


def _of_simpler_specs(test: DotTest) -> Iterator[DotTest]:
    for k, spec in enumerate(test.specs):
        simpler: list[Any] = []
        if isinstance(spec, Layout) and spec.spec is not None:
            simpler = [P(*spec.spec.trimmed), Layout(spec.shape, spec.spec, spec.axes)]
        elif isinstance(spec, P):
            simpler = [_spec(spec, dict.fromkeys((n for n in spec.axes if n != name), 1)) for name in spec.axes]
            if test.operator is not None:
                simpler.append(None)
        for new in simpler:
            yield _with(test, test.f, test.shapes, _put(test.specs, k, new))
