"""Fits a linear regression by averaging models. This script is an ordinary script for mpi4py and does not mention
ringtrain.

    ringrun --mpi4py -n 4 python mpi_average.py
    mpirun -n 4 python mpi_average.py

Rank 0 scatters the data, every rank fits a model to its part, and rank 0 gathers the models and averages them.
"""

import argparse

import numpy as np
from mpi4py import MPI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4001, help="rows of data on rank 0 (default: %(default)s)")
    parser.add_argument("--features", type=int, default=8, help="features of a row (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of random numbers (default: %(default)s)")
    options = parser.parse_args()

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()

    # Methods in lower case send pickled objects, so the parts can have different sizes.
    parts = None
    if rank == 0:
        random = np.random.default_rng(options.seed)
        inputs = random.normal(size=(options.rows, options.features))
        truth = random.normal(size=options.features)
        targets = inputs @ truth + 0.5 * random.normal(size=options.rows)
        parts = list(zip(np.array_split(inputs, size), np.array_split(targets, size), strict=True))
    own_inputs, own_targets = comm.scatter(parts, root=0)
    model = np.linalg.lstsq(own_inputs, own_targets, rcond=None)[0]

    # Methods in upper case send buffers without pickling.
    models = np.empty((size, options.features)) if rank == 0 else None
    comm.Gather(model, models, root=0)
    average = np.empty(options.features)
    comm.Allreduce(model, average, op=MPI.SUM)
    average /= size
    rows = comm.reduce(len(own_targets), op=MPI.SUM, root=0)

    if rank == 0:
        agreement = np.abs(models.mean(axis=0) - average).max()
        error = np.abs(average - truth).max()
        print(f"final: ranks {size}, rows {rows}, error of a weight {error:.6f}, gathered and reduced differ by {agreement:.1e}")


if __name__ == "__main__":
    main()
