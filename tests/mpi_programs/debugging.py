"""What `spmd.debug` says of global arrays of which every process has a part. Prints it as JSON."""

from __future__ import annotations

import json
import time

import numpy as np

import spmd
from spmd import P
from spmd.errors import NonFiniteError


def found() -> dict:
    """What passes, and what is said on each process of a NaN that one of them has."""
    with spmd.Mesh(x=2), spmd.debug(nans=True, replicas=True), np.errstate(divide="ignore"):
        f = spmd.map(lambda x: np.sin(x), P("x"), P("x"))
        slope = lambda x: np.sum(spmd.grad(lambda x: np.sum(f(x) ** 2))(x))
        x = spmd.put(np.arange(1.0, 6.0), P("x"))
        if not spmd.is_main():
            time.sleep(0.5)  # the first exchange, before any map, is one that is waited for
        passed = spmd.grad(slope)(x).numpy().tolist()
        try:
            spmd.grad(lambda x: np.sum(np.log(x)))(spmd.put(np.array([1.0, 2, 3, 4, 0]), P("x")))
        except NonFiniteError as error:
            said = str(error).splitlines()[1]
        else:
            said = ""
        return {"passed": passed, "said": said}


if __name__ == "__main__":
    result = found()
    assert result["said"], "every process learns of it"
    if spmd.is_main():
        print(json.dumps(result))
