"""Options of examples/torch_gpt.py, drawn at random from all that go together."""

from __future__ import annotations

import random


def model_options(draw: random.Random) -> dict[str, int]:
    """Those of the network."""
    return {
        "layers": draw.randint(1, 4),
        "experts": draw.choice([0, 2, 3, 5]),
        "heads": draw.choice([1, 2, 3]),
        "context": draw.randint(2, 9),
        "batch": draw.randint(3, 9),
    }


def mesh_options(draw: random.Random, model: dict[str, int]) -> list[str]:
    """Those of the mesh, and of what runs on it, at most sixteen workers."""
    axes = {
        "data": draw.randint(1, 3),
        "model": draw.randint(1, 2),
        "stage": draw.randint(1, min(4, model["layers"] + 2)),
    }
    axes["expert"] = draw.randint(1, 2) if model["experts"] else 1
    while axes["data"] * axes["model"] * axes["stage"] * axes["expert"] > 16:
        axes[draw.choice([*axes])] = 1
    numbers = axes | {"accumulate": draw.randint(1, 3), "microbatches": draw.randint(1, 5)}
    flags = [flag for flag in ("--sequence", "--shard") if draw.random() < 0.5]
    if model["experts"] and axes["expert"] == 1:
        flags = [flag for flag in flags if flag != "--shard"]
    schedule = draw.choice(["gpipe", "1f1b", "zero_bubble"])
    return [*words(numbers), *flags, "--schedule", schedule]


def words(numbers: dict[str, int]) -> list[str]:
    return [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
