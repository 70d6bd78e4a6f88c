"""Write the pages of the gallery: run each example as its reader would, and keep its picture, output and run time.

    python docs/tools/make_gallery.py            all examples
    python docs/tools/make_gallery.py wave fno   these

It takes minutes, so the pages are in the repository; a test says which of them are older than their example.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["ENTRIES", "Entry", "description", "digest", "main"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "gallery"


class Entry(NamedTuple):
    """An example of the gallery. alt: what its picture shows, for readers who cannot see it."""

    title: str
    alt: str


ENTRIES = {
    "digits": Entry(
        "Digits: data and model parallel",
        "The loss falls over epochs; scans of digits and what the network reads; blocks of two weights.",
    ),
    "shallow_water": Entry(
        "Shallow water: an initial height from gauges",
        "The true and the found height of water, both cut into blocks of four workers, and the falling misfit.",
    ),
    "wave": Entry(
        "Full-waveform inversion",
        "Maps of wave speeds, true, at the start and found, cut into blocks of four workers, and the falling misfit.",
    ),
    "fno": Entry(
        "A Fourier neural operator",
        "Permeability, the solver's pressure, the network's, and their difference, with the rows of two workers.",
    ),
    "transformer": Entry(
        "A transformer in NumPy",
        "The loss falls over steps; blocks of two weights, one by rows and one by columns; text that it writes.",
    ),
    "recorded_step": Entry(
        "Steps that are recorded once",
        "Times of a step of four ways to run it: recorded ones take about a quarter of the others.",
    ),
    "restart": Entry(
        "A run that is killed, and goes on",
        "The loss of a run that is killed three times and goes on on other meshes lies on that of a run without break.",
    ),
    "adjoint_test": Entry(
        "An adjoint, and the bug in it",
        "The transpose of an operator, an adjoint that lacks two entries at block borders, and the right one.",
    ),
    "affine": Entry(
        "A layer on unequal partitions",
        "Blocks of input, weights and output on three, twelve and four workers, and the falling loss.",
    ),
    "torch_unet": Entry(
        "PyTorch: a U-Net split in space",
        "Images of shapes in noise, the true classes and the predicted ones, with lines between four workers.",
    ),
    "torch_lenet": Entry(
        "PyTorch: LeNet split over rows and channels",
        "The loss falls over steps; scans of digits, cut between two workers, with the digits that the network reads.",
    ),
    "torch_transformer": Entry(
        "PyTorch: a transformer split over heads",
        "The losses of four workers lie on those of one; which worker has which heads and hidden features.",
    ),
    "torch_gpt": Entry(
        "PyTorch: a GPT on any mesh",
        "The loss falls over steps; blocks of two weights, one by rows and one by columns.",
    ),
}


def source_of(name: str) -> str:
    return (ROOT / "examples" / f"{name}.py").read_text()


def digest(name: str) -> str:
    """A hash of the source of an example."""
    return hashlib.sha256(source_of(name).encode()).hexdigest()[:16]


def description(name: str) -> tuple[str, str]:
    """The docstring of an example: its first sentence, and the rest; commands in it are blocks."""
    first, _, rest = (ast.get_docstring(ast.parse(source_of(name))) or "").partition("\n\n")
    paragraphs = []
    for paragraph in rest.split("\n\n"):
        lines = paragraph.splitlines()
        is_code = all(line.startswith("    ") for line in lines)
        paragraphs.append(f"```text\n{chr(10).join(line[4:] for line in lines)}\n```" if is_code else paragraph)
    return " ".join(first.split()), "\n\n".join(paragraphs)


def machine() -> str:
    """The processor, in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {names[0] if names else platform.machine()}"


def run(name: str) -> tuple[str, float]:
    """What an example prints, and its seconds; its picture lies in the gallery then."""
    picture = FOLDER / "pictures" / f"{name}.png"
    picture.parent.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--picture", str(picture)]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600)
        seconds = time.perf_counter() - start
    if done.returncode or not picture.exists():
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.replace(str(picture), f"{name}.png"), seconds


def page(name: str, entry: Entry, printed: str, seconds: float) -> str:
    first, rest = description(name)
    return f"""\
<!-- by python docs/tools/make_gallery.py, of {digest(name)} -->

# {entry.title}

{first}

![{entry.alt}](pictures/{name}.png)

{rest}

It ran in {seconds:.0f} s on {machine()}, drawing the picture included, and printed:

```text
{printed.rstrip()}
```

{{download}}`The program <../../examples/{name}.py>` · {{download}}`the same as a notebook <notebooks/{name}.ipynb>`

:::{{literalinclude}} ../../examples/{name}.py
:language: python
:lines: {_start(name)}-
:::
"""


def _start(name: str) -> int:
    """The line after the docstring, which the page shows as text."""
    return ast.parse(source_of(name)).body[1].lineno


def index() -> str:
    """The page with all pictures."""
    cards = [
        f":::{{figure}} pictures/{name}.png\n:alt: {entry.alt}\n:target: {name}.html\n\n[{entry.title}]({name}.md)\n:::"
        for name, entry in ENTRIES.items()
    ]
    toctree = "\n".join(ENTRIES)
    return (
        "<!-- by python docs/tools/make_gallery.py -->\n\n# Gallery\n\n"
        "Programs of the folder examples/. Each runs on virtual workers, under mpiexec, and under torchrun, and prints "
        "the same numbers. Each takes less than a minute on two cores.\n\n"
        "::::::{container} gallery\n" + "\n\n".join(cards) + "\n::::::\n\n"
        "Each page has its program as a notebook too, which runs virtual workers. One more notebook drives processes "
        "of MPI, by ipyparallel: {download}`mpi_workers.ipynb <../../examples/notebooks/mpi_workers.ipynb>`.\n\n"
        f":::{{toctree}}\n:hidden:\n\n{toctree}\n:::\n"
    )


def main(names: list[str]) -> None:
    unknown = set(names) - set(ENTRIES)
    if unknown:
        raise SystemExit(f"no such examples: {', '.join(sorted(unknown))}; there are {', '.join(ENTRIES)}")
    for name in names or ENTRIES:
        printed, seconds = run(name)
        (FOLDER / f"{name}.md").write_text(page(name, ENTRIES[name], printed, seconds))
        print(f"{name}: {seconds:.1f} s", flush=True)
    (FOLDER / "index.md").write_text(index())


if __name__ == "__main__":
    main(sys.argv[1:])
