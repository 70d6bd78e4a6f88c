"""The documents: every block of Python runs, every command is one line, every name and every link is there."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

import spmd
from spmd.testing import operator_classes

ROOT = Path(__file__).resolve().parent.parent
PAGES = [path for path in sorted((ROOT / "docs").glob("**/*.md")) if path.parent.name != "api"]
"""Without those that a build of the site makes from docstrings: tests/test_reference.py runs their examples."""
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
NOT_RUN = "# not run"
LESSONS = (
    "docs/index.md",
    "docs/start/",
    "docs/tutorials/",
    "docs/how_to/debug",
    "docs/how_to/porting_mpi4py",
    "docs/how_to/porting_py",
)
"""Pages that show in a text block what the block of Python before it prints, all of it."""


class Block(NamedTuple):
    """A fenced block: its language, the line of its first line, and its text."""

    language: str
    line: int
    text: str


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a document; one inside of a list is indented as the list is."""
    found, opened = [], None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = re.fullmatch(r"( *)```(\S*) *", line)
        if fence and opened is None:
            opened = (fence[1], fence[2], number + 1, [])
        elif fence and fence[1] == opened[0] and not fence[2]:
            found.append(Block(opened[1], opened[2], "\n".join(opened[3]) + "\n"))
            opened = None
        elif opened is not None:
            assert line.startswith(opened[0]) or not line.strip(), f"{path.name}:{number}: out of its block"
            opened[3].append(line.removeprefix(opened[0]))
    assert opened is None, f"{path.name}:{opened and opened[2]}: a block that does not end"
    return found


def run(path: Path) -> tuple[dict, list[str]]:
    """Run the blocks of a document, one after the other, in one namespace; that, and what each block prints."""
    name = f"page_{path.stem}"
    module = sys.modules[name] = ModuleType(name)  # as dataclasses need it
    names, printed = vars(module), []
    for block in blocks(path):
        if block.language != "python" or block.text.startswith(NOT_RUN):
            continue
        # Line numbers in tracebacks are those of the document.
        code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        printed.append(out.getvalue())
    del sys.modules[name]
    return names, printed


@contextlib.contextmanager
def same_dtype_of_torch() -> Iterator[None]:
    """The default dtype of torch is afterwards what it was before; a page may set it."""
    torch = sys.modules.get("torch")
    before = torch.get_default_dtype() if torch else None
    try:
        yield
    finally:
        torch = sys.modules.get("torch")
        if torch:
            torch.set_default_dtype(before or torch.float32)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_documents_are_found():
    assert {relative(path) for path in FILES} >= {
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/reference/map.md",
    }
    assert all(path.exists() for path in FILES)


HOST = pytest.mark.host("the page declares a function of SciPy, which takes arrays of the host")
PRINTS = pytest.mark.host("the page shows how arrays of the host are printed")


def is_lesson(path: Path) -> bool:
    return relative(path).startswith(LESSONS)


def marks(path: Path) -> list[pytest.MarkDecorator]:
    torch = any("import torch" in block.text for block in blocks(path) if block.language == "python")
    found = [pytest.mark.torch] if torch else []
    found += [HOST] if path.name == "rules.md" else []
    return found + [PRINTS] * is_lesson(path)


@pytest.mark.parametrize("path", [pytest.param(p, marks=marks(p)) for p in FILES], ids=map(relative, FILES))
def test_every_block_runs(path, monkeypatch):
    if is_lesson(path):
        monkeypatch.delenv("SPMD_SCHEDULER", raising=False)  # bodies that print do so in the order of the workers
    with same_dtype_of_torch():
        _, printed = run(path)
    if is_lesson(path):
        assert not differences(path, printed)


def differences(path: Path, printed: list[str]) -> list[tuple[str, str]]:
    """What a lesson shows after a block of Python and what the block prints, where they differ."""
    every = blocks(path)
    shown = [
        after.text if after.language == "text" else ""
        for block, after in zip(every, [*every[1:], Block("", 0, "")], strict=True)
        if block.language == "python"
    ]
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    same = doctest.OutputChecker().check_output
    return [(text, got) for text, got in zip(shown, printed, strict=True) if not same(text, got, options)]


