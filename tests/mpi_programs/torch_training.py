"""Maps, gradients of any order and a training loop in torch; prints the same bits whoever the workers are."""

import copy
import sys

import torch

import spmd
from spmd import P
from spmd.bridge import torch as spt

n = int(sys.argv[1])
mesh = spmd.Mesh(x=n)
torch.manual_seed(0)
x = torch.randn(9, 3, dtype=torch.float64)
target = torch.randn(9, dtype=torch.float64)
lines = []


def say(name, *tensors):
    lines.append(" ".join([name, *(v.hex() for t in tensors for v in t.detach().double().reshape(-1).tolist())]))


def loss(w, x, y):
    h = torch.tanh(spt.halo_exchange(x, P("x"), 1, "periodic")).sum()
    g = spt.all_gather(x @ w, "x", tiled=True).sum()
    return spt.mean((x @ w - y) ** 2, "x") + spt.psum(h * 1e-3 + g * 1e-3, "x") + spt.max(x @ w, "x")


# From outside
f = spt.map(loss, (P(), P("x"), P("x")), P(), mesh=mesh)
w = torch.randn(3, dtype=torch.float64, requires_grad=True)
x.requires_grad_()
value = f(w, x, target)
value.backward()
say("outside", value, w.grad, x.grad)
(g,) = torch.autograd.grad(f(w, x, target), w, create_graph=True)
say("second", *torch.autograd.grad((g * g).sum(), (w, x)))
say("jvp", *torch.func.jvp(lambda w: f(w, x.detach(), target), (w.detach(),), (torch.ones_like(w),)))
say("jacobian", torch.func.jacrev(lambda w: f(w, x.detach(), target))(w.detach()))

# Parameters that are closed over
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
train = spt.map(lambda x, y: spt.mean((net(x)[:, 0] - y) ** 2, "x"), (P("x"), P("x")), P(), mesh=mesh)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    optimizer.zero_grad()
    value = train(x.detach(), target)
    value.backward()
    optimizer.step()
    say(f"closed over {step}", value)
say("parameters", *net.parameters())


# The whole loop in a body. Threads share torch's generator, so each worker copies what was drawn before.
drawn = torch.nn.Linear(3, 1).double()


def inside(x, y):
    lin = copy.deepcopy(drawn)
    optimizer = torch.optim.Adam(lin.parameters(), 0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        value = spt.mean((lin(x)[:, 0] - y) ** 2, "x")
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses), lin.weight, spt.all_gather(x, "x", tiled=True, to="invariant")


say("inside", *spt.map(inside, (P("x"), P("x")), P(), mesh=mesh)(x.detach(), target))


def transforms(x, w):
    def of(w):
        return spt.mean(torch.sin(x @ w), "x")

    return torch.func.grad(of)(w), torch.func.hessian(of)(w), torch.func.vmap(lambda r: spt.psum(r, "x"))(x[:2])


for y in spt.map(transforms, (P("x"), P()), P(), mesh=mesh)(x.detach(), w.detach()):
    say("transforms", y)
if spmd.is_main():
    print("\n".join(lines))
