// Sums of images, and products of images by one pixel, on the operations of an instruction set (its bytes.h).
#pragma once
#include "isa/images/floats.h"
#include "isa/x86/bytes/dense.h"

namespace zoo {
namespace {

void add_bytes(const ByteSum &s, const uint8_t *a, const uint8_t *b, uint8_t *out, int64_t count) {
    constexpr int64_t kVector = 4 * kInts;
    int64_t done = 0;
    if (255.0f * (std::abs(s.a_ratio) + std::abs(s.b_ratio)) + std::abs(s.fixed) < 1 << 30)
        for (const SumOf sum(s); done + kVector <= count; done += kVector) store(out + done, sum.of<4>(load(a + done), load(b + done)));
    sum_bytes(s, a + done, b + done, out + done, count - done);
}

// Vectors of bytes go across pixels that follow each other: their factors repeat after `period` of them.
void multiply_bytes(const ByteProduct &p, const PixelRow<const uint8_t> &x, const PixelRow<const uint8_t> &gate, const PixelRow<uint8_t> &out,
                    int64_t pixels, int64_t channels) {
    constexpr int64_t kVector = 4 * kInts;
    int64_t common = kVector;  // divisor
    while (channels % common) common /= 2;
    const int64_t period = channels / common, total = pixels * channels;
    const float ratio = (p.x_scale * p.gate_scale) / p.scale;
    const bool follow = x.pitch == channels && out.pitch == channels && gate.pitch == 0, in_bounds = ratio * 65025.0f < 1 << 30;
    if (!follow || !in_bounds || p.low != 0 || p.high != 255 || total < 2 * period * kVector) return multiply_pixels(p, x, gate, out, pixels, channels);

    // (x - x_zero) factor = x factor - x_zero factor, all of them whole numbers below 2^17
    auto *factors = static_cast<float *>(kernel_scratch(2 * period * kVector * static_cast<int64_t>(sizeof(float))));
    const Floats gate_zero = same_floats(static_cast<float>(-p.gate_zero)), x_zero = same_floats(static_cast<float>(-p.x_zero));
    for (int64_t v = 0; v < period; ++v) {
        uint8_t bytes[kVector];
        for (int64_t b = 0; b < kVector; b += 16) std::memcpy(bytes + b, gate.data + (v * kVector + b) % channels, 16);
        unroll<4>([&](auto i) {
            const Floats factor = sum_of(unpacked<i.value>(load(bytes)), gate_zero);
            store_floats(factors + (2 * v * 4 + i.value) * kInts, factor);
            store_floats(factors + ((2 * v + 1) * 4 + i.value) * kInts, multiply(factor, x_zero));
        });
    }
    const Floats ratios = same_floats(ratio), zero = same_floats(static_cast<float>(p.zero));
    const BytesOf<false> bytes_of(Requantization{0, 0, 255});
    const float *factor = factors;
    for (int64_t begin = 0, v = 0; begin < total; begin += kVector) {
        const Ints bytes = load(x.data + begin);
        Ints q[4];
        unroll<4>([&](auto i) ZOO_INLINE {
            const Floats product = fused(unpacked<i.value>(bytes), load_floats(factor + i.value * kInts), load_floats(factor + (4 + i.value) * kInts));
            q[i.value] = to_ints(sum_of(multiply(product, ratios), zero));
        });
        const Ints results = bytes_of.pack<4>(q);
        if (total - begin >= kVector) store(out.data + begin, results);
        unroll<kVector / 16 - 1>([&](auto i) ZOO_INLINE {
            constexpr int kCount = 16 * (i.value + 1);
            if (total - begin == kCount) store_channels<kCount>(out.data + begin, results);
        });
        factor += 2 * kVector;
        if (++v == period) v = 0, factor = factors;
    }
}

}  // namespace
}  // namespace zoo
