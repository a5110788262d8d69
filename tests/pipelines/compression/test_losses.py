"""Losses of distillation against their formulas in numpy."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")

from pipelines.compression.losses import fsp, fsp_loss, l2  # noqa: E402


def test_l2_is_relative_to_the_teacher():
    teacher = torch.randn(2, 3, 4, 4)
    assert l2(teacher, teacher) == 0
    assert l2(torch.zeros_like(teacher), teacher) == pytest.approx(1)


def test_fsp_matrices_are_products_of_maps_averaged_over_places():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.rand(shape, generator=generator) for shape in ((2, 3, 8, 8), (2, 5, 4, 4)))
    pooled = first.numpy().reshape(2, 3, 4, 2, 4, 2).max((3, 5))
    wanted = np.einsum("nihw,njhw->nij", pooled, second.numpy()) / 16
    np.testing.assert_allclose(fsp(first, second).numpy(), wanted, rtol=1e-5)


def test_the_fsp_loss_is_zero_for_the_same_flow_and_has_a_gradient_otherwise():
    maps = [torch.rand(2, 3, side, side) for side in (8, 4, 2)]
    own = [tensor.clone().requires_grad_(True) for tensor in maps]
    assert fsp_loss(own, maps) == 0
    loss = fsp_loss([2 * tensor for tensor in own], maps)
    loss.backward()
    assert loss.item() == pytest.approx(9.0, rel=1e-5)  # flows are products: four times theirs, (4 - 1)^2
    assert all(tensor.grad.abs().sum() > 0 for tensor in own)
