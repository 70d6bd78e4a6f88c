"""scipy.fft that also takes traced arrays: the same names, options and results.

    from spmd.scipy import fft
    spmd.grad(lambda x: np.sum(fft.dct(x) ** 2))(x)

CuPy arrays go to cupyx.scipy.fft, with the options that it has.

The module is also a backend of scipy.fft. After `scipy.fft.register_backend(spmd.scipy.fft)` plain `scipy.fft.fft(x)`
takes traced arrays too, and each call takes about 2 µs longer. (`scipy.fft.set_backend` as a context works outside of
bodies only: it belongs to a thread, which bodies may share.)
"""

from __future__ import annotations

import scipy.fft as _scipy
from scipy.fft import (
    fftfreq,
    fftshift,
    fhtoffset,
    get_workers,
    ifftshift,
    next_fast_len,
    register_backend,
    rfftfreq,
    set_backend,
    set_global_backend,
    set_workers,
    skip_backend,
)

from spmd.autodiff.rules.fourier_scipy import functions
from spmd.autodiff.tracer import find

fft, ifft = functions["fft"], functions["ifft"]
fft2, ifft2 = functions["fft2"], functions["ifft2"]
fftn, ifftn = functions["fftn"], functions["ifftn"]
rfft, irfft = functions["rfft"], functions["irfft"]
rfft2, irfft2 = functions["rfft2"], functions["irfft2"]
rfftn, irfftn = functions["rfftn"], functions["irfftn"]
hfft, ihfft = functions["hfft"], functions["ihfft"]
hfft2, ihfft2 = functions["hfft2"], functions["ihfft2"]
hfftn, ihfftn = functions["hfftn"], functions["ihfftn"]

dct, idct = functions["dct"], functions["idct"]
dctn, idctn = functions["dctn"], functions["idctn"]
dst, idst = functions["dst"], functions["idst"]
dstn, idstn = functions["dstn"], functions["idstn"]
fht, ifht = functions["fht"], functions["ifht"]

__ua_domain__ = "numpy.scipy.fft"


def __ua_function__(method, args, kwargs):
    """What scipy.fft calls of a backend. NotImplemented unless an array is traced or has a state."""
    if method.__name__ in functions and find((args, kwargs), []):
        return functions[method.__name__](*args, **kwargs)
    return NotImplemented


__all__ = [
    "dct",
    "dctn",
    "dst",
    "dstn",
    "fft",
    "fft2",
    "fftfreq",
    "fftn",
    "fftshift",
    "fht",
    "fhtoffset",
    "get_workers",
    "hfft",
    "hfft2",
    "hfftn",
    "idct",
    "idctn",
    "idst",
    "idstn",
    "ifft",
    "ifft2",
    "ifftn",
    "ifftshift",
    "ifht",
    "ihfft",
    "ihfft2",
    "ihfftn",
    "irfft",
    "irfft2",
    "irfftn",
    "next_fast_len",
    "register_backend",
    "rfft",
    "rfft2",
    "rfftfreq",
    "rfftn",
    "set_backend",
    "set_global_backend",
    "set_workers",
    "skip_backend",
]

if hasattr(_scipy, "prev_fast_len"):
    prev_fast_len = _scipy.prev_fast_len
    __all__ += ["prev_fast_len"]
