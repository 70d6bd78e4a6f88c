"""A step of AdamW on many parameters, against PyTorch's.

Run: python benchmarks/updates.py. It needs `pip install -e ".[bench]"`. One thread for all. The results are compared
before anything is timed. PyTorch writes into its parameters and state; ours are new arrays each time.
"""

from __future__ import annotations

import numpy as np
import torch
from timing import interleaved

from spmd import optim
from spmd.kernels import jit

OPTIONS = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}


class Ours:
    """Steps of `spmd.optim.adamw`."""

    def __init__(self, params: list[np.ndarray], grads: list[np.ndarray]):
        self.optimizer = optim.adamw(1e-3, **OPTIONS)
        self.params, self.grads, self.state = params, grads, self.optimizer.init(params)

    def step(self) -> None:
        self.params, self.state = self.optimizer.update(self.grads, self.state, self.params)


class Theirs:
    """Steps of `torch.optim.AdamW`."""

    def __init__(self, params: list[np.ndarray], grads: list[np.ndarray], **how: bool):
        self.params = [torch.nn.Parameter(torch.from_numpy(p.copy())) for p in params]
        for p, g in zip(self.params, grads, strict=True):
            p.grad = torch.from_numpy(g)
        self.step = torch.optim.AdamW(self.params, lr=1e-3, weight_decay=1e-2, **how).step


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    for count, megabytes in (8, 4), (2, 64), (64, 1 / 64):
        n = int(megabytes * (1 << 18))
        params, grads = ([rng.standard_normal(n, np.float32) for _ in range(count)] for _ in range(2))
        ours, fused, foreach = (
            Ours(params, grads),
            Theirs(params, grads, fused=True),
            Theirs(params, grads, foreach=True),
        )
        alone = Ours(params, grads)

        def without(alone: Ours = alone) -> None:
            with jit.off():
                alone.step()

        for run in (ours.step, fused.step, foreach.step):
            run()
        for p, q in zip(ours.params, fused.params, strict=True):
            np.testing.assert_allclose(p, q.detach().numpy(), rtol=1e-5, atol=1e-7)
        steps = (ours.step, without, fused.step, foreach.step)
        times = interleaved(*steps, rounds=15)
        names = ("spmd" if jit.available() else "spmd without numba", "NumPy alone", "torch fused", "torch foreach")
        print(f"{count} parameters of {megabytes:g} MB, float32: milliseconds a step, and GB/s of 28 bytes an entry")
        for name, seconds in zip(names, times, strict=True):
            print(f"  {name:20}{seconds * 1e3:10.3f}{28 * count * n / seconds / 1e9:10.1f}{seconds / times[2]:10.2f}")


if __name__ == "__main__":
    main()
