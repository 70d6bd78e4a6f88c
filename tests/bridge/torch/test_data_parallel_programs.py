"""spt.data_parallel with samplers, compared with programs of DDP and under launchers."""

from __future__ import annotations

import difflib
import json
import re
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from data_parallel_cases import CHECKS, Net, assert_near, drawn, on_workers, randn, squares, values  # noqa: E402
from launch import PROGRAMS, ROOT, TORCHRUN, launch, mpiexec, run_python  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from spmd.bridge import torch as spt  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


@pytest.mark.parametrize("check", CHECKS)
def test_an_epoch_by_a_sampler(check):
    """The minibatches of the sequential run, and a step for each, with an uneven tail."""
    x, t = randn(17, 5, seed=1), randn(17, 3, seed=2)
    data = torch.utils.data.TensorDataset(x, t)

    def train(model, batches, mean):
        steps = torch.optim.Adam(model.parameters(), lr=0.01)
        for x, t in batches:
            steps.zero_grad()
            mean(squares(model(x), t)).backward()
            steps.step()
        return values(model)

    serial = spt.DistributedSampler(data, num_replicas=1, rank=0, batch_size=6, seed=3)
    expected = train(drawn(Net(), 2), serial.loader(), torch.mean)

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        loader = spt.DistributedSampler(data, batch_size=6, seed=3, axis_name="data").loader()
        batches = ([spt.varying(a, "data") for a in batch] for batch in loader)
        return train(model, batches, lambda loss: spt.mean(loss, "data"))

    for result in on_workers(4, main, check=check):
        assert_near(result, expected)


def ten_steps(worker, n):
    """What the programs that are compared do."""
    net = drawn(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 4)), 1)
    model = spt.data_parallel(net, "data", reduction="mean", bucket_bytes=1000)
    steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for k in range(10):
        x, t = randn(16, 20, seed=k, dtype=torch.float32), randn(16, 4, seed=100 + k, dtype=torch.float32)
        rows = slice(16 // n * worker, 16 // n * (worker + 1))
        steps.zero_grad()
        F.mse_loss(model(x[rows]), t[rows]).backward()
        steps.step()
    return {name: v.double().tolist() for name, v in model.state_dict().items()}


def test_ten_steps_of_ddp():
    """Two processes of torch's DistributedDataParallel over gloo, and two workers here."""
    ended = run_python(ROOT / "tests" / "torch_programs" / "ddp.py", timeout=120)
    assert ended.returncode == 0, str(ended)
    theirs = json.loads(ended.stdout.splitlines()[-1])
    for ours in on_workers(2, ten_steps, 2, check=False):
        assert list(ours) == list(theirs)
        for name, expected in theirs.items():
            # Of numbers beyond 8, as running variances are, a last bit of float32 is 1e-6 already.
            bound = 1e-6 * np.maximum(1, np.abs(expected))
            assert (np.abs(np.subtract(ours[name], expected)) <= bound).all(), name


def same_bits(n, python):
    """Uneven shares, unused parameters, accumulation, several dtypes and buffers, as virtual workers have them."""
    program = PROGRAMS / "torch_data_parallel.py"
    ended, serial = launch(program, str(n), n=n, python=python, timeout=120), run_python(program, str(n), timeout=120)
    assert ended.returncode == 0, str(ended)
    assert serial.returncode == 0, str(serial)
    assert ended.stdout == serial.stdout
    assert len(set(ended.stdout.splitlines())) == 4  # steps, alike on all workers
    assert len(ended.stdout.splitlines()) == 4 * n


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
@pytest.mark.full
@pytest.mark.parametrize("n", [2, 3])
def test_the_same_bits_under_mpiexec(n):
    same_bits(n, sys.executable)


@pytest.mark.full
def test_the_same_bits_under_torchrun():
    same_bits(3, TORCHRUN)


PLAIN, PORT = ROOT / "examples" / "torch_ddp.py", ROOT / "examples" / "torch_data_parallel.py"
EPOCH = re.compile(r"epoch \d  loss \d\.\d{4}  test accuracy (\d\d\.\d)%")


def printed(ended):
    assert ended.returncode == 0, str(ended)
    lines = ended.stdout.splitlines()
    assert [bool(EPOCH.fullmatch(line)) for line in lines] == [True] * 5, str(ended)
    assert float(EPOCH.fullmatch(lines[-1])[1]) > 90
    return lines


def test_a_port_of_a_script_for_ddp():
    """It trains as the script does, to the printed digits, without a launcher."""
    for _ in range(5):
        plain = launch(PLAIN, n=2, python=TORCHRUN, timeout=120)
        # The script has torch serial in it, which aborts now and then when such processes end.
        if "terminate called without an active exception" not in str(plain):
            break
    assert printed(run_python(PORT, timeout=120)) == printed(plain)


@pytest.mark.full
@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_the_port_under_launchers():
    expected = printed(run_python(PORT, timeout=120))
    assert printed(launch(PORT, n=2, timeout=120)) == expected
    assert printed(launch(PORT, n=2, python=TORCHRUN, timeout=120)) == expected
    assert len(printed(run_python(PORT, "3", timeout=120))) == 5


def test_the_port_is_a_few_lines():
    """Those of the page, and imports."""
    lines = list(
        difflib.unified_diff(
            PLAIN.read_text().split('"""', 2)[2].splitlines(), PORT.read_text().split('"""', 2)[2].splitlines(), n=0
        )
    )
    changed = [line for line in lines[2:] if line[0] in "+-" and len(line) > 1 and "import" not in line]
    page = (ROOT / "docs" / "how_to" / "torch_data_parallel.md").read_text()
    shown = page[page.index("```diff") :].split("```")[1].splitlines()
    assert changed == [line for line in shown if line[:1] in ("+", "-")]
    assert len(changed) <= 12
