"""Which rows go to which expert: integers only, of which every worker computes its own part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spmd.operators.all_to_all import Piece

__all__ = ["Routes", "accepted_counts", "best_experts", "plan_routes", "sorted_choices"]


def best_experts(scores: np.ndarray, k: int) -> np.ndarray:
    """The experts of the k largest scores of each row, the best first: (tokens, k).

    Of equal scores the expert of the lowest index comes first; NaN counts as less than any number.
    """
    numbers = np.where(np.isnan(scores), -np.inf, scores)
    left, rows, best = numbers.copy(), np.arange(len(numbers)), np.empty((len(numbers), k), np.int64)
    for choice in range(k):
        taken = rows, left.argmax(1)
        if (left[taken] == -np.inf).any():  # those that are taken and those that are left look alike
            return np.argsort(-numbers, axis=1, kind="stable")[:, :k]
        best[:, choice] = taken[1]
        left[taken] = -np.inf
    return best


def sorted_choices(best: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """The entries of `best`, counted along its rows, in the order of experts and then of tokens; and how many each
    expert has."""
    flat = best.reshape(-1).astype(np.int16 if experts < 2**15 else np.int64)  # short ones are sorted by radix
    return np.argsort(flat, kind="stable"), np.bincount(flat, minlength=experts)


def accepted_counts(counts: np.ndarray, capacity: int | None) -> np.ndarray:
    """How many tokens of each worker each expert takes: the first `capacity` of all, in the order of workers.

    counts: those that chose it, (workers, experts).
    """
    if capacity is None:
        return counts
    before = np.cumsum(counts, axis=0) - counts
    return np.clip(capacity - before, 0, counts)


@dataclass(frozen=True)
class Routes:
    """What a worker sends to experts, and what its own experts get.

    choices: of each row that is sent, which of this worker's (tokens, k) choices it is, by expert and then in the order
    of tokens. experts: to which it goes. pieces: of rows that this worker sends or gets. rows: how many it sends, and
    gets; those are in the order of its experts, of workers, and of tokens. loads: how many rows each of its experts
    gets.
    """

    choices: np.ndarray
    experts: np.ndarray
    pieces: tuple[Piece, ...]
    rows: tuple[int, int]
    loads: tuple[int, ...]


def plan_routes(
    order: np.ndarray, counts: np.ndarray, accepted: np.ndarray, experts_per_worker: np.ndarray, worker: int
) -> Routes:
    """The routes of one worker.

    order, counts: of `sorted_choices`. accepted: the tokens that each expert takes of each worker, (workers, experts).
    experts_per_worker: how many experts each worker has; the first has the first of them.
    """
    own = accepted[worker]
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = rank < np.repeat(own, counts)
    ends = np.cumsum(experts_per_worker)
    first, last = int(ends[worker] - experts_per_worker[worker]), int(ends[worker])
    loads = accepted[:, first:last].sum(0)
    return Routes(
        order[kept],
        np.repeat(np.arange(len(own)), own),
        _pieces(accepted, experts_per_worker, worker),
        (int(own.sum()), int(loads.sum())),
        tuple(loads.tolist()),
    )


def _pieces(accepted: np.ndarray, experts_per_worker: np.ndarray, worker: int) -> tuple[Piece, ...]:
    """One piece for each expert and worker that sends rows to it, of those that this worker sends or gets."""
    workers, experts = accepted.shape
    owners = np.repeat(np.arange(workers), experts_per_worker)
    starts = np.cumsum(accepted, axis=1) - accepted  # in the rows that the source sends
    before = (np.cumsum(accepted.T) - accepted.T.reshape(-1)).reshape(experts, workers)
    first = np.cumsum(experts_per_worker) - experts_per_worker
    ats = before - before[first[owners], :1] if experts else before  # in the rows that the target gets
    concerned = (accepted > 0) & ((np.arange(workers)[:, None] == worker) | (owners == worker))
    sources, chosen = np.nonzero(concerned)
    columns = sources, owners[chosen], starts[concerned], ats[chosen, sources], accepted[concerned]
    return tuple(Piece(*numbers) for numbers in zip(*(c.tolist() for c in columns), strict=True))
