"""Halos and what is added back, as digests of all workers, and the exact dot test. Runs with any transport."""

from __future__ import annotations

import hashlib
import itertools
import json

import numpy as np

import spmd
from spmd import P
from spmd.device import to_host
from spmd.kernels import on_device
from spmd.layout import Layout
from spmd.operators.halo import HaloExchange
from spmd.operators.halo_geometry import BOUNDARIES
from spmd.testing import check_adjoint

WIDTHS = [1, ((2, 0), (0, 3)), (5, (-1, 2)), ([(1, 0), (0, 2), (0, 0), (4, 4)], 0), ((-1, -1), 1)]


def cases(mesh: spmd.Mesh):
    """Specs, widths and layouts: balanced blocks, and uneven ones with an empty one among them."""
    specs = [P("x"), P(None, "x")] if len(mesh.axes) == 1 else [P("x", "y"), P("y", "x"), P(("x", "y")), P(None, "y")]
    for spec, widths, boundary in list(itertools.product(specs, WIDTHS, BOUNDARIES))[::2]:
        layout = mesh.layout((11, 9), spec)
        per_block = isinstance(widths, tuple) and isinstance(widths[0], list)
        if per_block and len(layout.cuts[0]) != 4:
            continue
        yield spec, widths, boundary, layout
        cuts = [(4, 0, 1, 6) if len(c) == 4 else (2, sum(c) - 2) if len(c) == 2 else c for c in layout.cuts]
        if boundary == "none" and not (isinstance(widths, tuple) and widths[0] == (-1, -1)):
            yield spec, widths, boundary, Layout((11, sum(cuts[1])), spec, mesh.axes, cuts)


def digest(x) -> str:
    assert on_device(x) or not x.flags.writeable
    assert x.flags.c_contiguous
    x = to_host(x)
    return f"{x.dtype}{list(x.shape)}" + hashlib.sha256(x.tobytes()).hexdigest()[:12]


def results(**options) -> dict[str, str]:
    """For each case the digests of all workers: of real numbers, so that the order of sums shows."""
    found: dict[str, str] = {}
    for mesh in (spmd.Mesh(x=4, **options), spmd.Mesh(x=2, y=2, **options)):
        for number, (spec, widths, boundary, layout) in enumerate(cases(mesh)):
            if len(layout.cuts[1]) == 4 and sum(layout.cuts[1]) != layout.shape[1]:
                continue
            op = HaloExchange(spec.axes, spec, widths, boundary)
            whole = np.random.default_rng(number).normal(size=layout.shape).astype(["f8", "f4", "c16"][number % 3])

            def body(worker, op=op, whole=whole, layout=layout):
                x = np.ascontiguousarray(whole[layout.slices(worker.index)])
                wide = op(x)
                sizes = [c if names else None for c, names in zip(layout.cuts, layout.spec.dims, strict=True)]
                args = op.axes, op.spec, op.widths, op.boundary, sizes
                return [digest(wide), digest(HaloExchange(*args).H(wide * 1.1))]

            outcome = mesh.run(body, tracked=False)
            name = f"{mesh} {number}: {op} {layout.cuts}"
            for worker, said in mesh.transport.share(outcome.results).items():
                found[f"{name} on {worker}"] = " ".join(said)
            if number % 4 == 0:
                check_adjoint(op, layout.shape, mesh=mesh, in_specs=layout, trials=1, seed=number)
    found.update(around_large_blocks(spmd.Mesh(x=4, **options)))
    return found


def around_large_blocks(mesh: spmd.Mesh) -> dict[str, str]:
    """Results that lie around their blocks, or do not: where another one is there, or there is no room."""
    whole, found = np.random.default_rng(7).normal(size=(4800, 8)), {}

    def body(x):
        said = []
        for widths in (2, 70):
            kept = []
            for _ in range(3):
                kept.append(spmd.halo_exchange(x, P("x"), widths, "periodic"))
                freed = spmd.halo_exchange(spmd.relu(x), P("x"), widths, "reflect")
                said.append(digest(spmd.block(freed)))
                del freed
            del kept[0]
            kept.append(spmd.halo_exchange(kept[0], P("x"), widths, "edge"))
            said += [digest(spmd.block(y)) for y in kept]
        return said

    outcome = mesh.run(lambda worker: body(spmd.varying(whole[1200 * worker.index :][:1200], "x")))
    for worker, said in mesh.transport.share(outcome.results).items():
        found[f"around large blocks on {worker}"] = " ".join(said)
    return found


if __name__ == "__main__":
    found = results()
    if spmd.is_main():
        print(json.dumps(found))
