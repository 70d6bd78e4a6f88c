"""Layers of networks: training a classifier on split batches (W1), and a block whose weights are split (W2).

W1: 784-512-512-10, ReLU, the mean cross-entropy of the whole batch, its gradients and a step of plain descent; each
step goes on from the parameters of the one before. The batch is split over two workers. Ours: two virtual workers, and
two processes, with spmd.jit as JAX has its own. torch: DDP; gradients by hand into one flat tensor and one sum of it,
by gloo and by mpi4py; each with two processes of one thread; one process of two threads, that sends nothing; and our
bridge, on two virtual workers.
The limit is what NumPy and mpi4py take where every array is there beforehand, and all is written out by hand.

W2: 1024-4096-1024 on 512 tokens with GELU in its tanh form, the gradients of all five arrays. The first weight is split
by columns, the second by rows. torch: DTensor; the two sums by hand, that of backward sent while the gradient of the
weight is made; one process of two threads. The limit is the six products of matrices alone, two of them forward, by
NumPy's BLAS on two threads, into memory that is there.

JAX is jitted, in W1 with its parameters donated: one device, which uses all cores, and two, where the faster of sharded
arrays and of shard_map takes part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.contest import (
    ONE_THREAD,
    TWO_DEVICES,
    Builders,
    Case,
    Section,
    by_steps,
    faster,
    in_two_threads,
    jitted,
    repeated,
    room,
    torch_with,
)

WIDTHS = (784, 512, 512, 10)
RATE = 0.01
TORCH: dict[str, Any] = {"needs": ("torch",), "env": {"OMP_NUM_THREADS": "2"}}
TORCHRUN: dict[str, Any] = {"launcher": "torchrun", "processes": 2, "needs": ("torch",), "env": ONE_THREAD}

W1 = Section("w1", "steps of training a classifier, batches split over two workers", 1e-4, memory=True)
W2 = Section("w2", "two layers whose weights are split over two workers, value and gradients", 1e-4, memory=True)


# W1


def initial() -> list[np.ndarray]:
    """Weights and biases in turn."""
    rng = np.random.default_rng(0)
    shapes = [s for n, m in itertools.pairwise(WIDTHS) for s in ((n, m), (m,))]
    return [(rng.standard_normal(s) * np.sqrt(2 / s[0])).astype(np.float32) for s in shapes]


def minibatch(batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((batch, WIDTHS[0])).astype(np.float32), rng.integers(0, WIDTHS[-1], batch)


def training(
    start: Callable[[], Any],
    step: Callable[[Any], tuple[Any, Any]],
    whole: Callable[[Any], Sequence[np.ndarray]],
    drop: Callable[[], Any] = lambda: None,
    kept: int = 0,
) -> Case:
    """start: the parameters at first. step: these to the loss and the next. whole: these to arrays like `initial`.
    kept: the bytes of the memory for gradients, where it stays from step to step."""
    once, third = by_steps(start, step)

    def tell():
        value, params = third()
        return told(value, whole(params))

    return Case(repeated(once), tell, drop, kept)


def told(value: Any, trained: Sequence[np.ndarray]) -> list[Any]:
    """The loss, and how far the parameters have gone: they themselves hardly differ from those at first."""
    return [value, *(a - b for a, b in zip(trained, initial(), strict=True))]


def batches(case: Callable[[int], Case], quick: bool) -> Builders:
    return {f"batch {n}": lambda n=n: case(n) for n in ((64, 256) if quick else (256, 4096))}


def trained_spmd(batch: int, transport: str = "local") -> Case:
    import spmd
    from spmd import P
    from spmd.functions import bias_act, softmax_cross_entropy

    def local_loss(params, x, labels):
        *hidden, (w, b) = zip(params[::2], params[1::2], strict=True)
        for v, a in hidden:
            x = bias_act(x @ v, a, "relu")
        return softmax_cross_entropy(x @ w + b, labels, reduction="mean", batch_axis_name="data")

    mesh = spmd.Mesh(data=2, transport=transport)
    loss = spmd.jit(mesh.map(local_loss, in_specs=(P(), P("data"), P("data")), out_specs=P()))
    loss_and_grads = spmd.value_and_grad(loss)
    optimizer = spmd.optim.sgd(RATE)
    with mesh:
        x, labels = spmd.put(minibatch(batch), P("data"))

    def start():
        with mesh:
            params = spmd.put(initial(), P())
        return params, optimizer.init(params)

    def step(trained):
        params, state = trained
        value, grads = loss_and_grads(params, x, labels)
        return value, optimizer.update(grads, state, params, donate=True)

    # What a process has lent to others it keeps until they meet again: gradients of the last step, in the account.
    meet = mesh.map(lambda x: spmd.psum(x, "data"), in_specs=P("data"), out_specs=P())
    return training(start, step, lambda trained: [p.numpy() for p in trained[0]], drop=lambda: meet(np.zeros(2)))


@W1.contestant("spmd, NumPy alone", env={"SPMD_NUMBA": "0"})
@W1.contestant("spmd")
def _(quick: bool) -> Builders:
    return batches(trained_spmd, quick)


@W1.contestant("spmd, MPI", launcher="mpiexec", processes=2, env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return batches(lambda batch: trained_spmd(batch, "mpi"), quick)


def trained_numpy(batch: int) -> Case:
    """The fewest calls of NumPy, BLAS and MPI that make a step."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    n = batch // 2
    x, labels = (a[n * comm.rank : n * comm.rank + n] for a in minibatch(batch))
    first = np.concatenate([a.reshape(-1) for a in initial()])
    flat, (own, sums) = room(first.shape), (room(len(first) + 1) for _ in range(2))  # and the loss
    ends = np.cumsum([0, *(a.size for a in initial())])
    params, grads = (
        [whole[i:j].reshape(a.shape) for a, (i, j) in zip(initial(), itertools.pairwise(ends), strict=True)]
        for whole in (flat, own)
    )
    hidden, errors = ([room((n, m)) for m in WIDTHS[1:]] for _ in range(2))
    layers, each = range(len(WIDTHS) - 1), np.arange(n)

    def start():
        flat[:] = first

    def step(_):
        h = x
        for k in layers:
            z = np.matmul(h, params[2 * k], out=hidden[k])
            z += params[2 * k + 1]
            h = np.maximum(z, 0, out=z) if k < layers[-1] else z
        h -= h.max(axis=1, keepdims=True)
        g = np.exp(h, out=errors[-1])
        total = g.sum(axis=1, keepdims=True)
        own[-1] = (np.log(total[:, 0]) - h[each, labels]).sum() / batch
        g /= total
        g[each, labels] -= 1
        g *= np.float32(1 / batch)
        for k in reversed(layers):
            np.matmul((hidden[k - 1] if k else x).T, g, out=grads[2 * k])
            np.sum(g, axis=0, out=grads[2 * k + 1])
            if k:
                g = np.matmul(g, params[2 * k].T, out=errors[k - 1])
                g *= hidden[k - 1] > 0
        comm.Allreduce(own, sums)
        value = sums[-1]
        np.multiply(sums, np.float32(RATE), out=sums)
        np.subtract(flat, sums[:-1], out=flat)
        return value, None

    kept = sum(a.nbytes for a in (own, sums, *hidden, *errors))
    return training(start, step, lambda _: [p.copy() for p in params], kept=kept)


