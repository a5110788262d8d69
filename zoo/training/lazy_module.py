"""Base class of torch modules in files that must not import torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

    class LazyModule(Module):
        """See below."""

else:

    class LazyModule:
        """Base class of networks whose instances are `torch.nn.Module`s.

        torch is imported when the first instance is made. A subclass imports torch in its methods, and is otherwise
        written like any other module: `super().__init__()` first, then the layers.
        """

        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            """Makes an instance of the class that is a torch module, too."""
            return object.__new__(_with_torch(cls))

    @functools.cache
    def _with_torch(cls: type) -> type:
        from torch import nn

        if issubclass(cls, nn.Module):
            return cls
        return type(cls.__name__, (cls, nn.Module), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
