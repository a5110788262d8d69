// Depthwise convolutions of images by products of bytes, on the operations of an instruction set (its bytes.h).
#pragma once
#include "isa/images/kernels.h"
#include "isa/x86/bytes/dense.h"

namespace zoo {
namespace {

// Blocks of channels, those of a vector of bytes: weights [groups][channels][4], bias int32 [channels], scale float [channels], placed as those of a panel of
// four vectors. The channels of a last, narrow block come again for the segments of a row that fill its vector.
constexpr int64_t kChannels = 4 * kInts;
inline int64_t depthwise_bytes(int64_t groups, int64_t channels) { return (4 * groups + 8) * round_up(channels, kChannels); }

inline void pack_depthwise(const int8_t *weight, const int32_t *bias, const float *scale, int64_t groups, int64_t channels, void *packed) {
    auto *out = static_cast<int8_t *>(packed);
    std::memset(out, 0, static_cast<size_t>(depthwise_bytes(groups, channels)));
    const int64_t narrow = channels % kChannels, whole = channels - narrow;
    for (int64_t j = 0; j < (narrow && kChannels % narrow == 0 ? whole + kChannels : channels); ++j) {
        const int64_t c = j < channels ? j : whole + (j - whole) % narrow;
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

// Rows of n pixels in a block of `Count` channels: segments of a row, side by side, fill a vector. They overlap where the pixels do not part evenly.
template <int Count>
struct Segments {
    static constexpr int64_t kParts = kChannels / Count;
    int64_t pixels, x[3] = {}, out[3] = {};
    Segments(const Depthwise &d, int64_t n) : pixels((n + kParts - 1) / kParts) {
        for (int64_t p = 1; p < kParts; ++p) {
            const int64_t first = p * pixels < n - pixels ? p * pixels : n - pixels;
            x[p - 1] = first * d.x_step, out[p - 1] = first * d.out_step;
        }
    }
    ZOO_INLINE inline Ints read(const uint8_t *address) const { return load_parts<Count>(address, x); }
    ZOO_INLINE inline void write(uint8_t *address, Ints bytes) const { store_parts<Count>(address, out, bytes); }
};

// Windows of any taps.
template <int Count>
void any_windows(const Depthwise &d, const int8_t *w, const DepthwiseResults &results, const uint8_t *x, uint8_t *out, const Segments<Count> &segments) {
    constexpr int64_t kVector = 4 * kInts, kGroup = 4 * kVector;  // bytes
    const int8_t *bias = w + kGroup * d.groups;
    for (int64_t p = 0; p < segments.pixels; ++p, x += d.x_step, out += d.out_step) {
        Ints sums[4];
        unroll<4>([&](auto i) ZOO_INLINE { sums[i.value] = load(bias + kVector * i.value); });
        for (int64_t g = 0; g < d.groups; ++g) {
            const int64_t *offsets = d.offsets + 4 * g;
            const Quads taps(segments.read(x + offsets[0]), segments.read(x + offsets[1]), segments.read(x + offsets[2]), segments.read(x + offsets[3]));
            unroll<4>([&](auto i) ZOO_INLINE { dot_u8s8(sums[i.value], taps.values[i.value], load(w + kGroup * g + kVector * i.value)); });
        }
        segments.write(out, results.of(sums));
    }
}

// Windows of Side x Side, Stride columns apart. A column of x is read once and added to the sums of all pixels whose windows have it.
template <int Side, int Stride, int Count>
struct Windows {
    static constexpr int64_t kVector = 4 * kInts, kGroup = 4 * kVector;
    static constexpr int kBefore = (Side - 1) / Stride;          // pixels that begin before the first one is complete
    static constexpr bool kKept = Side == 3 && kInts == 16;  // the weights stay in registers
    const Segments<Count> &segments;
    const int8_t *weights, *bias;
    const uint8_t *rows[Side];
    int64_t step;
    Ints kept[kKept ? 3 : 1][4], sums[kBefore + 1][4];  // of the pixel that began last, and of those before it

    ZOO_INLINE inline Windows(const Depthwise &d, const int8_t *w, const Segments<Count> &of)
        : segments(of), weights(w), bias(w + kGroup * d.groups), step(d.offsets[4] - d.offsets[0]) {
        if constexpr (kKept)
            unroll<3>([&](auto g) ZOO_INLINE { unroll<4>([&](auto i) ZOO_INLINE { kept[g.value][i.value] = load(w + kGroup * g.value + kVector * i.value); }); });
    }
    template <int Group>
    ZOO_INLINE inline void add(Ints (&to)[4], const Quads &taps) {
        unroll<4>([&](auto i) ZOO_INLINE {
            if constexpr (kKept) dot_u8s8(to[i.value], taps.values[i.value], kept[Group][i.value]);
            else dot_weights<kGroup * Group + kVector * i.value>(to[i.value], taps.values[i.value], weights);
        });
    }
    // The next column: the one `Phase` of the window of the pixel that began last. Begun: pixels that have begun; next: from column to column of the last row.
    template <int Phase, int Begun>
    ZOO_INLINE inline void column(int64_t next) {
        if constexpr (Phase == 0) {
            unroll<Begun - 1>([&](auto m) ZOO_INLINE {
                constexpr int to = Begun - 1 - m.value;
                unroll<4>([&](auto i) ZOO_INLINE { sums[to][i.value] = sums[to - 1][i.value]; });
            });
            unroll<4>([&](auto i) ZOO_INLINE { sums[0][i.value] = load(bias + kVector * i.value); });
        }
        const Ints third = segments.read(rows[2]);
        const Quads taps(segments.read(rows[0]), segments.read(rows[1]), third, Side == 3 ? third : segments.read(rows[3 % Side]));
        unroll<Begun>([&](auto m) ZOO_INLINE {
            constexpr int tap = Phase + Stride * m.value;
            if constexpr (tap < Side) add<tap>(sums[m.value], taps);
        });
        if constexpr (Side == 5 && Phase == 0) {  // the last row: four columns of the pixel that begins, and the last one of the pixel that is complete
            const uint8_t *last = rows[4];
            const Quads row(segments.read(last), segments.read(last + next), segments.read(last + 2 * next), segments.read(last + 3 * next));
            add<5>(sums[0], row);
            if constexpr (Begun == kBefore + 1) add<6>(sums[kBefore], row);
        }
        unroll<Side>([&](auto i) ZOO_INLINE { rows[i.value] += step; });
    }
    ZOO_INLINE inline void run(const Depthwise &d, const DepthwiseResults &results, const uint8_t *x, uint8_t *out) {
        unroll<Side>([&](auto i) ZOO_INLINE { rows[i.value] = x + d.offsets[i.value < 4 ? i.value : 20]; });
        unroll<kBefore>([&](auto p) ZOO_INLINE { unroll<Stride>([&](auto phase) ZOO_INLINE { column<phase.value, p.value + 1>(step); }); });
        for (int64_t p = 0; p < segments.pixels; ++p, out += d.out_step) {
            const bool begins = p + kBefore < segments.pixels;  // else that pixel is none, and the row ends before its window
            column<0, kBefore + 1>(begins ? step : 0);
            segments.write(out, results.of(sums[kBefore]));
            if (p + 1 < segments.pixels) unroll<Stride - 1>([&](auto f) ZOO_INLINE { column<f.value + 1, kBefore + 1>(step); });
        }
    }
};

template <int Side, int Stride, int Count>
void windows(const Depthwise &d, const int8_t *w, const uint8_t *x, uint8_t *out, int64_t rows, const Segments<Count> &segments) {
    const Segments<Count> own = segments;  // copies, whose elements stores of bytes cannot change
    const DepthwiseResults results(d, w + 4 * kChannels * (d.groups + 1));
    Windows<Side, Stride, Count> of(d, w, own);
    for (int64_t row = 0; row < rows; ++row, x += d.x_row, out += d.out_row) of.run(d, results, x, out);
}

template <int Count>
void depthwise_block(const Depthwise &d, const int8_t *w, const uint8_t *x, uint8_t *out, int64_t rows, int64_t n) {
    const Segments<Count> segments(d, n);
    const auto are = [&](int64_t side, int64_t stride) { return d.side == side && d.x_step == stride * (d.offsets[4] - d.offsets[0]); };
    if (are(3, 1)) return windows<3, 1>(d, w, x, out, rows, segments);
    if (are(3, 2)) return windows<3, 2>(d, w, x, out, rows, segments);
    if constexpr (kInts == 16) {  // sixteen registers do not hold the sums
        if (are(5, 1)) return windows<5, 1>(d, w, x, out, rows, segments);
        if (are(5, 2)) return windows<5, 2>(d, w, x, out, rows, segments);
    }
    const DepthwiseResults results(d, w + 4 * kChannels * (d.groups + 1));
    for (int64_t row = 0; row < rows; ++row, x += d.x_row, out += d.out_row) any_windows(d, w, results, x, out, segments);
}

inline void depthwise(const Depthwise &d, const uint8_t *x, uint8_t *out, int64_t rows, int64_t n) {
    const auto *w = static_cast<const int8_t *>(d.packed);
    for (int64_t c = 0; c < d.channels; c += kChannels, w += 4 * kChannels * (d.groups + 2))
        unroll<kChannels / 16>([&](auto i) {
            constexpr int kCount = 16 * (i.value + 1);
            const int64_t left = d.channels - c;
            if (left == kCount || (kCount == kChannels && left > kCount)) depthwise_block<kCount>(d, w, x + c, out + c, rows, n);
        });
}

}  // namespace
}  // namespace zoo
