"""When the stages of a pipeline work on which microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd.errors import LayoutError
from spmd.plot.canvas import font_that_fits, legend_beside, new_axes, pixels_per_unit
from spmd.plot.timelines import Event, events_of, tracks_of
from spmd.representations.colours import COLOURS, ink
from spmd.tracebacks import api_boundary

__all__ = ["pipeline"]

_WHERE = "spmd.plot.pipeline"
_COLOURS = {"forward": COLOURS[1], "backward": COLOURS[0], "weight": COLOURS[2]}
_LABELS = {"forward": "forward", "backward": "backward", "weight": "gradients of weights"}


@api_boundary
def pipeline(trace: Any, *, title: str | None = None, ax: Any = None) -> Any:
    """Draw what the stages of pipelines do over time: a row for each worker, a box for each action.

    trace: as of `spmd.plot.timeline`: a profile of a program in which a pipeline runs, or its file. title: above the
    picture; by default it says how much of the time workers are idle, between the first action and the last one. ax:
    the Axes to draw on; by default those of a new figure. The number in a box is that of the microbatch. Where a worker
    has several stages, the boxes of later ones are lighter. Returns the Axes. Cost: reads the file.
    Raises LayoutError for a trace without stages, ImportError without Matplotlib: `pip install "spmd[plot]"`.

        >>> span = {"ph": "X", "cat": "stage", "pid": 0, "name": "forward of stage 0"}
        >>> args = {"action": "forward", "stage": 0}
        >>> events = [{**span, "tid": k, "ts": 10 * k, "dur": 10, "args": {**args, "microbatch": k}} for k in range(2)]
        >>> spmd.plot.pipeline(events).get_title()
        'idle for 50% of the time'
    """
    tracks = {
        name: actions
        for name, events in tracks_of(events_of(trace, _WHERE)).items()
        if (actions := [event for event in events if event.kind == "stage"])
    }
    if not tracks:
        raise LayoutError.at(
            _WHERE,
            argument="trace",
            got="a trace in which no pipeline runs",
            need="one of a program that calls spmd.training.pipeline or spt.pipeline",
            mend='with spmd.profile("trace.json"): a step, then spmd.plot.pipeline("trace.json")',
        )
    ax = new_axes(_WHERE, ax, 9.0, min(12.0, 1.1 + 0.32 * max(2, len(tracks))))
    actions = [event for own in tracks.values() for event in own]
    first, last = min(e.start for e in actions), max(e.start + e.length for e in actions)
    ax.set_xlim(0.0, max(last - first, 1e-9))
    ax.set_ylim(len(tracks) - 0.5, -0.5)
    ax.set_yticks(range(len(tracks)), [*tracks], fontsize="small", parse_math=False)
    ax.set_xlabel("milliseconds")
    idle = 1 - sum(e.length for e in actions) / max((last - first) * len(tracks), 1e-9)
    ax.set_title(f"idle for {idle:.0%} of the time" if title is None else title, fontsize="medium", parse_math=False)
    _legend(ax, actions)
    _draw(ax, tracks, first)
    return ax


def _draw(ax: Any, tracks: Mapping[str, list[Event]], first: float) -> None:
    from matplotlib.patches import Rectangle

    scale = pixels_per_unit(ax)
    for y, events in enumerate(tracks.values()):
        stages = sorted({e.args["stage"] for e in events})
        for event in events:
            colour = _lighter(_COLOURS[event.args["action"]], stages.index(event.args["stage"]) / len(stages))
            x, width, height = event.start - first, event.length, 0.8
            ax.add_patch(Rectangle((x, y - height / 2), width, height, facecolor=colour, edgecolor="white", lw=0.5))
            label = str(event.args["microbatch"])
            size = font_that_fits(ax, len(label), width, height, scale)
            if size is not None:
                ax.text(x + width / 2, y, label, ha="center", va="center", fontsize=size, color=ink(colour))


def _lighter(colour: str, share: float) -> str:
    """A colour with so large a share of white."""
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _legend(ax: Any, actions: list[Event]) -> None:
    from matplotlib.patches import Patch

    used = {event.args["action"] for event in actions}
    legend_beside(ax, [Patch(facecolor=c, label=_LABELS[kind]) for kind, c in _COLOURS.items() if kind in used])
