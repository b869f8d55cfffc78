"""Computes heat diffusion on a grid of processes, which exchange their borders."""

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
dims = MPI.Compute_dims(world.size, 2)
cart = world.Create_cart(dims, periods=[False, True])
n = 6
field = np.zeros((n + 2, n + 2))
field[1:-1, 1:-1] = cart.rank + 1
up, down = cart.Shift(0, 1)
left, right = cart.Shift(1, 1)

column = MPI.DOUBLE.Create_vector(n, 1, n + 2).Commit()
for _ in range(10):
    cart.Sendrecv(field[1, 1:-1], up, 0, field[-1, 1:-1], down, 0)
    cart.Sendrecv(field[-2, 1:-1], down, 1, field[0, 1:-1], up, 1)
    flat = field.reshape(-1)
    stride = n + 2
    cart.Sendrecv([flat[stride + 1 :], 1, column], left, 2, [flat[stride + n + 1 :], 1, column], right, 2)
    cart.Sendrecv([flat[stride + n :], 1, column], right, 3, [flat[stride:], 1, column], left, 3)
    inner = field[1:-1, 1:-1]
    field[1:-1, 1:-1] = inner + 0.1 * (field[:-2, 1:-1] + field[2:, 1:-1] + field[1:-1, :-2] + field[1:-1, 2:] - 4 * inner)

print(f"{cart.rank}: {cart.Get_coords(cart.rank)} {cart.Get_topo()[0]} {field[1:-1, 1:-1].sum():.9f}")
print(f"{cart.rank}: total {cart.allreduce(field[1:-1, 1:-1].sum()):.9f}")
row = cart.Sub([False, True])
print(f"{cart.rank}: row {row.rank} of {row.size}")
print(f"{cart.rank}: {cart.neighbor_allgather(cart.rank)}")
