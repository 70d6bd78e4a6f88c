"""First on the path of processes that tests start with SPMD_TEST_DEVICE=emulated: their CuPy is the stand-in too."""

import os
import sys
from pathlib import Path

if os.environ.get("SPMD_TEST_DEVICE") == "emulated":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    from emulator import fake_cupy

    sys.modules.update(fake_cupy.make())
