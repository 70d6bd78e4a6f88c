"""The report of a plan: what lies where, what a step sends, the memory of each worker; and what it leaves alone."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.plans.plain_models import GPT, ResNet, UNet  # noqa: E402
from bridge.torch.plans.test_parallelize import LANGUAGE, ROWS, SEQUENCE, image, run, words  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError, SpecError  # noqa: E402

pytestmark = pytest.mark.torch

BATCH, WIDTH, HIDDEN = 5, 8, 11
PAIR = {"0": spt.column("model"), "2": spt.row("model")}


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)).double()


def report_of(net, plan, *args, check=True, **axes):
    def main():
        report = spt.plan_report(spt.parallelize(net, plan), *args)
        return str(report), json.dumps(report.to_dict())

    text, data = run(main, check, **axes)
    return text, json.loads(data)


@pytest.mark.parametrize("check", [True, False])
def test_a_pair_of_layers_sends_one_sum_forward_and_one_backward(check):
    x = image(BATCH, WIDTH).requires_grad_()
    text, report = report_of(pair(), PAIR, x, check=check)
    activation = BATCH * WIDTH * 8
    once = {"operator": "Sum", "axes": ["model"], "calls": 1, "messages": [1, 1], "nbytes": [activation] * 2}
    assert report["sent"] == [{"module": "2", "phase": "forward"} | once, {"module": "0", "phase": "backward"} | once]
    assert report["sent_by_axes"] == {"model": [2 * activation] * 2}
    # Features 6 and 5, with their weights, biases, and columns of the second layer; its bias is whole.
    least, most = (8 * (n * WIDTH + n + n * WIDTH + WIDTH) for n in (5, 6))
    kept = [activation + 8 * BATCH * n for n in (5, 6)]  # x, and what ReLU makes
    assert report["memory"] == {
        "parameters": [least, most],
        "gradients": [least, most],
        "states of Adam": [2 * least, 2 * most],
        "buffers": [0, 0],
        "kept for backward": kept,
    }
    assert report["kept"] == {"0": [activation] * 2, "1": [8 * BATCH * 5, 8 * BATCH * 6]}
    row = report["parameters"][0]
    assert row == {
        "module": "0",
        "kind": "Linear",
        "style": "column('model')",
        "parameter": "weight",
        "shape": [HIDDEN, WIDTH],
        "lies": "P('model')",
        "nbytes": [8 * 5 * WIDTH, 8 * 6 * WIDTH],
    }
    for line in ("0: Linear, column('model')", "weight  11 x 8", "320 to 384", "backward      0       Sum"):
        assert line in text


def test_an_input_without_gradient_sends_nothing_backward():
    _, report = report_of(pair(), PAIR, image(BATCH, WIDTH))
    assert [(r["module"], r["phase"]) for r in report["sent"]] == [("2", "forward")]


def test_one_worker_sends_nothing():
    text, report = report_of(pair(), PAIR, image(BATCH, WIDTH).requires_grad_(), model=1)
    assert report["sent"] == []
    assert "a step sends nothing" in text


@pytest.mark.parametrize(
    ("make", "plan", "args", "check"),
    [
        (GPT, LANGUAGE, (words(5, 7), words(5, 7)), True),
        (GPT, SEQUENCE, (words(5, 7), words(5, 7)), False),
        (UNet, {"enter": ROWS}, (image(3, 1, 12, 8).float(), words(3, 12, 8) % 3), True),
    ],
    ids=["gpt", "sequence", "unet"],
)
def test_the_report_counts_what_a_step_of_training_sends(make, plan, args, check):
    torch.manual_seed(0)
    net = make()

    def main():
        split = spt.parallelize(net, plan)
        given = [spt.put(x, P("data")) for x in args]
        report = spt.plan_report(split, *given)
        with spmd.ledger() as log:
            split(*given).backward()
        return log.workers, report.to_dict()

    seen = []
    bodies = lambda: seen.append(main()) or 0
    run(bodies, check, data=2, model=3)
    assert len(seen) == 6
    reports = [report for _, report in seen]
    assert all(report == reports[0] for report in reports)
    sent = [record.bytes for workers, _ in seen for record in workers.values()]
    rows = reports[0]["sent"]
    assert sum(r["nbytes"][0] for r in rows) <= min(sent) <= max(sent) <= sum(r["nbytes"][1] for r in rows)
    assert sum(r["nbytes"][0] for r in rows) < sum(r["nbytes"][1] for r in rows)
    operators = [record.operators for workers, _ in seen for record in workers.values()]
    for name in {r["operator"] for r in rows}:
        assert sum(r["calls"] for r in rows if r["operator"] == name) <= operators[0][name]
    modules = {name for name, _ in net.named_modules()}
    assert {r["module"] for r in rows} <= modules
    assert len({r["module"] for r in rows if r["phase"] == "backward"}) > 3


@pytest.mark.parametrize("check", [True, False])
def test_it_changes_nothing(check):
    torch.manual_seed(0)
    net = nn.Sequential(ResNet(), nn.Dropout(0.5), nn.BatchNorm1d(5))

    def main():
        split = spt.parallelize(net, {"0.conv1": spt.spatial(P(None, None, "model"))})
        x = image(2, 3, 33, 31).float().requires_grad_()
        y = spt.put(x, P(None, None, "model"))
        split(y).sum().backward()
        before = copy.deepcopy(split.state_dict()), [copy.deepcopy(p.grad) for p in split.parameters()]
        grad, objects = x.grad.clone(), list(split.buffers())
        if check:  # else workers of one process share a generator
            torch.manual_seed(3)
            state = torch.get_rng_state()
        spt.plan_report(split, y)
        assert not check or torch.equal(torch.get_rng_state(), state)
        after = split.state_dict(), [p.grad for p in split.parameters()]
        for a, b in zip([*before[0].values(), *before[1]], [*after[0].values(), *after[1]], strict=True):
            assert torch.equal(a, b)
        assert all(a is b for a, b in zip(objects, split.buffers(), strict=True))
        assert torch.equal(x.grad, grad)
        assert split.training
        assert not any(m._forward_pre_hooks for name, m in split.named_modules() if name != "0.conv1")
        assert not any(m._forward_hooks for m in split.modules())
        split(y).sum().backward()

    run(main, check, model=3)


def test_data_parallelism_sends_the_gradients_and_trains_on():
    def main(x):
        with spt.drawing(0):
            net = nn.Linear(4, 3)
        split = spt.data_parallel(net, "data")
        split(x).sum().backward()
        before = [p.grad.clone() for p in net.parameters()]
        report = spt.plan_report(split, x)
        assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))
        with spmd.ledger() as log:
            split(x).sum().backward()
        assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(net.parameters(), before, strict=True))
        return sum(r.nbytes.most for r in report.sent), log.bytes, [r.phase for r in report.sent]

    nbytes, sent, phases = spt.map(main, P("data"), None, mesh=spmd.Mesh(data=2))(torch.randn(5, 4))
    assert nbytes == sent >= 4 * (12 + 3)
    assert set(phases) == {"backward"}


def test_the_generator_of_torch_is_left_too():
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))
    state = torch.get_rng_state()
    run(lambda: str(spt.plan_report(spt.parallelize(net, {"0": spt.column("model")}), torch.ones(3, 4))), check=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_made_by_hand_in_evaluation_without_gradients():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = spt.Parameter(torch.ones(7), P("model"))
            self.register_buffer("offset", torch.zeros(3, dtype=torch.float64))

        def forward(self, x, *, times):
            return times * spt.psum((x * self.scale.block()).sum(), "model")

    def main(x):
        net = nn.ModuleDict({"scale": Scale()}).eval()
        net["scale"].scale.requires_grad_(False)
        with torch.no_grad():
            report = spt.plan_report(net["scale"], x, times=2.0)
        assert not net["scale"].training
        return str(report), report.memory["buffers"], report.memory["gradients"]

    text, buffers, gradients = spt.map(main, P("model"), None, mesh=spmd.Mesh(model=3))(torch.ones(7))
    assert tuple(buffers) == (24, 24)
    assert tuple(gradients) == (0, 0)
    assert "(Scale): Scale" in text
    assert "8 to 12" in text  # the blocks have 3, 2 and 2 entries
    assert "forward       (Scale)  Sum" in text


@pytest.mark.parametrize("axes", [{"data": 1, "model": 4}, {"data": 2, "model": 2}, {"data": 8, "model": 1}], ids=str)
def test_the_text_fits_100_columns_and_names_tied_parameters(axes):
    name = "a_long_name" + "_and_longer" * 8

    def main():
        split = spt.parallelize(GPT(), LANGUAGE)
        return str(spt.plan_report(nn.Sequential(OrderedDict({name: split})), spt.put(words(8, 7), P("data"))))

    text = run(main, **axes)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("…") and line.endswith("blocks.1.down: Linear, row('model')") for line in lines)
    assert any(line.split()[0] == "weight" and line.split()[-2].endswith("embed.weight") for line in lines if line)


def test_what_is_no_module_raises():
    with pytest.raises(LayoutError) as caught:
        run(lambda: spt.plan_report(torch.ones(3)))
    for word in ("spt.plan_report", "module", "spt.parallelize(net, plan)"):
        assert word in str(caught.value)


def test_an_error_of_the_module_leaves_no_hooks():
    def main():
        split = spt.parallelize(pair(), PAIR)
        with pytest.raises(SpecError):
            spt.plan_report(split, torch.ones(2, 3))
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in split.modules())
        return split(image(1, WIDTH))

    run(main)
