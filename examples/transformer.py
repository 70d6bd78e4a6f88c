"""Train a small transformer to write like Python's manual, a character at a time, on any mesh.

    python examples/transformer.py                       four virtual workers in this process
    mpiexec -n 4 python examples/transformer.py          four processes: the same file, the same losses
    python examples/transformer.py --data 3 --model 1    another mesh; it need not divide the batch or the heads
    python examples/transformer.py --picture text.png    draws the losses, and how arrays lie

Workers along `data` share a batch; workers along `model` share the heads of attention and the hidden features. The text
is that of `help()` in the standard library. A whole step is recorded once: loss, gradients, clipping, AdamW.
"""

import argparse
import time
from pydoc_data.topics import topics

import numpy as np

import spmd
from spmd import P
from spmd import functions as F

BATCH = P("data")
ROWS, COLUMNS = P("model"), P(None, "model")
LAYER_SPECS = {
    "norm1": P(),
    "norm2": P(),
    "qkv": P("model"),  # (heads, 3 * features of a head, features)
    "out": P(None, "model"),  # (features, heads, features of a head)
    "up": ROWS,
    "down": COLUMNS,
}


def drawn(rng, characters, args):
    """The first parameters, the same on every process, and their specs."""
    n, heads, of_head = args.features, args.heads, args.features // args.heads

    def normal(*shape, scale=n**-0.5):
        return rng.normal(0, scale, shape)

    small = (2 * n * args.layers) ** -0.5
    layers = [
        {
            "norm1": np.ones(n),
            "norm2": np.ones(n),
            "qkv": normal(heads, 3 * of_head, n),
            "out": normal(n, heads, of_head, scale=small),
            "up": normal(4 * n, n),
            "down": normal(n, 4 * n, scale=small),
        }
        for _ in range(args.layers)
    ]
    params = {"table": normal(characters, n), "places": normal(args.context, n), "norm": np.ones(n), "layers": layers}
    specs = {"table": P(), "places": P(), "norm": P(), "layers": [LAYER_SPECS] * args.layers}
    return params, specs


