"""Pictures by Matplotlib: layouts, values of arrays, what is sent, when workers run and wait, and how pipelines run.

Each function returns the Axes that it draws on: `ax`, or those of a new figure.
"""

from spmd.plot.fields import field
from spmd.plot.layouts import layout
from spmd.plot.pipelines import pipeline
from spmd.plot.sent import ledger
from spmd.plot.timelines import timeline

__all__ = ["field", "layout", "ledger", "pipeline", "timeline"]
