"""Functions that have no derivative rule: what to write instead, and those that take no entries of arrays."""

from __future__ import annotations

import numpy as np

from spmd.autodiff.primitive import composite, constant, passive, refused

# Those that write into an argument. Arrays are immutable: a changed copy takes their place.

refused(np.copyto, instead="y = x.at[...].set(v), or np.where(mask, v, x)", writes=True)
refused(np.fill_diagonal, instead="y = x.at[np.diag_indices_from(x)].set(v)", writes=True)
refused(np.place, instead="y = x.at[mask].set(v)", writes=True)
refused(np.put, instead="y = np.ravel(x).at[i].set(v), reshaped to the shape of x", writes=True)
refused(
    np.put_along_axis,
    instead="y = x.at[i].set(v); along the last of two: i = (np.arange(n)[:, None], indices)",
    writes=True,
)
refused(np.putmask, instead="y = np.where(mask, v, x)", writes=True)

# Sets. Where two entries are equal one of them is dropped, and which of them it was has no derivative.

refused(
    np.unique,
    np.unique_all,
    np.unique_counts,
    np.unique_inverse,
    np.unique_values,
    instead="np.sort(x), whose entries keep their gradients; of spmd.stop_gradient(x) for the values alone",
)
refused(np.intersect1d, instead="x[np.isin(x, y)]")
refused(np.setdiff1d, instead="x[np.isin(x, y, invert=True)]")
refused(np.setxor1d, instead="np.concatenate([x[np.isin(x, y, invert=True)], y[np.isin(y, x, invert=True)]])")
refused(np.union1d, instead="np.sort(np.concatenate([x, y]))")

# Those that make a new array of what they are given: NumPy does not tell us of the call, so that the array raises.

refused(
    np.array,
    np.asanyarray,
    np.asarray,
    np.fromiter,
    instead="np.stack([a, b]) of traced entries; a traced array is one already",
)
refused(np.asarray_chkfinite, instead="x itself, and np.isfinite(x)")
refused(
    np.ascontiguousarray,
    np.asfortranarray,
    np.isfortran,
    np.require,
    instead="x itself: how it lies in memory is no part of its value",
)
refused(np.from_dlpack, instead="x itself, or spmd.stop_gradient(x)")
refused(np.asmatrix, instead="np.atleast_2d(x)")
refused(np.bmat, instead="np.block")
refused(np.nested_iters, instead="`for row in x`, or np.apply_along_axis")
refused(np.arange, instead="start + step * np.arange(n), or np.linspace")
refused(np.full, instead="np.broadcast_to(v, shape)")
refused(np.kaiser, instead="np.i0(beta * np.sqrt(1 - t**2)) / np.i0(beta) for t from -1 to 1")
refused(
    np.frompyfunc, instead="the Python function itself: NumPy's functions in it are recorded; or np.apply_along_axis"
)

# Those that write files and text.

refused(np.save, np.savetxt, np.savez, np.savez_compressed, instead="save spmd.stop_gradient(x)")
refused(np.format_float_positional, np.format_float_scientific, instead="np.array2string(x), or an f-string")


def _named(names: str, module=np):
    """The functions of a module by their names, those that this version has."""
    return [getattr(module, name) for name in names.split() if hasattr(module, name)]


passive(*_named("empty eye fromfunction identity indices ones tri zeros bartlett blackman hamming hanning"))
passive(*_named("broadcast_shapes diag_indices mask_indices tril_indices triu_indices"))
passive(*_named("frombuffer fromfile fromregex fromstring genfromtxt load loadtxt"))
passive(*_named("isdtype isscalar issubdtype iterable mintypecode promote_types typename"))
passive(*_named("busday_count busday_offset datetime_as_string datetime_data is_busday isnat base_repr binary_repr"))
passive(*_named("get_include get_printoptions getbufsize geterr geterrcall info printoptions set_printoptions"))
passive(*_named("setbufsize seterr seterrcall show_config show_runtime"))
for _module in (np, np.linalg, np.fft):
    passive(*_named("test", _module))

# Other names of older releases.

constant(*_named("in1d"))


@composite(*_named("trapz"))
def trapz(y, x=None, dx=1.0, axis=-1):
    return np.trapezoid(y, x, dx, axis)
