"""What editors and type checkers are told: types, signatures, documentation and names.

`tests/typed_programs` has programs of users. pyright checks them in strict mode, in one run from a folder of its own,
with an environment that has `spmd` as an editable install has it.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import pydoc
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import spmd
from spmd import P

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tests" / "typed_programs" / "user_program.py"
TORCH_PROGRAM = PROGRAM.with_name("torch_program.py")
MODULES = (
    *("spmd", "spmd.autodiff", "spmd.data", "spmd.fft", "spmd.functions", "spmd.io", "spmd.linear", "spmd.numpy"),
    *("spmd.optim", "spmd.random", "spmd.scipy", "spmd.solvers", "spmd.testing", "spmd.training"),
)

WRONG = """
import numpy as np
import spmd
from spmd import P

def body(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    return spmd.psum(w * x, "data")

f = spmd.map(body, in_specs=(P(), P("data")), out_specs=P())
a = np.ones(4)
f(a)
f(a, weights=a)
f(a, "text")
spmd.jit(f)(a)
spmd.grad(f)(a)
spmd.value_and_grad(f)(a, a, a)
spmd.psum(a)
spmd.psum(a, axis="data")
spmd.relux(a)
spmd.functions.gelu(a, approximat=True)
spmd.random.normal(spmd.random.key(0), (4,), specs=P("data"))
"""

REVEALED = {
    "spmd.map(body, in_specs=P(), out_specs=P())": "Mapped[(w: ndarray, x: ndarray), PartitionedArray]",
    "spmd.jit(spmd.map(body, in_specs=P(), out_specs=P()))": "Jitted[(w: ndarray, x: ndarray), PartitionedArray]",
    "spmd.grad(body)": "(ndarray, x: ndarray) -> ndarray",
    "spmd.grad(body, (0, 1))": "(ndarray, ndarray) -> tuple[ndarray, ndarray]",
    "spmd.value_and_grad(body, argnums=1)": "(w: ndarray, x: ndarray) -> tuple[ndarray, Any]",
    "spmd.value_and_grad(with_aux, has_aux=True)": "(ndarray) -> tuple[tuple[ndarray, str], ndarray]",
    "spmd.checkpoint(body)": "(w: ndarray, x: ndarray) -> ndarray",
    "spmd.custom_vjp(body)": "custom_vjp[(w: ndarray, x: ndarray), ndarray]",
    'spmd.psum({"w": a}, "data")': "dict[str, ndarray]",
    "spmd.put({'w': a}, P())": "dict[str, ndarray]",
    "spmd.put(a, P())": "PartitionedArray",
    "spmd.put(2.0, P())": "PartitionedArray",
    "spmd.random.normal(key, (4,))": "ndarray",
    "spmd.random.normal(key, (4,), spec=P())": "PartitionedArray",
    "spmd.random.randint(key, (4,), 0, 3, like=spmd.put(a, P()))": "PartitionedArray",
    "spmd.random.permutation(key, 4)": "ndarray",
    "spmd.random.default_rng(0)": "Generator",
    "spmd.scan(lambda c, x: (c + x, {'y': x}), a, a)": "tuple[ndarray, dict[str, ndarray]]",
    "spmd.scan(lambda c, x: (c + x, None), 0.0, a)": "tuple[ndarray, None]",
    "spmd.fori_loop(0, 4, body, a)": "ndarray",
    "spmd.while_loop(lambda x: x < 9.0, lambda x: 2 * x, 1.0)": "ndarray",
    "spmd.cond(np.True_, body, body, a, a)": "ndarray",
    "spmd.hvp(body, (a, a), (a, a))": "tuple[ndarray, ndarray]",
    "spmd.at(a)[0].set(1.0)": "ndarray",
    "spmd.put(a, P()).at[0].add(1.0)": "PartitionedArray",
    "spmd.linear_operator(lambda x: 2 * x, P(), P(), shape=(4,)).H": "LinearOperator",
    "spmd.grad(v)": "(Any, ...) -> Any",
    "spmd.value_and_grad(v)": "(Any, ...) -> tuple[Any, Any]",
    "spmd.value_and_grad(body)(v, v)": "tuple[ndarray, ndarray]",
    "spmd.psum(v, 'x')": "Any",
    "spmd.jit(v)": "Jitted[..., Any]",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """The Python of an environment whose path has the checkout as an editable install puts it there."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (libraries,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages")]
    (libraries / "paths.pth").write_text("\n".join([str(ROOT / "src"), *others]))
    return folder / "bin" / "python"


