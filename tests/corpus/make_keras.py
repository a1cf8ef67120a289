"""Makes tests/corpus/keras again with real Keras (on torch): make_keras.py [FOLDER]

model.keras, model.weights.h5 and sharded.weights.json hold one model with its optimizer after one step; one layer is bfloat16.
expected.json has the SHA-256 of each variable, under its name in the file. Made with Keras 3.15.1 (pip install --no-deps keras absl-py
rich namex optree), h5py 3.16.0 and torch 2.15.0.
"""
import hashlib
import json
import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

HERE = os.path.join(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)), "keras")


def main():
    os.makedirs(HERE, exist_ok=True)
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, name="first"), keras.layers.BatchNormalization(name="norm"),
              keras.layers.Dense(5, name="second", dtype="bfloat16")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="small")
    model.compile(optimizer="adam", loss="mse")
    model.fit(np.random.rand(8, 6), np.random.rand(8, 5), epochs=1, verbose=0)
    model.save(f"{HERE}/model.keras")
    model.save_weights(f"{HERE}/model.weights.h5")
    model.save_weights(f"{HERE}/sharded.weights.json", max_shard_size=0.0000005)
    variables = {}
    for folder, layer in zip(("dense", "batch_normalization", "dense_1"), layers):
        variables.update({f"layers.{folder}.vars.{i}": v for i, v in enumerate(layer.weights)})
    variables.update({f"optimizer.vars.{i}": v for i, v in enumerate(model.optimizer.variables)})
    expected = {}
    for name, v in variables.items():
        value = v.value.detach().cpu()
        data = value.view(dtype=__import__("torch").int16).numpy() if "bfloat16" in str(value.dtype) else value.numpy()
        expected[name] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(v.shape), "sha256": hashlib.sha256(data.tobytes()).hexdigest()}
    with open(f"{HERE}/expected.json", "w") as f:
        json.dump(expected, f, indent=1)


main()
