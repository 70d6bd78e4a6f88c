"""The functions of global arrays that are run as maps, of traced arrays too."""

from __future__ import annotations

from functools import partial

from spmd import global_functions

__all__ = ["implements"]

implements = partial(global_functions.implements, table=global_functions.MAPPED)
"""`global_functions.implements` for functions that are run as maps."""
