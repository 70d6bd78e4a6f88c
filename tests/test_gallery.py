"""The gallery: its pages are those of the examples as they are, and the notebooks run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from launch import mpiexec
from loaded import load

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
QUICK = ("adjoint_test", "affine")


gallery = load(ROOT / "docs" / "tools" / "make_gallery.py")
notebooks = load(ROOT / "docs" / "extensions" / "notebooks.py")


@pytest.mark.parametrize("name", gallery.ENTRIES)
def test_the_page_is_that_of_the_example(name):
    made_of = re.search(
        r"<!-- by python docs/tools/make_gallery.py, of (\w+) -->", (gallery.FOLDER / f"{name}.md").read_text()
    )
    assert made_of[1] == gallery.digest(name), f"run python docs/tools/make_gallery.py {name}"
    assert (gallery.FOLDER / "pictures" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_every_example_is_in_the_gallery():
    pair = {"torch_ddp", "torch_data_parallel"}  # a script for DDP and its port, to be read side by side
    assert set(gallery.ENTRIES) == set(EXAMPLES) - pair
    assert (gallery.FOLDER / "index.md").read_text() == gallery.index()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_notebook_holds_the_whole_program(name):
    nbformat = pytest.importorskip("nbformat")
    made = notebooks.notebook(ROOT / "examples" / f"{name}.py")
    nbformat.validate(nbformat.from_dict(made))
    source = (ROOT / "examples" / f"{name}.py").read_text()
    lines = source.splitlines()[ast.parse(source).body[0].end_lineno :]
    wanted = [line for line in lines if line.strip() and line != "from __future__ import annotations"]
    held = [line for cell in made["cells"][2:] for line in cell["source"].splitlines() if line.strip()]
    assert held[:-1] == wanted[:-1]
    assert held[-1] in (wanted[-1], "    main()")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in EXAMPLES if n != "torch_ddp"]
)
def test_the_notebook_runs(name, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    if name.startswith("torch"):
        pytest.importorskip("torch")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    made = nbformat.from_dict(notebooks.notebook(ROOT / "examples" / f"{name}.py"))
    nbclient.NotebookClient(made, timeout=300, resources={"metadata": {"path": ROOT}}).execute()
    assert any(cell.get("outputs") for cell in made.cells)


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_the_notebook_drives_processes(monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipyparallel")
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / "mpi_workers.ipynb", 4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": ROOT}}).execute()
    text = "".join(str(output) for cell in notebook.cells for output in cell.get("outputs", []))
    assert "transport mpi: value 3.359330439634, gradient 2.105187157369" in text