HEAD = """
from typing import Any
import numpy as np
import spmd
from spmd import P
a: np.ndarray = np.ones(4)
key = spmd.random.key(0)
def body(w: np.ndarray, x: np.ndarray) -> np.ndarray: return w * x
def with_aux(w: np.ndarray) -> tuple[np.ndarray, str]: return w, ""
def untyped(v: Any) -> None:
"""


@pytest.fixture(scope="module")
def diagnostics(environment, tmp_path_factory) -> dict[str, list[dict]]:
    """What pyright reports of each program: it runs once for all."""
    folder = tmp_path_factory.mktemp("programs")
    revealed = HEAD + "".join(f"    reveal_type({e})\n" for e in REVEALED)
    programs = {"user": PROGRAM.read_text(), "wrong": WRONG, "revealed": revealed}
    if importlib.util.find_spec("torch"):
        programs["torch_user"] = TORCH_PROGRAM.read_text()
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "pythonVersion": "3.11"}')
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", environment]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.stdout.startswith("{"), done.stderr
    found: dict[str, list[dict]] = {name: [] for name in programs}
    for diagnostic in json.loads(done.stdout)["generalDiagnostics"]:
        found[Path(diagnostic["file"]).stem].append(diagnostic)
    return found


PROGRAMS = pytest.mark.parametrize(
    "program", [PROGRAM, pytest.param(TORCH_PROGRAM, marks=pytest.mark.torch)], ids=["user", "torch_user"]
)


@PROGRAMS
def test_program_of_a_user_has_no_error_in_strict_mode(diagnostics, program, request):
    found = diagnostics[request.node.callspec.id]
    assert not found, "\n".join(f"{d['range']['start']['line'] + 1}: {d['message']}" for d in found)


@PROGRAMS
def test_program_of_a_user_runs(program, tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program, tmp_path], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_wrong_calls_are_reported(diagnostics):
    lines = {d["range"]["start"]["line"] for d in diagnostics["wrong"] if d["severity"] == "error"}
    first = WRONG.split("\n").index("f(a)")
    assert lines == set(range(first, WRONG.count("\n")))


def test_types_of_results(diagnostics):
    found = diagnostics["revealed"]
    texts = [d["message"].split(" is ", 1)[1].strip('"') for d in found if d["severity"] == "information"]
    shown = [re.sub(r"ndarray\[(?:Any|tuple\[Any, \.\.\.\]), dtype\[Any\]\]", "ndarray", text) for text in texts]
    assert dict(zip(REVEALED, shown, strict=True)) == REVEALED


@pytest.mark.parametrize("name", MODULES)
def test_dir_has_the_public_names_only(name):
    module = importlib.import_module(name)
    names = dir(module)
    assert not [n for n in names if n.startswith("_")]
    public = set(getattr(module, "__all__", ()))
    assert public <= set(names)
    # Beside the names of __all__: submodules, and names that are loaded on first use.
    for extra in set(names) - public:
        value = getattr(module, extra)
        assert isinstance(value, types.ModuleType) or value.__module__.startswith("spmd.strategies"), extra


@pytest.mark.parametrize("name", ["jit", "hessian", "scan", "all_gather", "save", "map", "grad", "stencil", "psum"])
def test_functions_have_signatures_and_documentation(name):
    """Those that are loaded on first use too."""
    function = getattr(spmd, name)
    parameters = inspect.signature(function).parameters
    assert parameters
    assert not any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    assert function.__doc__.split("\n")[0] in pydoc.plain(pydoc.render_doc(function))


@pytest.mark.parametrize(
    "transform", [lambda f: f, spmd.jit, spmd.grad, spmd.value_and_grad], ids=["map", "jit", "grad", "value_and_grad"]
)
def test_a_map_has_the_signature_and_documentation_of_its_body(transform):
    def body(w: np.ndarray, x: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """What it is for."""
        return scale * w * x

    mapped = transform(spmd.map(body, in_specs=P(), out_specs=P()))
    assert list(inspect.signature(mapped).parameters) == ["w", "x", "scale"]
    assert mapped.__doc__ == "What it is for."
    assert mapped.__name__ == "body"


def test_interactive_completion_offers_public_names():
    jedi = pytest.importorskip("jedi")
    for text, name in (("spmd.value_an", "value_and_grad"), ("spmd.functions.softm", "softmax"), ("spmd.ji", "jit")):
        assert name in {c.name for c in jedi.Interpreter(text, [{"spmd": spmd}]).complete()}
