"""Training on blocks with torch's own tools, in processes: what each finds is what one worker finds."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bridge.torch.test_training as training
import torch

NAMES = ["clip_grad_norm_ foreach", "weight penalty", "gradient penalty", "adamw", "adafactor", "lbfgs", "ema"]
NAMES += ["scaler of infinite gradients"] + ["muon"] * hasattr(torch.optim, "Muon")

if __name__ == "__main__":
    for name in NAMES:
        training.check(name, torch.float64)
    print("a process is through\n", end="", flush=True)
