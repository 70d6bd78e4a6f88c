"""Train a small GPT to write like Python's manual: data, tensor and sequence parallel in PyTorch, by options.

    python examples/torch_gpt.py                          two by two virtual workers in this process
    mpiexec -n 4 python examples/torch_gpt.py             four processes, the same losses
    torchrun --nproc-per-node 4 examples/torch_gpt.py     the same, without MPI
    python examples/torch_gpt.py --data 3 --model 1       another mesh; it need not divide anything
    python examples/torch_gpt.py --sequence               positions are split too, outside of attention
    python examples/torch_gpt.py --shard                  parameters and states are split over `data` too
    python examples/torch_gpt.py --stage 2                layers in two stages, a pipeline
    python examples/torch_gpt.py --experts 4              mixtures of experts, which lie over `data`, or by --expert 2
    python examples/torch_gpt.py --checkpoints run        saves there, and goes on from there, on any mesh
    python examples/torch_gpt.py --check                  trains on one worker too, and compares step by step
    python examples/torch_gpt.py --picture gpt.png        draws the losses, and how weights lie

`GPT` is a module of plain PyTorch, and `train` is the loop of one worker: gradients of several minibatches are added
up, and clipped by the norm of all together; the rate of AdamW falls as a cosine. `parallel` says how the layers are
split over the mesh axis `model`, and `staged` how they lie along `stage`. Samples are split over `data` and `expert`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import P
from spmd.bridge import torch as spt


class Attention(nn.Module):
    """Causal attention; one layer makes queries, keys and values."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, positions, width = x.shape
        q, k, v = (
            a.view(batch, positions, self.heads, width // self.heads).transpose(1, 2)
            for a in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, positions, width))


def perceptron(width: int) -> nn.Module:
    up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))


SAMPLES = P(("data", "expert"))


