"""The wheel, the sdist, the editable install and the bare checkout all hold the same modules, and all work.

Nothing here needs the network: builds run without isolation, installs without dependencies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = ["mpi4py", "cupy", "torch"]


def python(*arguments: str | Path, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter without the caller's Python paths; it must succeed unless `check` is false."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=clean | env, capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done


def copy(source: Path, target: Path) -> Path:
    """A copy of a checkout without what git ignores; links stay links."""
    ignore = shutil.ignore_patterns(".*", "venv", "__pycache__", "build", "dist", "*.egg-info")
    return Path(shutil.copytree(source, target, symlinks=True, ignore=ignore))


def build(source: Path, kind: str) -> Path:
    python("-m", "build", "--no-isolation", kind, "--outdir", source / "dist", cwd=source)
    (made,) = (source / "dist").iterdir()
    return made


def contents(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def modules(names: list[str]) -> list[str]:
    return sorted(name for name in names if name.endswith(".py"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    return copy(ROOT, tmp_path_factory.mktemp("bare") / "checkout")


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    return build(copy(checkout, tmp_path_factory.mktemp("wheel") / "source"), "--wheel")


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory) -> Path:
    return build(copy(checkout, tmp_path_factory.mktemp("sdist") / "source"), "--sdist")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that holds this wheel beside another distribution's `kernels` and `autodiff`."""
    other = tmp_path_factory.mktemp("other") / "kernels_and_autodiff-1.0-py3-none-any.whl"
    info = "kernels_and_autodiff-1.0.dist-info"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("kernels/__init__.py", "OWNER = 'other'\n")
        archive.writestr("autodiff/__init__.py", "OWNER = 'other'\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kernels-and-autodiff\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    target = tmp_path_factory.mktemp("installed")
    python("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, other, wheel, cwd=target)
    return target


def test_wheel_holds_spmd_alone(wheel):
    names = contents(wheel)
    assert {name.split("/")[0].removesuffix(".dist-info") for name in names} == {"spmd", wheel.name.split("-py3")[0]}
    assert "spmd/py.typed" in names


def test_wheel_holds_every_module(checkout, wheel):
    """Setuptools leaves out, without a word, a folder that has no __init__.py."""
    needed = modules(
        [
            Path(folder, name).relative_to(checkout).as_posix()
            for folder, _, names in os.walk(checkout / "spmd", followlinks=True)
            for name in names
        ]
    )
    assert {"spmd/__init__.py", "spmd/kernels/__init__.py", "spmd/autodiff/rules/__init__.py"} <= set(needed)
    assert modules(contents(wheel)) == needed


def test_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
    shutil.unpack_archive(sdist, tmp_path)
    (source,) = tmp_path.iterdir()
    assert contents(build(source, "--wheel")) == contents(wheel)


IMPORT_EACH = f"""
import gc, importlib, os, sys, traceback

import numpy, optree, greenlet, threadpoolctl

gc.disable()  # A collection would write to all memory, and so copy it in each process.

for other in "numba", "scipy.fft", "scipy.special":  # once, not in each of the processes whose module needs it
    try:
        importlib.import_module(other)
    except ImportError:
        pass

target, *names = sys.argv[1:]
target = os.path.realpath(target)
sys.path.insert(0, target)


def attempt(name):
    try:
        importlib.import_module(name)
    except Exception as error:
        cause = error
        while cause is not None and not (
            isinstance(cause, ImportError) and (cause.name or "").split(".")[0] in {OPTIONAL}
        ):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
    outside = {{
        module: file
        for module, loaded in sys.modules.items()
        if module.split(".")[0] == "spmd" and (file := getattr(loaded, "__file__", None))
        and not file.startswith(os.path.join(target, "spmd", ""))
    }}
    assert "spmd" in sys.modules and not outside, outside


assert not any(module.split(".")[0] == "spmd" for module in sys.modules)


def failures(name):
    # How many of a module and those inside it cannot be imported. Python imports a package before what is in it, so
    # the processes of its modules are forked from one that has done that. What this has imported needs no process.
    inside = [m for m in names if m.rpartition(".")[0] == name]
    if name in sys.modules:
        return sum(map(failures, inside))
    child = os.fork()
    if child == 0:
        try:
            attempt(name)
        except BaseException:
            print(name, traceback.format_exc(), sep="\\n", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(sum(map(failures, inside)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


assert all(name == "spmd" or name.rpartition(".")[0] in names for name in names)
print(len(names), "modules,", failures("spmd"), "failed")
"""


def test_every_module_of_the_wheel_imports(wheel, installed, tmp_path):
    """Each first and alone, so that none leans on another having been imported before it: in a process of its own,
    forked from one that holds its package."""
    names = [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in modules(contents(wheel))]
    script = tmp_path / "import_each.py"
    script.write_text(IMPORT_EACH)
    done = python(script, installed, *names, cwd=tmp_path, check=False)
    assert done.stdout == f"{len(names)} modules, 0 failed\n", done.stderr


def test_lives_beside_other_kernels_and_autodiff(installed, tmp_path):
    code = (
        "import kernels, autodiff, spmd.kernels, spmd.autodiff\n"
        "assert kernels.OWNER == autodiff.OWNER == 'other'\n"
        "assert not hasattr(spmd.kernels, 'OWNER') and not hasattr(spmd.autodiff, 'OWNER')\n"
    )
    python("-c", code, cwd=tmp_path, PYTHONPATH=str(installed))
    assert python("-m", "spmd", "info", cwd=tmp_path, PYTHONPATH=str(installed)).stdout


WHERE = (
    "import spmd.kernels, spmd.autodiff; print(*(m.__file__ for m in (spmd, spmd.kernels, spmd.autodiff)), sep='\\n')"
)


def test_bare_checkout(checkout):
    files = python("-c", WHERE, cwd=checkout).stdout.splitlines()
    assert all(Path(file).is_relative_to(checkout) for file in files)
    assert python("-m", "spmd", "info", cwd=checkout).stdout


@pytest.fixture(scope="module")
def editable(checkout, tmp_path_factory) -> tuple[Path, Path]:
    """A checkout, and a folder with what an editable install of it puts beside the other libraries."""
    folder = tmp_path_factory.mktemp("editable")
    source = copy(checkout, folder / "source")
    python("-c", f"from setuptools.build_meta import build_editable as b; b({str(folder)!r})", cwd=source)
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(folder / "site")
    return source, folder / "site"


def test_editable_install(editable, tmp_path):
    """It finds spmd in the checkout, and nothing else there."""
    source, site = editable
    libraries = [path for path in sys.path if path.endswith("-packages")]
    if any(Path(path, "spmd").exists() for path in libraries):
        pytest.skip("an installed spmd hides the editable one")
    code = f"""
import importlib.util, site, sys

site.addsitedir({str(site)!r})
sys.path += {libraries}
{WHERE}
for name in "kernels", "autodiff":
    spec = importlib.util.find_spec(name)
    assert spec is None or {str(source)!r} not in str(spec.origin), spec
"""
    # -S: no .pth file of the environment runs, so no other editable install of spmd gets in the way.
    files = python("-I", "-S", "-c", code, cwd=tmp_path).stdout.splitlines()
    assert all(Path(file).is_relative_to(source) for file in files)


def test_editors_see_an_editable_install(editable, tmp_path):
    """A type checker resolves the package and the types of its functions from another folder."""
    _, site = editable
    environment = tmp_path / "environment"
    python("-m", "venv", "--without-pip", environment, cwd=tmp_path)
    (libraries,) = environment.glob("lib/python*/site-packages")
    shutil.copytree(site, libraries, dirs_exist_ok=True)
    program = tmp_path / "program.py"
    program.write_text("import spmd, spmd.kernels, spmd.autodiff\nfrom spmd.autodiff.tape import Node\nspmd.psum()\n")
    done = python(
        "-m", "pyright", "--pythonpath", environment / "bin" / "python", program.name, cwd=tmp_path, check=False
    )
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert len(errors) == 1, done.stdout
    assert 'Arguments missing for parameters "x", "axis_name"' in errors[0]


def test_other_files_name_the_same_version_and_packages():
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation
    recipe = (ROOT / "recipe" / "recipe.yaml").read_text()
    assert f'\n  version: "{project["version"]}"\n' in recipe
    run = recipe.split("  run:\n")[1].split("  run_constraints:")[0]
    needed = {
        line.strip().removeprefix("- ").replace("python-xxhash", "xxhash").replace(" ", "") for line in run.splitlines()
    }
    assert needed == {"python>=${{python_min}},<3.15", *project["dependencies"]}
    assert project["requires-python"] == ">=3.11,<3.15"
    assert '\n  python_min: "3.11"\n' in recipe
