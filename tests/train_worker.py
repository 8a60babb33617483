"""Trains in a process of its own, which tests kill or launch twice: python train_worker.py DATA TARGET OUTPUT KIND."""

from __future__ import annotations

import json
import sys
import time

import torch

from hf_specdec.training.loop import train
from hf_specdec.training.options import TrainOptions
from hf_specdec.training.recipes import RecipeOptions


def options(data: str, target: str, output: str, kind: str = "eagle3", **changes) -> TrainOptions:
    own_ids = {"coverage": 1.0} if kind in ("eagle3", "p-eagle") else {}
    recipe = RecipeOptions(depth=3, num_layers=1, **own_ids)
    settings = {"max_steps": 24, "evaluate_steps": 8, "save_steps": 2, "held_out_share": 0.3, "batch_tokens": 60}
    settings |= {"warmup_steps": 2, "dtype": "float32", "device": "cpu"}
    return TrainOptions(kind, data, output, target, recipe, **(settings | changes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Steps that last, so that whoever kills this run five times still finds it running.
    print(json.dumps(train(options(*sys.argv[1:5]), lambda event: time.sleep(0.05))))
