"""What every layer of `spt.nn` does as torch's module of its name does, over one case of each class.

A new class needs a row here: add a file `behaviour_<family>.py` beside this one, or a row to one that is there, with
`CASES`, a list of `Case`s. The files are found by their names. A case has specs alone, no `Layout` and no `Grid`, so
that it runs on meshes of other sizes; take one in which a parameter, or else the input, is split unevenly.
`test_every_layer_has_a_case` fails for a class without one. A lazy class is checked beside the class that it becomes:
it needs no case of its own.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.modules.lazy import LazyModuleMixin  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.nn.module_cases import Case, tensors  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = pytest.mark.torch

FILES = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name.startswith("behaviour_")]
CASES: list[Case] = [c for name in FILES for c in importlib.import_module(f"tests.bridge.torch.nn.{name}").CASES]
LAYERS = {
    name
    for name in spt.nn.__all__
    if isinstance(getattr(spt.nn, name), type) and issubclass(getattr(spt.nn, name), spt.nn.Layer) and name != "Layer"
}
LAZY = {name for name in LAYERS if issubclass(getattr(spt.nn, name), LazyModuleMixin)}

NAMES = {c.name for c in CASES}
LATER = {name for name in NAMES if name[-2:] in ("1d", "3d") and f"{name[:-2]}2d" in NAMES}
"""Of classes that differ by their dimensions alone, those of two are in the ordinary run."""

every_layer = pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=f"{c.name}-{k}", marks=[pytest.mark.full] * (c.name in LATER)) for k, c in enumerate(CASES)],
)


@pytest.fixture(autouse=True)
def double():
    """Layers in float64, with one seed."""
    outer = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    yield
    torch.set_default_dtype(outer)


def in_body(case: Case, body: Callable, axes: dict[str, int] | None = None, change: Any = None) -> Any:
    """What a body returns of the blocks of the inputs, on each worker. change: of the whole inputs."""
    result = {}

    def main(*blocks: Any) -> None:
        result[spmd.mesh.here("a test").index] = body(*blocks)

    inputs = [x if change is None else change(x) for x in tensors(case)]
    torch.manual_seed(3)
    spt.map(main, tuple(case.in_specs), None, mesh=spmd.Mesh(**(axes or case.axes)))(*inputs)
    return [result[k] for k in sorted(result)]


def theirs(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.theirs()


def same(found: Any, expected: Any) -> None:
    """Equal state dicts of whole tensors."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(spt.block(found[name]), value), name


def states(module: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(spt.state_dict(module))


def leaves(blocks: Any) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() if _has_gradients(x) else x for x in blocks]


