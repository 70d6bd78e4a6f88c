"""Minibatches on processes: shares, a loader in bodies and of global arrays, resuming, and means with true counts."""

from __future__ import annotations

import sys
import tempfile
import threading
from contextlib import closing

import numpy as np

import spmd
from spmd import P
from spmd.data import Loader, Sampler

X = np.random.default_rng(0).integers(-9, 9, (29, 2)).astype(float)
mesh = spmd.Mesh(data=int(sys.argv[1]), model=2) if len(sys.argv) > 2 else spmd.Mesh(data=int(sys.argv[1]))
read: list[int] = []


def samples(indices):
    read.append(len(indices))
    return X[indices]


def metrics(x):
    return {"mean": x, "weighted": (x[:, 0], x[:, 1] ** 2)}


def sums(epoch):
    sampler = Sampler(X, 6, "data", order="strided")
    return np.stack([spmd.sum(x, "data", axis=0) for x in Loader(samples, sampler).epoch(epoch)])


def means():
    return spmd.training.evaluate(metrics, Loader(X, Sampler(X, 6, "data")).epoch(1), "data")


def check_means(found):
    np.testing.assert_allclose(found["mean"], X.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found["weighted"], np.average(X[:, 0], weights=X[:, 1] ** 2), rtol=1e-12)


serial = Sampler(X, 6)
with mesh:
    for epoch in range(2):
        found = spmd.map(sums, None, P())(epoch).numpy()
        assert np.array_equal(found, [X[i].sum(axis=0) for i in serial.epoch(epoch)])
    with spmd.ledger() as log:
        found = spmd.map(means, (), P())()
    assert log.first.axes == {("Sum", ("data",)): 1}
    check_means({k: v.numpy() for k, v in found.items()})

    read.clear()
    loader = Loader(samples, Sampler(X, 6, "data"))
    with closing(iter(loader.epoch(0))) as batches:
        first = [next(batches).numpy() for _ in range(2)]
    folder = tempfile.mkdtemp() if spmd.is_main() else ""
    path = mesh.transport.share(dict.fromkeys(mesh.local_workers, folder))[0] + "/run"
    spmd.save(path, {"loader": loader})
    assert not [t for t in threading.enumerate() if t.name == "spmd.data.Loader"]

    after = Loader(samples, Sampler(X, 6, "data", order="strided"))
    spmd.load(path, like={"loader": after})
    rest = [x.numpy() for x in after.epoch(0)]
    assert len(rest) == 3
    assert np.array_equal(np.sort(np.concatenate([*first, *rest]), axis=0), np.sort(X, axis=0))
    assert max(read) <= -(-6 // mesh.axes["data"])  # each worker reads its own samples
    check_means(spmd.training.evaluate(metrics, Loader(X, Sampler(X, 6, "data")).epoch(0)))
if spmd.is_main():
    print("alike")