def test_a_lesson_that_shows_something_else_is_noticed(tmp_path):
    path = tmp_path / "lesson.md"
    path.write_text("```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n\n```python\nprint(3)\n```\n")
    _, printed = run(path)
    assert differences(path, printed) == [("", "3\n")]
    assert not differences(path, ["2\n", ""])


def test_lessons_end_with_what_comes_next():
    for path in filter(is_lesson, FILES):
        if path.parent.name in ("start", "tutorials") and path.name != "index.md":
            assert re.search(r"^(Next: \[|## What next$)", path.read_text(), re.M), path


def test_blocks_are_run_and_not_skipped():
    every = [block for path in FILES for block in blocks(path)]
    assert sum(block.language == "python" for block in every) >= 50
    assert len(rows_of_errors()) >= 30
    assert not [block for block in every if NOT_RUN in block.text]
    languages = {block.language for block in every}
    assert {language for language in languages if not language.startswith("{")} <= {"python", "sh", "text", "diff", ""}


def test_a_block_that_fails_is_noticed(tmp_path):
    path = tmp_path / "wrong.md"
    path.write_text("Words.\n\n  ```python\n  x = 1\n  ```\n\n```python\nassert x == 2\n```\n")
    assert [(b.line, b.text) for b in blocks(path)] == [(4, "x = 1\n"), (8, "assert x == 2\n")]
    with pytest.raises(AssertionError) as caught:
        run(path)
    assert caught.traceback[-1].lineno + 1 == 8


def test_the_first_program_prints_what_the_readme_says():
    names, printed = run(ROOT / "README.md")
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("print(f"))
    promised = line.split("# ")[1]
    pattern = r"loss (\S+), w (\[.*\])"
    loss, w = re.fullmatch(pattern, printed[0].strip()).groups()
    promised_loss, promised_w = re.fullmatch(pattern, promised).groups()
    assert w == promised_w
    assert float(loss) == pytest.approx(float(promised_loss), rel=0.2, abs=0)
    assert np.allclose(names["w"], [1.0, -2.0, 0.5])
    assert "adjoint (exact, 3 trials)" in printed[1]


def test_the_first_program_is_short():
    first = blocks(ROOT / "README.md")[0]
    assert first.language == "python"
    assert sum(bool(line.strip()) for line in first.text.splitlines()) <= 14


def test_the_tape_is_as_long_as_it_says():
    text = (ROOT / "docs" / "explanation" / "tape.md").read_text()
    code, rules = map(int, re.search(r"the whole of it: (\d+) lines, of which (\d+) are rules", text).groups())

    def lines(until: str) -> int:
        end = text[: text.index(until)].count("\n") + 1
        every = [
            line
            for b in blocks(ROOT / "docs" / "explanation" / "tape.md")
            if b.line < end
            for line in b.text.splitlines()
        ]
        return sum(bool(line.strip()) for line in every)

    assert lines("That is all.") == code
    assert lines("Indexing and `scatter` are") - lines("## 4. Rules") == rules


