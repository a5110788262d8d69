// The kernels in plain C++: the version for every CPU, and the shape of the others.
#include <cmath>
#include <cstring>

#include "isa/isa.h"

namespace zoo {
namespace {

inline uint8_t requantize(float value, int32_t zero_point, int32_t low) {
    const long rounded = std::lrintf(value) + zero_point;  // half to even
    return static_cast<uint8_t>(rounded < low ? low : rounded > 255 ? 255 : rounded);
}

// Transposed: [outputs][inputs].
int64_t packed_bytes(int64_t inputs, int64_t outputs) { return inputs * outputs; }

void pack_linear(const int8_t *weight, int64_t inputs, int64_t outputs, void *packed) {
    auto *out = static_cast<int8_t *>(packed);
    for (int64_t k = 0; k < inputs; ++k)
        for (int64_t j = 0; j < outputs; ++j) out[j * inputs + k] = weight[k * outputs + j];
}

void unpack_column(const void *packed, int64_t inputs, int64_t column, int8_t *weight) {
    std::memcpy(weight, static_cast<const int8_t *>(packed) + column * inputs, static_cast<size_t>(inputs));
}

void gather_columns(const void *packed, int64_t inputs, const int32_t *columns, int64_t count, void *gathered) {
    auto *to = static_cast<int8_t *>(gathered);
    for (int64_t j = 0; j < count; ++j) unpack_column(packed, inputs, columns[j], to + j * inputs);
    std::memset(to + count * inputs, 0, static_cast<size_t>((round_up(count, kColumns) - count) * inputs));
}

void linear(const Linear &l, const RowEpilogue &epilogue, const uint8_t *x, int64_t x_stride, int64_t n, void *out, int64_t out_stride) {
    const auto *weight = static_cast<const int8_t *>(l.weight);
    for (int64_t s = 0; s < n; ++s, x += x_stride)
        for (int64_t j = 0; j < l.outputs; ++j) {
            const int8_t *row = weight + j * l.inputs;
            int32_t sum = l.bias[j];
            for (int64_t k = 0; k < l.inputs; ++k) sum += x[k] * row[k];
            if (epilogue.scale) {
                float value = static_cast<float>(sum) * (epilogue.scale[s] * l.scale[j]) + epilogue.bias[j];
                if (epilogue.relu && value < 0) value = 0;
                if (epilogue.residual) value += epilogue.residual[s * epilogue.residual_stride + j];
                static_cast<float *>(out)[s * out_stride + j] = value;
                continue;
            }
            const float value = static_cast<float>(sum) * l.scale[j];
            if (l.float_output)
                static_cast<float *>(out)[s * out_stride + j] = value;
            else
                static_cast<uint8_t *>(out)[s * out_stride + j] = requantize(value, l.zero_point, l.low);
        }
}

void pack_weights(int32_t *) {}

void resample(const Resampling &r, int64_t outputs, const uint8_t *in, int64_t in_stride, int64_t width, uint8_t *out, int64_t out_stride) {
    uint32_t sums[kColumns];  // unsigned: partial sums are modulo 2^32
    for (int64_t i = 0; i < outputs; ++i, out += out_stride)
        for (int64_t begin = 0; begin < width; begin += kColumns) {
            for (uint32_t &sum : sums) sum = 1u << (kWeightBits - 1);
            const uint8_t *row = in + r.first[i] * in_stride + begin;
            for (int64_t t = 0; t < 4 * r.tap_groups[i]; ++t, row += in_stride) {
                const auto weight = static_cast<uint32_t>(r.weights[i * r.stride + t]);
                for (int64_t j = 0; j < kColumns; ++j) sums[j] += weight * row[j];
            }
            for (int64_t j = 0; j < kColumns; ++j) {
                const int32_t value = static_cast<int32_t>(sums[j]) >> kWeightBits;
                out[begin + j] = static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value);
            }
        }
}

}  // namespace
}  // namespace zoo

#include "isa/table.h"  // behind the kernels

namespace zoo {
const Isa ZOO_SET::kIsa = table_of("portable", "what every CPU has", [] { return true; });
}  // namespace zoo
