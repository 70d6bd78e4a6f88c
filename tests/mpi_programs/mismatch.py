"""Worker 2 calls something else, in several ways: what each worker is told, and that all goes on afterwards."""

from __future__ import annotations

import json

import numpy as np

import spmd

X = np.ones((4, 4))
LOOP = [(k, (k + 1) % 4) for k in range(4)]
BACK = [(k, (k - 1) % 4) for k in range(4)]

# What worker 2 calls, and what the others call.
CASES = {
    "operator": (lambda: spmd.pmax(X, "x"), lambda: spmd.psum(X, "x")),
    "verb": (lambda: spmd.ppermute(X, "x", LOOP), lambda: spmd.psum(X, "x")),
    "verb of two": (lambda: spmd.all_to_all(X, "x", 0, 0), lambda: spmd.all_gather(X, "x")),
    "shape": (lambda: spmd.psum(X[:3], "x"), lambda: spmd.psum(X, "x")),
    "rank": (lambda: spmd.all_gather(X[0], "x"), lambda: spmd.all_gather(X, "x")),
    "dtype": (lambda: spmd.psum(np.float32(X), "x"), lambda: spmd.psum(X, "x")),
    "dimension": (
        lambda: spmd.psum_scatter(X, "x", scatter_dimension=1),
        lambda: spmd.psum_scatter(X, "x", scatter_dimension=0),
    ),
    "permutation": (lambda: spmd.ppermute(X, "x", BACK), lambda: spmd.ppermute(X, "x", LOOP)),
    "root": (lambda: spmd.sum_reduce(X, "x", 1), lambda: spmd.sum_reduce(X, "x", 2)),
    "order": (
        lambda: (spmd.pmax(X, "x"), spmd.psum(X, "x")),
        lambda: (spmd.psum(X, "x"), spmd.pmax(X, "x")),
    ),
    "function": (lambda: spmd.pmean(X, "x"), lambda: spmd.psum(X, "x")),
    "tree": (lambda: spmd.psum({"b": X, "c": X}, "x"), lambda: spmd.psum({"a": X, "b": X}, "x")),
    "missing": (lambda: None, lambda: spmd.psum(X, "x")),
}
OTHER_ORDER = (lambda: spmd.psum(X, ("y", "x")), lambda: spmd.psum(X, ("x", "y")))


def told(mesh: spmd.Mesh, different, usual) -> list[str]:
    """What each worker of the mesh is told."""

    def body(worker) -> None:
        (different if worker.index == 2 else usual)()

    try:
        outcome = mesh.run(body, tracked=False)
        mesh.transport.share(outcome.results)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    texts = mesh.transport.share(dict.fromkeys(mesh.local_workers, said))
    return [texts[w] for w in range(mesh.size)]


def main() -> dict[str, list[str]]:
    line, square = spmd.Mesh(x=4), spmd.Mesh(x=2, y=2)
    found = {name: told(line, *pair) for name, pair in CASES.items()}
    found["axes"] = told(square, *OTHER_ORDER)
    total = spmd.map(lambda: spmd.psum(1, "x"), (), None, mesh=line, check=False)()
    found["afterwards"] = [str(total)]
    return found


if __name__ == "__main__":
    found = main()
    if spmd.is_main():
        print(json.dumps(found))