def rows_of_errors() -> list[tuple[str, str, list[str]]]:
    """The table of what raises: what is written, the name of the error, and what to write instead."""
    _, after = (ROOT / "docs" / "reference" / "autodiff.md").read_text().split("## What raises\n")
    cells = [[re.findall(r"`([^`]+)`", cell) for cell in re.split(r" \| ", row)] for row in after.splitlines()]
    return [(this[0], name[0], mends) for this, name, mends in (c for c in cells if len(c) == 3) if this and mends]


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize(("this", "name", "mends"), rows_of_errors(), ids=lambda x: x if isinstance(x, str) else "")
def test_what_raises_is_as_the_table_says(this, name, mends):
    scipy = pytest.importorskip("scipy")
    for module in ("scipy.fft", "scipy.special", "spmd.numpy", "spmd.scipy.fft", "spmd.scipy.special"):
        importlib.import_module(module)
    known = {"np": np, "spmd": spmd, "snp": spmd.numpy, "math": math, "pickle": pickle, "scipy": scipy}

    def run(text):
        def f(x):
            names = known | {"x": x, "b": np.zeros(3), "rng": np.random.default_rng(0)}
            try:
                code = compile(text, "<table>", "eval")
            except SyntaxError:
                exec(text, names)
                raise AssertionError("nothing was raised") from None
            value = eval(code, names)
            if "stop_gradient" not in text:
                assert isinstance(value, spmd.Array)
                assert value.tape is not None
            return np.sum(x)

        return spmd.grad(f)(np.array([0.5, 1.5, 2.5]))

    with pytest.raises((TypeError, AttributeError, ValueError)) as caught:
        run(this)
    assert type(caught.value).__name__ == name
    told = caught.value if hasattr(spmd.errors, name) else caught.value.__cause__
    assert "mend: " in str(told)
    for mend in mends:
        run(mend)


@HOST
def test_the_broken_rule_prints_what_the_page_says():
    _, printed = run(ROOT / "docs" / "how_to" / "rules.md")
    promised = [
        block.text for block in blocks(ROOT / "docs" / "how_to" / "rules.md") if block.text.startswith("check_vjp")
    ]
    number = r"-?\d+\.\d+(?:e-?\d+)?"
    (text,) = (text for text in printed if text)
    assert re.sub(number, "#", text) == re.sub(number, "#", promised[0])
    got, needed = ([float(n) for n in re.findall(number, t)] for t in (text, promised[0]))
    assert got == pytest.approx(needed, rel=0.1)


@HOST
def test_the_rules_and_the_row_on_the_page_are_true(monkeypatch):
    import rules

    source = "".join(path.read_text() for path in (ROOT / "autodiff" / "rules").glob("*.py"))
    texts = [block.text for block in blocks(ROOT / "docs" / "how_to" / "rules.md") if block.language == "text"]
    (quoted,) = (text for text in texts if text.startswith("rule("))
    assert not [line for line in quoted.splitlines() if f"\n{line}" not in source]

    monkeypatch.setattr(rules.Table, "all", [])
    names, _ = run(ROOT / "docs" / "how_to" / "rules.md")
    table = rules.Table()
    (text,) = (text for text in texts if "row(" in text)
    exec(text, {**vars(rules), **names, "row": table.row})
    (row,) = table.rows.values()
    tests = table.tests()()
    tests.test_against_finite_differences(row)
    tests.test_single_precision_stays_single(row)


@pytest.mark.torch
def test_the_page_of_plans_shows_what_it_prints():
    page = ROOT / "docs" / "how_to" / "torch_plans.md"
    _, printed = run(page)
    assert [text for text in printed if text] == [b.text for b in blocks(page) if b.language == "text"]


# Commands


def test_two_commands_that_need_only_a_clone_and_python():
    text = (ROOT / "README.md").read_text()
    commands = [line for line in text.splitlines() if "python3 -m venv" in line]
    assert len(commands) == 2
    shell = [block.text for block in blocks(ROOT / "README.md") if block.language == "sh"]
    assert shell == [command + "\n" for command in commands]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command, extra, last in zip(
        commands,
        ("", "[test]"),
        (".venv/bin/python examples/digits.py", ".venv/bin/python -m pytest -n auto"),
        strict=True,
    ):
        make, install, do = command.split(" && ")
        assert make == "python3 -m venv .venv"
        project = f'".{extra}"' if extra else "."
        assert install == f".venv/bin/python -m pip install -q -e {project}"
        assert do == last
    assert (ROOT / "examples" / "digits.py").exists()
    assert any("mpi" in need for need in extras["test"])


