"""`spmd.training.evaluate` against a serial loop over all samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
from spmd import P
from spmd.data import Loader, Sampler
from spmd.errors import DifferentiationError, LayoutError, MeshError, MismatchError, StateError
from spmd.training import evaluate

X = np.random.default_rng(0).normal(size=(40, 3))
LABELS = np.random.default_rng(1).integers(0, 5, 40)
W = np.array([1.0, -2.0, 0.5])


def metrics(batch):
    h = np.tanh(batch["x"] @ W)
    weights = batch["labels"] + 1.0
    return {
        "loss": h * h,
        "accuracy": (h > 0) == (batch["labels"] > 2),
        "weighted": (h, weights),
        "masked": (batch["x"], batch["x"] > 0),
        "rows": (batch["x"], weights),
        "columns": batch["x"],
        "tokens": np.reshape(batch["x"], -1),
        "complex": h * 1j,
    }


def expected(n: int) -> dict:
    """Of one loop over the samples, in exact sums."""
    found = {}
    for name, metric in metrics({"x": X[:n], "labels": LABELS[:n]}).items():
        values, weights = metric if isinstance(metric, tuple) else (metric, np.ones(metric.shape[0]))
        weights = np.broadcast_to(weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim)), values.shape)
        terms = (values * weights).reshape(len(values), -1).T
        sums = [complex(math.fsum(t.real), math.fsum(t.imag)) for t in terms]
        counts = [math.fsum(w) for w in weights.reshape(len(values), -1).T]
        mean = np.array([s / c for s, c in zip(sums, counts, strict=True)]).reshape(values.shape[1:])
        found[name] = mean if name == "complex" else mean.real
    return found


def check(found, n) -> None:
    serial = expected(n)
    assert [*found] == sorted(serial)
    for name, value in found.items():
        value = value.numpy() if hasattr(value, "numpy") else value
        np.testing.assert_allclose(value, serial[name], rtol=1e-12, atol=1e-15, err_msg=name)
        assert value.dtype == (complex if name == "complex" else float)


def batches(n, size, names=None, **options):
    return Loader({"x": X[:n], "labels": LABELS[:n]}, Sampler(n, size, names, **options)).epoch(0)


@given(
    st.integers(5, 40), st.integers(1, 12), st.integers(1, 8), st.sampled_from(["blocked", "strided"]), st.booleans()
)
@settings(max_examples=15)
def test_means_are_those_of_all_samples(n, size, p, order, lockstep):
    with spmd.Mesh(data=p, scheduler="lockstep" if lockstep else "threads"):
        check(spmd.map(lambda: evaluate(metrics, batches(n, size, "data", order=order), "data"), (), P())(), n)


def test_over_two_axes_of_a_mesh_of_three(scheduler):
    names = ("z", "x")
    with spmd.Mesh(x=2, y=2, z=2, scheduler=scheduler):
        for check_states in (True, False):
            body = spmd.map(lambda: evaluate(metrics, batches(23, 5, names), names), (), P(), check=check_states)
            check(body(), 23)


def test_one_message_in_a_body():
    with spmd.Mesh(data=4), spmd.ledger() as log:
        spmd.map(lambda: evaluate(metrics, batches(40, 9, "data"), "data"), (), P())()
    assert log.first.axes == {("Sum", ("data",)): 1}


def test_outside_of_bodies():
    check(evaluate(metrics, batches(23, 5)), 23)
    with spmd.Mesh(data=3, model=2):
        with spmd.ledger() as log:
            means = evaluate(metrics, batches(23, 5, "data"))
        check(means, 23)
        assert log.first.axes["Sum", ("data",)] == 11  # of 5 batches together: 8 metrics, 3 weights


def test_shares_of_any_number_of_batches():
    """A worker may have more batches than others, as long as it has one."""

    def body():
        k = spmd.worker_index("data")
        cuts = np.array_split(X[:20], 4)
        own = [cuts[0], cuts[1]] if k == 0 else [cuts[2][:0]] if k == 1 else [cuts[2], cuts[3][:1], cuts[3][1:]]
        return evaluate(lambda x: x, [spmd.varying(x, "data") for x in own], "data")

    with spmd.Mesh(data=3):
        np.testing.assert_allclose(spmd.map(body, (), P())().numpy(), X[:20].mean(axis=0), rtol=1e-12)


def test_integers_and_short_numbers_are_added_in_float64():
    ones = np.full(5000, 1.0, np.float16)
    with spmd.Mesh(data=2):
        mean = spmd.map(lambda x: evaluate(lambda x: x, [x, x[:3]], "data"), P("data"), P())(ones)
        assert (float(mean), mean.dtype) == (1.0, np.float64)
        big = spmd.map(lambda x: evaluate(lambda x: x, [x], "data"), P("data"), P())(np.full(3, 2**62))
        assert float(big) == 2.0**62


def test_metrics_are_not_differentiated():
    with spmd.Mesh(data=2):
        loss = spmd.map(lambda w, x: np.sum(w) + evaluate(lambda x: x @ w, [x], "data"), (P(), P("data")), P())
        with pytest.raises(DifferentiationError, match=r"evaluate of <lambda>: result of f\n  got: +traced Varying"):
            spmd.grad(loss)(W, X)
        with pytest.raises(DifferentiationError, match=r"result\['b'\] of f\n  got: +traced array"):
            spmd.grad(lambda w: evaluate(lambda x: {"a": x[:, 0], "b": (x[:, 0], x @ w)}, [X])["b"])(W)

        def watched(w, x):
            metric = evaluate(lambda x: x @ spmd.stop_gradient(w), [spmd.stop_gradient(x)], "data")
            return np.sum(w) + metric

        loss = spmd.map(watched, (P(), P("data")), P())
        np.testing.assert_array_equal(spmd.grad(loss)(W, X), np.ones(3))


@pytest.mark.torch
def test_bodies_of_torch():
    torch = pytest.importorskip("torch")
    import spmd.bridge.torch as spt

    tensors = {"x": torch.tensor(X[:23]), "labels": torch.tensor(LABELS[:23])}
    linear = torch.nn.Linear(3, 5).double()

    def losses(batch):
        logits = linear(batch["x"])
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        return {"loss": loss, "right": logits.argmax(1) == batch["labels"], "weighted": (loss, batch["labels"])}

    def body():
        loader = Loader(tensors, Sampler(23, 5, "data"))
        with torch.no_grad():
            return evaluate(losses, loader.epoch(0), "data")

    serial = {
        name: np.average(m[0].detach(), weights=m[1]) if isinstance(m, tuple) else m.detach().double().mean().item()
        for name, m in losses(tensors).items()
    }
    with spmd.Mesh(data=3, model=2):
        means = spt.map(body, (), P())()
        for name, value in means.items():
            assert isinstance(value, torch.Tensor)
            np.testing.assert_allclose(value.item(), serial[name], rtol=1e-12)
        with pytest.raises(LayoutError, match=r"reduction='none'"):
            spt.map(
                lambda: evaluate(
                    lambda b: linear(b["x"]).mean(), Loader(tensors, Sampler(23, 5, "data")).epoch(0), "data"
                ),
                (),
                P(),
            )()


# Errors


def run(f, *, own=None, names="data"):
    """evaluate in bodies on two workers along `data`. own: the batches of this worker, from its block."""
    own = own or (lambda x: [x])
    with spmd.Mesh(data=2, model=2):
        return spmd.map(lambda x: evaluate(f, own(x), names), P("data"), P())(X[:5])


def test_a_mean_over_a_batch_is_an_error():
    for f, got in (
        (lambda x: np.mean(x), "traced array|array float64"),
        (lambda x: {"loss": spmd.mean(x, "data")}, r"result\['loss'\] of f"),
        (lambda x: np.mean(x, axis=0)[:1], "for a batch of"),
        (lambda x: np.mean(x, keepdims=True), "for a batch of"),
        (lambda x: 1.0, "float 1.0, for a batch of"),
        (lambda x: (np.mean(x), x.shape[0]), "for a batch of"),
    ):
        with pytest.raises(LayoutError, match=got) as caught:
            run(f)
        assert "a value per sample" in str(caught.value)
        with pytest.raises(LayoutError):
            evaluate(f if "data" not in got and "loss" not in got else np.mean, [X])


def test_errors():
    with pytest.raises(StateError, match=r"every worker has alike(.|\n)*spmd.varying"):
        run(lambda x: np.zeros(x.shape))
    with pytest.raises(StateError, match=r"varies over axis 'model' too(.|\n)*spmd.psum"):
        run(lambda x: spmd.pvary(x, "model"))
    with pytest.raises(LayoutError, match="no batch on worker 2"):
        run(lambda x: x, own=lambda x: [x] if spmd.worker_index("data") == 0 else [])
    with pytest.raises(LayoutError, match=r"weights of shape \[3, 2\] for values of shape \[3, 3\]"):
        run(lambda x: (x, x[:, :2]))
    with pytest.raises(LayoutError, match=r"metrics of shapes(.|\n)*as of the first batch"):
        run(lambda x: {f"n{x.shape[0]}": x}, own=lambda x: [x, x[:1]])
    with pytest.raises(MismatchError, match=r"evaluate\[b\](.|\n)*evaluate\[a\]"):
        run(lambda x: {"a" if spmd.worker_index("data") else "b": x})
    with pytest.raises(MeshError, match="axis_name='data'"):
        run(lambda x: x, names=None)
    with pytest.raises(MeshError, match="'data', outside of any body"):
        evaluate(lambda x: x, [X], "data")
    with pytest.raises(LayoutError, match=r"evaluate of <lambda>: argument batches\n  got:    no batch\n"):
        evaluate(lambda x: x, [])
