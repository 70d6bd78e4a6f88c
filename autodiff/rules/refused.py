"""Functions that have no derivative rule: what to write instead, and those that take no entries of arrays."""

from __future__ import annotations

import numpy as np

from spmd.autodiff.primitive import composite, constant, passive, refused

# Those that write into an argument. Arrays are immutable: a changed copy takes their place.

refused(np.copyto, instead="y = np.where(mask, v, x), or spmd.at(x)[...].set(v)", writes=True)
refused(np.fill_diagonal, instead="i = np.arange(min(x.shape)); y = spmd.at(x)[i, i].set(v)", writes=True)
refused(np.place, instead="y = spmd.at(x)[mask].set(np.resize(v, np.count_nonzero(mask)))", writes=True)
refused(np.put, instead="y = spmd.at(x)[np.unravel_index(i, x.shape)].set(v)", writes=True)
refused(
    np.put_along_axis,
    instead="y = spmd.at(x)[np.arange(len(x))[:, None], i].set(v), along the last dimension of two",
    writes=True,
)
refused(np.putmask, instead="y = np.where(mask, np.resize(v, x.shape), x)", writes=True)

refused(np.intersect1d, instead="x[np.isin(x, y)], of which x alone is differentiated")

# Those that do not dispatch on their arguments, so that the array itself raises. Others of them have overrides.

refused(
    np.isfortran,
    instead="leave it out: how an array lies in memory is no part of its value",
)
refused(np.asmatrix, instead="np.atleast_2d(x)")
refused(np.bmat, instead="np.block([[x, y]])")
refused(np.nested_iters, instead="np.stack([f(row) for row in x]), or np.apply_along_axis(f, -1, x)")
refused(np.frompyfunc, instead="spmd.numpy.vectorize(f), or f(x) where f is made of NumPy's functions")

# Those that write files.

refused(np.save, instead="np.save(file, spmd.stop_gradient(x))")
refused(np.savetxt, instead="np.savetxt(file, spmd.stop_gradient(x))")
refused(np.savez, instead="np.savez(file, spmd.stop_gradient(x))")
refused(np.savez_compressed, instead="np.savez_compressed(file, spmd.stop_gradient(x))")


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
