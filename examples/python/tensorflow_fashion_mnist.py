"""Horovod's interface for TensorFlow 2, with a training loop of its own: a small network learns Fashion-MNIST.

    ringrun -n 4 python tensorflow_fashion_mnist.py

A Horovod script needs one line changed: `import ringtrain.tensorflow as hvd` instead of `import horovod.tensorflow as hvd`. The
data are the files of the Debian package dataset-fashion-mnist.
"""

import argparse
import gzip
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ringtrain.tensorflow as hvd


def read_data(directory: Path, name: str, limit: int) -> tf.data.Dataset:
    """Returns the first `limit` images, with values from 0 to 1, and their labels."""
    contents = [directory / f"{name}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    try:
        images, labels = (gzip.decompress(path.read_bytes()) for path in contents)
    except OSError as error:
        print(f"{error}; get the data with `apt-get install dataset-fashion-mnist`, and pass --data", file=sys.stderr)
        sys.exit(2)
    # The headers have 16 and 8 bytes.
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28, 1)[:limit]
    numbers = np.frombuffer(labels, np.uint8, offset=8)[:limit].astype(np.int32)
    return tf.data.Dataset.from_tensor_slices((pixels.astype(np.float32) / 255, numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--limit", type=int, default=60_000, help="number of images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="number of epochs (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images per step on all ranks together (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="directory for a checkpoint")
    parser.add_argument("--steps", action="store_true", help="print the loss of each step")
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(1)
    batch = options.batch // hvd.size()
    dataset = read_data(options.data, "train", options.limit).shard(hvd.size(), hvd.rank()).batch(batch, drop_remainder=True)
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    model = keras.Sequential([keras.layers.Input((28, 28, 1)), *layers])
    optimizer = keras.optimizers.SGD(options.rate, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    losses: list[float] = []
    for epoch in range(options.epochs):
        first = len(losses)
        losses += [float(train_step(images, labels)) for images, labels in dataset]
        mean = float(hvd.allreduce(np.mean(losses[first:]), name="loss"))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}: loss {mean:.4f}")

    of_all_ranks = hvd.allreduce(losses, name="losses").numpy()
    correct = [
        tf.argmax(model(images), 1, tf.int32) == labels
        for images, labels in read_data(options.data, "t10k", options.limit).shard(hvd.size(), hvd.rank()).batch(1000)
    ]
    accuracy = float(hvd.allreduce(tf.reduce_mean(tf.cast(tf.concat(correct, 0), tf.float32)), name="accuracy"))
    if hvd.rank() == 0:
        if options.steps:
            print("losses:", *(f"{loss:.7f}" for loss in of_all_ranks))
        if options.checkpoint:
            tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(options.checkpoint / "model"))
        print(f"final: ranks {hvd.size()}, test accuracy {accuracy:.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
