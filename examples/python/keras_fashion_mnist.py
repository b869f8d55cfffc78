"""Horovod's interface for Keras 3: a small network learns Fashion-MNIST.

    KERAS_BACKEND=jax ringrun -n 4 python keras_fashion_mnist.py --save model.keras

A Horovod script needs one line changed: `import ringtrain.keras as hvd` instead of `import horovod.keras as hvd`. The data are
the files of the Debian package dataset-fashion-mnist.
"""

import argparse
import gzip
import sys
from pathlib import Path

import keras
import numpy as np

import ringtrain.keras as hvd


def read_data(directory: Path, name: str, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first `limit` images, with values from 0 to 1, and their labels."""
    contents = [directory / f"{name}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    try:
        images, labels = (gzip.decompress(path.read_bytes()) for path in contents)
    except OSError as error:
        print(f"{error}; get the data with `apt-get install dataset-fashion-mnist`, and pass --data", file=sys.stderr)
        sys.exit(2)
    # The headers have 16 and 8 bytes.
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28, 1)[:limit]
    return pixels.astype(np.float32) / 255, np.frombuffer(labels, np.uint8, offset=8)[:limit].astype(np.int32)


class BatchLosses(keras.callbacks.Callback):
    """Collects the mean of the loss since the epoch began, after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.losses.append(float(logs["loss"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--limit", type=int, default=60_000, help="number of images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="number of epochs (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images per step on all ranks together (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="file for the model, which ends in .keras")
    parser.add_argument("--steps", action="store_true", help="print the loss after each step")
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(1)
    images, labels = hvd.shard(read_data(options.data, "train", options.limit))
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    model = keras.Sequential([keras.layers.Input((28, 28, 1)), *layers])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(options.rate, momentum=0.9))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    record = BatchLosses()
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), record]
    batch = options.batch // hvd.size()
    history = model.fit(images, labels, batch, options.epochs, verbose=0, callbacks=callbacks, shuffle=False).history

    losses = hvd.allreduce(record.losses, name="losses")
    test_images, test_labels = hvd.shard(read_data(options.data, "t10k", options.limit))
    predicted = keras.ops.convert_to_numpy(model.predict(test_images, verbose=0)).argmax(1)
    accuracy = float(hvd.allreduce((predicted == test_labels).mean(), name="accuracy"))
    if hvd.rank() == 0:
        if options.steps:
            print("losses:", *(f"{loss:.7f}" for loss in losses))
        for epoch, loss in enumerate(history["loss"], 1):
            print(f"epoch {epoch}/{options.epochs}: loss {loss:.4f}")
        if options.save:
            model.save(options.save)
        print(f"final: ranks {hvd.size()}, test accuracy {accuracy:.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
