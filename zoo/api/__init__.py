"""The verbs of the `zoo` command as Python functions, by what a user does. A model is a NAME of the zoo or a folder
that a verb wrote. A verb's module is imported on its first use: the others' imports take longer than a small run.
"""

import importlib
from typing import Any

MODULES = {
    "distributed": ("check", "cluster_yaml", "run_on_ray", "run_shard", "serve_on_ray", "train_on_ray"),
    "exporting": ("export",),
    "importing": ("import_model",),
    "evaluation": ("benchmark", "evaluate", "plan"),
    "models": ("build", "doctor", "download", "info", "run"),
    "quantization": ("calibrate", "quantize", "rewrite", "tune"),
    "serving": ("serve",),
    "training": ("finetune", "freeze", "schema", "train"),
}


def __getattr__(name: str) -> Any:
    for module, verbs in MODULES.items():
        if name in verbs:
            return getattr(importlib.import_module(f"zoo.api.{module}"), name)
    raise AttributeError(f"module 'zoo.api' has no attribute {name!r}")
