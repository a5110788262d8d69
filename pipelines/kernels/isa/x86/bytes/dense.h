// Dense convolutions of images by products of bytes, on the operations of an instruction set (its bytes.h).
#pragma once
#include "isa/images/kernels.h"
#include "isa/vectors/unroll.h"

namespace zoo {
namespace {

// Outputs come in panels of up to kPanelVectors vectors. vpackssdw and vpackuswb join the vectors of a panel 128 bits by 128 bits, so that element
// 4 l + j of its vector i is column 4 V l + 4 i + j of the V vectors' columns: then the bytes come out in order.
struct Panels {
    int64_t count, least, wider;  // `wider` panels have one vector more than `least`
    explicit Panels(int64_t outputs) {
        const int64_t vectors = outputs / kInts;
        count = (vectors + kPanelVectors - 1) / kPanelVectors, least = vectors / count, wider = vectors % count;
    }
    int64_t vectors(int64_t i) const { return least + (i < wider); }
};
inline int64_t place(int64_t vectors, int64_t column) {  // of a column in its panel
    return column / 4 % vectors * kInts + column / (4 * vectors) * 4 + column % 4;
}

// f(Index<V>) of a panel's vectors: outputs come in whole sixteens.
template <int V = kPanelVectors, class F>
inline void of_vectors(int64_t vectors, F f) {
    if (vectors == V) return f(Index<V>{});
    if constexpr (V > 16 / kInts) of_vectors<V - 16 / kInts>(vectors, f);
}

// Panels: weights [inputs / 4][columns][4], bias int32 [columns], scale float [columns].
inline int64_t dense_bytes(int64_t inputs, int64_t outputs) { return (inputs + 8) * outputs; }

inline void pack_dense(const int8_t *weight, const int32_t *bias, const float *scale, int64_t inputs, int64_t outputs, void *packed) {
    auto *out = static_cast<int8_t *>(packed);
    const Panels panels(outputs);
    int64_t first = 0;
    for (int64_t p = 0; p < panels.count; ++p) {
        const int64_t vectors = panels.vectors(p), width = kInts * vectors;
        for (int64_t c = 0; c < width; ++c) {
            const int64_t column = place(vectors, c);
            for (int64_t k = 0; k < inputs; ++k) out[(k / 4 * width + column) * 4 + k % 4] = weight[k * outputs + first + c];
            std::memcpy(out + inputs * width + 4 * column, bias + first + c, 4);
            std::memcpy(out + (inputs + 4) * width + 4 * column, scale + first + c, 4);
        }
        out += (inputs + 8) * width, first += width;
    }
}

inline Ints broadcast_dword(const uint8_t *address) {
    int32_t four;
    std::memcpy(&four, address, 4);
    return same(four);
}

constexpr int64_t kLine = 64;

// The sums of Rows pixels and one panel.
template <int Rows, int V>
struct DenseSums {
    Ints values[Rows][V];
    // ahead: bytes that come into L2 meanwhile, a cache line with the weights of four inputs.
    ZOO_INLINE inline const int8_t *run(const Dense &d, const int8_t *w, const uint8_t *const *in, const int8_t *ahead) {
        const uint8_t *x[Rows];
        const int8_t *bias = w + kInts * V * d.stretches * d.stretch;
        unroll<Rows>([&](auto r) ZOO_INLINE {
            x[r.value] = in[r.value];
            unroll<V>([&](auto v) ZOO_INLINE { values[r.value][v.value] = load(bias + 4 * kInts * v.value); });
        });
        for (int64_t s = 0; s < d.stretches; ++s)
            for (int64_t k = d.offsets[s], end = k + d.stretch; k < end; k += 4, w += 4 * kInts * V, ahead += kLine) {
                Ints weights[V];
                __builtin_prefetch(ahead, 0, 2);
                unroll<V>([&](auto v) ZOO_INLINE { weights[v.value] = load(w + 4 * kInts * v.value); });
                unroll<Rows>([&](auto r) ZOO_INLINE {
                    const Ints four = broadcast_dword(x[r.value] + k);
                    unroll<V>([&](auto v) ZOO_INLINE { dot_u8s8(values[r.value][v.value], four, weights[v.value]); });
                });
            }
        return bias + 4 * kInts * V;  // the scales
    }
};

template <bool kClips>
struct BytesOf {
    Ints zero, low, high;
    explicit BytesOf(const Requantization &b)
        : zero(same_words(static_cast<int16_t>(b.zero))), low(same_bytes(static_cast<int8_t>(b.low))), high(same_bytes(static_cast<int8_t>(b.high))) {}
    // V vectors of int32 as bytes, 128 bits by 128 bits. vpackssdw saturates, which the zero point does not undo.
    template <int V>
    ZOO_INLINE inline Ints pack(const Ints (&q)[4]) const {
        const Ints first = add_words(to_words(q[0], q[1]), zero), second = V < 3 ? first : add_words(to_words(q[2], q[3]), zero);
        const Ints bytes = to_bytes(first, second);
        return kClips ? clip_bytes(bytes, low, high) : bytes;
    }
};

struct ActivationOf {
    ActivatedWords words;
    explicit ActivationOf(const ActivationTable &t) : words(t) {}
    template <int V>
    ZOO_INLINE inline Ints pack(const Ints (&q)[4]) const {
        const Ints first = words.of(to_words(q[0], q[1]));
        if constexpr (V < 3) return to_bytes(first, first);
        else return to_bytes(first, words.of(to_words(q[2], q[3])));
    }
};

// Of a panel whose first column is `column`.
template <int V>
struct ScaledActivationOf {
    ActivatedWords words;
    Ints first, second;
    explicit ScaledActivationOf(const Dense &d, int64_t column) : words(*d.activation) {
        Ints gains[4] = {};
        unroll<V>([&](auto v) ZOO_INLINE { gains[v.value] = load(static_cast<const int8_t *>(d.gains) + 8 * column + 4 * kInts * v.value); });
        first = to_words(gains[0], gains[1]), second = to_words(gains[2], gains[3]);
    }
    template <int>
    ZOO_INLINE inline Ints pack(const Ints (&q)[4]) const {
        return to_bytes(words.of(to_words(q[0], q[1]), first), words.of(to_words(q[2], q[3]), second));
    }
};

inline Ints requantized(Ints sum, Floats scale) { return to_ints(multiply(to_floats(sum), scale)); }

// The vectors i of bytes that `BytesOf::pack` made, as floats.
template <int I>
ZOO_INLINE inline Floats unpacked(Ints bytes) {
    constexpr int b = 4 * I;
    return to_floats(choose_bytes(bytes, _mm_setr_epi8(b, -1, -1, -1, b + 1, -1, -1, -1, b + 2, -1, -1, -1, b + 3, -1, -1, -1)));
}

struct SumOf {
    BytesOf<true> bytes;
    Floats a, b, fixed;
    explicit SumOf(const ByteSum &s)
        : bytes(Requantization{0, s.low, s.high}), a(same_floats(s.a_ratio)), b(same_floats(s.b_ratio)), fixed(same_floats(s.fixed)) {}
    // Of the bytes of V vectors.
    template <int V>
    ZOO_INLINE inline Ints of(Ints x, Ints y) const {
        Ints sums[4] = {};
        unroll<V>([&](auto i) ZOO_INLINE {
            const Floats inner = fused(unpacked<i.value>(y), b, fixed);
            sums[i.value] = to_ints(fused(unpacked<i.value>(x), a, inner));
        });
        return bytes.pack<V>(sums);
    }
};

// What becomes of sums. A tile has one of them: with several, gcc 12 keeps all sums in memory until it knows which.
enum class End { kBytes, kClipped, kActivated, kScaled, kSummed, kFloats, kAdded };

inline End end_of(const Dense &d) {
    if (d.activation) return d.gains ? End::kScaled : End::kActivated;
    if (d.sum) return End::kSummed;
    return d.bytes.low > 0 || d.bytes.high < 255 ? End::kClipped : End::kBytes;
}

template <End kEnd, int Rows, int V>
void dense_tile(const Dense &d, const int8_t *w, const int8_t *ahead, const uint8_t *const *in, uint8_t *const *out,
                const uint8_t *const *others, int64_t column) {
    DenseSums<Rows, V> sums;
    const int8_t *scales = sums.run(d, w, in, ahead);
    Floats scale[4] = {};
    unroll<V>([&](auto v) ZOO_INLINE { scale[v.value] = load_floats(scales + 4 * kInts * v.value); });
    const auto finish = [&](const auto &bytes_of, auto then) ZOO_INLINE {
        unroll<Rows>([&](auto r) ZOO_INLINE {
            Ints q[4] = {};
            unroll<V>([&](auto v) ZOO_INLINE { q[v.value] = requantized(sums.values[r.value][v.value], scale[v.value]); });
            store_panel<V>(out[r.value] + column, then(bytes_of.template pack<V>(q), r.value));
        });
    };
    const auto alone = [](Ints bytes, int) ZOO_INLINE { return bytes; };
    if constexpr (kEnd == End::kScaled) {
        finish(ScaledActivationOf<V>(d, column), alone);
    } else if constexpr (kEnd == End::kActivated) {
        finish(ActivationOf(*d.activation), alone);
    } else if constexpr (kEnd == End::kSummed) {
        const BytesOf<true> bytes_of(d.bytes);
        const SumOf other(*d.sum);
        finish(bytes_of, [&](Ints bytes, int r) ZOO_INLINE {
            const Ints added = load_panel<V>(others[r] + column);
            return d.other_first ? other.of<V>(added, bytes) : other.of<V>(bytes, added);
        });
    } else {
        finish(BytesOf<kEnd == End::kClipped>(d.bytes), alone);
    }
}

// Sums of a panel as floats, plus `others` where there are any. A vector of a panel has four channels of each 128 bits.
template <int V, class Sums, class Scales>
ZOO_INLINE inline void store_floats_of(const Sums &sums, const Scales &scale, float *out, const float *others) {
    Floats values[V], ordered[V];
    unroll<V>([&](auto v) ZOO_INLINE { values[v.value] = multiply(to_floats(sums[v.value]), scale[v.value]); });
    order_panel(values, ordered);
    unroll<V>([&](auto v) ZOO_INLINE {
        const int64_t offset = kInts * v.value;
        store_floats(out + offset, others ? sum_of(ordered[v.value], load_floats(others + offset)) : ordered[v.value]);
    });
}

template <End kEnd, int Rows, int V>
void dense_tile(const Dense &d, const int8_t *w, const int8_t *ahead, const uint8_t *const *in, float *const *out, const float *const *others,
                int64_t column) {
    DenseSums<Rows, V> sums;
    const int8_t *scales = sums.run(d, w, in, ahead);
    Floats scale[V];
    unroll<V>([&](auto v) ZOO_INLINE { scale[v.value] = load_floats(scales + 4 * kInts * v.value); });
    unroll<Rows>([&](auto r) ZOO_INLINE {
        store_floats_of<V>(sums.values[r.value], scale, out[r.value] + column, kEnd == End::kAdded ? others[r.value] + column : nullptr);
    });
}

template <End kEnd, int V, int Rows, class Out>
ZOO_INLINE inline void dense_rows(int64_t rows, const Dense &d, const int8_t *w, const int8_t *ahead, const uint8_t *const *in, Out *const *out,
                                  const Out *const *others, int64_t column) {
    if (rows == Rows) return dense_tile<kEnd, Rows, V>(d, w, ahead, in, out, others, column);
    if constexpr (Rows > 1) dense_rows<kEnd, V, Rows - 1>(rows, d, w, ahead, in, out, others, column);
}

template <End kEnd, int V, class Out>
void dense_panel(const Dense &d, const int8_t *w, const uint8_t *const *in, Out *const *out, const Out *const *others, int64_t n,
                 int64_t column) {
    const int64_t tiles = (n + kTileRows<V> - 1) / kTileRows<V>;  // of as equal heights as can be
    const int64_t inputs = d.stretches * d.stretch, part = inputs / 4 * kLine;
    for (int64_t t = 0, first = 0; t < tiles; ++t) {
        const int64_t rows = n / tiles + (t < n % tiles), ahead = (inputs + 8) * kInts * V + t * part;
        const bool fetches = t * kLine < 4 * kInts * V;  // the first tiles bring the next panel, or what lies behind, often the next layer's
        dense_rows<kEnd, V, kTileRows<V>>(rows, d, w, fetches ? w + ahead : w, in + first, out + first, others ? others + first : nullptr, column);
        first += rows;
    }
}

template <End kEnd, class Out>
inline void dense_panels(const Dense &d, const uint8_t *const *in, Out *const *out, const Out *const *others, int64_t n) {
    const Panels panels(d.outputs);
    const auto *w = static_cast<const int8_t *>(d.packed);
    int64_t column = 0;
    for (int64_t p = 0; p < panels.count; ++p) {
        const int64_t vectors = panels.vectors(p);
        of_vectors(vectors, [&](auto v) { dense_panel<kEnd, v.value>(d, w, in, out, others, n, column); });
        w += (d.stretches * d.stretch + 8) * kInts * vectors, column += kInts * vectors;
    }
}

inline void dense(const Dense &d, const uint8_t *const *in, uint8_t *const *out, const uint8_t *const *others, int64_t n) {
    switch (end_of(d)) {
        case End::kScaled: return dense_panels<End::kScaled>(d, in, out, others, n);
        case End::kActivated: return dense_panels<End::kActivated>(d, in, out, others, n);
        case End::kSummed: return dense_panels<End::kSummed>(d, in, out, others, n);
        case End::kClipped: return dense_panels<End::kClipped>(d, in, out, others, n);
        default: return dense_panels<End::kBytes>(d, in, out, others, n);
    }
}

inline void dense_floats(const Dense &d, const uint8_t *const *in, float *const *out, const float *const *added, int64_t n) {
    if (added) dense_panels<End::kAdded>(d, in, out, added, n);
    else dense_panels<End::kFloats>(d, in, out, added, n);
}

}  // namespace
}  // namespace zoo
