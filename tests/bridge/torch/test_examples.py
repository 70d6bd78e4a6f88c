"""The examples in torch train as one worker does, on any mesh and under any launcher, and print the same numbers."""

from __future__ import annotations

import functools
import random
import re
import sys

import pytest
from gpt_options import mesh_options, model_options, words
from launch import ROOT, TORCHRUN, launch, mpiexec, run_python
from loaded import load

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.host("tensors of these examples lie on the host")

LENET = ROOT / "examples" / "torch_lenet.py"
TRANSFORMER = ROOT / "examples" / "torch_transformer.py"
GPT = ROOT / "examples" / "torch_gpt.py"
UNET = ROOT / "examples" / "torch_unet.py"
SHORT = ("--epochs", "2", "--steps", "3", "--check")
FEW = ("--steps", "20")
SMALL_GPT = (
    *("--steps", "3", "--every", "2", "--batch", "6", "--check", "--sample", "9"),
    *("--context", "9", "--width", "12", "--heads", "3", "--layers", "1"),
)
TIMES = re.compile(r" +[\d.]+ (s per epoch|ms per step|characters/s)")


def apart(text: str) -> list[float]:
    """How far the losses and the parameters are from those of one worker."""
    result = re.findall(r"at most ([\d.e+-]+) apart", text)
    assert len(result) == 2
    return [float(n) for n in result]


def losses(text: str) -> list[str]:
    """The lines that tell losses: those of the workers, and as many of one worker, which are the same."""
    result = [line for line in TIMES.sub("", text).splitlines() if re.match(r"(epoch|step) +\d", line)]
    half = len(result) // 2
    assert result[:half] == result[half:] != []
    return result[:half]


@functools.cache
def serial(program, *options: str) -> list[str]:
    """What a program prints that runs in one process, without times."""
    ended = run_python(program, *options, timeout=120)
    assert ended.returncode == 0, str(ended)
    return TIMES.sub("", ended.stdout).splitlines()


