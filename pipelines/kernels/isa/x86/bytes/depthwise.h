// Depthwise convolutions of images by products of bytes, on the operations of an instruction set (its bytes.h).
#pragma once
#include "isa/images/kernels.h"
#include "isa/x86/bytes/dense.h"

namespace zoo {
namespace {

// Blocks of channels, those of a vector of bytes: weights [groups][channels][4], bias int32 [channels], scale float [channels], placed as those of a panel of
// four vectors.
constexpr int64_t kChannels = 4 * kInts;
inline int64_t depthwise_bytes(int64_t groups, int64_t channels) { return (4 * groups + 8) * round_up(channels, kChannels); }

inline void pack_depthwise(const int8_t *weight, const int32_t *bias, const float *scale, int64_t groups, int64_t channels, void *packed) {
    auto *out = static_cast<int8_t *>(packed);
    std::memset(out, 0, static_cast<size_t>(depthwise_bytes(groups, channels)));
    for (int64_t j = 0; j < (channels == kChannels / 2 ? kChannels : channels); ++j) {  // half a block's twice, for two pixels at once
        const int64_t c = j % channels;
        int8_t *block = out + j / kChannels * (4 * groups + 8) * kChannels;
        const int64_t offset = 4 * place(4, j % kChannels);
        for (int64_t t = 0; t < 4 * groups; ++t) block[t / 4 * 4 * kChannels + offset + t % 4] = weight[t * channels + c];
        std::memcpy(block + 4 * kChannels * groups + offset, bias + c, 4);
        std::memcpy(block + 4 * kChannels * (groups + 1) + offset, scale + c, 4);
    }
}

// Four taps of a block of channels, the taps of a channel side by side, placed as the weights are.
struct Quads {
    Ints values[4];
    ZOO_INLINE inline Quads(Ints a, Ints b, Ints c, Ints d) {
        const Ints ab = low_bytes(a, b), AB = high_bytes(a, b);
        const Ints cd = low_bytes(c, d), CD = high_bytes(c, d);
        values[0] = low_words(ab, cd), values[1] = high_words(ab, cd);
        values[2] = low_words(AB, CD), values[3] = high_words(AB, CD);
    }
};

// One block of channels of n pixels; Reused: how many columns of a 3 x 3 window the next one reads again (-1: windows of any taps).
template <int Reused, class Store>
ZOO_INLINE inline void depthwise_block(const Depthwise &d, const int8_t *w, const uint8_t *x, uint8_t *out, int64_t n, Store store) {
    constexpr int64_t kVector = 4 * kInts, kGroup = 4 * kVector;  // bytes
    const int8_t *bias = w + kGroup * d.groups, *scales = bias + kGroup;
    const BytesOf bytes_of(d.bytes);
    const Floats scale[4] = {load_floats(scales), load_floats(scales + kVector), load_floats(scales + 2 * kVector), load_floats(scales + 3 * kVector)};
    const auto finish = [&](const Ints(&sums)[4]) ZOO_INLINE {
        store(out, bytes_of.pack<4>({requantized(sums[0], scale[0]), requantized(sums[1], scale[1]), requantized(sums[2], scale[2]), requantized(sums[3], scale[3])}));
        out += d.out_step;
    };
    Ints sums[4];
    const auto begin = [&]() ZOO_INLINE { unroll<4>([&](auto i) ZOO_INLINE { sums[i.value] = load(bias + kVector * i.value); }); };
    const auto add = [&](const Quads &quads, const int8_t *weights) ZOO_INLINE {
        unroll<4>([&](auto i) ZOO_INLINE { dot_u8s8(sums[i.value], quads.values[i.value], load(weights + kVector * i.value)); });
    };
    if constexpr (Reused < 0) {
        for (int64_t p = 0; p < n; ++p, x += d.x_step) {
            begin();
            for (int64_t g = 0; g < d.groups; ++g) {
                const int64_t *offsets = d.offsets + 4 * g;
                add(Quads(load(x + offsets[0]), load(x + offsets[1]), load(x + offsets[2]), load(x + offsets[3])), w + kGroup * g);
            }
            finish(sums);
        }
        return;
    }
    const uint8_t *top = x + d.offsets[0], *middle = x + d.offsets[1], *bottom = x + d.offsets[2];
    const int64_t step = d.offsets[4] - d.offsets[0];
    const auto column = [&](int64_t k) ZOO_INLINE {
        const Ints last = load(bottom + k * step);
        return Quads(load(top + k * step), load(middle + k * step), last, last);
    };
    const auto advance = [&]() ZOO_INLINE { top += d.x_step, middle += d.x_step, bottom += d.x_step; };
    Quads first = column(0);
    if constexpr (Reused == 2) {
        Quads second = column(1);
        for (int64_t p = 0; p < n; ++p, advance()) {
            const Quads third = column(2);
            begin(), add(first, w), add(second, w + kGroup), add(third, w + 2 * kGroup);
            finish(sums);
            first = second, second = third;
        }
    } else {
        for (int64_t p = 0; p < n; ++p, advance()) {
            const Quads second = column(1), third = column(2);
            begin(), add(first, w), add(second, w + kGroup), add(third, w + 2 * kGroup);
            finish(sums);
            first = third;
        }
    }
}

template <class Store>
void depthwise_with(const Depthwise &d, const int8_t *w, const uint8_t *x, uint8_t *out, int64_t n, Store store) {
    const int64_t step = d.columns ? d.offsets[4] - d.offsets[0] : 0;
    if (d.columns && d.x_step == step) return depthwise_block<2>(d, w, x, out, n, store);
    if (d.columns && d.x_step == 2 * step) return depthwise_block<1>(d, w, x, out, n, store);
    depthwise_block<-1>(d, w, x, out, n, store);
}

inline void depthwise(const Depthwise &d, const uint8_t *x, uint8_t *out, int64_t n) {
    constexpr int64_t kHalf = kChannels / 2;
    const auto *w = static_cast<const int8_t *>(d.packed);
    const auto whole = [](uint8_t *address, Ints bytes) ZOO_INLINE { store(address, bytes); };
    if (d.channels == kHalf && d.columns && d.x_step == kHalf && d.out_step == kHalf && d.offsets[4] - d.offsets[0] == kHalf && n > 1) {
        Depthwise pairs = d;  // of pixels, side by side as a block's channels are: the last column of one pair is the first of the next
        pairs.x_step = pairs.out_step = kChannels;
        depthwise_block<1>(pairs, w, x, out, n / 2, whole);
        x += n / 2 * kChannels, out += n / 2 * kChannels, n %= 2;
    }
    for (int64_t c = 0; c < d.channels && n; c += kChannels, w += 4 * kChannels * (d.groups + 2)) {
        const int64_t left = d.channels - c;
        if (left >= kChannels) depthwise_with(d, w, x + c, out + c, n, whole);
        unroll<kChannels / 16 - 1>([&](auto i) {
            constexpr int kCount = 16 * (i.value + 1);
            if (left == kCount) depthwise_with(d, w, x + c, out + c, n,
                                                [](uint8_t *address, Ints bytes) ZOO_INLINE { store_channels<kCount>(address, bytes); });
        });
    }
}

}  // namespace
}  // namespace zoo
