"""Train a classifier of handwritten digits on a 2 x 2 mesh of workers.

    python examples/digits.py                     four virtual workers in this process
    mpiexec -n 4 python examples/digits.py        four processes: the same file, the same losses, bit for bit
    python examples/digits.py --data 3 --model 1  another mesh; it need not divide the batch or the widths

The batch is split over the mesh axis `data`, the hidden layers over the axis `model`.
"""

import argparse
import shutil
import sys
import time

import numpy as np
import optree
from sklearn.datasets import load_digits

import spmd
from spmd import P
# beside

# How the parameters of two layers lie on the mesh. The first is split by columns: each worker along `model` has some
# of the hidden features, bias included. The second is split by rows, to match: each worker turns its features into
# a partial product, and one sum over `model` makes them whole. Between the two layers nothing needs to be sent.
PAIR = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None), "b2": P()}


def network(params, x):
    """Logits of this worker's share of the batch, equal on all workers along `model`."""
    for k, pair in enumerate(params):
        x = spmd.relu(x) if k else x
        hidden = spmd.relu(x @ pair["w1"] + pair["b1"])
        # The second bias comes after the sum: before it, every worker would add it once.
        x = spmd.psum(hidden @ pair["w2"], "model") + pair["b2"]
    return x


def local_loss(params, x, labels):
    """The mean cross-entropy over the whole batch; every scan counts once, also where the shares are uneven."""
    return spmd.mean(spmd.softmax_cross_entropy(network(params, x), labels), "data")


def draw_params(widths, rng, dtype):
    """Random weights, as large as ReLUs like them (He et al., 2015), and zero biases: one dict per pair of layers."""

    def weight(n, m):
        return rng.normal(0, np.sqrt(2 / n), (n, m)).astype(dtype)

    return [
        {"w1": weight(n, m), "b1": np.zeros(m, dtype), "w2": weight(m, k), "b2": np.zeros(k, dtype)}
        for n, m, k in zip(widths[:-2:2], widths[1::2], widths[2::2], strict=True)
    ]


def load_data(rng, dtype):
    """The 1797 scans of 8 x 8 pixels as rows of numbers from 0 to 1, and their labels: 80 % to train, 20 % to test."""
    digits = load_digits()
    order = rng.permutation(len(digits.target))
    x, labels = (digits.data[order] / 16).astype(dtype), digits.target[order]
    n = len(x) // 5
    return x[n:], labels[n:], x[:n], labels[:n]


def show_progress(done, text, end_of_epoch):
    """A bar that is drawn over and over on a terminal; elsewhere a plain line per epoch."""
    if not spmd.is_main():
        return
    if sys.stdout.isatty():
        bar = ("━" * round(30 * done)).ljust(30, "┈")
        print(f"\r{bar} {text}", end="\n" if done == 1 else "", flush=True)
    elif end_of_epoch:
        print(text, flush=True)


def largest_difference(tree, other):
    """The largest difference of two trees of arrays, relative to the largest entry of each array."""
    return max(optree.tree_leaves(optree.tree_map(lambda a, b: abs(a - b).max() / (abs(b).max() or 1), tree, other)))


def main():
    args = parse_args()
    rng = np.random.default_rng(args.seed)  # every process draws the same numbers
    x, labels, x_test, labels_test = load_data(rng, args.dtype)
    single = draw_params([64, *args.hidden, 10], rng, args.dtype)
    optimizer = (
        spmd.optim.sgd(args.lr or 0.1, momentum=0.9) if args.optimizer == "sgd" else spmd.optim.adam(args.lr or 2e-3)
    )

    specs = [PAIR] * len(single)
    loss = spmd.map(local_loss, in_specs=(specs, P("data"), P("data")), out_specs=P())
    predict = spmd.map(network, in_specs=(specs, P("data")), out_specs=P("data"))
    loss_and_grads = spmd.value_and_grad(loss)

    with spmd.Mesh(data=args.data, model=args.model, scheduler=args.scheduler) as mesh:
        # Each worker keeps its blocks of the parameters. Gradients lie as the parameters do, so updates are local.
        params = [{name: spmd.put(w, PAIR[name]) for name, w in pair.items()} for pair in single]
        state = optimizer.init(params)

        x0, labels0 = x[: args.batch], labels[: args.batch]
        with spmd.ledger() as log:
            _, grads = loss_and_grads(params, x0, labels0)
        grads = optree.tree_map(lambda g: g.numpy(), grads)
        with spmd.Mesh(data=1, model=1, transport="local"):
            _, single_grads = loss_and_grads(single, x0, labels0)
        difference = largest_difference(grads, single_grads)

        start = time.perf_counter()
        accuracy = 0.0
        for epoch in range(1, args.epochs + 1):
            order = rng.permutation(len(x))
            total = 0.0
            for k in range(0, len(x), args.batch):
                rows = order[k : k + args.batch]
                value, grads = loss_and_grads(params, x[rows], labels[rows])
                params, state = optimizer.update(grads, state, params)
                total += float(value) * len(rows)
                seen = k + len(rows)
                if seen == len(x):
                    accuracy = np.mean(predict(params, x_test).numpy().argmax(1) == labels_test)
                mean = repr(total / seen) if args.full_precision else f"{total / seen:.4f}"
                text = f"epoch {epoch:2}/{args.epochs}  loss {mean}  test accuracy {accuracy:6.1%}"
                show_progress((epoch - 1 + seen / len(x)) / args.epochs, text, seen == len(x))
        seconds = time.perf_counter() - start
        logits = predict(params, x0)
        if spmd.is_main():
            print(f"{seconds:.1f} s, difference {difference:.1e}, {log.messages} messages")
            print(log.first.axes)


def parse_args():
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits on a mesh of workers.")
    parser.add_argument("--data", type=int, default=2, help="workers that share a batch (default: 2)")
    parser.add_argument("--model", type=int, default=2, help="workers that share a layer (default: 2)")
    parser.add_argument("--batch", type=int, default=64, help="scans per step (default: 64)")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 64, 128])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--scheduler", choices=["auto", "lockstep", "threads"])
    parser.add_argument("--full-precision", action="store_true")
    args = parser.parse_args()
    return args


if __name__ == "__main__":
    main()