class Mixture(nn.Module):
    """For each character two of some experts. axis_name: of the mesh, along which they lie. routing: the latest scores,
    and the axes that split the characters, for the loss that balances the experts."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.gate, self.axis_name, self.routing = nn.Linear(width, experts, bias=False), None, ()
        self.w1 = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, 4 * width, width) * width**-0.5 / 2)

    def spread(self, axis_name: str) -> None:
        self.axis_name = axis_name
        self.w1, self.w2 = (spt.Parameter(w.detach(), P(axis_name)) for w in (self.w1, self.w2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layout = x.block_layout if isinstance(x, spt.GlobalTensor) else None
        block = x.block() if layout else x
        rows = block.flatten(0, 1)
        scores = self.gate(rows)
        w1, w2 = (w.block() if isinstance(w, spt.PartitionedTensor) else w for w in (self.w1, self.w2))
        expert = lambda w, rows: F.gelu(rows @ w[0]) @ w[1]
        y = spt.functions.experts(rows, scores, expert, self.axis_name, params=(w1, w2)).view_as(block)
        self.routing = scores, tuple(layout.varying) if layout else None
        return spt.GlobalTensor.from_block(y, layout.spec) if layout else y


class Block(nn.Module):
    def __init__(self, width: int, heads: int, experts: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.layers = nn.LayerNorm(width), Mixture(width, experts) if experts else perceptron(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.layers(self.norm2(x))


class Embedding(nn.Module):
    def __init__(self, characters: int, context: int, width: int):
        super().__init__()
        self.table, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        for embedding in (self.table, self.places):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.table(text) + self.places(torch.arange(text.shape[1]))


class GPT(nn.Sequential):
    """The scores of the next character after each of some text."""

    def __init__(self, characters: int, args: argparse.Namespace):
        super().__init__()
        self.embedding = Embedding(characters, args.context, args.width)
        for k in range(args.layers):
            self.add_module(f"block{k}", Block(args.width, args.heads, args.experts))
        head = nn.Linear(args.width, characters, bias=False)
        head.weight = self.embedding.table.weight  # tied
        self.scores = nn.Sequential(OrderedDict(norm=nn.LayerNorm(args.width), head=head))


def parallel(net: nn.Module, args: argparse.Namespace, specs: P | None = None) -> nn.Module:
    """Layers on the workers of the mesh, in a body: those of these names are split over `model`. specs: of the blocks
    that they take and give; None: they take and give global tensors."""
    plan = {
        "attention": spt.heads("model"),
        "up": spt.column("model"),
        "down": spt.row("model", sequence=1 if args.sequence else None),
        "table": spt.vocab("model"),
        "head": spt.vocab("model"),
    }
    if args.sequence:
        plan |= dict.fromkeys(("norm1", "norm2", "norm"), spt.sequence("model"))
    names = {name.rpartition(".")[2] for name, _ in net.named_modules()}  # a stage has some of them only
    plan = {name: style for name, style in plan.items() if name in names}
    model = spt.parallelize(net, plan, in_specs=specs, out_specs=specs)
    for module in model.modules():
        if isinstance(module, Mixture):
            module.spread("expert" if args.expert > 1 else "data")
    unit = Block if any(isinstance(module, Block) for module in model.modules()) else None
    varying = "stage" if args.stage > 1 else ()
    return spt.shard_parameters(model, "data", unit=unit, varying=varying) if args.shard else model


def staged(net: GPT, args: argparse.Namespace) -> spt.Pipeline:
    """The network in stages along `stage`, in a body. Each worker lays out its own one."""
    stages: list = spt.split_stages(net, args.stage)
    for k in range(args.stage):
        here = k == spt.worker_index("stage")
        stages[k] = parallel(stages[k], args, SAMPLES) if here else None
    tied = [(0, "embedding.table.weight"), (args.stage - 1, "scores.head.weight")]
    loss = lambda scores, following: cross_entropy(scores, following) / (args.batch * args.context)
    return spt.pipeline(
        stages, "stage", microbatches=args.microbatches, schedule=args.schedule, loss=loss, reduction="sum", tied=[tied]
    )


def cross_entropy(scores: torch.Tensor, following: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction=reduction)


def gradients(model: nn.Module, text: torch.Tensor, args: argparse.Namespace, split: Callable) -> torch.Tensor:
    """Set the gradients of the mean loss over text, (samples, positions + 1), in some parts. The loss."""
    model.zero_grad()
    total = torch.zeros(())
    for x, following in ((split(part[:, :-1]), split(part[:, 1:])) for part in text.chunk(args.accumulate)):
        if isinstance(model, spt.Pipeline):
            loss = spt.psum(model.backward(x, following), ("data", "expert"))
        else:
            loss = cross_entropy(model(x), following, "mean")
            for mixture in (m for m in model.modules() if args.balance and isinstance(m, Mixture)):
                loss = loss + args.balance * spt.functions.load_balance_loss(*mixture.routing)
            loss = loss * (len(x) / len(text))
            loss.backward()
        total = total + loss.detach()
    return total


def train(model: nn.Module, text: torch.Tensor, args: argparse.Namespace, split: Callable, folder: str | None = None):
    """The losses of training a network, from the last checkpoint in the folder on. split: lays out a minibatch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    draws = torch.Generator().manual_seed(args.seed)  # every worker draws the same numbers
    losses = torch.full((args.steps,), torch.nan)
    run = {"model": model, "optimizer": optimizer, "schedule": schedule, "draws": draws, "losses": losses, "step": 0}
    checkpoints = spmd.io.CheckpointManager(folder, max_to_keep=2) if folder else None
    if checkpoints and checkpoints.latest() is not None:
        run = checkpoints.restore(like=run)  # modules, optimisers and generators are loaded in place
        say(f"goes on after step {run['step']}")
    first = run["step"]
    while run["step"] < args.steps:
        steps = range(run["step"], min(run["step"] + args.every, args.steps))
        start = time.perf_counter()
        with spmd.ledger() as log:
            for step in spmd.progress(steps, label="training"):
                starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=draws)
                batch = text[starts + torch.arange(args.context + 1)]
                run["losses"][step] = gradients(model, batch, args, split)
                spt.clip_grad_norm_(model, args.clip)
                optimizer.step()
                schedule.step()
        seconds = time.perf_counter() - start
        run["step"] = steps.stop
        if steps.start == first and log.bytes:
            say(f"in {len(steps)} steps a worker sends {sent(log, args)}")
        rate = len(steps) * args.batch * args.context / seconds
        say(f"step {steps.stop:4}  loss {run['losses'][step]:.8f}  {rate:7.0f} characters/s")
        if checkpoints:
            checkpoints.save(steps.stop, run)  # in the background
    if checkpoints:
        checkpoints.wait()
    return run["losses"]


def sent(log: spmd.ledger, args: argparse.Namespace) -> str:
    """How much a worker has sent, by the axes of the mesh."""
    counts: Counter[str] = Counter()
    for row in log.rows():
        counts[" and ".join(name for name in row.axes if vars(args)[name] > 1)] += row.bytes
    return ", ".join(f"{count / 1e3:.1f} kB along {axes}" for axes, count in counts.items() if count)


@torch.no_grad()
def continued(net: GPT, text: torch.Tensor, count: int, context: int) -> torch.Tensor:
    """text and as many more characters, each drawn by its probability after those before it."""
    for _ in range(count):
        scores = net(text[None, -context:])[0, -1] / 0.7
        text = torch.cat([text, torch.multinomial(scores.softmax(0), 1)])
    return text


def say(line: str) -> None:
    if spmd.is_main():
        print(line, flush=True)


