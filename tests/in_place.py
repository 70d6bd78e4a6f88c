"""A plugin for pytest, `-p in_place`: what is done in place for large arrays only is done for arrays of every size."""

from spmd.autodiff import backward

backward.INPLACE_MIN = -1