def together(python: str, program, *options: str) -> list[str]:
    """The same of four processes that mpiexec or torchrun has started."""
    ended = launch(program, *options, n=4, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    transport = "torch transport" if python == TORCHRUN else "mpi transport"
    assert ended.stdout.count(transport) == 1
    return TIMES.sub("", ended.stdout).replace(transport, "local transport").splitlines()


MPI = [pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")]
MPIEXEC = pytest.param(sys.executable, id="mpiexec", marks=MPI)
launchers = pytest.mark.parametrize("python", [MPIEXEC, pytest.param(TORCHRUN, id="torchrun")])

RUNS = {
    "lenet": (LENET, *SHORT),
    "transformer": (TRANSFORMER, *FEW),
    "unet": (UNET, *SHORT, "--batch", "4"),
    "gpt": (GPT, *SMALL_GPT),
}
SEQUENCE = (TRANSFORMER, *FEW, "--sequence")
SHARDED_GPT = (GPT, *SMALL_GPT, "--sequence", "--shard")
STAGED_GPT = (GPT, *SMALL_GPT, "--stage", "2", "--model", "1", "--experts", "3")


@pytest.mark.parametrize("name", RUNS)
def test_an_example_follows_one_worker(name):
    text = "\n".join(serial(*RUNS[name]))
    assert max(apart(text)) < 1e-10
    losses(text)


def same_under(python: str, *run) -> None:
    ours, theirs = together(python, *run), serial(*run)
    assert max(apart("\n".join(ours))) < 1e-10
    # The figures of rounding depend on torch's threads, of which a process alone may have more.
    said = lambda lines: [line for line in lines if "apart" not in line]
    assert said(ours) == said(theirs)


@pytest.mark.full
@launchers
@pytest.mark.parametrize(
    "run",
    [*RUNS.values(), SEQUENCE, SHARDED_GPT, STAGED_GPT],
    ids=[*RUNS, "sequence", "sharded gpt", "staged gpt"],
)
def test_each_example_prints_the_same_under_each_launcher(python, run):
    same_under(python, *run)


def test_a_pair_of_layers_takes_one_sum_forward_and_one_backward():
    """There are two pairs: attention and the perceptron."""
    assert serial(*RUNS["transformer"])[0] == "a step takes, forward: 2 sums; backward: 2 sums"


# On other meshes, in this process


@pytest.fixture
def output(monkeypatch, capsys):
    """Run the main() of an example; what it prints."""

    def run(program, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(program), *options])
        load(program).main()
        return capsys.readouterr().out

    dtype = torch.get_default_dtype()
    yield run
    torch.set_default_dtype(dtype)


def few(meshes):
    """The first three belong to the ordinary run."""
    return [*meshes[:3], *(pytest.param(mesh, marks=pytest.mark.full) for mesh in meshes[3:])]


LENETS = [
    ("--rows", "3", "--channels", "1"),
    ("--rows", "1", "--channels", "4", "--unchecked"),
    ("--rows", "2", "--channels", "2", "--unchecked"),
    ("--rows", "6", "--channels", "1", "--batch", "5", "--lr", "0.004"),  # small batches want small steps
    ("--rows", "2", "--channels", "3"),
    ("--rows", "1", "--channels", "1"),
]


@pytest.mark.parametrize("mesh", few(LENETS), ids=" ".join)
def test_lenet_on_any_mesh(mesh, output):
    text = output(LENET, "--epochs", "1", "--steps", "2", "--check", *mesh)
    assert max(apart(text)) < 1e-10
    losses(text)


UNETS = [
    ("--rows", "3", "--columns", "1"),
    ("--rows", "1", "--columns", "2", "--unchecked"),
    ("--rows", "2", "--columns", "3", "--size", "20", "--width", "4"),
    ("--rows", "5", "--columns", "1", "--size", "12", "--unchecked"),  # fewer rows than workers at the bottom
    ("--rows", "1", "--columns", "1"),
]


@pytest.mark.parametrize("mesh", few(UNETS), ids=" ".join)
def test_a_unet_on_any_mesh(mesh, output):
    text = output(UNET, "--epochs", "1", "--steps", "2", "--batch", "3", "--check", *mesh)
    assert max(apart(text)) < 1e-10
    losses(text)


def test_a_unet_draws_what_it_predicts(tmp_path, output):
    pytest.importorskip("matplotlib")
    path = tmp_path / "unet.png"
    text = output(UNET, "--epochs", "1", "--steps", "1", "--images", "8", "--picture", str(path))
    assert f"{path}: lines separate the blocks of 4 workers" in text
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.full
def test_a_unet_finds_the_shapes(output):
    text = output(UNET)
    assert float(re.search(r"right class: ([\d.]+)%", text)[1]) > 96
    assert min(float(n) for n in re.findall(r"intersection over union ([\d.]+)", text)) > 0.6


TRANSFORMERS = [
    ("--model", "3", "--heads", "5", "--hidden", "50"),
    ("--model", "3", "--heads", "2", "--hidden", "2", "--unchecked"),
    ("--model", "4", "--positions", "3", "--sequence"),
    ("--model", "3", "--heads", "5", "--positions", "10", "--sequence", "--unchecked"),
    ("--model", "1"),
]


@pytest.mark.parametrize("mesh", few(TRANSFORMERS), ids=" ".join)
def test_a_transformer_on_any_mesh(mesh, output):
    text = output(TRANSFORMER, "--steps", "5", *mesh)
    assert max(apart(text)) < 1e-10
    losses(text)
    # Two pairs of layers, checked or not.
    each = "2 all-gathers, 2 reduce-scatters" if "--sequence" in mesh else "2 sums"
    assert text.split(";")[0].count(each) == text.split(";")[1].count(each) == 1


GPTS = [
    ("--data", "3", "--model", "2", "--sequence", "--accumulate", "3", "--batch", "5", "--shard"),
    ("--data", "2", "--model", "2", "--stage", "2", "--experts", "5", "--microbatches", "3", "--layers", "2"),
    ("--data", "4", "--model", "1", "--batch", "3", "--accumulate", "1"),  # one worker has no sample
    ("--data", "1", "--model", "4"),  # one worker has no head
    ("--data", "5", "--model", "1", "--batch", "3", "--accumulate", "1", "--shard"),
    ("--data", "2", "--model", "1", "--stage", "3"),
    ("--data", "1", "--model", "2", "--stage", "4", "--layers", "3", "--batch", "3"),  # empty microbatches
    ("--data", "3", "--model", "1", "--stage", "2", "--experts", "2", "--batch", "5", "--accumulate", "2"),
    ("--data", "2", "--model", "2", "--experts", "3", "--balance", "0.5", "--sequence"),
    ("--data", "2", "--model", "1", "--experts", "3", "--expert", "2", "--shard", "--stage", "2"),
    ("--data", "3", "--model", "1", "--experts", "2"),  # one worker has no expert
    ("--data", "2", "--model", "3", "--sequence"),
    ("--data", "1", "--model", "5", "--sequence", "--context", "3"),
    ("--data", "3", "--model", "1", "--accumulate", "9"),
    ("--data", "2", "--model", "2", "--layers", "2", "--clip", "1e9"),
    ("--data", "1", "--model", "1"),
]


@pytest.mark.parametrize("mesh", few(GPTS), ids=" ".join)
def test_a_gpt_on_any_mesh(mesh, output):
    text = output(GPT, *SMALL_GPT, *mesh)
    assert max(apart(text)) < 1e-10
    losses(text)
    axes = {
        name for name in ("data", "model", "stage") if f"--{name}" in mesh and mesh[mesh.index(f"--{name}") + 1] != "1"
    }
    for name in ("data", "model", "stage"):
        assert (f" kB along {name}" in text) == (name in axes)


@pytest.mark.parametrize("seed", [0, 9, *(pytest.param(k, marks=pytest.mark.full) for k in range(1, 40) if k != 9)])
def test_a_gpt_with_random_options(seed, output):
    """9: zero bubble with three experts on two workers, whose graphs differ."""
    draw = random.Random(seed)
    model = model_options(draw)
    options = [*words(model), *mesh_options(draw, model), "--clip", draw.choice(["0.3", "1e9"])]
    text = output(GPT, *SMALL_GPT, *options)
    assert max(apart(text)) < 1e-10
    losses(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--stage", "2", "--picture", "a"), "the layers of its own stage"),
        (("--stage", "4", "--layers", "1"), "there are 3 layers"),
        (("--experts", "1"), "two or more"),
        (("--expert", "2"), "--expert is for these"),
        (("--experts", "3", "--shard"), "--expert 2 gives them an axis of their own"),
        (("--experts", "3", "--stage", "2", "--balance", "0.1"), "each microbatch would be balanced by itself"),
    ],
)
def test_options_of_a_gpt_that_do_not_go_together(output, capsys, options, said):
    with pytest.raises(SystemExit):
        output(GPT, *options)
    assert said in capsys.readouterr().err


def test_a_gpt_draws_its_losses_and_writes(tmp_path, output):
    pytest.importorskip("matplotlib")
    path = tmp_path / "gpt.png"
    text = output(GPT, *SMALL_GPT, "--steps", "1", "--data", "2", "--model", "1", "--picture", str(path))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    written = text.partition("\n\n")[2].partition("\n\n")[2]
    assert len(written) == len('The "asse') + 9 + len("\n")


@pytest.mark.full
def test_a_gpt_learns(output):
    text = output(GPT, "--data", "2", "--model", "1")
    assert float(re.search(r"step  100  loss ([\d.]+)", text)[1]) < 2.7


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(), *LENETS], ids=" ".join)
def test_all_epochs_of_lenet_follow_one_worker(mesh, output):
    text = output(LENET, "--check", *mesh)
    assert max(apart(text)) < 1e-10
    assert float(re.search(r"accuracy ([\d.]+)%", text)[1]) >= (90 if "0.004" in mesh else 98)
    losses(text)


@pytest.mark.full
@launchers
def test_an_epoch_of_lenet_under_each_launcher(python):
    same_under(python, LENET, "--epochs", "1", "--check")
