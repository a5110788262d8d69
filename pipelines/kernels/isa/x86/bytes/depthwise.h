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
    for (int64_t j = 0; j < (kChannels % channels ? channels : kChannels); ++j) {  // a part of a block again, for several pixels at once
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

// The bytes of a block of channels.
struct DepthwiseResults {
    BytesOf<false> bytes_of;
    BytesOf<true> clipped;
    bool clips;
    Floats scale[4];
    DepthwiseResults(const Depthwise &d, const int8_t *scales) : bytes_of(d.bytes), clipped(d.bytes), clips(d.bytes.low > 0 || d.bytes.high < 255) {
        unroll<4>([&](auto i) ZOO_INLINE { scale[i.value] = load_floats(scales + 4 * kInts * i.value); });
    }
    ZOO_INLINE inline Ints of(const Ints (&sums)[4]) const {
        const Ints q[4] = {requantized(sums[0], scale[0]), requantized(sums[1], scale[1]), requantized(sums[2], scale[2]), requantized(sums[3], scale[3])};
        return clips ? clipped.pack<4>(q) : bytes_of.pack<4>(q);
    }
};

// One block of channels of n pixels; Reused: how many columns of a 3 x 3 window the next one reads again (-1: windows of any taps).
template <int Reused, class Store>
ZOO_INLINE inline void depthwise_block(const Depthwise &d, const int8_t *w, const uint8_t *x, uint8_t *out, int64_t n, Store store) {
    constexpr int64_t kVector = 4 * kInts, kGroup = 4 * kVector;  // bytes
    const int8_t *bias = w + kGroup * d.groups;
    const DepthwiseResults results(d, bias + kGroup);
    const auto finish = [&](const Ints(&sums)[4]) ZOO_INLINE {
        store(out, results.of(sums));
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
    if constexpr (Reused == 2) {
        Quads first = column(0), second = column(1);
        for (int64_t p = 0; p < n; ++p, advance()) {
            const Quads third = column(2);
            begin(), add(first, w), add(second, w + kGroup), add(third, w + 2 * kGroup);
            finish(sums);
            first = second, second = third;
        }
    } else if constexpr (Reused == 0) {
        for (int64_t p = 0; p < n; ++p, advance()) {
            begin(), add(column(0), w), add(column(1), w + kGroup), add(column(2), w + 2 * kGroup);
            finish(sums);
        }
    } else {
        Quads first = column(0);
        for (int64_t p = 0; p < n; ++p, advance()) {
            const Quads second = column(1), third = column(2);
            begin(), add(first, w), add(second, w + kGroup), add(third, w + 2 * kGroup);
            finish(sums);
            first = third;
        }
    }
}

// Pixels of 5 x 5 windows, `stride` columns apart. quads: of each column the first four rows, and the last row from it on.
template <int Pixels, class Store>
ZOO_INLINE inline void tile_of_five(const Depthwise &d, const int8_t *w, const Ints (*quads)[8], int64_t stride, uint8_t *out, Store store) {
    constexpr int64_t kVector = 4 * kInts, kGroup = 4 * kVector;
    const int8_t *bias = w + kGroup * d.groups;
    Ints sums[Pixels][4];
    unroll<Pixels>([&](auto p) ZOO_INLINE { unroll<4>([&](auto i) ZOO_INLINE { sums[p.value][i.value] = load(bias + kVector * i.value); }); });
    const auto add = [&](const Ints (*first)[8], auto part) ZOO_INLINE {
        Ints weights[4];
        unroll<4>([&](auto i) ZOO_INLINE { weights[i.value] = load(w + kVector * i.value); });
        unroll<Pixels>([&](auto p) ZOO_INLINE {
            unroll<4>([&](auto i) ZOO_INLINE { dot_u8s8(sums[p.value][i.value], first[p.value * stride][part.value + i.value], weights[i.value]); });
        });
        w += kGroup;
    };
    for (int64_t k = 0; k < 5; ++k) add(quads + k, Index<0>{});
    add(quads, Index<4>{}), add(quads + 4, Index<4>{});
    const DepthwiseResults results(d, bias + kGroup);
    unroll<Pixels>([&](auto p) ZOO_INLINE { store(out + p.value * d.out_step, results.of(sums[p.value])); });
}

template <int Pixels, class Store>
ZOO_INLINE inline void tiles_of_five(int64_t n, const Depthwise &d, const int8_t *w, const Ints (*quads)[8], int64_t stride, uint8_t *out, Store store) {
    if (n == Pixels) return tile_of_five<Pixels>(d, w, quads, stride, out, store);
    if constexpr (Pixels > 1) tiles_of_five<Pixels - 1>(n, d, w, quads, stride, out, store);
}

template <class Store>
void depthwise_of_five(const Depthwise &d, const int8_t *w, const uint8_t *x, uint8_t *out, int64_t n, int64_t stride, Store store) {
    constexpr int64_t kColumns = 32, kTile = 5;  // columns at a time; pixels whose sums and a group's weights fill the registers
    const int64_t *offsets = d.offsets, step = offsets[4] - offsets[0], most = (kColumns - 5) / stride + 1;
    Ints quads[kColumns][8];
    for (int64_t first = 0, count; first < n; first += count) {
        count = n - first < most ? n - first : most;
        const int64_t columns = (count - 1) * stride + 5;
        const uint8_t *from = x + first * d.x_step;
        for (int64_t c = 0; c < columns; ++c, from += step) {
            const Quads rows(load(from + offsets[0]), load(from + offsets[1]), load(from + offsets[2]), load(from + offsets[3]));
            unroll<4>([&](auto i) ZOO_INLINE { quads[c][i.value] = rows.values[i.value]; });
            if (c % stride) continue;
            const uint8_t *last = from + offsets[20];
            const int64_t next = c + 5 <= columns ? step : 0;  // behind it only the first one has a weight
            const Quads row(load(last), load(last + next), load(last + 2 * next), load(last + 3 * next));
            unroll<4>([&](auto i) ZOO_INLINE { quads[c][4 + i.value] = row.values[i.value]; });
        }
        const int64_t tiles = (count + kTile - 1) / kTile;
        for (int64_t t = 0, p = 0; t < tiles; ++t) {
            const int64_t pixels = count / tiles + (t < count % tiles);
            tiles_of_five<kTile>(pixels, d, w, quads + p * stride, stride, out + (first + p) * d.out_step, store);
            p += pixels;
        }
    }
}

template <class Store>
void depthwise_with(const Depthwise &d, const int8_t *w, const uint8_t *x, uint8_t *out, int64_t n, Store store) {
    const int64_t step = d.side ? d.offsets[4] - d.offsets[0] : 0;
    if (d.side == 3 && d.x_step == step) return depthwise_block<2>(d, w, x, out, n, store);
    if (d.side == 3 && d.x_step == 2 * step) return depthwise_block<1>(d, w, x, out, n, store);
    if (d.side == 3 && d.x_step == 4 * step) return depthwise_block<0>(d, w, x, out, n, store);
    if constexpr (kInts == 16)  // sixteen registers hold the sums of too few pixels
        for (int64_t stride : {1, 2, 4})
            if (d.side == 5 && d.x_step == stride * step) return depthwise_of_five(d, w, x, out, n, stride, store);
    depthwise_block<-1>(d, w, x, out, n, store);
}

inline void depthwise(const Depthwise &d, const uint8_t *x, uint8_t *out, int64_t n) {
    const auto *w = static_cast<const int8_t *>(d.packed);
    const auto whole = [](uint8_t *address, Ints bytes) ZOO_INLINE { store(address, bytes); };
    const int64_t together = kChannels % d.channels ? 1 : kChannels / d.channels;
    if (together > 1 && d.x_step == d.channels && d.out_step == d.channels && n >= together) {
        Depthwise joined = d;  // pixels side by side, as a block's channels are
        joined.x_step = joined.out_step = kChannels;
        depthwise_with(joined, w, x, out, n / together, whole);
        x += n / together * kChannels, out += n / together * kChannels, n %= together;
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