@W1.contestant("limit", launcher="mpiexec", processes=2, env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return batches(trained_numpy, quick)


def trained_jax(devices: int, batch: int) -> Case:
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    def loss(params, x, labels):
        *hidden, (w, b) = zip(params[::2], params[1::2], strict=True)
        for v, a in hidden:
            x = jax.nn.relu(x @ v + a)
        logits = jax.nn.log_softmax(x @ w + b)
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))

    def update(params, grads):
        return [p - RATE * g for p, g in zip(params, grads, strict=True)]

    def step(params, x, labels):
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        return value, update(params, grads)

    def local(params, x, labels):
        own = lax.pcast(params, "data", to="varying")
        value, grads = lax.pmean(jax.value_and_grad(loss)(own, x, labels), "data")
        return value, update(params, grads)

    def case(step, copies=None, rows=None):
        step = jax.jit(step, donate_argnums=0)
        x, labels = (jax.device_put(a, rows) for a in minibatch(batch))
        return training(
            lambda: jax.device_put([jnp.array(p) for p in initial()], copies),
            lambda params: jax.block_until_ready(step(params, x, labels)),
            lambda params: [np.asarray(p) for p in params],
        )

    if devices == 1:
        return case(step)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_hand = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    return faster(case(step, *shardings), case(by_hand, *shardings))


@W1.contestant("jax, 1 device", needs=("jax",))
def _(quick: bool) -> Builders:
    return batches(lambda batch: trained_jax(1, batch), quick)


@W1.contestant("jax, 2 devices", needs=("jax",), env=TWO_DEVICES)
def _(quick: bool) -> Builders:
    return batches(lambda batch: trained_jax(2, batch), quick)


