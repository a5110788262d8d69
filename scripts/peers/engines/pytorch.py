"""torch on one thread, and the post-training quantization of torchao for Inductor on x86."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def use_one_thread() -> None:
    """Limits torch to one thread of this process, without gradients."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


def quantize(network: Any, samples: Sequence[tuple[Any, ...]], **options: Any) -> Any:
    """Quantizes an exported network (PT2E), calibrated on samples.

    Args:
        network: A torch module in evaluation mode.
        samples: Arguments of the module, a tuple a batch.
        options: Options of `torch.export.export`.

    Returns:
        The graph module, to be compiled.
    """
    import torch
    from torchao.quantization.pt2e import move_exported_model_to_eval  # type: ignore[import-untyped]
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # type: ignore[import-untyped]
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # type: ignore[import-untyped]

    use_one_thread()
    exported = torch.export.export(network, samples[0], **options).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    for sample in samples:
        prepared(*sample)
    return move_exported_model_to_eval(convert_pt2e(prepared))