def attention(w, x, spec):
    """Each character looks at those before it, by the heads of this worker."""
    batch, steps, _ = x.shape
    heads, width, n = w["qkv"].shape
    split = P(*spec, *[None] * (2 - len(spec)), "model")  # features of all heads, this worker's
    qkv = F.linear(x, np.reshape(w["qkv"], (heads * width, n)), spec=spec, w_spec=ROWS)
    q, k, v = np.transpose(np.reshape(qkv, (batch, steps, heads, 3, width // 3)), (3, 0, 2, 1, 4))
    y = np.swapaxes(F.attention(q, k, v, causal=True), 1, 2)
    out = np.reshape(w["out"], (n, heads * (width // 3)))
    return F.linear(np.reshape(y, (batch, steps, heads * (width // 3))), out, spec=split, w_spec=COLUMNS)


def logits_of(params, text, spec=BATCH):
    """The scores of the next character after each of text, (sequences, steps), which lies by spec."""
    x = F.embedding(params["table"], text) + params["places"][: text.shape[1]]
    split = P(*spec, *[None] * (2 - len(spec)), "model")
    for w in params["layers"]:
        x = x + attention(w, F.layer_norm(x, w["norm1"]), spec)
        hidden = F.gelu(F.linear(F.layer_norm(x, w["norm2"]), w["up"], spec=spec, w_spec=ROWS))
        x = x + F.linear(hidden, w["down"], spec=split, w_spec=COLUMNS)
    return F.linear(F.layer_norm(x, params["norm"]), params["table"], spec=spec)


def loss_of(params, text):
    logits = logits_of(params, text[:, :-1])
    return F.softmax_cross_entropy(logits, text[:, 1:], reduction="mean", batch_axis_name="data")


def continued(logits, params, text, count, rng):
    """text and as many more characters, each drawn by its probability after those before it."""
    steps = len(text)
    for _ in range(count):
        scores = logits(params, text[None, -steps:]).numpy()[0, -1]
        # The largest of scores and Gumbel noise is a draw by their softmax.
        text = np.append(text, np.argmax(scores / 0.7 + rng.gumbel(size=len(scores))))
    return text


def main():
    args = parse_args()
    rng = np.random.default_rng(0)  # every process draws the same numbers
    manual = "\n".join(topics[name] for name in sorted(topics))
    alphabet, text = np.unique([*manual], return_inverse=True)
    drawn_params, specs = drawn(rng, len(alphabet), args)
    optimizer = spmd.optim.adamw(spmd.optim.cosine(1e-2, args.steps, warmup=args.steps // 10))
    state_specs = optimizer.specs(specs)

    @spmd.jit
    @spmd.map(in_specs=(specs, state_specs, BATCH), out_specs=(specs, state_specs, P()))
    def step(params, state, text):
        value, grads = spmd.value_and_grad(loss_of)(params, text)
        grads = spmd.optim.clip_by_global_norm(grads, 1.0)
        params, state = optimizer.update(grads, state, params)
        return params, state, value

    @spmd.jit
    @spmd.map(in_specs=(specs, P()), out_specs=P())
    def logits(params, text):
        return logits_of(params, text, P())

    with spmd.Mesh(data=args.data, model=args.model):
        params = spmd.put(drawn_params, specs)
        state = optimizer.init(params)
        losses = []
        start, since = time.perf_counter(), 0
        for k in range(1, args.steps + 1):
            starts = rng.integers(0, len(text) - args.context, args.batch)
            rows = text[starts[:, None] + np.arange(args.context + 1)]
            params, state, value = step(params, state, spmd.put(rows, BATCH))
            losses.append(value)
            since += args.batch * args.context
            if k == 1 or k == args.steps or k % args.every == 0:
                last, now = float(value), time.perf_counter()
                report(f"step {k:5}   loss {last:.8f}   {since / (now - start):9.0f} characters/s")
                start, since = now, 0
        sample = continued(logits, params, text[: args.context], args.sample, rng)
        written = "".join(alphabet[sample])
        report("\n" + written)
        if args.picture and spmd.is_main():
            draw(args.picture, [float(value) for value in losses], written, params["layers"][0])


def draw(path, losses, written, layer):
    """The loss of each step, how two weights lie, and what the network writes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    curve, up, down, text = figure.subplots(1, 4, width_ratios=(2, 1, 1, 2))
    curve.plot(range(1, len(losses) + 1), losses, color="black")
    curve.set(title="loss", xlabel="step")
    spmd.plot.layout(layer["up"], title="up: rows", ax=up)
    spmd.plot.layout(layer["down"], title="down: columns", ax=down)
    lines = [line[k : k + 48] for line in written.splitlines() for k in range(0, max(len(line), 1), 48)]
    text.text(0, 1, "\n".join(lines[:16]), family="monospace", fontsize=8, va="top", parse_math=False)
    text.set_title("what it writes")
    text.set_axis_off()
    figure.savefig(path, dpi=120)


def report(line):
    if spmd.is_main():
        print(line, flush=True)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=int, default=2, help="workers that share a batch")
    parser.add_argument("--model", type=int, default=2, help="workers that share heads and hidden features")
    parser.add_argument("--steps", type=int, default=500, help="steps of training")
    parser.add_argument("--every", type=int, default=50, help="steps between reports")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--context", type=int, default=64, help="characters per sequence")
    parser.add_argument("--layers", type=int, default=2, help="layers")
    parser.add_argument("--heads", type=int, default=4, help="heads of attention per layer")
    parser.add_argument("--features", type=int, default=64, help="features of a character, a multiple of the heads")
    parser.add_argument("--picture", metavar="FILE", help="draw the losses, how weights lie, and what is written")
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