def _has_gradients(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def summed(x: torch.Tensor) -> torch.Tensor:
    """The sum of all entries of a tensor, on all workers."""
    total, varying = x.sum(), getattr(getattr(x, "state", None), "varying", ())
    if varying and not isinstance(x, spt.PartitionedTensor):
        total = spt.psum(total, tuple(varying))
    return total.real + 2 * total.imag if total.is_complex() else total


def outputs(layer: nn.Module, inputs: Any) -> list[torch.Tensor]:
    return pytree.tree_leaves(layer(*inputs))


def loss_of(results: list[torch.Tensor]) -> torch.Tensor:
    """A number that weighs the entries of results by themselves: the same whole on any mesh."""
    return sum((summed(y.sin() + y * y / 10) for y in results), torch.zeros(()))


def penalty_of(gradients: Any, of: list[torch.Tensor]) -> torch.Tensor:
    """A number that weighs the entries of gradients by those of the tensors that they are of."""
    pairs = [(g, x.detach()) for g, x in zip(gradients, of, strict=True) if g is not None]
    return sum((summed(g * g.conj() / 10 + g * x) for g, x in pairs), torch.zeros(()))


def wanted(layer: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*(x for x in inputs if x.requires_grad), *(p for p in layer.parameters() if p.requires_grad)]


def penalties(layer: nn.Module, blocks: Any) -> list[torch.Tensor]:
    """Numbers that depend on the results and on all first and second derivatives."""
    inputs = leaves(blocks)
    loss = loss_of(outputs(layer, inputs))
    values, leaf = [loss], wanted(layer, inputs)
    if not leaf or not loss.requires_grad:
        return [v.detach() for v in values]
    for _ in range(2):
        found = torch.autograd.grad(values[-1], leaf, create_graph=True, allow_unused=True)
        values.append(penalty_of(found, leaf))
        if not values[-1].requires_grad:
            break
    return [v.detach() for v in values]


def close(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(spt.block(a), b, rtol=1e-9, atol=1e-9)


def numbers(case: Case, change: Callable[[Any], Any] = lambda layer: layer) -> None:
    """Results, gradients and gradients of gradients of a changed layer are those of torch's, changed alike."""
    expected = penalties(change(theirs(case)), tensors(case))
    for found in in_body(case, lambda *blocks: penalties(change(case.ours()), blocks)):
        close(found, expected)


def test_every_layer_has_a_case():
    assert {c.name for c in CASES} == LAYERS - LAZY
    assert {name.removeprefix("Lazy") for name in LAZY} <= LAYERS


@every_layer
def test_double_backward_is_that_of_one_worker(case):
    numbers(case)


@every_layer
def test_hooks_see_and_change_what_those_of_torch_do(case):
    calls: list[str] = []

    def hooked(layer: nn.Module) -> nn.Module:
        def double_(m, args, *rest):
            calls.append(type(m).__name__)
            return tuple(2 * x if _has_gradients(x) else x for x in args)

        layer.register_forward_pre_hook(double_)
        layer.register_forward_hook(lambda _, __, y: pytree.tree_map(lambda t: 3 * t, y))
        return layer

    numbers(case, hooked)
    assert len(calls) == 1 + spmd.Mesh(**case.axes).size
    assert set(calls) == {case.name}


@every_layer
def test_backward_hooks_change_gradients_as_those_of_torch_do(case):
    def gradients(layer: nn.Module, blocks: Any) -> list[torch.Tensor]:
        layer.register_full_backward_pre_hook(lambda _, gs: tuple(g if g is None else 2 * g for g in gs))
        layer.register_full_backward_hook(lambda _, gs, __: tuple(g if g is None else 3 * g for g in gs))
        inputs = leaves(blocks)
        loss, leaf = loss_of(outputs(layer, inputs)), wanted(layer, inputs)
        if not leaf or not loss.requires_grad:
            return [loss.detach()]
        return [penalty_of(torch.autograd.grad(loss, leaf, allow_unused=True), leaf)]

    expected = gradients(theirs(case), tensors(case))
    for found in in_body(case, lambda *blocks: gradients(case.ours(), blocks)):
        close(found, expected)


@every_layer
def test_eval_is_torch_s_eval(case):
    numbers(case, lambda layer: layer.eval())
    numbers(case, lambda layer: layer.eval().train())


@every_layer
@pytest.mark.parametrize("change", ["double", "float", "half", "bfloat16"])
def test_dtypes_change_as_those_of_torch(case, change):
    expected = getattr(theirs(case), change)()

    def body(*_: Any) -> Any:
        layer = getattr(case.ours(), change)()
        assert [p.dtype for p in layer.parameters()] == [p.dtype for p in expected.parameters()]
        split = [isinstance(p, spt.PartitionedTensor) for p in case.ours().parameters()]
        assert [isinstance(p, spt.PartitionedTensor) for p in layer.parameters()] == split
        return states(layer)

    for found in in_body(case, body):
        same(found, expected.state_dict())


def narrow(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex64 if x.is_complex() else torch.float32) if _has_gradients(x) else x


@every_layer
def test_autocast_gives_the_dtypes_of_torch(case):
    def dtypes(layer: nn.Module, blocks: Any) -> list[Any]:
        inputs = leaves(blocks)
        with torch.autocast("cpu", torch.bfloat16):
            results = outputs(layer, inputs)
        leaf = wanted(layer, inputs)
        loss = sum((summed(y.float() if y.is_floating_point() else y) for y in results), torch.zeros(()))
        found = torch.autograd.grad(loss, leaf, allow_unused=True) if leaf and loss.requires_grad else ()
        return [y.dtype for y in results] + [None if g is None else g.dtype for g in found]

    torch.set_default_dtype(torch.float32)
    inputs = [narrow(x) for x in tensors(case)]
    expected = dtypes(theirs(case), inputs)
    for found in in_body(case, lambda *blocks: dtypes(case.ours(), blocks), change=narrow):
        assert found == expected


@every_layer
def test_on_the_meta_device_a_layer_is_filled_later(case):
    expected = theirs(case)
    if not expected.state_dict():
        pytest.skip("nothing to fill")

    def body(*_: Any) -> Any:
        layer = getattr(spt.nn, case.name)(**case.options, **case.specs, device="meta")
        assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
        assert [p.shape for p in layer.parameters()] == [p.shape for p in expected.parameters()]
        loaded = copy.deepcopy(layer).to_empty(device="cpu")
        loaded.load_state_dict(expected.state_dict())
        layer.to_empty(device="cpu")
        layer.reset_parameters()
        return states(loaded), states(layer)

    for loaded, drawn in in_body(case, body):
        same(loaded, expected.state_dict())
        same(drawn, expected.state_dict())


@every_layer
def test_initial_values_are_equal_on_any_mesh(case):
    expected = theirs(case).state_dict()
    for n in (1, 2, 5):
        axes = {name: n if k == 0 else 1 for k, name in enumerate(case.axes)}
        for found in in_body(case._replace(shapes=[], in_specs=[]), lambda: states(case.ours()), axes):
            same(found, expected)


@every_layer
def test_frozen_parameters_get_no_gradient(case):
    def body(*blocks: Any) -> None:
        layer = case.ours().requires_grad_(False)
        copied = getattr(spt.nn, case.name).from_torch(theirs(case).requires_grad_(False), **case.specs)
        for each in (layer, copied):
            assert not any(p.requires_grad for p in each.parameters())
            inputs = leaves(blocks)
            loss = loss_of(outputs(each, inputs))
            if loss.requires_grad:
                loss.backward()
            assert all(p.grad is None for p in each.parameters())

    in_body(case, body)


@every_layer
def test_tied_layers_share_parameters(case):
    """Two layers with the same parameters: one gradient, two names."""

    def tied(layer: nn.Module) -> nn.Module:
        other = copy.deepcopy(layer)
        for name, p in list(layer._parameters.items()):
            if p is not None:
                other.register_parameter(name, p)
        return copy.deepcopy(nn.ModuleList([layer, other]))

    def values(both: nn.Module, blocks: Any) -> list[torch.Tensor]:
        inputs = leaves(blocks)
        direct = sum(p is not None for p in both[0]._parameters.values())
        assert len(list(both.parameters())) == 2 * len(list(both[0].parameters())) - direct
        loss = loss_of(outputs(both[0], inputs)) + 2 * loss_of(outputs(both[1], inputs))
        leaf = wanted(both, inputs)
        found = torch.autograd.grad(loss, leaf, allow_unused=True) if loss.requires_grad else [None] * len(leaf)
        return [loss.detach(), penalty_of(found, leaf)]

    expected = tied(theirs(case))
    names, wholes = list(expected.state_dict()), values(expected, tensors(case))

    def body(*blocks: Any) -> Any:
        both = tied(case.ours())
        assert list(spt.state_dict(both)) == names
        return values(both, blocks)

    for found in in_body(case, body):
        close(found, wholes)


class Squared(nn.Module):
    """An elementwise parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square() + x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().sqrt().to(x.dtype)


@every_layer
def test_elementwise_parametrizations(case):
    names = [name for name, p in theirs(case)._parameters.items() if p is not None]
    if not names:
        pytest.skip("no parameters of its own")

    def parametrized(layer: nn.Module) -> nn.Module:
        for name in names:
            parametrize.register_parametrization(layer, name, Squared())
        return layer

    numbers(case, parametrized)
    expected = parametrized(theirs(case))
    wholes = copy.deepcopy(expected.state_dict())
    parametrize.remove_parametrizations(expected, names[0])

    def body(*blocks: Any) -> Any:
        layer = parametrized(case.ours())
        before = states(layer)
        layer.load_state_dict(before)
        parametrize.remove_parametrizations(layer, names[0])
        return before, states(layer)

    for before, after in in_body(case, body):
        same(before, wholes)
        same(after, expected.state_dict())


@every_layer
def test_strict_loading_has_the_messages_of_torch(case):
    whole = theirs(case)
    good = whole.state_dict()
    wrong = [good | {"more": torch.ones(2)}]
    for name, value in good.items():
        wrong.append({n: v for n, v in good.items() if n != name})
        wrong.append(good | {name: torch.ones(*value.shape, 2)})

    def message(layer: nn.Module, state: dict[str, Any]) -> str:
        try:
            return str(layer.load_state_dict(state))  # torch fills counters that old states lack
        except RuntimeError as error:
            return re.sub(r" A checkpoint has whole tensors\.", "", str(error))

    expected = [message(whole, state) for state in wrong]
    assert expected[0].startswith("Error")
    for found in in_body(case, lambda *_: [message(case.ours(), state) for state in wrong]):
        assert found == expected


@every_layer
def test_states_whole_and_in_blocks(case):
    """What a mesh saves whole another one loads; blocks go where they came from; pickle and torch's files keep them."""
    expected = theirs(case)
    with torch.no_grad():
        for p in expected.parameters():
            p.add_(torch.randn(p.shape))
    given = expected.state_dict()
    for n in (3, 2):
        axes = {name: n if k == 0 else 2 for k, name in enumerate(case.axes)}

        def body(given: Any = given) -> Any:
            layer, other = case.ours(), case.ours()
            assert str(layer.load_state_dict(given)) == "<All keys matched successfully>"
            other.load_state_dict(pickle.loads(pickle.dumps(spt.state_dict(layer, whole=False))))
            same(spt.state_dict(other), given)
            other = copy.deepcopy(other)
            with torch.no_grad():
                for p in other.parameters():
                    p.zero_()
            return pickle.loads(pickle.dumps(states(layer)))

        results = in_body(case._replace(shapes=[], in_specs=[]), body, axes)
        for found in results:
            assert all(type(v) is torch.Tensor for v in found.values())
            same(found, expected.state_dict())
        given = results[0]


@every_layer
def test_printing(case):
    plain = repr(theirs(case))

    def body(*_: Any) -> Any:
        layer = case.ours()
        assert repr(getattr(spt.nn, case.name)(**case.options)) == plain
        assert repr(layer.to_torch()) == plain
        return repr(layer)

    for found in in_body(case, body):
        assert found.startswith(plain.split("\n", maxsplit=1)[0].removesuffix(")"))
        for name, spec in case.specs.items():
            if spec is not None:
                assert f"{name}={spec!r}" in found


@every_layer
def test_copies_are_independent(case):
    expected = theirs(case)

    def body(*blocks: Any) -> Any:
        layer = case.ours()
        other = copy.deepcopy(layer)
        with torch.no_grad():
            for p in other.parameters():
                p.add_(1)
        same(spt.state_dict(layer), expected.state_dict())
        copied = copy.deepcopy(layer)
        same(spt.state_dict(copied), expected.state_dict())
        return penalties(copied, blocks)

    wholes = penalties(theirs(case), tensors(case))
    for found in in_body(case, body):
        close(found, wholes)


@every_layer
def test_lazy_layers_become_what_they_stand_for(case):
    name = f"Lazy{case.name}"
    if not hasattr(nn, name):
        pytest.skip("torch has no lazy class")
    given = {k: v for k, v in case.options.items() if k not in ("in_features", "in_channels", "num_features")}
    expected = getattr(nn, name)(**given)
    torch.manual_seed(3)
    whole = copy.deepcopy(_filled(expected, tensors(case)).state_dict())
    wholes = penalties(expected, tensors(case))

    def body(*blocks: Any) -> Any:
        layer = getattr(spt.nn, name)(**given, **case.specs)
        assert layer.has_uninitialized_params()
        _filled(layer, blocks)
        assert type(layer) is getattr(spt.nn, case.name)
        for own, value in spt.state_dict(layer).items():  # running statistics are sums in another order
            torch.testing.assert_close(spt.block(value), whole[own], rtol=1e-12, atol=1e-12)
        return penalties(layer, blocks)

    for found in in_body(case, body):
        close(found, wholes)


def _filled(layer: nn.Module, inputs: Any) -> nn.Module:
    with torch.no_grad():
        layer(*inputs)
    return layer