STAND_IN = """#!/bin/sh
echo "$0 $*" | sed "s,^.*/\\(\\.venv\\|python3\\),\\1," >> "$CALLS"
[ "$1 $2" != "-m venv" ] || { [ ! -e "$3" ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }
"""
"""In place of python3 and of each environment's python: notes how it is called. `-m venv` makes an environment, and
fails where there is one."""


def test_ci_runs_the_test_command_first_and_unchanged(tmp_path):
    for file in ("README.md", ".ci/run"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(STAND_IN)
    python.chmod(0o755)
    for left_over in (".venv", ".venv-torch", ".venv-openmpi"):
        (tmp_path / left_over).mkdir()

    calls = tmp_path / "calls"
    variables = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "CALLS": str(calls)}
    done = subprocess.run(["bash", tmp_path / ".ci" / "run"], env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (command,) = (line for line in (ROOT / "README.md").read_text().splitlines() if "-m pytest" in line)
    assert calls.read_text().splitlines()[:3] == command.replace('"', "").split(" && ")
    assert calls.read_text().count("torch==2.13.0") == 1


def test_mpiexec_with_a_path_is_the_environment_s_own():
    for path in FILES:
        for found in re.findall(r"(\S*)mpiexec -n \d+ (\S+)", path.read_text()):
            before, python = found
            assert (before.strip("`") == "") == (python == "python"), f"{path.name}: {found}"
            assert before.strip("`") in ("", ".venv/bin/"), f"{path.name}: {found}"


# Names and links


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_link_leads_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def anchors(path: Path) -> set[str]:
    """The headings of a document, as links name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def library_names(path: Path, *, bridge: bool) -> list[list[str]]:
    """The dotted names of the library in a document, without `spmd`: those of the bridge to PyTorch, or the others."""
    names = (name[1:].split(".") for name in set(re.findall(r"\bspmd((?:\.[A-Za-z_]\w*)+)", path.read_text())))
    return [parts for parts in names if parts[-1] not in ("py", "md") and (parts[:2] == ["bridge", "torch"]) == bridge]


def look_up(parts: list[str]) -> None:
    thing = spmd
    for k, part in enumerate(parts):
        if not hasattr(thing, part):
            importlib.import_module(".".join(["spmd", *parts[: k + 1]]))
        thing = getattr(thing, part)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_name_of_the_library_is_there(path):
    for parts in library_names(path, bridge=False):
        look_up(parts)


@pytest.mark.torch
def test_every_name_of_the_bridge_is_there():
    names = [parts for path in FILES for parts in library_names(path, bridge=True)]
    assert names
    for parts in names:
        look_up(parts)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_file_that_is_named_is_there(path):
    for name in set(
        re.findall(r"`((?:spmd|autodiff|kernels|tests|examples|benchmarks|docs)/[\w./]*)`", path.read_text())
    ):
        assert (ROOT / name).exists(), name


def test_the_operator_that_is_walked_through_is_a_real_one():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    _, after = text.split("## Add an operator\n")
    section = after[: after.index("\n## ")]
    files = (ROOT / "spmd" / "operators" / "permute.py", ROOT / "spmd" / "testing.py")
    source = {line for file in files for line in file.read_text().splitlines()}
    quoted = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    assert len(quoted) >= 20
    for line in quoted:
        # The docstring of the class goes on in the file; a row stands in a table.
        assert {line, line.removesuffix('"""'), f"    {line}"} & source, line


def test_every_operator_is_in_the_table():
    text = (ROOT / "docs" / "explanation" / "adjoint.md").read_text()
    rows = {
        cells[0].strip(" `"): cells for cells in (line.split("|")[1:-1] for line in text.splitlines() if "|" in line)
    }
    for kind in operator_classes():
        if not kind.__module__.startswith("spmd."):
            continue
        _, function, _, adjoint = (cell.strip() for cell in rows[kind.__name__])
        assert f"`{kind.function}" in function
        assert adjoint.startswith("`")
