"""Python API of the `zoo` command: one function for each command.

A model is the NAME of a pretrained model, the path of a model folder, or hf://ORG/NAME[@REVISION]. The module of a
function is imported on first use, since some modules import frameworks that take seconds to load.
"""

import importlib
from typing import Any

MODULES = {
    "distributed": ("check", "cluster_yaml", "run_on_ray", "run_shard", "serve_on_ray", "train_on_ray"),
    "exporting": ("apply_delta", "delta", "export", "push", "verify"),
    "importing": ("import_model",),
    "evaluation": ("benchmark", "evaluate", "plan"),
    "models": ("build", "doctor", "download", "info", "rank", "run"),
    "quantization": ("calibrate", "quantize", "rewrite", "tune"),
    "serving": ("serve",),
    "training": ("finetune", "freeze", "schema", "train"),
}


def __getattr__(name: str) -> Any:
    for module, verbs in MODULES.items():
        if name in verbs:
            return getattr(importlib.import_module(f"zoo.api.{module}"), name)
    raise AttributeError(f"module 'zoo.api' has no attribute {name!r}")
