"""Norms, for the table of what every layer does."""

from __future__ import annotations

from collections.abc import Iterator

from spmd import P
from tests.bridge.torch.nn.module_cases import Case

AXES = {"model": 3}
CHANNELS, ROWS = P(None, "model"), P(None, None, "model")
OF_ROWS = {"spec": CHANNELS, "w_spec": P("model")}
GROUPS = {"num_groups": 2, "num_channels": 6}
SHAPE = (3, 5, 4, 2, 2)


def _of_channels(name: str, ndim: int, spec: P, shape: tuple[int, ...] = SHAPE, **options: object) -> Case:
    return Case(name, {"num_features": 5} | options, {"spec": spec}, [shape[:ndim]], [spec], spec, AXES)


def _instance_norms() -> Iterator[Case]:
    for n in (1, 2, 3):
        yield _of_channels(f"InstanceNorm{n}d", n + 2, CHANNELS, affine=True, track_running_stats=True)


CASES = [
    _of_channels("BatchNorm1d", 3, CHANNELS),
    _of_channels("BatchNorm2d", 4, ROWS),
    _of_channels("BatchNorm3d", 5, CHANNELS, momentum=None),
    _of_channels("SyncBatchNorm", 4, CHANNELS),
    *_instance_norms(),
    Case(
        "GroupNorm",
        {"num_groups": 2, "num_channels": 6},
        {"spec": P(None, "model")},
        [(2, 6, 3)],
        [CHANNELS],
        CHANNELS,
        AXES,
    ),
    Case(
        "LayerNorm",
        {"normalized_shape": 5},
        {"spec": CHANNELS, "w_spec": P("model")},
        [(3, 5)],
        [CHANNELS],
        CHANNELS,
        AXES,
    ),
    Case(
        "RMSNorm",
        {"normalized_shape": 5},
        {"spec": CHANNELS, "w_spec": P("model")},
        [(3, 5)],
        [CHANNELS],
        CHANNELS,
        AXES,
    ),
]
