"""Tensors and modules of PyTorch in checkpoints: every dtype and layout, from any mesh onto any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mistakes import Row, parsed

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import CheckpointError, CorruptCheckpointError, LayoutError  # noqa: E402
from spmd.io.reading import Reader  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("tensors of these tests lie on the host")]


def on(body, *args, check: bool = True, **axes: int) -> Any:
    """What the body gives on virtual workers."""
    mesh = spmd.Mesh(transport="local", scheduler="threads", **axes)
    return spt.map(body, (P(),) * len(args), None, mesh=mesh, check=check)(*args)


def bits(x: torch.Tensor) -> bytes:
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# Tensors

DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
]


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    x = 40 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if dtype.is_complex:
        return torch.complex(x, x.flip(0) if shape else -x).to(dtype)
    return (x > 0 if dtype is torch.bool else x.abs() if str(dtype).startswith("torch.u") else x).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype, tmp_path):
    tree = {f"{list(shape)}": some(shape, dtype) for shape in ((5, 3), (7,), (), (0, 4))}
    spmd.save(tmp_path, tree)
    loaded = spmd.load(tmp_path, like={name: torch.zeros_like(x) for name, x in tree.items()})
    for name, x in tree.items():
        assert (loaded[name].dtype, loaded[name].shape, bits(loaded[name])) == (x.dtype, x.shape, bits(x))
    bare = spmd.load(tmp_path)["[5, 3]"]
    assert type(bare) is np.ndarray
    assert bare.tobytes() == bits(tree["[5, 3]"])


def test_the_values_of_odd_tensors_are_saved(tmp_path):
    x, z = some((4, 6), torch.float64), some((4, 6), torch.complex64)
    odd = {
        "transposed": x.T,
        "strided": x[::2, 1::2],
        "expanded": x[:1].expand(3, 6),
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "history": (x.requires_grad_() * 2).tanh(),
        "permuted bfloat16": some((2, 3, 4, 5), torch.bfloat16).permute(0, 3, 1, 2),
    }
    assert odd["conjugate"].is_conj()
    assert odd["negative"].is_neg()
    spmd.save(tmp_path, odd)
    loaded = spmd.load(tmp_path, like=odd | {"history": torch.zeros(4, 6, dtype=torch.float64)})
    for name, value in odd.items():
        assert torch.equal(loaded[name], value.detach()), name
    assert not loaded["history"].requires_grad


def test_loaded_tensors_are_like_those_that_are_wanted(tmp_path):
    x = some((2, 3, 4, 5), torch.float32)
    spmd.save(tmp_path, {"a": x, "b": x, "c": x, "d": x.numpy()})
    like = {
        "a": nn.Parameter(torch.zeros(2, 3, 4, 5), requires_grad=False),
        "b": torch.zeros(2, 3, 4, 5, requires_grad=True),
        "c": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "d": torch.zeros(2, 3, 4, 5),
    }
    loaded = spmd.load(tmp_path, like=like)
    assert all(torch.equal(loaded[name], x) for name in like)
    assert all(type(loaded[name]) is type(like[name]) for name in like)
    assert all(loaded[name].requires_grad == like[name].requires_grad for name in like)
    assert loaded["c"].stride() == like["c"].stride()
    assert all(not like[name].any() for name in like)  # what is wanted stays as it is
    loaded["d"].add_(1)  # memory of its own
    as_double = spmd.load(tmp_path, like=dict.fromkeys("abcd", torch.zeros(2, 3, 4, 5).double()), convert=True)
    assert torch.equal(as_double["a"], x.double())


# Blocks

SHAPE = (7, 5)
SPECS = [P("a", "b"), P("b"), P(None, ("b", "a")), P("a"), P()]


def saved_in_blocks(path, whole, specs=SPECS, **axes):
    def body(whole):
        blocks = {str(k): spt.Parameter(whole + k, spec) for k, spec in enumerate(specs)}
        blocks["plain"] = spt.PartitionedTensor.from_block(blocks["0"].block() * 2, specs[0])
        spmd.save(path, blocks)

    on(body, whole, **axes)


@pytest.mark.parametrize("axes", [{"a": 3, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 8}, {"b": 3, "a": 2}], ids=str)
def test_blocks_come_back_on_another_mesh(axes, tmp_path, monkeypatch):
    """From 2 x 2 workers. Every worker reads its boxes, and no more."""
    whole = some(SHAPE, torch.float64)
    saved_in_blocks(tmp_path, whole, a=2, b=2)
    entries: list[int] = []
    wanted: list[int] = []
    read = Reader.read

    def counted(self, entry, box=None, dtype=None):
        out = read(self, entry, box, dtype)
        entries.append(out.size)
        return out

    monkeypatch.setattr(Reader, "read", counted)

    def body():
        like: dict[str, Any] = {str(k): spt.Parameter(torch.zeros(SHAPE).double(), s) for k, s in enumerate(SPECS)}
        like["plain"] = spt.PartitionedTensor.from_block(torch.zeros_like(like["1"].block()), SPECS[1])
        loaded = spmd.load(tmp_path, like=like)
        for name, x in loaded.items():
            assert type(x) is type(like[name])
            assert (x.requires_grad, x.block_layout) == (like[name].requires_grad, like[name].block_layout)
            assert torch.equal(x.block(), x.like_whole(x.whole()).block())
        loss = (loaded["0"] * loaded["0"]).sum()
        loss.backward()
        assert loaded["0"].grad.block_layout == loaded["0"].block_layout
        wanted.extend(x.block().numel() for x in like.values())
        return {name: x.detach().whole() for name, x in loaded.items()}

    loaded = on(body, **axes)
    for k in range(len(SPECS)):
        assert torch.equal(loaded[str(k)], whole + k)
    assert torch.equal(loaded["plain"], whole * 2)
    assert sorted(entries) == sorted(wanted)


def test_every_box_is_written_once(tmp_path):
    whole = some(SHAPE, torch.float64)
    saved_in_blocks(tmp_path, whole, a=2, b=3)
    arrays = json.loads((tmp_path / "manifest.json").read_bytes())["arrays"]
    for entry in arrays.values():
        count = np.zeros(SHAPE, int)
        for piece in entry["pieces"]:
            count[tuple(slice(*side) for side in piece["box"])] += 1
        assert (count == 1).all()
    used = {piece["file"] for entry in arrays.values() for piece in entry["pieces"]}
    assert len(used) == 6  # copies are shared out among the workers that have them


def test_blocks_on_some_workers_only(tmp_path):
    """The others hold nothing. Grids, uneven cuts, and blocks of global arrays."""
    x = some((5, 6), torch.float32)
    grid = spt.Grid((2, 1), workers=[3, 1])

    def save(x):
        p, uneven = spt.Parameter(x, grid), spmd.Layout((5, 6), P("a"), {"a": 2, "b": 2}, ((1, 4), None))
        q = spt.Parameter(x, uneven)
        assert (spmd.worker_index("a") * 2 + spmd.worker_index("b") in (1, 3)) == bool(p.block().numel())
        spmd.save(tmp_path, {"grid": p, "uneven": q})

    on(save, x, a=2, b=2)
    with spmd.Mesh(z=3, transport="local"):
        as_array = spmd.load(tmp_path, specs={"grid": P(None, "z"), "uneven": P("z")})
    assert all((y.numpy() == x.numpy()).all() for y in as_array.values())

    def load():
        p = spt.Parameter(torch.zeros(5, 6), spt.Grid((1, 2), workers=[2, 0]))
        return spmd.load(tmp_path, like={"grid": p, "uneven": torch.zeros(5, 6)})["grid"].detach().whole()

    assert torch.equal(on(load, m=3), x)


def test_a_bare_tensor_has_one_value_for_all_workers(tmp_path):
    def differs():
        spmd.save(tmp_path, {"w": torch.ones(2) * spmd.worker_index("a")})

    with pytest.raises(CheckpointError, match=r"'w'.*\n.*values that differ between .*a=0.* and .*a=1") as caught:
        on(differs, check=False, a=2)
    assert "spt.PartitionedTensor.from_block" in parsed(caught.value).mend
    assert not (tmp_path / "manifest.json").exists()


# Modules


class Counting(nn.Module):
    """A module with a state of its own, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Any] = {}

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


