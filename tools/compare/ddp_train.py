"""Trains a multilayer perceptron with DistributedDataParallel and a communication hook, on one rank of a job.

`training.py` starts this program on every host. For each --codec, the program trains the model again from the start, and rank 0
prints a line of JSON with the duration of the steps and the test accuracy of each epoch. One process trains with several codecs,
because importing torch takes longer than many of these runs. The data are IDX files, and an epoch has as many steps as with
`ringtrain`.
"""

import argparse
import gzip
import json
import math
import pathlib
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

# A limit that no model here reaches, so that DistributedDataParallel has a single bucket.
ONE_BUCKET_MB = 1 << 20
# torch requires that PowerSGD begins after step 1, because DistributedDataParallel changes its buckets after the first step.
POWER_SGD_START = 2


def read_idx(directory, name, dims):
    """Returns the array in an IDX file, plain or compressed."""
    path = directory / f"{name}-idx{dims}-ubyte"
    content = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(path.name + ".gz").read_bytes())
    shape = np.frombuffer(content, dtype=">u4", count=dims, offset=4)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dims).reshape(tuple(map(int, shape)))


def read_samples(directory, name):
    """Returns the pixels from 0 to 1, with a row for each image, and the classes."""
    images, labels = read_idx(directory, f"{name}-images", 3), read_idx(directory, f"{name}-labels", 1)
    pixels = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32)) / 255
    return pixels, torch.from_numpy(labels.astype(np.int64))


def build_model(description, inputs, classes):
    """Returns the model `mlp:WIDTH,...` of ringtrain."""
    widths = [inputs, *(int(width) for width in description.removeprefix("mlp:").split(",")), classes]
    layers = []
    for width, following in zip(widths, widths[1:]):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def register_gloo_hook(model, codec):
    """Registers torch's own hook for the codec."""
    name, _, parameter = codec.partition(":")
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, int(parameter), start_powerSGD_iter=POWER_SGD_START)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name != "none":
        model.register_comm_hook(None, {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[name])


def register_ring_hook(model, codec):
    """Registers the hook of ringtrain for the codec."""
    from ringtrain.torch import hooks

    if codec != "none":
        model.register_comm_hook(hooks.CompressionState(codec), hooks.compress)


def distribute(model, backend, codec):
    """Wraps the model in DistributedDataParallel with the hook for the codec."""
    # The continuations of torch's PowerSGD begin collectives in several threads. With several buckets, the order of these
    # collectives differs between ranks, and Gloo fails.
    more = {"bucket_cap_mb": ONE_BUCKET_MB} if backend == "gloo" and codec.startswith("powersgd") else {}
    model = DistributedDataParallel(model, gradient_as_bucket_view=True, **more)
    (register_gloo_hook if backend == "gloo" else register_ring_hook)(model, codec)
    return model


def build_optimizer(args, model):
    if args.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    return torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9 if args.optimizer == "momentum" else 0)


def build_schedule(args, optimizer, steps):
    """Returns the schedule of the learning rate: with `cosine`, the rate falls to 0 over all steps, as with `ringtrain`."""
    factor = (lambda step: (1 + math.cos(math.pi * step / steps)) / 2) if args.schedule == "cosine" else lambda _: 1.0
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_epoch(args, epoch, samples, model, optimizer, schedule):
    """Trains for an epoch, and returns the time of each step in seconds."""
    pixels, labels = samples
    rank, size = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(1000 * args.seed + epoch))
    times = []
    dist.barrier()
    started = time.perf_counter()
    for step in range(math.ceil(len(order) / args.batch_size)):
        mine = order[step * args.batch_size : (step + 1) * args.batch_size][rank::size]
        loss = functional.cross_entropy(model(pixels[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        now = time.perf_counter()
        times.append(now - started)
        started = now
    return times


def accuracy(model, samples):
    """Returns the fraction of the samples whose class the model predicts."""
    pixels, labels = samples
    with torch.no_grad():
        right = sum((model(part).argmax(1) == own).sum().item() for part, own in zip(pixels.split(1000), labels.split(1000)))
    return right / len(labels)


def train(args, codec, samples, tests):
    """Trains with a codec. Returns the results on rank 0, and None on other ranks."""
    torch.manual_seed(args.seed)
    model = build_model(args.model, samples[0].shape[1], int(samples[1].max()) + 1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model = distribute(model, args.backend, codec)
    optimizer = build_optimizer(args, model)
    schedule = build_schedule(args, optimizer, args.epochs * math.ceil(len(samples[0]) / args.batch_size))
    history = []
    for epoch in range(args.epochs):
        times = train_epoch(args, epoch, samples, model, optimizer, schedule)
        if tests:
            history.append({"steps": len(times), "seconds": sum(times), "test_accuracy": accuracy(model.module, tests)})
    version = f"PyTorch {torch.__version__}"
    return {"codec": codec, "version": version, "parameters": parameters, "history": history} if tests else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["gloo", "ring"], required=True)
    parser.add_argument("--codec", action="append", required=True,
                        help="none, fp16, bf16 or powersgd:RANK; with ring every compression of ringtrain. May be repeated")
    parser.add_argument("--data", type=pathlib.Path, required=True, help="a directory of IDX files")
    parser.add_argument("--model", required=True, help="mlp:WIDTH,WIDTH,...")
    parser.add_argument("--batch-size", type=int, required=True, help="samples of all ranks in a step")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--optimizer", choices=["adam", "sgd", "momentum"], default="adam")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--schedule", choices=["constant", "cosine"], default="constant")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # The ranks share the processors of one machine.
    torch.set_num_threads(1)
    if args.backend == "ring":
        import ringtrain.torch  # noqa: F401  (registers the backend)
    dist.init_process_group(args.backend)
    samples = read_samples(args.data, "train")
    tests = read_samples(args.data, "t10k") if dist.get_rank() == 0 else None
    for codec in args.codec:
        if (result := train(args, codec, samples, tests)) is not None:
            print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
