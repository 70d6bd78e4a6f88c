"""Draw on Invariant and on Varying tensors; print what came of it on each worker."""

import sys

import torch
from torch.nn import functional as F

import spmd
from spmd import P
from spmd.bridge import torch as spt


def main():
    x = torch.ones(20)
    same = F.dropout(x).tolist(), torch.rand(3).tolist()
    mine = F.dropout(spt.varying(x, "x")), spt.dropout(spt.varying(x, "x"), 0.5, spec=P("x"))
    print(f"Invariant {same}\n", end="")
    print(f"{spt.worker_index('x')} {[spt.block(m).tolist() for m in mine]}\n", end="")


torch.manual_seed(8)
with spmd.Mesh(x=int(sys.argv[1])):
    spt.map(main, (), None)()
