"""Channel groups of a torch network that can only be pruned together, the importance of channels, and the cut.

Groups are found by torch-pruning in the traced graph (Fang et al. 2023, "DepGraph: Towards Any Structural Pruning"). A
cut network is the same code with other sizes: `shapes` returns them, `resize` applies them before weights are loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, requires

if TYPE_CHECKING:
    from torch import Tensor, nn

Shapes = dict[str, list[int]]  # of a layer's weight, its first two axes; of a norm, its one


def _library() -> Any:
    with requires("pruning", "int8-zoo[train]"):
        import torch_pruning
    return torch_pruning


def groups(network: nn.Module, example: Tensor) -> dict[str, list[tuple[str, NDArray[np.int64]]]]:
    """Finds the channel groups of a network.

    Args:
        network: The network.
        example: Input of the network, first axis = samples.

    Returns:
        By group, in network order: layers or norms with the indices of their outputs that belong to channel 0, 1, ...
        of the group. A group has the name of its first layer. Outputs of the network belong to no group.
    """
    from torch import nn

    tp = _library()
    graph = tp.DependencyGraph().build_dependency(network.eval(), example_inputs=example)
    names = {module: name for name, module in network.named_modules()}
    layers = (nn.Conv2d, nn.Linear)
    head = [module for module in network.modules() if isinstance(module, nn.Linear)][-1:]
    grouped = {}
    for group in graph.get_all_groups(ignored_layers=head, root_module_types=list(layers)):
        members = {
            names[member.dep.target.module]: np.asarray(member.idxs, np.int64)
            for member in group
            if member.dep.target.module in names and graph.is_out_channel_pruning_fn(member.dep.handler)
        }
        first = min(
            (name for name in members if isinstance(network.get_submodule(name), layers)),
            key=list(names.values()).index,
        )
        grouped[first] = [(name, members[name]) for name in sorted(members, key=list(names.values()).index)]
    return {name: grouped[name] for name in names.values() if name in grouped}


def importances(
    network: nn.Module,
    grouped: Mapping[str, Any],
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    kind: str,
) -> dict[str, NDArray[np.float64]]:
    """Computes the importance of every channel.

    taylor: |sum over the channel's weights of w dL/dw|, squared and summed over the group's layers and norms and over
    the batches (Molchanov et al. 2019, "Importance Estimation for Neural Network Pruning", equation 8). activation: the
    mean of |y| of the group's layers.

    Args:
        network: The network.
        grouped: Result of `groups`.
        batches: Inputs of `loss`.
        loss: Loss of the network on a batch.
        kind: "taylor" or "activation".

    Returns:
        float64 [width] by group.
    """
    import torch

    scores = {name: np.zeros(len(members[0][1])) for name, members in grouped.items()}
    activations: dict[str, NDArray[np.float64]] = {}
    hooks = []

    def watch(path: str) -> Any:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            axes = [axis for axis in range(output.dim()) if axis != (1 if output.dim() == 4 else output.dim() - 1)]
            activations[path] = activations.get(path, 0.0) + output.detach().abs().mean(axes).double().numpy()

        return hook

    if kind == "activation":
        members = {path for group in grouped.values() for path, _ in group}
        hooks = [network.get_submodule(path).register_forward_hook(watch(path)) for path in members]
    network.eval()
    for batch in batches:
        network.zero_grad(set_to_none=True)
        if kind == "activation":
            with torch.no_grad():
                loss(network, batch)
            continue
        torch.autograd.backward(loss(network, batch))
        for name, members in grouped.items():
            for path, index in members:
                module: Any = network.get_submodule(path)
                parts = [part for part in (module.weight, module.bias) if part is not None and part.grad is not None]
                rows = sum((part * part.grad).detach().reshape(len(part), -1).sum(1) for part in parts)
                scores[name] += np.square(np.asarray(rows, np.float64)[index])
    for hook in hooks:
        hook.remove()
    network.zero_grad(set_to_none=True)
    for name, members in grouped.items() if kind == "activation" else ():
        for path, index in members:
            scores[name] += activations[path][index]
    return scores


def cut(network: nn.Module, example: Tensor, removed: Mapping[str, NDArray[np.int64]]) -> nn.Module:
    """Copies a network without some channels.

    Args:
        network: The network.
        example: Input of the network.
        removed: Indices of channels by group.

    Returns:
        The cut copy.
    """
    from torch import nn

    tp = _library()
    smaller = copy.deepcopy(network).eval()
    graph = tp.DependencyGraph().build_dependency(smaller, example_inputs=example)
    for name, index in removed.items():
        layer: Any = smaller.get_submodule(name)
        depthwise = isinstance(layer, nn.Conv2d) and layer.groups == layer.out_channels > 1
        prune = tp.prune_linear_out_channels if isinstance(layer, nn.Linear) else tp.prune_conv_out_channels
        group = graph.get_pruning_group(
            layer, tp.prune_depthwise_conv_out_channels if depthwise else prune, index.tolist()
        )
        group.prune()
    return smaller


def shapes(network: nn.Module, like: nn.Module) -> Shapes:
    """Returns the sizes of layers and norms that differ between two networks.

    Args:
        network: Cut network.
        like: Original network.

    Returns:
        Sizes by module path.
    """
    whole = dict(like.named_modules())
    sizes = {}
    for path, module in network.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.shape != whole[path].weight.shape:
            sizes[path] = [int(side) for side in weight.shape[:2]]
    return sizes


def resize(network: nn.Module, sizes: Mapping[str, Any]) -> nn.Module:
    """Resizes layers and norms in place; their weights are initialized again.

    Args:
        network: Network to change.
        sizes: Result of `shapes`.

    Returns:
        The network.

    Raises:
        RequestError: The sizes belong to another network.
    """
    from torch import nn

    modules: dict[str, Any] = dict(network.named_modules())
    for path, size in sizes.items():
        old = modules.get(path)
        kernel: Any
        options: dict[str, Any] = {}
        try:
            match old:
                case nn.Conv2d():
                    groups = size[0] if old.groups > 1 else 1
                    kernel = old.kernel_size
                    options = {"stride": old.stride, "padding": old.padding, "dilation": old.dilation, "groups": groups}
                    new: Any = nn.Conv2d(size[1] * groups, size[0], kernel, **options, bias=old.bias is not None)
                case nn.Linear():
                    new = nn.Linear(size[1], size[0], bias=old.bias is not None)
                case nn.BatchNorm2d() | nn.BatchNorm1d():
                    new = type(old)(size[0], old.eps, old.momentum, old.affine, old.track_running_stats)
                case _:
                    raise ValueError(f"no layer {path}")
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise RequestError(
                f"found sizes {path} {size} of another network ({error}); prune the model again"
            ) from error
        network.set_submodule(path, new)
    return network
