"""Recurrent layers over blocks of time: each worker has a block, and states go from worker to worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spmd.frontends import frontend
from spmd.functions.local import local, namespace
from spmd.functions.recurrent_cells import Chain, State, empty
from spmd.layout import block_sizes, offsets
from spmd.operators.permute import ppermute
from spmd.operators.reduce import psum
from spmd.operators.varying import varying

__all__ = ["Line", "pipeline"]

Wires = list[Any]
"""The states of all layers side by side in the last dimension: one message. With a projection over split features two,
because h is one value on the workers along their axes, and c is not."""


@dataclass(frozen=True)
class Line:
    """The workers along the axes that split time, and the microbatches.

    names: the axes. sizes: the lengths of the blocks. index: this worker's. microbatches: into how many the batch is
    cut.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    index: int
    microbatches: int

    @property
    def size(self) -> int:
        return len(self.sizes)


def pipeline(
    chains: Sequence[Chain], x: Any, lengths: Any, line: Line | None, drops: Any = None
) -> list[tuple[Any, list[State]]]:
    """The output of each chain on this worker's block of time, and its last states, the same on all workers of a line.

    lengths: the steps of each sequence from the beginning of this block, or None. drops: as for `Chain.run`.
    Worker k runs microbatch m at tick k + m, and sends its last states to the next worker. A chain in reverse begins at
    the last worker. All chains run at the same time. Messages of a chain: microbatches + size - 2 permutations, and a
    sum of the last states. Adjoint: the same in the opposite order.
    """
    if line is None:
        return [chain.run(x, chain.states, lengths, chain.tokens(x), drops) for chain in chains]
    steps = x.shape[0]
    if chains[0].names:
        x, lengths = _even(x, lengths, chains[0].states[0][0], line)
    if drops is not None:
        zeros, added = local(x, "recurrent").zeros, x.shape[0] - steps
        drops = namespace(x).concat([drops, zeros(x, (drops.shape[0], added, *drops.shape[2:]))], axis=1)
    runs = [_Run(chain, x, lengths, line, drops) for chain in chains]
    for tick in range(line.microbatches + line.size - 1):
        for run in runs:
            run.advance(tick)
    return [(y[:steps], ends) for y, ends in (run.result() for run in runs)]


def _even(x: Any, lengths: Any, h: Any, line: Line) -> tuple[Any, Any]:
    """A block of as many steps as the largest, of which those added count as ended. The lengths vary as h does.

    Where hidden features are split, workers meet in each step, and all workers of a mesh make equally many collectives.
    """
    steps, batch = x.shape[:2]
    xp, zeros = namespace(x), local(x, "recurrent").zeros
    own = varying(xp.real(zeros(h, (batch,))) + steps, line.names)
    lengths = own if lengths is None else xp.where(lengths < own, lengths, own)
    return xp.concat([x, zeros(x, (max(line.sizes) - steps, *x.shape[1:]))]), lengths


