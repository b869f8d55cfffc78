"""Jobs of Keras in which a rank fails. The argument selects the failure."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import runner

import ringtrain
import ringtrain.keras as hvd


class Failure(keras.callbacks.Callback):
    """Makes the last rank fail after five batches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 5 and self.kind == "interrupt":
            print("ready", flush=True)
        if batch != 5 or hvd.rank() != hvd.size() - 1:
            return
        if self.kind == "kill":
            print(f"killed at {time.time():.3f}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "callback":
            raise KeyError("a broken callback")


def check_fork() -> None:
    """Checks that a child that was forked after `init` gets an error, and that its parent continues."""
    child = os.fork()
    if child == 0:
        try:
            hvd.allreduce(1.0)
        except ringtrain.Forked:
            print("the child raised Forked", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    assert float(hvd.allreduce(1.0)) == 1


def train(kind: str) -> None:
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    points, labels = runner.classes(20_000)
    epochs = 10_000 if kind == "interrupt" else 1
    try:
        model.fit(points, labels, batch_size=2, epochs=epochs, verbose=0, callbacks=[Failure(kind)])
    except Exception as error:
        if hvd.rank() == hvd.size() - 1:
            raise
        line = " ".join(str(error).split())
        print(f"rank {hvd.rank()} raised at {time.time():.3f}: {line}", flush=True)


if __name__ == "__main__":
    hvd.init()
    if sys.argv[1] == "fork":
        check_fork()
    else:
        train(sys.argv[1])