def network(torch: Any) -> Any:
    """Layers of torch, whose weights are transposed."""
    layers = [torch.nn.Linear(n, m) for n, m in itertools.pairwise(WIDTHS)]
    return torch.nn.Sequential(*(f for layer in layers for f in (layer, torch.nn.ReLU(inplace=True))))[:-1]


def load(torch: Any, net: Any) -> None:
    with torch.no_grad():
        for p, a in zip(net.parameters(), initial(), strict=True):
            p.copy_(torch.from_numpy(a).T if a.ndim == 2 else torch.from_numpy(a))


def unloaded(net: Any) -> list[np.ndarray]:
    return [p.detach().numpy().T.copy() for p in net.parameters()]


def rows_of(torch: Any, batch: int, rank: int, processes: int) -> Any:
    n = batch // processes
    return [torch.from_numpy(a[n * rank : n * rank + n]) for a in minibatch(batch)]


def trained_module(batch: int, processes: int) -> Case:
    """A module of torch's and its optimiser, in one process or, as DDP, in several."""
    torch = torch_with(2 // processes, group=processes > 1)
    dist, rank = torch.distributed, torch.distributed.get_rank() if processes > 1 else 0
    net = network(torch)
    model = net
    if processes > 1:
        model = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, fused=True)
    x, labels = rows_of(torch, batch, rank, processes)

    def start():
        load(torch, net)

    def step(_):
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        value = loss.detach() / processes
        # The loss of the whole batch comes while backward goes on.
        request = dist.all_reduce(value, async_op=True) if processes > 1 else None
        loss.backward()
        optimizer.step()
        if request is not None:
            request.wait()
        return value, None

    # DDP's gradients lie in buckets of its own.
    kept = sum(4 * p.numel() for p in net.parameters()) if processes > 1 else 0
    return training(start, step, lambda _: unloaded(net), lambda: optimizer.zero_grad(set_to_none=True), kept)


@W1.contestant("torch DDP", **TORCHRUN)
def _(quick: bool) -> Builders:
    return batches(lambda batch: trained_module(batch, 2), quick)


@W1.contestant("torch, 1 process", **TORCH)
def _(quick: bool) -> Builders:
    return batches(lambda batch: trained_module(batch, 1), quick)


def trained_flat(torch: Any, batch: int, rank: int, add: Callable[[Any], Any]) -> Case:
    """Parameters in one flat tensor, gradients and the loss in another: one sum, one update, nothing copied."""
    shapes = [a.shape for a in initial()]
    sizes = [int(np.prod(s)) for s in shapes]
    flat, sums = torch.empty(sum(sizes)), torch.empty(sum(sizes) + 1)
    params, grads = (
        [a.view(s) for a, s in zip(whole.split(sizes), shapes, strict=True)] for whole in (flat, sums[:-1])
    )
    x, labels = rows_of(torch, batch, rank, 2)
    each = torch.arange(len(x))
    last = len(params) - 2

    def start():
        flat.copy_(torch.from_numpy(np.concatenate([a.reshape(-1) for a in initial()])))

    def step(_):
        inputs = [x]
        for k in range(0, last, 2):
            inputs.append(torch.addmm(params[k + 1], inputs[-1], params[k]).relu_())
        logs = torch.addmm(params[-1], inputs[-1], params[-2]).log_softmax(1)
        sums[-1] = -logs[each, labels].sum() / batch
        g = logs.exp_()
        g[each, labels] -= 1
        g /= batch
        for k in range(last, -1, -2):
            h = inputs.pop()
            torch.mm(h.T, g, out=grads[k])
            torch.sum(g, 0, out=grads[k + 1])
            if k > 0:
                g = torch.mm(g, params[k].T).mul_(h > 0)
        add(sums)
        flat.add_(sums[:-1], alpha=-RATE)
        return sums[-1], None

    return training(start, step, lambda _: [p.numpy() for p in params], kept=sums.nbytes)


def trained_gloo(batch: int) -> Case:
    torch = torch_with(1, group=True)
    return trained_flat(torch, batch, torch.distributed.get_rank(), torch.distributed.all_reduce)


@W1.contestant("torch, by hand", **TORCHRUN)
def _(quick: bool) -> Builders:
    return batches(trained_gloo, quick)


def trained_mpi(batch: int) -> Case:
    from mpi4py import MPI

    torch, comm = torch_with(1), MPI.COMM_WORLD
    return trained_flat(torch, batch, comm.rank, lambda sums: comm.Allreduce(MPI.IN_PLACE, sums.numpy()))


