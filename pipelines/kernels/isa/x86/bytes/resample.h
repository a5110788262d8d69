// Resizing of images by products of bytes, on the operations of an instruction set (its bytes.h).
#pragma once
#include <cstring>

#include "isa/isa.h"

namespace zoo {
namespace {

// A weight is 2^16 a + 2^8 b + c in signed bytes (a fits: Resize says how large weights are); the dwords are the as, bs and cs of four.
inline void pack_weights(int32_t *four) {
    int8_t digits[16] = {};
    for (int i = 0; i < 4; ++i) {
        int32_t remainder = four[i];
        for (int digit = 2; digit >= 0; --digit) {
            digits[4 * digit + i] = static_cast<int8_t>(remainder);
            remainder = (remainder - digits[4 * digit + i]) >> 8;
        }
    }
    std::memcpy(four, digits, sizeof digits);
}

inline void resample(const Resampling &r, int64_t outputs, const uint8_t *in, int64_t in_stride, int64_t width, uint8_t *out, int64_t out_stride) {
    const Ints rounding = same(1 << (kWeightBits - 1)), zero = same(0);
    for (int64_t i = 0; i < outputs; ++i, out += out_stride)
        for (int64_t begin = 0; begin < width; begin += 4 * kInts) {
            const uint8_t *row = in + r.first[i] * in_stride + begin;
            const int32_t *weight = r.weights + i * r.stride;
            Ints a0 = zero, a1 = zero, a2 = zero, a3 = zero, b0 = zero, b1 = zero, b2 = zero, b3 = zero, c0 = rounding, c1 = rounding,
                    c2 = rounding, c3 = rounding;
            for (int64_t t = 0; t < r.tap_groups[i]; ++t, row += 4 * in_stride, weight += 4) {
                const Ints p = load(row), q = load(row + in_stride), s = load(row + 2 * in_stride), u = load(row + 3 * in_stride);
                const Ints a = same(weight[0]), b = same(weight[1]), c = same(weight[2]);
                const Ints pq = low_bytes(p, q), su = low_bytes(s, u);
                const Ints PQ = high_bytes(p, q), SU = high_bytes(s, u);
                const Ints x0 = low_words(pq, su), x1 = high_words(pq, su);
                const Ints x2 = low_words(PQ, SU), x3 = high_words(PQ, SU);
                dot_u8s8(a0, x0, a), dot_u8s8(a1, x1, a), dot_u8s8(a2, x2, a), dot_u8s8(a3, x3, a);
                dot_u8s8(b0, x0, b), dot_u8s8(b1, x1, b), dot_u8s8(b2, x2, b), dot_u8s8(b3, x3, b);
                dot_u8s8(c0, x0, c), dot_u8s8(c1, x1, c), dot_u8s8(c2, x2, c), dot_u8s8(c3, x3, c);
            }
            const auto result = [](Ints a, Ints b, Ints c) {
                const Ints ab = add(times256(a), b);
                return shift_right<kWeightBits>(add(times256(ab), c));
            };
            const Ints first = to_words(result(a0, b0, c0), result(a1, b1, c1));
            const Ints second = to_words(result(a2, b2, c2), result(a3, b3, c3));
            store(out + begin, to_bytes(first, second));
        }
}

}  // namespace
}  // namespace zoo