def main() -> None:
    args = parse_args()
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.manual_seed(args.seed)  # every process draws the same parameters
    manual = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(manual))
    numbers = {character: number for number, character in enumerate(alphabet)}
    text = torch.tensor([numbers[character] for character in manual])
    net = GPT(len(alphabet), args)

    def body():
        model = staged(net, args) if args.stage > 1 else parallel(net, args)
        split = lambda x: spt.put(x, SAMPLES).block() if args.stage > 1 else spt.put(x, SAMPLES)
        losses = train(model, text, args, split, args.checkpoints)
        named = model.named_parameters() if args.stage == 1 else ()
        layouts = {name: getattr(x, "block_layout", None) for name, x in named}
        return losses, spt.state_dict(model), layouts  # of whole tensors, of all stages

    with spmd.Mesh(stage=args.stage, data=args.data, expert=args.expert, model=args.model) as mesh:
        say(f"{mesh}, {mesh.transport.name} transport: {sum(p.numel() for p in net.parameters())} parameters")
        losses, state, layouts = spt.map(body, (), None)()
        if not spmd.is_main():
            return
        if args.check:
            check(net, text, args, losses, state)
        net.load_state_dict(state)
        sample = continued(net, text[: args.context], args.sample, args.context)
        print("\n" + "".join(alphabet[number] for number in sample))
        if args.picture:
            draw(args, losses, layouts)


def check(net: GPT, text: torch.Tensor, args: argparse.Namespace, losses: torch.Tensor, state: dict) -> None:
    """Train on one worker, and tell how far apart the losses and the parameters are."""
    print("\nthe same on one worker")
    losses_of_one = train(net, text, args, lambda x: x)
    apart = (losses - losses_of_one).abs().max().item()
    apart_at_last = max((state[name] - x).abs().max().item() for name, x in net.state_dict().items())
    print(f"losses of {len(losses)} steps: at most {apart:.1e} apart")
    print(f"all parameters at last: at most {apart_at_last:.1e} apart")


def draw(args: argparse.Namespace, losses: torch.Tensor, layouts: dict) -> None:
    """The losses, and how two weights lie."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    curve, *places = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    curve.plot(range(1, len(losses) + 1), losses, color="#D55E00")
    curve.set(title=f"loss, {args.data * args.expert * args.model} workers", xlabel="step")
    for name, axes in zip(("w1", "w2") if args.experts else ("up.weight", "down.weight"), places, strict=True):
        spmd.plot.layout(layouts[f"block0.layers.{name}"], title=name, ax=axes)
    figure.savefig(args.picture, dpi=120)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on Python's manual, split over samples, heads, hidden features and positions.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=int, default=2, help="workers that share a batch")
    parser.add_argument("--model", type=int, default=2, help="workers that share the layers")
    parser.add_argument("--stage", type=int, default=1, help="workers that have some of the layers each, in a pipeline")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b", "zero_bubble"], default="1f1b", help="of a pipeline")
    parser.add_argument("--microbatches", type=int, default=4, help="of each part of a batch, in a pipeline")
    parser.add_argument("--experts", type=int, default=0, help="of each block, over `data`; 0: a perceptron")
    parser.add_argument("--expert", type=int, default=1, help="workers that share experts; 1: those of `data` do")
    parser.add_argument("--balance", type=float, help="weight of the loss that balances experts (default: 0.01, or 0)")
    parser.add_argument("--sequence", action="store_true", help="split positions too, outside of attention")
    parser.add_argument("--shard", action="store_true", help="split parameters over `data` too, as ZeRO-3 and FSDP")
    parser.add_argument("--steps", type=int, default=100, help="steps of training")
    parser.add_argument("--every", type=int, default=20, help="steps between reports, and between checkpoints")
    parser.add_argument("--batch", type=int, default=32, help="stretches of text per step")
    parser.add_argument("--accumulate", type=int, default=2, help="parts of a batch whose gradients are added up")
    parser.add_argument("--context", type=int, default=64, help="characters per stretch")
    parser.add_argument("--layers", type=int, default=2, help="blocks of attention and perceptron")
    parser.add_argument("--heads", type=int, default=4, help="of attention per block")
    parser.add_argument("--width", type=int, default=64, help="features of a character, a multiple of the heads")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate of AdamW at first")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients together")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="save there, and go on from the last checkpoint there")
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters, the batches and the sample")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64", help="of the parameters")
    parser.add_argument("--check", action="store_true", help="train on one worker too, and compare step by step")
    parser.add_argument("--picture", metavar="FILE", help="draw the losses, and how two weights lie")
    args = parser.parse_args()
    if args.stage > args.layers + 2:
        parser.error(f"--stage {args.stage}: there are {args.layers + 2} layers, with the first and the last one")
    if args.stage > 1 and args.picture:
        parser.error("--picture: a worker knows only how the layers of its own stage lie")
    if args.experts == 1 or (args.expert > 1 and not args.experts):
        parser.error("--experts: two or more, as each character takes two; --expert is for these")
    if args.shard and args.experts and args.expert == 1:
        parser.error("--shard: experts lie over `data` already; --expert 2 gives them an axis of their own")
    if args.balance is None:
        args.balance = 0.01 if args.experts and args.stage == 1 else 0.0
    elif args.balance and (not args.experts or args.stage > 1):
        parser.error("--balance: with --experts; without --stage, of which each microbatch would be balanced by itself")
    return args


if __name__ == "__main__":
    main()
