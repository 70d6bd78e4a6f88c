"""Train a classifier of handwritten digits on a 2 x 2 mesh of workers.

    python examples/digits.py                      four virtual workers in this process
    mpiexec -n 4 python examples/digits.py         four processes: the same file, the same losses to the last bit
    python examples/digits.py --data 3 --model 1   another mesh; it need not divide the batch or the widths
    python examples/digits.py --device cuda        the workers' blocks on a GPU, or on several
    python examples/digits.py --checkpoints run    save each epoch; another call goes on from there, on any mesh
    python examples/digits.py --picture a.png      draws losses, some scans, and where the weights lie

The batch is split over the mesh axis `data`, the layers over the axis `model`.
"""

import argparse
import itertools
import shutil
import sys
import time
from pathlib import Path

import numpy as np

import spmd
from spmd import P
from spmd.layout_picture import side_by_side

DIGITS = Path(__file__).with_name("digits.npz")  # see DATA.md

# The specs of the weight and the bias of a layer. Layers are in pairs. The first of a pair is split by columns: every
# worker along `model` computes some of the hidden features. The second is split by rows: every worker multiplies its
# features, and one sum over `model` adds the partial products. Between the two nothing is sent.
COLUMN = (P(None, "model"), P("model"))
ROW = (P("model", None), P())


def network(params, x):
    """The logits of this worker's share of the batch: the same on all workers along `model`."""
    for k, ((w1, b1), (w2, b2)) in enumerate(zip(params[::2], params[1::2], strict=True)):
        x = spmd.relu(x) if k > 0 else x
        hidden = spmd.relu(x @ w1 + b1)
        # The second bias is added after the sum: before it, every worker would add it once.
        x = spmd.psum(hidden @ w2, "model") + b2
    return x


def local_loss(params, x, labels):
    """The mean cross-entropy over the whole batch: every scan counts once, however uneven the shares are."""
    return spmd.mean(spmd.softmax_cross_entropy(network(params, x), labels), "data")


def draw_params(widths, rng, dtype):
    """For each layer random weights of the size that suits ReLUs (He et al., 2015), and zero biases."""
    return [
        (rng.normal(0, np.sqrt(2 / n), (n, m)).astype(dtype), np.zeros(m, dtype)) for n, m in itertools.pairwise(widths)
    ]


def load_data(rng, dtype):
    """1797 scans of 8 x 8 pixels as rows of numbers from 0 to 1, and their labels: 80 % to train on, 20 % to test."""
    digits = np.load(DIGITS)
    order = rng.permutation(len(digits["labels"]))
    x = (digits["images"].reshape(-1, 64)[order] / 16).astype(dtype)
    labels = digits["labels"].astype(int)[order]
    n = len(x) // 5
    return x[n:], labels[n:], x[:n], labels[:n]


