"""Blocks extended to what their outputs need, against the whole array padded by NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, integers, random_layout, random_mesh
from spmd.functions.windows import extended
from spmd.layout import Layout
from spmd.window import plan_window

MODES = {"zero": "constant", "periodic": "wrap", "reflect": "reflect", "edge": "edge"}


@FRONTENDS
@pytest.mark.parametrize("kind", ["spec", "uneven", "grid"])
@pytest.mark.parametrize("seed", range(15))
def test_each_block_is_extended_to_its_window(seed, kind, torch):
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    a = integers(rng, rng.integers(2, 7, rng.integers(1, 4)).tolist())
    how = random_layout(rng, a.shape, mesh, kind=kind)
    source = how if isinstance(how, Layout) else mesh.layout(a.shape, how)
    windows, boundaries, low = [], [], []
    for d, n in enumerate(a.shape):
        kernel, pads = int(rng.integers(1, n + 1)), rng.integers(0, n, 2).tolist()
        boundary = rng.choice(["none", *MODES])
        window = plan_window(n, kernel, padding=tuple(pads) if boundary != "none" else 0, inputs=source.cuts[d])
        windows.append(window if rng.random() < 0.8 else None)
        boundaries.append(boundary)
        low.append(0 if windows[-1] is None or boundary == "none" else pads[0])
    padded = a
    for d, (window, boundary) in enumerate(zip(windows, boundaries, strict=True)):
        if window is not None and boundary != "none":
            widths = [(0, 0)] * a.ndim
            widths[d] = (window.taps.low, window.taps.high)
            padded = np.pad(padded, widths, mode=MODES[boundary])
    seen = {}

    def body(x):
        y = extended(x, source, windows, boundaries)
        seen[spmd.worker_index(tuple(mesh.axes))] = np.asarray(spmd.block(y)).copy()
        return library.psum(library.varying(y.sum(), tuple(mesh.axes)), tuple(mesh.axes))

    library, x = spmd, a
    if torch:
        from torch import tensor

        from spmd.bridge import torch as library

        x = tensor(a)
    library.map(body, in_specs=source, out_specs=spmd.P(), mesh=mesh)(x)
    for w in range(mesh.size):
        place = source.positions(w)
        if place is None:
            assert seen[w].size == 0
            continue
        box = []
        for d, (window, k) in enumerate(zip(windows, place, strict=True)):
            start, stop = source.boxes[w][d] if window is None else window.needs[k]
            if window is not None and boundaries[d] == "none":
                start, stop = (min(max(i, 0), a.shape[d]) for i in (start, stop))
            box.append(slice(start + low[d], stop + low[d]))
        np.testing.assert_array_equal(seen[w], padded[tuple(box)])
