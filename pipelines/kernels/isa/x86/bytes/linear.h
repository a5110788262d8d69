// The layout of layers by products of bytes, and layers of few outputs, on the operations of an instruction set (its bytes.h).
#pragma once
#include <cstring>

#include "isa/isa.h"
#include "isa/vectors/lanes.h"

namespace zoo {
namespace {

// Panels of kPanel columns: [outputs / kPanel][inputs / 4][kPanel][4]; layers of few outputs: [outputs][inputs padded to 64].
constexpr int64_t kPanel = kPanelVectors * kInts, kBytes = 4 * kInts;  // kBytes: of a vector
inline int64_t packed_bytes(int64_t inputs, int64_t outputs) {
    return outputs <= kNarrow ? outputs * round_up(inputs, 64) : round_up(outputs, kPanel) * round_up(inputs, 4);
}

inline void pack_linear(const int8_t *weight, int64_t inputs, int64_t outputs, void *packed) {
    auto *out = static_cast<int8_t *>(packed);
    std::memset(out, 0, static_cast<size_t>(packed_bytes(inputs, outputs)));
    for (int64_t k = 0; k < inputs; ++k)
        for (int64_t j = 0; j < outputs; ++j) {
            const int64_t index = outputs <= kNarrow ? j * round_up(inputs, 64) + k
                                                  : ((j / kPanel) * (round_up(inputs, 4) / 4) + k / 4) * 4 * kPanel + (j % kPanel) * 4 + k % 4;
            out[index] = weight[k * outputs + j];
        }
}

inline void unpack_column(const void *packed, int64_t inputs, int64_t column, int8_t *weight) {
    const auto *from = static_cast<const int8_t *>(packed) + column / kPanel * round_up(inputs, 4) * kPanel + column % kPanel * 4;
    for (int64_t k = 0; k < inputs; ++k) weight[k] = from[k / 4 * 4 * kPanel + k % 4];
}

inline void gather_columns(const void *packed, int64_t inputs, const int32_t *columns, int64_t count, void *gathered) {
    gather_panels<kPanel>(static_cast<const int32_t *>(packed), round_up(inputs, 4) / 4, columns, count, static_cast<int32_t *>(gathered));
}

// A layer of few outputs, a dot product each.
inline void narrow(const Linear &l, const RowEpilogue &epilogue, const uint8_t *x, int64_t x_stride, int64_t n, void *out, int64_t out_stride) {
    const int64_t whole = l.inputs / kBytes * kBytes;
    for (int64_t s = 0; s < n; ++s, x += x_stride)
        for (int64_t j = 0; j < l.outputs; ++j) {
            const auto *weight = static_cast<const int8_t *>(l.weight) + j * round_up(l.inputs, 64);
            Ints sum = same(0);
            for (int64_t k = 0; k < whole; k += kBytes) dot_u8s8(sum, load(x + k), load(weight + k));
            if (l.inputs > whole) dot_u8s8(sum, load_bytes(x + whole, l.inputs - whole), load(weight + whole));
            const float total = static_cast<float>(sum_of(sum) + l.bias[j]);
            if (epilogue.scale) {
                float value = total * (epilogue.scale[s] * l.scale[j]) + epilogue.bias[j];
                if (epilogue.relu && value < 0) value = 0;
                if (epilogue.residual) value += epilogue.residual[s * epilogue.residual_stride + j];
                static_cast<float *>(out)[s * out_stride + j] = value;
                continue;
            }
            const float value = total * l.scale[j];
            if (l.float_output) {
                static_cast<float *>(out)[s * out_stride + j] = value;
            } else {
                const int32_t rounded = _mm_cvtss_si32(_mm_set_ss(value)) + l.zero_point;
                static_cast<uint8_t *>(out)[s * out_stride + j] =
                    static_cast<uint8_t>(rounded < l.low ? l.low : rounded > 255 ? 255 : rounded);
            }
        }
}

}  // namespace
}  // namespace zoo