def main():
    args = parse_args()
    rng = np.random.default_rng(args.seed)  # every process draws the same numbers
    x, labels, x_test, labels_test = load_data(rng, args.dtype)
    drawn = draw_params([64, *args.hidden, 10], rng, args.dtype)
    if args.optimizer == "sgd":
        optimizer = spmd.optim.sgd(args.lr or 0.05, momentum=0.9)
    else:
        optimizer = spmd.optim.adam(args.lr or 0.002)

    specs = [COLUMN, ROW] * (len(drawn) // 2)
    loss = spmd.map(local_loss, in_specs=(specs, P("data"), P("data")), out_specs=P())
    predict = spmd.map(network, in_specs=(specs, P("data")), out_specs=P("data"))
    loss_and_grads = spmd.value_and_grad(loss)

    def accuracy_of(params):
        return np.mean(predict(params, x_test).numpy().argmax(axis=1) == labels_test)

    with spmd.Mesh(data=args.data, model=args.model, scheduler=args.scheduler, device=args.device) as mesh:
        # Every worker keeps its blocks. A gradient lies as its parameter does, so that an update sends nothing.
        params = spmd.put(drawn, specs)
        state = optimizer.init(params)

        # The order of the scans belongs to the state of a run: a generator is loaded in place.
        first, checkpoints = 1, spmd.io.CheckpointManager(args.checkpoints) if args.checkpoints else None
        if checkpoints is not None and checkpoints.latest() is not None:
            saved = checkpoints.restore(like={"params": params, "state": state, "rng": rng, "epoch": 0})
            params, state, first = saved["params"], saved["state"], saved["epoch"] + 1

        # One step to look at: what it sends, and whether its gradients are those of one worker that holds everything.
        batch, batch_labels = x[: args.batch], labels[: args.batch]
        with spmd.ledger() as log:
            _, grads = loss_and_grads(params, batch, batch_labels)
            optimizer.update(grads, state, params)
        with spmd.Mesh(data=1, model=1, transport="local", device=args.device):
            _, grads_of_one = loss_and_grads(drawn, batch, batch_labels)
        difference = largest_difference(spmd.tree.map(lambda g: g.numpy(), grads), grads_of_one)

        losses = []
        start, accuracy = time.perf_counter(), accuracy_of(params)
        for epoch in range(first, args.epochs + 1):
            order, total = rng.permutation(len(x)), 0.0
            for k in range(0, len(x), args.batch):
                rows = order[k : k + args.batch]
                value, grads = loss_and_grads(params, x[rows], labels[rows])
                params, state = optimizer.update(grads, state, params)
                # The sum of the losses is an array too: its number is asked for when it is shown, and not before,
                # because on a GPU that waits for all that is under way.
                total = total + value.astype(float) * len(rows)
                seen = k + len(rows)
                accuracy = accuracy_of(params) if seen == len(x) else accuracy
                show_progress(args, mesh, epoch, seen / len(x), total / seen, accuracy)
            losses.append(float(total) / len(x))
            if checkpoints is not None:
                checkpoints.save(epoch, {"params": params, "state": state, "rng": rng, "epoch": epoch})
        seconds = time.perf_counter() - start

        arrays = {f"{name}{k}": a for k, layer in enumerate(params, 1) for name, a in zip("wb", layer, strict=True)}
        arrays |= {"batch": spmd.put(batch, P("data")), "logits": predict(params, batch)}
        guesses = predict(params, x_test[:12]).numpy().argmax(axis=1)
        if args.picture and spmd.is_main():
            draw(args.picture, losses, x_test, labels_test, guesses, params[0][0], params[1][0])
        if spmd.is_main():
            report(mesh, seconds, accuracy, difference, log, arrays)


def largest_difference(tree, other):
    """The largest difference between two trees of arrays, relative to the largest entry of each array."""
    relative = spmd.tree.map(lambda a, b: abs(a - b).max() / (abs(b).max() or 1), tree, other)
    return max(spmd.tree.leaves(relative))


def show_progress(args, mesh, epoch, part, loss, accuracy):
    """A bar that is redrawn after every step on a terminal; elsewhere, and in full precision, a line per epoch."""
    # The processes of an MPI job may see a terminal where the job itself has none.
    redrawn = sys.stdout.isatty() and mesh.transport.name == "local" and not args.full_precision
    if not spmd.is_main() or not (redrawn or part == 1):
        return
    loss = float(loss)
    text = f"epoch {epoch:2}/{args.epochs}  loss {repr(loss) if args.full_precision else format(loss, '.4f')}"
    text += f"  test accuracy {accuracy:.1%}"
    if redrawn:
        done = (epoch - 1 + part) / args.epochs
        bar = "█░" if writes_unicode() else "#."
        print(f"\r{bar[0] * round(30 * done):{bar[1]}<30} {text} ", end="\n" if done == 1 else "", flush=True)
    else:
        print(text, flush=True)


def report(mesh, seconds, accuracy, difference, log, arrays):
    """What came of it, what it cost, and a picture of how each array lies on the mesh."""
    sums = [f"{n} over {' and '.join(axes)}" for (operator, axes), n in log.first.axes.items() if operator == "Sum"]
    print(f"\n{mesh}, {mesh.transport.name} transport, trained for {seconds:.1f} s")
    print(f"test accuracy   {accuracy:.1%}")
    print(f"gradients       those of one worker, up to {difference:.1e} of their size")
    print(f"sent per step   {log.messages} messages of {log.bytes} bytes together, by worker 0")
    print(f"sums per step   {', '.join(sums)}\n")
    pictures = [a.layout.picture(title, ascii=not writes_unicode()) for title, a in arrays.items()]
    print(side_by_side(pictures, width=shutil.get_terminal_size((120, 24)).columns))


def draw(path, losses, scans, labels, guesses, first, second):
    """The losses, some scans that were not trained on, and the blocks of the first two weights."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=(1, 1, 1.2))
    curve = left.subplots()
    curve.semilogy(range(1, len(losses) + 1), losses, ".-", color="black")
    curve.set(title="loss", xlabel="epoch")
    curve.xaxis.get_major_locator().set_params(integer=True)
    middle.suptitle("test scans, as the network reads them", fontsize="medium")
    for ax, scan, label, guess in zip(middle.subplots(3, 4).flat, scans, labels, guesses, strict=False):
        ax.imshow(scan.reshape(8, 8), cmap="gray_r")
        ax.set_title(f"{guess}", fontsize="small", color="black" if guess == label else "#D55E00", pad=2)
        ax.set_axis_off()
    for ax, name, weight in zip(right.subplots(1, 2), ("columns", "rows"), (first, second), strict=True):
        spmd.plot.layout(weight, title=f"weights {' × '.join(map(str, weight.shape))}, by {name}", ax=ax)
    figure.savefig(path, dpi=120)


def writes_unicode():
    return "utf" in (sys.stdout.encoding or "").lower()


def parse_args():
    parser = argparse.ArgumentParser(
        description="Train a classifier of handwritten digits on a mesh of workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=int, default=2, help="workers that share a batch")
    parser.add_argument("--model", type=int, default=2, help="workers that share a layer")
    parser.add_argument("--batch", type=int, default=64, help="scans per step")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 64, 128], help="widths, an odd number of them")
    parser.add_argument("--epochs", type=int, default=15, help="how often to go through the data")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd", help="sgd with momentum 0.9, or Adam")
    parser.add_argument("--lr", type=float, help="learning rate; None means 0.05 for sgd, 0.002 for adam")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the parameters and the order of the scans")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64", help="of data and parameters")
    parser.add_argument(
        "--scheduler", choices=["auto", "lockstep", "threads"], help="of virtual workers; None: by itself"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="where the blocks lie; None: on the CPU")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="where to save each epoch, and to go on from")
    parser.add_argument("--picture", metavar="FILE", help="draw losses, some scans, and where the weights lie")
    parser.add_argument("--full-precision", action="store_true", help="print losses to the last bit, a line per epoch")
    args = parser.parse_args()
    if len(args.hidden) % 2 == 0 or min(args.hidden) < 1 or args.batch < 1:
        parser.error("layers come in pairs: --hidden takes an odd number of widths; these and --batch are at least 1")
    return args


if __name__ == "__main__":
    main()
