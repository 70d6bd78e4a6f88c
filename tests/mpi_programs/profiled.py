"""A profile of examples/digits.py, of jitted steps, of a block that raises, or with clocks that differ by host.

profiled.py digits FOLDER      trace.json, and for each worker N what its ledger says in ledgerN.json
profiled.py jitted FOLDER      trace.json, and ledgerN.json of one step
profiled.py raising FOLDER     trace.json and trace.processN.json
profiled.py clocks FOLDER      trace.json, where each process seems to be on a host of its own
"""

import json
import runpy
import sys
from pathlib import Path

import numpy as np

import spmd
from spmd import P

ROOT = Path(__file__).resolve().parents[2]


def write_ledger(folder, log, **more):
    (worker,) = [*log.workers] or [0]
    row = {"bytes": log.bytes, "messages": log.messages, "rows": log.rows(), **more}
    Path(folder, f"ledger{worker}.json").write_text(json.dumps(row))


def digits(folder):
    example = str(ROOT / "examples" / "digits.py")
    sys.argv = [example, "--epochs", "1"]
    sys.path.insert(0, str(ROOT / "examples"))
    with spmd.profile(Path(folder, "trace.json")) as profile, Workers() as log:
        runpy.run_path(example, run_name="__main__")
    Path(folder, f"ledger{log.number}.json").write_text(
        json.dumps({"bytes": log.bytes, "rows": len(profile.rows()), "table": str(profile)})
    )


class Workers:
    """A ledger that also sees the mesh of one worker in it, whose worker is 0 everywhere."""

    def __enter__(self):
        self.context = spmd.ledger()
        self.log = self.context.__enter__()
        return self

    def __exit__(self, *error):
        self.context.__exit__(*error)

    @property
    def number(self):
        return max(self.log.workers)

    @property
    def bytes(self):
        return sum(record.bytes for record in self.log.workers.values())


def loss_of(jitted):
    def body(w, x):
        y = x @ w
        return spmd.psum(np.sum(y * y), "x")

    mapped = spmd.map(body, in_specs=(P(), P("x")), out_specs=P())
    return spmd.value_and_grad(spmd.jit(mapped) if jitted else mapped)


W, X = np.arange(12.0).reshape(3, 4), np.arange(33.0).reshape(11, 3)


def jitted(folder):
    step = loss_of(True)
    with spmd.Mesh(x=4):
        with spmd.ledger() as log:
            step(W, X)
        for _ in range(3):
            step(W, X)
        with spmd.profile(Path(folder, "trace.json")) as profile:
            for _ in range(5):
                step(W, X)
                profile.step()
    write_ledger(folder, log, table=str(profile))


def raising(folder):
    step = loss_of(False)
    try:
        with spmd.Mesh(x=4), spmd.profile(Path(folder, "trace.json")):
            step(W, X)
            raise ArithmeticError("after a step")
    except ArithmeticError:
        print("raised")


def clocks(folder):
    from spmd.profiling import merging

    step = loss_of(False)
    with spmd.Mesh(x=4) as mesh:
        merging._boot = lambda: f"host of {mesh.local_workers[0]}"
        with spmd.profile(Path(folder, "trace.json")):
            for _ in range(5):
                step(W, X)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
