"""Imported, it notes when this process is ready, with torch where that is the launcher."""

from __future__ import annotations

import os
import time

if "TORCHELASTIC_RUN_ID" in os.environ:
    import torch.distributed  # noqa: F401
if "SPMD_TEST_UP" in os.environ:
    with open(os.environ["SPMD_TEST_UP"], "a") as file:
        file.write(f"{time.time()}\n")