class _Run:
    """A chain on its way through a pipeline."""

    def __init__(self, chain: Chain, x: Any, lengths: Any, line: Line, drops: Any):
        self.chain, self.x, self.lengths, self.line, self.drops = chain, x, lengths, line, drops
        self.place = line.size - 1 - line.index if chain.reverse else line.index
        self.cuts = offsets(block_sizes(x.shape[1], line.microbatches))
        self.tokens = chain.tokens(x)[: len(self.wires)]
        self.received: Wires = []
        self.outputs: list[Any] = []
        self.ends: list[Wires] = []

    @cached_property
    def wires(self) -> list[list[tuple[int, int]]]:
        """For each wire the (layer, part of the state) that lie in it."""
        parts, layers = range(self.chain.cell.states), range(len(self.chain.states))
        if self.chain.projected and self.chain.names:
            return [[(layer, part) for layer in layers] for part in parts]
        return [[(layer, part) for layer in layers for part in parts]]

    def advance(self, tick: int) -> None:
        """Run a microbatch, if this worker has one at this tick, and send."""
        xp, piece = namespace(self.x), tick - self.place
        if 0 <= piece < self.line.microbatches:
            y, sent = self._run(piece)
            self.outputs.append(y)
            if self.place == self.line.size - 1:
                self.ends.append(sent)
        else:
            if self.chain.names:
                y, ends = self._run(0, idle=True)
                self.tokens = self._joined(ends)
                self.tokens = (empty([self.tokens[0], y]), *self.tokens[1:])
            sent = [xp.reshape(token, (0, self._width(k))) for k, token in enumerate(self.tokens)]
        senders = range(max(0, tick - self.line.microbatches + 1), min(self.line.size - 1, tick + 1))
        if not senders:
            return
        last = self.line.size - 1
        pairs = [(last - p, last - p - 1) if self.chain.reverse else (p, p + 1) for p in senders]
        received = [ppermute(wire, self.line.names, pairs) for wire in sent]
        self.received = [self._sized(wire, k, tick - self.place + 1) for k, wire in enumerate(received)]
        self.tokens = self._joined(self.received)

    def _sized(self, wire: Any, k: int, piece: int) -> Any:
        """A wire that came, with the states of a microbatch if there is such a one."""
        other = frontend(wire)
        if other is None or self.place == 0 or not 0 <= piece < self.line.microbatches:
            return wire
        return other.sized(wire, (self.cuts[piece + 1] - self.cuts[piece], self._width(k)))

    def _joined(self, wires: Wires) -> tuple[Any, ...]:
        """The tokens, which depend on these arrays, too. So every worker's result depends on every message, and all
        workers take part in the adjoints, in one order."""
        return tuple(empty(each) for each in zip(self.tokens, wires, strict=True))

    def _run(self, piece: int, idle: bool = False) -> tuple[Any, Wires]:
        """The output and the last states of a microbatch. idle: as if all sequences had ended."""
        rows = slice(*self.cuts[piece : piece + 2])
        if self.place == 0 or idle:
            states = [tuple(part[rows] for part in state) for state in self.chain.states]
        else:
            states = self._unpacked(self.received)
        lengths = None if self.lengths is None else self.lengths[rows]
        lengths = namespace(lengths).zeros_like(lengths) if idle else lengths
        tokens = self.tokens * (1 if len(self.wires) > 1 else self.chain.cell.states)
        drops = None if self.drops is None else self.drops[:, :, rows]
        y, ends = self.chain.run(self.x[:, rows], states, lengths, tokens, drops)
        concat = namespace(y).concat
        return y, [concat([ends[layer][part] for layer, part in wire], axis=-1) for wire in self.wires]

    def _unpacked(self, wires: Wires) -> list[State]:
        parts: dict[tuple[int, int], Any] = {}
        for wire, keys in zip(wires, self.wires, strict=True):
            at = offsets([self._part_width(*key) for key in keys])
            parts.update((key, wire[:, at[k] : at[k + 1]]) for k, key in enumerate(keys))
        layers, count = range(len(self.chain.states)), range(self.chain.cell.states)
        return [tuple(parts[layer, part] for part in count) for layer in layers]

    def _part_width(self, layer: int, part: int) -> int:
        return self.chain.states[layer][part].shape[-1]

    def _width(self, wire: int) -> int:
        return sum(self._part_width(*key) for key in self.wires[wire])

    def result(self) -> tuple[Any, list[State]]:
        xp, batch = namespace(self.x), self.x.shape[1]
        tokens = list(self.tokens)
        if len(tokens) > 1:
            tokens[0] = xp.concat([tokens[0], psum(tokens[1], self.chain.names)])
        steps, _, features = self.outputs[0].shape
        y = xp.concat([*self.outputs, xp.reshape(tokens[0], (steps, 0, features))], axis=1)
        ends = []
        for k, token in enumerate(tokens):
            shape = batch, self._width(k)
            pieces = [end[k] for end in self.ends] or [local(self.x, "recurrent").zeros(self.outputs[0], shape)]
            own = xp.concat([*pieces, xp.reshape(token, (0, shape[1]))])
            ends.append(psum(own, self.line.names))
        return y, self._unpacked(ends)