@W1.contestant("torch + mpi4py", launcher="mpiexec", processes=2, needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return batches(trained_mpi, quick)


def trained_bridge(batch: int) -> Case:
    """torch on virtual workers; what each of them holds lives from one call to the next."""
    torch = torch_with(1)

    import spmd
    from spmd.bridge import torch as spt

    mesh = spmd.Mesh(data=2, transport="local")
    held: dict[int, Any] = {}
    seconds: dict[int, float] = {}

    def made():
        rank = spt.worker_index("data")
        model = spt.data_parallel(network(torch), "data")
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, fused=True)
        x, labels = (spt.varying(a, "data") for a in rows_of(torch, batch, rank, 2))
        load(torch, model.module)

        def step():
            optimizer.zero_grad(set_to_none=True)
            losses = torch.nn.functional.cross_entropy(model(x), labels, reduction="none")
            loss = spt.mean(losses, "data")
            loss.backward()
            optimizer.step()
            return loss.detach()

        held[rank] = model, step

    def worked(count):
        rank = spt.worker_index("data")
        seconds[rank] = repeated(held[rank][1])(count)

    def trained():
        model, step = held[spt.worker_index("data")]
        load(torch, model.module)
        *_, value = (step() for _ in range(3))
        return float(value), unloaded(model.module)

    def in_body(f, *args):
        return spt.map(f, (None,) * len(args), None, mesh=mesh)(*args)

    def run(count):
        in_body(worked, count)
        return max(seconds.values())

    in_body(made)
    return Case(run, lambda: told(*in_body(trained)))


