"""`import spmd` is light: it brings no engine. How long it takes, `benchmarks costs` says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

HEAVY = ["mpi4py", "cupy", "torch", "jax", "scipy", "numba"]


def python(code: str) -> str:
    """What `code` prints in a fresh interpreter that finds this checkout first and may keep its bytecode."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_no_engine():
    # What is there before belongs to the environment: some distributions import themselves at start-up.
    new = python("import sys; old = set(sys.modules); import spmd; print(*(set(sys.modules) - old))").split()
    assert "spmd" in new
    heavy = sorted(name for name in new if name in HEAVY)
    assert not heavy, f"import spmd imports {heavy}; import them where they are used"


def test_what_is_imported_late_is_found_as_if_it_were_there():
    code = (
        "import spmd, sys\n"
        "assert not {'spmd.optim', 'spmd.autodiff.custom', 'spmd.transport.local.transport'} & set(sys.modules)\n"
        "for module in spmd, spmd.autodiff, spmd.functions, spmd.scipy:\n"
        "    names = getattr(module, '__all__', ['fft', 'special'])\n"
        "    assert {*names} <= {*dir(module)}, module\n"
        "    first = {name: getattr(module, name) for name in names}\n"
        "    assert all(getattr(module, name) is found for name, found in first.items())\n"
        "    try:\n"
        "        module.no_such_name\n"
        "    except AttributeError as error:\n"
        "        print(error)\n"
        "assert spmd.custom_vjp is spmd.autodiff.custom.custom_vjp and spmd.optim is sys.modules['spmd.optim']\n"
    )
    modules = "spmd", "spmd.autodiff", "spmd.functions", "spmd.scipy"
    assert python(code).splitlines() == [f"module {name!r} has no attribute 'no_such_name'" for name in modules]
