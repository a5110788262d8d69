"""BlocksToImage, from ONNX text."""

from helpers.rewriting import integers, model, ops, reasons, rewritten

from pipelines.rewrites.blocks_to_image import BlocksToImage


def folded(text, image, block):
    return model(text, opset=18, image=integers(*image), block=integers(*block))


def test_blocks_side_by_side_are_reordered(normal):
    text = "(float[n,24,6] x) => (float[n,4,4,9] y) { y = Col2Im<strides=[2, 3]>(x, image, block) }"
    net = folded(text, (4, 9), (2, 3))
    report = rewritten(net, BlocksToImage(), exact=True, x=normal(2, 24, 6))
    assert report.fired("BlocksToImage") == 1 and ops(net)[:3] == ["Reshape", "Transpose", "Reshape"]


def test_blocks_that_overlap_are_refused(normal):
    net = folded("(float[n,16,9] x) => (float[n,4,4,4] y) { y = Col2Im(x, image, block) }", (4, 4), (2, 2))
    report = rewritten(net, BlocksToImage(), exact=True, x=normal(2, 16, 9))
    assert report.fired("BlocksToImage") == 0 and len(reasons(report, "BlocksToImage")) == 1