@W1.contestant("spmd, torch bridge", needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return batches(trained_bridge, quick)


# W2


def block(quick: bool) -> list[np.ndarray]:
    """x, w1, b1, w2, b2, and the cotangent of the result."""
    tokens, width, hidden = (64, 128, 512) if quick else (512, 1024, 4096)
    rng = np.random.default_rng(0)
    shapes = (tokens, width), (width, hidden), (hidden,), (hidden, width), (width,), (tokens, width)
    scales = 1, width**-0.5, 1, hidden**-0.5, 1, 1
    return [(c * rng.standard_normal(s)).astype(np.float32) for c, s in zip(scales, shapes, strict=True)]


def blocks(case: Callable[[bool], Case], quick: bool) -> Builders:
    x, w1, *_ = block(quick)
    return {f"{len(x)} tokens, {len(w1)}-{len(w1.T)}-{len(w1)}": lambda: case(quick)}


def block_spmd(quick: bool) -> Case:
    import spmd
    from spmd import P
    from spmd.functions import bias_act

    def local(x, w1, b1, w2, b2, c):
        y = spmd.psum(bias_act(x @ w1, b1, "gelu_tanh") @ w2, "model") + b2
        return np.sum(y * c)

    specs = P(), P(None, "model"), P("model"), P("model"), P(), P()
    mesh = spmd.Mesh(model=2, transport="local")
    step = spmd.value_and_grad(mesh.map(local, in_specs=specs, out_specs=P()), tuple(range(5)))
    with mesh:
        args = spmd.put(tuple(block(quick)), specs)

    def tell():
        value, grads = step(*args)
        return [value, *map(np.asarray, grads)]

    return Case(repeated(lambda: step(*args)), tell)


@W2.contestant("spmd, NumPy alone", env={"SPMD_NUMBA": "0"})
@W2.contestant("spmd")
def _(quick: bool) -> Builders:
    return blocks(block_spmd, quick)


def block_numpy(quick: bool) -> Case:
    """What both workers multiply, each in a thread."""
    x, w1, _, w2, _, g = block(quick)
    halves = [
        (np.ascontiguousarray(u), np.ascontiguousarray(v))
        for u, v in zip(np.split(w1, 2, 1), np.split(w2, 2), strict=True)
    ]
    rooms = [
        [room(s) for s in ((len(x), len(v)), x.shape, v.shape, (len(x), len(v)), u.shape, x.shape)] for u, v in halves
    ]

    def multiply(k: int) -> None:
        (u, v), (h, y, dv, dh, du, dx) = halves[k], rooms[k]
        np.matmul(x, u, out=h)
        np.matmul(h, v, out=y)
        np.matmul(h.T, g, out=dv)
        np.matmul(g, v.T, out=dh)
        np.matmul(x.T, dh, out=du)
        np.matmul(dh, u.T, out=dx)

    return Case(repeated(in_two_threads(multiply)), list)


@W2.contestant("limit", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return blocks(block_numpy, quick)


def block_jax(devices: int, quick: bool) -> Case:
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    def value(x, w1, b1, w2, b2, c, add=lambda y: y):
        y = add(jax.nn.gelu(x @ w1 + b1, approximate=True) @ w2) + b2
        return jnp.sum(y * c)

    def local(*args):
        return value(*args, add=lambda y: lax.psum(y, "model"))

    def case(value, *args):
        return jitted(jax.value_and_grad(value, tuple(range(5))), *args)

    if devices == 1:
        return case(value, *map(jnp.asarray, block(quick)))
    specs = P(), P(None, "model"), P("model"), P("model"), P(), P()
    mesh = Mesh(np.array(jax.devices()), ("model",))
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(block(quick), specs, strict=True)]
    by_hand = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    return faster(case(value, *args), case(by_hand, *args))


@W2.contestant("jax, 1 device", needs=("jax",))
def _(quick: bool) -> Builders:
    return blocks(lambda quick: block_jax(1, quick), quick)


@W2.contestant("jax, 2 devices", needs=("jax",), env=TWO_DEVICES)
def _(quick: bool) -> Builders:
    return blocks(lambda quick: block_jax(2, quick), quick)


def block_dtensor(quick: bool) -> Case:
    torch = torch_with(1, group=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    x, w1, b1, w2, b2, c = map(torch.from_numpy, block(quick))
    net = torch.nn.Sequential(torch.nn.Linear(*w1.shape), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(*w2.shape))
    with torch.no_grad():
        for p, a in zip(net.parameters(), (w1, b1, w2, b2), strict=True):
            p.copy_(a.T if a.ndim == 2 else a)
    net = parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x.requires_grad_()

    def drop():
        x.grad = None
        net.zero_grad(set_to_none=True)

    def step():
        drop()
        value = (net(x) * c).sum()
        value.backward()
        return value

    def tell():
        value = step()
        return [value.detach().numpy(), x.grad.numpy(), *(p.grad.full_tensor().numpy().T for p in net.parameters())]

    return Case(repeated(step), tell, drop)


@W2.contestant("torch DTensor", **TORCHRUN)
def _(quick: bool) -> Builders:
    return blocks(block_dtensor, quick)


def block_torch(quick: bool, processes: int) -> Case:
    """Plain tensors, in one process or, with the two sums by hand, in two."""
    torch = torch_with(2 // processes, group=processes > 1)
    dist, several = torch.distributed, processes > 1
    x, w1, b1, w2, b2, c = map(torch.from_numpy, block(quick))
    if several:
        part = dist.get_rank()
        w1, b1, w2 = (a.chunk(2, k)[part].contiguous() for a, k in ((w1, 1), (b1, 0), (w2, 0)))
    args = [a.requires_grad_() for a in (x, w1, b1, w2, b2)]

    class Columns(torch.autograd.Function):
        """x @ w + b. The gradient of x is summed over the workers while that of w is made."""

        @staticmethod
        def forward(ctx, x, w, b):
            ctx.save_for_backward(x, w)
            return torch.addmm(b, x, w)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            dx = g @ w.T
            request = dist.all_reduce(dx, async_op=True)
            dw, db = x.T @ g, g.sum(0)
            request.wait()
            return dx, dw, db

    class Sum(torch.autograd.Function):
        """The sum of what the workers have, in the place of what this one has."""

        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            dist.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx, g):
            return g

    def step():
        h = Columns.apply(x, w1, b1) if several else torch.addmm(b1, x, w1)
        h = torch.nn.functional.gelu(h, approximate="tanh")
        y = Sum.apply(h @ w2).add_(b2) if several else torch.addmm(b2, h, w2)
        value = (y * c).sum()
        return value, torch.autograd.grad(value, args)

    def gathered(part, dim):
        """The whole of which the workers hold parts."""
        parts = [torch.empty_like(part) for _ in range(processes)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim)

    def tell():
        value, (dx, dw1, db1, dw2, db2) = step()
        if several:
            dw1, db1, dw2 = gathered(dw1, 1), gathered(db1, 0), gathered(dw2, 0)
        return [a.detach().numpy() for a in (value, dx, dw1, db1, dw2, db2)]

    return Case(repeated(step), tell)


@W2.contestant("torch, by hand", **TORCHRUN)
def _(quick: bool) -> Builders:
    return blocks(lambda quick: block_torch(quick, 2), quick)


@W2.contestant("torch, 1 process", **TORCH)
def _(quick: bool) -> Builders:
    return blocks(lambda quick: block_torch(quick, 1), quick)
