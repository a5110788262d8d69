"""The verbs of the `zoo` command as Python functions, by what a user does. A model is a NAME of the zoo or a folder
that a verb wrote.
"""

from zoo.verbs.logs import schema
from zoo.verbs.measuring import benchmark, evaluate, plan
from zoo.verbs.models import build, doctor, download, info, run
from zoo.verbs.quantizing import calibrate, quantize, rewrite, tune
from zoo.verbs.training import finetune, freeze, train

__all__ = [
    "benchmark",
    "build",
    "calibrate",
    "doctor",
    "download",
    "evaluate",
    "finetune",
    "freeze",
    "info",
    "plan",
    "quantize",
    "rewrite",
    "run",
    "schema",
    "train",
    "tune",
]
