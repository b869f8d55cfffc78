"""DistributedDataParallel on the backend "ring": a small convolutional network learns Fashion-MNIST.

    ringrun -n 4 python ddp_fashion_mnist.py --save model.pt
    torchrun --nproc-per-node 4 ddp_fashion_mnist.py --save model.pt

This is an ordinary DDP program. Only the import of ringtrain.torch and the name of the backend are specific to ringtrain.
"""

import argparse
import gzip
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ringtrain.torch  # noqa: F401  (registers the backend "ring")

# The Debian package dataset-fashion-mnist installs the data here.
DATA = Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10


class DataError(Exception):
    """The data is missing or invalid. The text of the exception says what to do."""


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the images or labels in a gzipped IDX file as an array of bytes. Each image or label must have the
    shape `shape`."""
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing; get it with `apt-get install dataset-fashion-mnist` or from "
            "https://github.com/zalandoresearch/fashion-mnist, and name its directory with --data"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    # The header has two zeros, an 8 for the type "unsigned byte", the number of dimensions, and the size of each dimension in
    # big-endian byte order.
    header = struct.Struct(f">HBB{1 + len(shape)}I")
    if len(content) < header.size:
        raise DataError(f"{path} ends within its header")
    zeros, kind, dimensions, count, *found = header.unpack_from(content)
    if (zeros, kind, dimensions, tuple(found)) != (0, 8, 1 + len(shape), shape):
        raise DataError(f"{path} is not an IDX file of bytes whose items have the shape {shape}")
    if len(content) - header.size != count * int(np.prod(shape)):
        raise DataError(f"the header of {path} says {count} items, which does not match the length of the file")
    return np.frombuffer(content, np.uint8, offset=header.size).reshape(count, *shape)


def read_data(directory: Path, name: str, limit: int | None) -> TensorDataset:
    """Returns the images, with values from -1 to 1, and their labels. If `limit` is not None, returns only the first `limit`
    images."""
    images = read_idx(directory / f"{name}-images-idx3-ubyte.gz", (28, 28))[:limit]
    labels = read_idx(directory / f"{name}-labels-idx1-ubyte.gz", ())[:limit]
    if len(images) != len(labels) or len(labels) == 0:
        raise DataError(f"{directory} has {len(images)} {name} images and {len(labels)} labels; each image needs one")
    if labels.max() >= CLASSES:
        raise DataError(f"{directory} has the {name} label {labels.max()}; the largest valid label is {CLASSES - 1}")
    scaled = torch.from_numpy(images[:, None].astype(np.float32) / 127.5 - 1)
    return TensorDataset(scaled, torch.from_numpy(labels.astype(np.int64)))


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, CLASSES),
    )


def count_correct(model: nn.Module, data: TensorDataset) -> Tensor:
    """Tests the model on this rank's part of the images. Returns the number of correct classifications and the number of
    images."""
    images, labels = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in data.tensors)
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum() for x, y in zip(images.split(1000), labels.split(1000), strict=True))
    return torch.tensor([int(correct), len(labels)])


def train(model: nn.Module, data: TensorDataset, options: argparse.Namespace) -> None:
    # DDP averages the gradients over the ranks during the backward pass.
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=options.rate)
    sampler = DistributedSampler(data, seed=options.seed)
    loader = DataLoader(data, batch_size=max(1, options.batch // dist.get_world_size()), sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # Shuffles the images in the same way on all ranks. Each rank takes its part.
        total = torch.zeros(())
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = total / len(loader)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}: train loss {mean:.4f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="directory with *-ubyte.gz (default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N training images and the first N test images")
    parser.add_argument("--epochs", type=int, default=3, help="number of epochs (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="images per step, summed over all ranks (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of random numbers (default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="file to which rank 0 writes the model's state_dict")
    options = parser.parse_args()

    try:
        train_data, test_data = (read_data(options.data, name, options.limit) for name in ("train", "t10k"))
    except DataError as error:
        print(error, file=sys.stderr)
        return 2

    dist.init_process_group("ring")
    torch.manual_seed(options.seed)
    model = make_model()
    train(model, train_data, options)

    # Every rank tests the model on its part of the images.
    counts = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count_correct(model, test_data))
    correct, images = torch.stack(counts).sum(0).tolist()
    if dist.get_rank() == 0:
        if options.save is not None:
            torch.save(model.state_dict(), options.save)
            print(f"saved {options.save}")
        print(f"final: ranks {dist.get_world_size()}, test accuracy {correct / images:.4f} of {images} images")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
