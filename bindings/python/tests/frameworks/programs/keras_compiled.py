"""Trains a model of Keras with `jit_compile=True`, as a single process does."""

from __future__ import annotations

import keras
import keras_checks

import ringtrain.keras as hvd

if __name__ == "__main__":
    hvd.init()
    model = keras_checks.require_same_training(lambda: keras.optimizers.SGD(0.1, momentum=0.9), {"jit_compile": True})
    print(f"the same training, compiled: {model.jit_compile}")
    hvd.shutdown()
