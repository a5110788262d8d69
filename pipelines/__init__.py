"""INT8 quantization, engines and kernels for any model. Knows no model by name and never imports `zoo`."""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

# onnxruntime would keep an id of the device and count calls; openvino: see `engine`
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Modules that onnx_ir imports, 0.3 s and 30 MB, for arithmetic of symbolic sizes alone.
DEFERRED = ("sympy", "onnx_ir._symbolic_shapes")


class _Deferred(ModuleType):
    """A module that is imported at the first use of its contents."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # asked by the import system
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:  # another thread uses it while onnx_ir is imported
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class _Loader(SourceFileLoader):
    """Loads onnx_ir with `DEFERRED` modules, which only onnx_ir sees."""

    def exec_module(self, module: ModuleType) -> None:
        added = {name: _Deferred(name) for name in DEFERRED if name not in sys.modules}
        sys.modules.update(added)
        try:
            super().exec_module(module)
        finally:
            for name, deferred in added.items():
                if sys.modules.get(name) is deferred:
                    del sys.modules[name]


class _Finder:
    """Finds onnx_ir for `_Loader`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the specification of onnx_ir; None for other modules."""
        spec = PathFinder.find_spec(name, path, target) if name == "onnx_ir" else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)
