"""Train a transformer in PyTorch to spell the Zen of Python, its heads and hidden features split over four workers.

    python examples/torch_transformer.py                          four virtual workers in this process
    mpiexec -n 4 python examples/torch_transformer.py             four processes, the same losses
    torchrun --nproc-per-node 4 examples/torch_transformer.py     the same, without MPI
    python examples/torch_transformer.py --sequence               between the pairs of layers positions are split too
    python examples/torch_transformer.py --model 3 --heads 5      another mesh; it need not divide anything
    python examples/torch_transformer.py --picture a.png          draws the losses, and which worker has which heads

Layers come in pairs. The first of a pair makes features, some on each worker; the second takes those, and one sum over
the mesh axis `model` completes it. The gradient needs one sum as well, where the pair begins (Shoeybi et al., 2019).
`Transformer` is the network on one worker; the classes derived from it say what differs on several. The program trains
both, compares them step by step, and counts what is sent.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import time

import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import P
from spmd.bridge import torch as spt


class Transformer(nn.Module):
    """The next character from those before: one block of causal attention and a perceptron, each behind a norm."""

    def __init__(self, letters: int, positions: int, width: int, heads: int, hidden: int):
        super().__init__()
        size = width // heads
        normal = lambda *shape: nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)
        self.letters, self.positions = normal(letters, width), normal(positions, width)
        self.queries, self.keys, self.values = (normal(heads, size, width) for _ in range(3))
        self.joined = nn.Parameter(torch.randn(heads, size, width) / width**0.5)
        self.up, self.up_bias = normal(hidden, width), nn.Parameter(torch.zeros(hidden))
        self.down, self.down_bias = normal(width, hidden), nn.Parameter(torch.zeros(width))
        self.norm1, self.norm2, self.norm3 = (nn.Parameter(torch.ones(width)) for _ in range(3))
        self.head = normal(letters, width)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the following characters. text, following: (sample, position)."""
        p = {name: self.given(name, x) for name, x in self.named_parameters()}
        x = p["letters"][text] + p["positions"]

        h = self.enter(F.rms_norm(x, x.shape[-1:], p["norm1"]))
        q, k, v = (torch.einsum("btd,hsd->bhts", h, p[name]) for name in ("queries", "keys", "values"))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leave(torch.einsum("bhts,hsd->btd", h, p["joined"]))

        h = self.enter(F.rms_norm(x, x.shape[-1:], p["norm2"]))
        h = F.gelu(h @ p["up"].T + p["up_bias"])
        x = x + self.leave(h @ p["down"].T) + p["down_bias"]

        logits = F.rms_norm(x, x.shape[-1:], p["norm3"]) @ p["head"].T
        return self.mean(F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none"))

    def given(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A parameter as it is used."""
        return x

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What goes into a pair of layers."""
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """What comes out of it."""
        return x

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.mean()


class TensorParallel(Transformer):
    """The same network, with the same parameters; heads and hidden features are split over `model`."""

    specs = dict.fromkeys(("queries", "keys", "values", "joined", "up", "up_bias"), P("model")) | {
        "down": P(None, "model")
    }
    text = P()  # all workers read all of it

    def __init__(self, whole: Transformer):
        nn.Module.__init__(self)
        for name, x in whole.named_parameters():
            self.register_parameter(name, nn.Parameter(block(x.detach(), self.specs.get(name, P()))))

    def given(self, name, x):
        return spt.varying(x, "model") if name in self.specs else x  # a block of its own on each worker

    def enter(self, x):
        return spt.pvary(x, "model")  # sends nothing; the gradient is the sum over the workers

    def leave(self, x):
        return spt.psum(x, "model")  # the sum over the workers; its gradient sends nothing


class SequenceParallel(TensorParallel):
    """Outside the pairs of layers each worker has some of the positions only. What was a sum becomes two halves: one
    that adds up and splits the result over the positions, and one that joins them before the next pair (Korthikanti et
    al., 2022)."""

    specs = TensorParallel.specs | {"positions": P("model")}
    text = P(None, "model")

    def given(self, name, x):
        # Parameters that all workers have meet other positions on each: their gradients are summed.
        return super().given(name, x) if name in self.specs else spt.pvary(x, "model")

    def enter(self, x):
        return spt.all_gather(x, "model", axis=1, tiled=True)

    def leave(self, x):
        return spt.psum_scatter(x, "model", scatter_dimension=1, tiled=True)

    def mean(self, losses):
        return spt.mean(losses, "model")


def block(whole: torch.Tensor, spec: P) -> torch.Tensor:
    """This worker's block of a tensor that all have."""
    for d, names in enumerate(spec):
        whole = spt.pslice(whole, names, axis=d, tiled=True) if names else whole
    return spt.block(whole).clone()


def gathered(model: TensorParallel) -> list[torch.Tensor]:
    """The parameters of a network on blocks as whole tensors."""
    wholes = []
    for name, x in model.named_parameters():
        spec = model.specs.get(name, P())
        x = spt.varying(x.detach(), spec.axes) if spec.axes else x.detach()
        for d, names in enumerate(spec):
            x = spt.all_gather(x, names, axis=d, tiled=True, to="invariant") if names else x
        wholes.append(x)
    return wholes


def train(model: Transformer, text, following, args: argparse.Namespace) -> list[float]:
    """Train a network, whole or in blocks, on as many minibatches as there are; the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    losses = []
    for step, (x, y) in enumerate(zip(text.split(args.batch), following.split(args.batch), strict=True), 1):
        optimizer.zero_grad()
        with spmd.ledger() as forward:
            loss = model(x, y)
        with spmd.ledger() as backward:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if spmd.is_main() and step == 1 and type(model) is not Transformer:
            print(f"a step takes, forward: {counted(forward)}; backward: {counted(backward)}")
        if spmd.is_main() and (step % 20 == 0 or step == args.steps):
            print(f"step {step:3}  loss {losses[-1]:.8f}", flush=True)
    return losses


def counted(log: spmd.ledger) -> str:
    """The collectives that were used, but those that send nothing."""
    names = {"Sum": "sum", "AllGather": "all-gather", "ReduceScatter": "reduce-scatter"}
    found = {names[k]: n for k, n in log.operators.items() if k in names}
    return ", ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in sorted(found.items())) or "nothing"


def load_text(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Random stretches of the Zen of Python as numbers of letters, the same one further on, and how many letters."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    zen = codecs.decode(this.s, "rot13")
    letters = sorted(set(zen))
    numbers = torch.tensor([letters.index(c) for c in zen])
    starts = torch.randint(len(zen) - args.positions, (args.steps * args.batch, 1))
    stretches = numbers[starts + torch.arange(args.positions + 1)]
    return stretches[:, :-1], stretches[:, 1:], len(letters)


def main() -> None:
    args = parse_args()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(args.seed)  # every process draws the same numbers
    text, following, letters = load_text(args)
    whole = Transformer(letters, args.positions, args.width, args.heads, args.hidden)
    parallel = SequenceParallel if args.sequence else TensorParallel

    def body(text, following):
        model = parallel(whole)
        losses = train(model, text, following, args)
        return torch.tensor(losses), gathered(model)

    with spmd.Mesh(model=args.model) as mesh:
        run = spt.map(body, in_specs=(parallel.text, parallel.text), out_specs=P(), check=not args.unchecked)
        start = time.perf_counter()
        losses, parameters = run(text, following)
        seconds = time.perf_counter() - start
        if spmd.is_main():
            print(f"{mesh}, {mesh.transport.name} transport: {1e3 * seconds / args.steps:.1f} ms per step\n")
            print("the same on one worker")
            start = time.perf_counter()
            losses_of_one = train(whole, text, following, args)
            seconds = time.perf_counter() - start
            apart = max(abs(a - b) for a, b in zip(losses.tolist(), losses_of_one, strict=True))
            pairs = zip(parameters, whole.parameters(), strict=True)
            apart_at_last = max((a - b).abs().max().item() for a, b in pairs)
            print(f"one worker: {1e3 * seconds / args.steps:.1f} ms per step")
            if args.picture:
                draw(args, losses, losses_of_one, mesh)
            print(f"losses of {len(losses)} steps: at most {apart:.1e} apart")
            print(f"all parameters at last: at most {apart_at_last:.1e} apart")


def draw(args: argparse.Namespace, losses, losses_of_one, mesh: spmd.Mesh) -> None:
    """The losses of the workers over those of one, and which worker has which heads and hidden features."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    curve, heads, hidden = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    steps = range(1, len(losses) + 1)
    curve.plot(steps, losses_of_one, color="lightgray", linewidth=6, label="one worker")
    curve.plot(steps, losses, color="#D55E00", label=f"{args.model} workers")
    curve.set(title="loss", xlabel="step")
    curve.legend(frameon=False)
    of_head = args.width // args.heads
    spmd.plot.layout(P("model"), (args.heads, of_head), mesh, title="heads, by features", ax=heads)
    spmd.plot.layout(P("model"), (args.hidden, args.width), mesh, title="up, of the perceptron", ax=hidden)
    figure.savefig(args.picture, dpi=120)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a transformer on the Zen of Python, split over heads and hidden features.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=int, default=4, help="workers that share the layers")
    parser.add_argument("--sequence", action="store_true", help="split positions between the pairs of layers")
    parser.add_argument("--steps", type=int, default=100, help="minibatches to train on")
    parser.add_argument("--batch", type=int, default=16, help="stretches of text in each")
    parser.add_argument("--positions", type=int, default=32, help="characters in a stretch")
    parser.add_argument("--width", type=int, default=48, help="features of a character")
    parser.add_argument("--heads", type=int, default=6, help="of attention")
    parser.add_argument("--hidden", type=int, default=128, help="features of the perceptron")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and the stretches")
    parser.add_argument("--picture", metavar="FILE", help="draw the losses, and which worker has which heads")
    parser.add_argument("--unchecked", action="store_true", help="a body of plain tensors: spt.map(..., check=False)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
