// The table of the image kernels of an instruction set: the header of each includes it behind its kernels.
#pragma once
#include "isa/images/float_convolution.h"
#include "isa/images/floats.h"
#include "isa/images/kernels.h"

namespace zoo {
namespace {

constexpr ImageKernels kImageKernels = {
    .dense_bytes = dense_bytes,
    .pack_dense = pack_dense,
    .dense = dense,
    .dense_floats = dense_floats,
    .depthwise_bytes = depthwise_bytes,
    .pack_depthwise = pack_depthwise,
    .depthwise = depthwise,
    .sum = add_bytes,
    .product = multiply_bytes,
    .max_pool = max_pool,
    .mean = mean,
    .global_mean = global_mean,
    .quantize = quantize_bytes,
    .quantize_floats = quantize_floats,
    .interleave = interleave,
    .lookup = lookup,
    .lookup_floats = lookup_floats,
    .list_pixels = list_pixels,
    .products = products,
    .dequantize = dequantize_bytes,
    .add_floats = add_floats,
    .scale_floats = scale_floats,
    .float_depthwise = float_depthwise,
    .float_convolution = float_convolution,
    .multiply_floats = multiply_floats,
    .weigh_floats = weigh_floats,
    .add_squares = add_squares,
    .softmax = softmax_groups,
    .group_linear = group_linear,
};

}  // namespace
}  // namespace zoo
