"""Random arrays as digests of their bits: made by specs outside of bodies, in bodies, and by dropout."""

from __future__ import annotations

import hashlib
import json

import numpy as np

import spmd
from spmd import P
from spmd.functions import dropout

SHAPE = (5, 3, 6)
SPECS = (P(), P("x"), P(None, "y"), P("y", None, "x"), P(("x", "y")), P(None, None, ("y", "x")))
KEY = spmd.random.key(2**40 + 17)


def digest(x) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]


def drawn(spec, shape=SHAPE) -> dict[str, object]:
    """One array of each kind."""
    random, keys = spmd.random, spmd.random.split(KEY, 6)
    return {
        "bits": random.bits(keys[0], shape, np.uint64, spec=spec),
        "uniform": random.uniform(keys[1], shape, np.float32, -1, 3, spec=spec),
        "normal": random.normal(keys[2], shape, spec=spec),
        "gumbel": random.gumbel(keys[3], shape, np.float32, spec=spec),
        "randint": random.randint(keys[4], shape, -3, 1000, spec=spec),
        "bernoulli": random.bernoulli(keys[5], 0.3, shape, spec=spec),
    }


def results(mesh: spmd.Mesh) -> dict[str, dict[str, str]]:
    """Digests of the whole arrays, by spec and by how they were made."""
    found = {}
    x = np.ones(SHAPE)
    with mesh:
        for spec in SPECS:
            outside = drawn(spec)
            assert all(a.layout == mesh.layout(SHAPE, spec) for a in outside.values())
            found[f"{spec} outside"] = {k: digest(a.numpy()) for k, a in outside.items()}
            inside = spmd.map(lambda spec=spec: drawn(spec), (), spec)()
            found[f"{spec} in a body"] = {k: digest(a.numpy()) for k, a in inside.items()}
            dropped = spmd.map(lambda x, key, spec=spec: dropout(x, 0.4, key, spec), (spec, P()), spec)(x, KEY)
            found[f"{spec} dropout"] = {"dropout": digest(dropped.numpy())}
    return found


def serial() -> dict[str, str]:
    return {k: digest(a) for k, a in {**drawn(None), "dropout": dropout(np.ones(SHAPE), 0.4, KEY)}.items()}


if __name__ == "__main__":
    said = results(spmd.Mesh(x=2, y=2))
    if spmd.is_main():
        print(json.dumps(said), flush=True)
