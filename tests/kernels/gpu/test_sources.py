"""Every source in CUDA is compiled for every combination of its types, by NVRTC, which needs no GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from spmd.kernels import FAMILIES

cupy = pytest.importorskip("cupy")
if not hasattr(cupy.cuda, "nvrtc"):
    pytest.skip("the stand-in for CuPy has no compiler", allow_module_level=True)
nvrtc = cupy.cuda.nvrtc

from spmd.kernels.gpu import source  # noqa: E402

for family in FAMILIES:
    importlib.import_module(f"spmd.kernels.gpu.{family}")

FILES = sorted(path.stem for path in Path(source.__file__).parent.glob("*.cu"))


def compiled(file: str, expressions: list[str], arch: str) -> str:
    """The assembly of a source with these instances of its templates."""
    program = nvrtc.createProgram(source.text(file), f"{file}.cu", [], [])
    for expression in expressions:
        nvrtc.addNameExpression(program, expression)
    try:
        nvrtc.compileProgram(program, (*source.Kernel.OPTIONS, f"-arch=compute_{arch}"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    names = [nvrtc.getLoweredName(program, expression) for expression in expressions]
    ptx = nvrtc.getPTX(program)
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert all(f".entry {name}" in text for name in names)
    return text


@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("file", FILES)
def test_every_instance_compiles(file, arch):
    expressions = [k.expression(types) for k in source.KERNELS if k.file == file for types in k.types]
    assert expressions, f"no kernel is declared over {file}.cu"
    compiled(file, expressions, arch)


def test_a_source_that_does_not_compile_is_told(monkeypatch):
    monkeypatch.setattr(source, "text", lambda file: "template <class T> __global__ void f(T* x) { x[0] = y; }")
    with pytest.raises(pytest.fail.Exception, match="identifier"):
        compiled("f", ["f<float>"], "80")


def test_rows_move_16_bytes_at_a_time():
    text = compiled("softmaxes", ["softmax<float>"], "90")
    assert "ld.global.v4" in text
    assert "st.global.v4" in text