class Net(nn.Module):
    """Blocks over two axes, replicated parameters, buffers, and parameters with two names."""

    def __init__(self, a: str = "a", b: str = "b") -> None:
        super().__init__()
        with spt.drawing(0):
            self.up, self.down = spt.nn.Linear(6, 7, w_spec=P(a)), spt.nn.Linear(7, 6, w_spec=P(None, a))
            self.norm = nn.BatchNorm1d(6)
            self.table = spt.Parameter(nn.init.normal_(torch.empty(5, 6)), P(b, a))
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.other.weight = self.one.weight
        self.count = Counting()
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.one(self.norm(self.down(torch.tanh(self.up(x)))))))


class Serial(nn.Module):
    """The same on one worker, outside of any body."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 7), nn.Linear(7, 6), nn.BatchNorm1d(6)
        self.table = nn.Parameter(torch.zeros(5, 6))
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.other.weight = self.one.weight
        self.count = Counting()


def changed(net: nn.Module) -> nn.Module:
    """With values that no constructor gives."""
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.mul_(1 + 0.1 * k)
    net.norm.running_mean += 3
    net.norm.num_batches_tracked += 5
    net.count.calls = {"seen": 12, "by": ["a", 0.5, None]}
    return net


def same(one: dict, other: dict) -> bool:
    return list(one) == list(other) and all(
        torch.equal(x, other[name]) if isinstance(x, torch.Tensor) else x == other[name] for name, x in one.items()
    )


def saved_net(path: Path, **axes: int) -> dict:
    def body():
        net = changed(Net())
        spmd.save(path, {"model": net})
        return spt.state_dict(net)

    return on(body, **axes)


@pytest.mark.parametrize("axes", [{"a": 3, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 4}], ids=str)
def test_a_module_comes_back_on_another_mesh(axes, tmp_path):
    expected = saved_net(tmp_path, a=2, b=2)

    def body():
        net = Net()
        parameters = dict(net.named_parameters())
        loaded = spmd.load(tmp_path, like={"model": net})
        assert loaded["model"] is net
        assert all(p is parameters[name] for name, p in net.named_parameters())  # in place
        assert net.other.weight is net.one.weight
        return spt.state_dict(net)

    assert same(on(body, **axes), expected)
    serial = Serial()
    spmd.load(tmp_path, like={"model": serial})
    assert same(serial.state_dict(), expected)


def test_a_module_and_the_dictionary_of_its_state_have_the_same_names(tmp_path):
    serial = changed(Serial())
    spmd.save(tmp_path / "dictionary", {"model": serial.state_dict()})
    spmd.save(tmp_path / "module", {"model": serial})
    nodes = [json.loads((tmp_path / name / "manifest.json").read_bytes())["tree"] for name in ("dictionary", "module")]
    assert nodes[0] == nodes[1]

    def body():
        net = Net()
        spmd.load(tmp_path / "dictionary", like={"model": net})
        return spt.state_dict(net)

    assert same(on(body, a=2, b=2), serial.state_dict())
    without = {k: v for k, v in Serial().state_dict().items() if k != "count._extra_state"}
    loaded = spmd.load(tmp_path / "module", like={"model": without}, strict=False)["model"]
    assert same(loaded, {k: v for k, v in serial.state_dict().items() if k in without})
    alone = nn.Linear(6, 7)  # a module that is the tree itself
    spmd.save(tmp_path / "alone", serial.up)
    spmd.load(tmp_path / "alone", like=alone)
    assert torch.equal(alone.weight, serial.up.weight)
    spmd.load(tmp_path / "alone", like=(other := spmd.load(tmp_path / "alone")))
    assert list(other) == ["weight", "bias"]


def test_hooks_of_a_module_run(tmp_path):
    seen: list[str] = []
    net = nn.Sequential(nn.Linear(2, 2))
    net.register_state_dict_pre_hook(lambda *_: seen.append("save"))
    net.register_load_state_dict_pre_hook(lambda *_: seen.append("load"))
    net.register_load_state_dict_post_hook(lambda module, keys: seen.append("loaded"))
    spmd.save(tmp_path, net)
    assert seen == ["save"]
    spmd.load(tmp_path, like=net)
    assert seen[-2:] == ["load", "loaded"]


def test_names_are_mapped_and_chosen(tmp_path):
    source = changed(Serial())
    state = {f"net.{name}": x for name, x in source.state_dict().items() if isinstance(x, torch.Tensor)}
    spmd.save(tmp_path, state)  # flat, as files of other tools are
    target = Serial()
    before = target.table.detach().clone()
    spmd.load(
        tmp_path,
        like={"model": target},
        rename=lambda name: name.replace("model.", "net."),
        names=["net.up.*", "net.down.bias"],
        strict=False,
    )
    assert torch.equal(target.up.weight, source.up.weight)
    assert torch.equal(target.down.bias, source.down.bias)
    assert not torch.equal(target.down.weight, source.down.weight)
    assert torch.equal(target.table, before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda net: net.add_module("extra", nn.Linear(2, 2)), ["missing", "'model.extra.weight', 'model.extra.bias'"]),
        (lambda net: delattr(net, "table"), ["unexpected", "'model.table'"]),
        (lambda net: setattr(net, "up", nn.Linear(6, 8)), ["'model.up.weight'", "[8, 6]", "[7, 6]"]),
        (lambda net: net.half(), ["dtype float16", "convert=True"]),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_names_and_shapes_that_do_not_fit_leave_the_module_as_it_is(change, words, tmp_path):
    spmd.save(tmp_path, {"model": changed(Serial())})
    net = Serial()
    change(net)
    before = {k: v.clone() for k, v in net.state_dict().items() if isinstance(v, torch.Tensor)}
    with pytest.raises(CheckpointError) as caught:
        spmd.load(tmp_path, like={"model": net})
    assert all(word in str(caught.value) for word in words), caught.value
    assert same({k: v for k, v in net.state_dict().items() if k in before}, before)


def test_nothing_changes_if_one_worker_reads_bad_bytes(tmp_path):
    """Only one of the workers reads them."""
    whole = torch.zeros(4, 1 << 18)  # a chunk for each row
    on(lambda x: spmd.save(tmp_path, {"w": nn.ParameterList([spt.Parameter(x + 1, P("a"))])}), whole, a=1)
    (data,) = tmp_path.glob("data-*")
    with data.open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\xff")

    def body(x):
        w = nn.ParameterList([spt.Parameter(x, P("a"))])
        with pytest.raises(CorruptCheckpointError, match=r"'w\.0'"):
            spmd.load(tmp_path, like={"w": w})
        return w[0].detach().abs().max()

    assert on(body, whole, a=4) == 0


def test_a_module_without_shapes_takes_them(tmp_path):
    spmd.save(tmp_path, nn.Linear(4, 3))
    lazy = nn.LazyLinear(3)
    spmd.load(tmp_path, like=lazy)
    assert lazy(torch.ones(2, 4)).shape == (2, 3)


# Mistakes


def save(tree):
    def body():
        spmd.save("nowhere/never", tree() if callable(tree) else tree)

    return body


def varying():
    return {"w": spt.varying(torch.ones(3), "a")}


def a_view():
    return {"w": spt.Parameter(torch.zeros(4, 6), P(None, "a")).detach().view(8, 3)}


def save_within(x):
    spmd.save("nowhere/never", {"w": x})
    return x.sum()


def of_a_body():
    kept: list[Any] = []
    on(lambda: kept.append(spt.Parameter(torch.ones(4), P("a"))), a=2)
    return kept[0]


MISTAKES = [
    Row(*row)
    for row in (
        (
            "a block that does not say so",
            lambda: on(save(varying), a=2),
            CheckpointError,
            "tree, the leaf 'w'",
            "Varying",
            "blocks that know their layout",
            "spt.PartitionedTensor.from_block(x, spec)",
        ),
        (
            "loading what varies",
            lambda: on(lambda: spmd.load(MISTAKES_FOLDER[0], like=varying()), a=2),
            CheckpointError,
            "like, the leaf 'w'",
            "Varying",
            "one tensor for all workers",
            "spt.mean(x, 'a')",
        ),
        (
            "a view of blocks",
            lambda: on(save(a_view), a=2),
            CheckpointError,
            "tree, the leaf 'w'",
            "a view of shape [8, 3]",
            "the shape [4, 6]",
            "x.reshape([4, 6])",
        ),
        (
            "blocks outside of bodies",
            lambda: spmd.save("nowhere/never", {"w": of_a_body()}),
            CheckpointError,
            "tree, the leaf 'w'",
            "outside of any body",
            "all workers",
            "call spmd.save in the body",
        ),
        *(
            (
                name,
                lambda x=x: spmd.save("nowhere/never", {"w": x()}),
                CheckpointError,
                "tree, the leaf 'w'",
                got,
                need,
                mend,
            )
            for name, x, got, need, mend in (
                ("sparse", lambda: torch.eye(3).to_sparse(), "torch.sparse_coo", "a dense tensor", "x.to_dense()"),
                (
                    "nested",
                    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
                    "a nested tensor",
                    "a dense tensor",
                    "x.unbind()",
                ),
                (
                    "quantized",
                    lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
                    "a quantized tensor",
                    "numbers",
                    "x.dequantize()",
                ),
                (
                    "meta",
                    lambda: torch.ones(2, device="meta"),
                    "on the device meta",
                    "memory",
                    'module.to_empty(device="cpu")',
                ),
                (
                    "complex32",
                    lambda: torch.zeros(2, dtype=torch.complex32),
                    "torch.complex32",
                    "a dtype of NumPy",
                    "x.to(torch.complex64)",
                ),
                (
                    "lazy",
                    lambda: nn.LazyLinear(2).weight,
                    "a parameter without a shape",
                    "knows its shapes",
                    "call the module once",
                ),
            )
        ),
        (
            "inside torch.func",
            lambda: torch.func.grad(save_within)(torch.ones(2)),
            CheckpointError,
            "tree, the leaf 'w'",
            "inside a transformation of torch.func",
            "a tensor with values",
            "save outside",
        ),
    )
]
MISTAKES_FOLDER: list[Path] = []


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.quantize")
@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row.name)
def test_a_mistake_is_explained(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spmd.save(tmp_path / "saved", {"w": np.ones(3, np.float32)})
    MISTAKES_FOLDER[:] = [tmp_path / "saved"]
    with pytest.raises(row.error) as caught:
        row.call()
    for part, word in zip(parsed(caught.value), row[3:], strict=True):
        assert word in part, caught.value
    assert not list(tmp_path.glob("nowhere/never/*"))


def test_a_block_of_another_worker_is_refused(tmp_path):
    kept: list[Any] = []

    def body():
        if spmd.worker_index("a") == 1:
            kept.append(spt.Parameter(torch.ones(4), P("a")))
        spmd.psum(spt.varying(torch.ones(()), "a"), "a")
        spmd.save(tmp_path, {"w": kept[0]})

    with pytest.raises((LayoutError, CheckpointError), match="the worker that it was made on"):
        on(body, a=2)


def test_tensors_of_torch_distributed_are_refused(tmp_path):
    distributed = pytest.importorskip("torch.distributed.tensor")
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        x = distributed.distribute_tensor(torch.ones(4), mesh, [distributed.Shard(0)])
        with pytest.raises(CheckpointError) as caught:
            spmd.save(tmp_path / "c", {"w": x})
    finally:
        dist.destroy_process_group()
    assert "DTensor" in parsed(caught.value).got
    assert "x.full_tensor()" in parsed(caught.value).mend


@pytest.mark.parametrize("parted", [True, False])
def test_copies_of_a_block_are_compared(parted, tmp_path):
    """A worker whose copy of a block has gone another way is found, whichever worker writes the block."""

    def body():
        p = spt.Parameter(torch.arange(6.0), P("a"))
        if parted and spmd.worker_index("b") == 1 and spmd.worker_index("a") == 1:
            with torch.no_grad():
                p.block().add_(1)
        spmd.save(tmp_path, {"p": p})

    with spmd.Mesh(a=2, b=2):
        save = spt.map(body, in_specs=(), out_specs=None)
        if not parted:
            return save()
        with pytest.raises(
            CheckpointError, match=r"'p'\n  got:    values that differ between worker 2 .* and worker 3"
        ):
            save()
