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

// What layers compute: of n pixels, from column `column` on, the panel at w.
template <class Out>
struct PanelOf {
    const Dense &d;
    const int8_t *w;
    const uint8_t *const *in;
    Out *const *out;
    const Out *const *others;  // null, or to add
    int64_t n, column;

    int64_t inputs() const { return d.stretches * d.stretch; }
    const int8_t *bias(int64_t vectors) const { return w + kInts * vectors * inputs(); }
    const int8_t *scales(int64_t vectors) const { return bias(vectors) + 4 * kInts * vectors; }
};

// The sums of Rows pixels and one panel.
template <int Rows, int V>
struct DenseSums {
    Ints values[Rows][V];
    const uint8_t *x[Rows];
    ZOO_INLINE inline void begin(const uint8_t *const *in, const int8_t *bias) {
        unroll<Rows>([&](auto r) ZOO_INLINE {
            x[r.value] = in[r.value];
            unroll<V>([&](auto v) ZOO_INLINE { values[r.value][v.value] = load(bias + 4 * kInts * v.value); });
        });
    }
    // Four inputs, k bytes behind the pixels' first.
    ZOO_INLINE inline void add_inputs(int64_t k, const int8_t *w) {
        Ints weights[V];
        unroll<V>([&](auto v) ZOO_INLINE { weights[v.value] = load(w + 4 * kInts * v.value); });
        unroll<Rows>([&](auto r) ZOO_INLINE {
            const Ints four = broadcast_dword(x[r.value] + k);
            unroll<V>([&](auto v) ZOO_INLINE { dot_u8s8(values[r.value][v.value], four, weights[v.value]); });
        });
    }
    // ahead: bytes that come into L2 meanwhile, a cache line with the weights of four inputs.
    ZOO_INLINE inline void add_all(const Dense &d, const int8_t *w, const int8_t *ahead) {
        for (int64_t s = 0; s < d.stretches; ++s)
            for (int64_t k = d.offsets[s], end = k + d.stretch; k < end; k += 4, w += 4 * kInts * V, ahead += kLine) {
                __builtin_prefetch(ahead, 0, 2);
                add_inputs(k, w);
            }
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

// Of a panel whose first column is `column`; of several rows, the gains again.
template <int V>
struct ScaledActivationOf {
    ActivatedWords words;
    Ints first, second;
    explicit ScaledActivationOf(const Dense &d, int64_t column) : words(*d.activation) {
        Ints gains[4] = {};
        unroll<V == 3 ? 3 : 4>([&](auto i) ZOO_INLINE { gains[i.value] = load(static_cast<const int8_t *>(d.gains) + 8 * column + 4 * kInts * (i.value % V)); });
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

// Rows of a panel whose bytes fill a vector.
template <int V>
constexpr int kTogether = V < 3 ? 4 / V : 1;

template <End kEnd, int V>
ZOO_INLINE inline auto packer_of(const Dense &d, int64_t column) {
    if constexpr (kEnd == End::kScaled) return ScaledActivationOf<V>(d, column);
    else if constexpr (kEnd == End::kActivated) return ActivationOf(*d.activation);
    else return BytesOf<kEnd != End::kBytes>(d.bytes);
}

// Finishes sums as bytes, kRows pixels at a time.
template <End kEnd, int V>
struct ByteResults {
    using Panel = PanelOf<uint8_t>;
    static constexpr End kResult = kEnd;
    static constexpr int kVectors = V, kRows = kTogether<V>;
    const Panel panel;  // a copy: bytes that are stored may be anything else
    const decltype(packer_of<kEnd, V>(panel.d, 0)) of;
    const int8_t *const scales;
    ZOO_INLINE inline explicit ByteResults(const Panel &p) : panel(p), of(packer_of<kEnd, V>(p.d, p.column)), scales(p.scales(V)) {}
    // The sums from row First on, of a tile whose first pixel is `first`; past its last row that one again.
    template <int First, int Rows>
    ZOO_INLINE inline void finish(const Ints (&sums)[Rows][V], int64_t first) const {
        Ints q[4] = {};
        int64_t pixels[kRows];
        unroll<kRows>([&](auto i) ZOO_INLINE {
            constexpr int row = First + i.value < Rows ? First + i.value : Rows - 1;
            pixels[i.value] = first + row;
            unroll<V>([&](auto v) ZOO_INLINE { q[i.value * V + v.value] = requantized(sums[row][v.value], load_floats(scales + 4 * kInts * v.value)); });
        });
        Ints bytes = of.template pack<kRows * V>(q);
        if constexpr (kEnd == End::kSummed) {
            const Ints added = load_rows<V>(panel.others, pixels, panel.column);
            const SumOf sum(*panel.d.sum);
            bytes = panel.d.other_first ? sum.of<kRows * V>(added, bytes) : sum.of<kRows * V>(bytes, added);
        }
        store_rows<V>(panel.out, pixels, panel.column, bytes);
    }
};

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

template <End kEnd, int V>
struct FloatResults {
    using Panel = PanelOf<float>;
    static constexpr End kResult = kEnd;
    static constexpr int kVectors = V, kRows = 1;
    const Panel panel;
    struct Scales {  // not in registers, of which gcc 12 would have too few for tiles of five rows
        const int8_t *first;
        ZOO_INLINE inline Floats operator[](int v) const { return load_floats(first + 4 * kInts * v); }
    } const scale;
    ZOO_INLINE inline explicit FloatResults(const Panel &p) : panel(p), scale{p.scales(V)} {}
    template <int Row, int Rows>
    ZOO_INLINE inline void finish(const Ints (&sums)[Rows][V], int64_t first) const {
        const float *added = kEnd == End::kAdded ? panel.others[first + Row] + panel.column : nullptr;
        store_floats_of<V>(sums[Row], scale, panel.out[first + Row] + panel.column, added);
    }
};

// `count` tiles of Rows pixels, from pixel `first` on; so many tiles were before them.
template <class Results, int Rows>
void dense_tiles(const typename Results::Panel &p, int64_t first, int64_t count, int64_t before) {
    constexpr int V = Results::kVectors;
    const Results results(p);
    const int8_t *const w = p.w, *const bias = p.bias(V), *const next = p.scales(V) + 4 * kInts * V;
    const uint8_t *const *const in = p.in;
    const int64_t part = p.inputs() / 4 * kLine;
    for (int64_t t = before; t < before + count; ++t, first += Rows) {
        const bool fetches = t * kLine < 4 * kInts * V;  // the first tiles bring the next panel, or what lies behind, often the next layer's
        DenseSums<Rows, V> sums;
        sums.begin(in + first, bias);
        sums.add_all(p.d, w, fetches ? next + t * part : w);
        unroll<(Rows + Results::kRows - 1) / Results::kRows>([&](auto g) ZOO_INLINE { results.template finish<g.value * Results::kRows>(sums.values, first); });
    }
}

template <class Results, int Rows = kTileRows<Results::kVectors>>
ZOO_INLINE inline void dense_rows(int64_t rows, const typename Results::Panel &p, int64_t first, int64_t count, int64_t before) {
    if (rows == Rows) return dense_tiles<Results, Rows>(p, first, count, before);
    if constexpr (Rows > 1) dense_rows<Results, Rows - 1>(rows, p, first, count, before);
}

constexpr int64_t kShortInputs = 144;

// Of few inputs, whose products take as long as what becomes of them: that of a tile goes between the products of the next. Returns the pixels done.
template <class Results>
int64_t short_tiles(const typename Results::Panel &p) {
    constexpr int V = Results::kVectors, kRows = 12 / V / Results::kRows * Results::kRows, kGroups = kRows / Results::kRows;
    const Results results(p);
    const int64_t count = p.n / kRows, steps = p.inputs() / 4;
    const uint8_t *const *const in = p.in;
    const int8_t *const weights = p.w, *const bias = p.bias(V);
    int64_t offsets[kShortInputs / 4];
    for (int64_t s = 0, i = 0; s < p.d.stretches; ++s)
        for (int64_t k = 0; k < p.d.stretch; k += 4) offsets[i++] = p.d.offsets[s] + k;
    Ints sums[kRows][V];
    const auto finish = [&](auto g, int64_t first) ZOO_INLINE { results.template finish<g.value * Results::kRows>(sums, first); };
    for (int64_t t = 0; t < count; ++t) {
        DenseSums<kRows, V> next;
        next.begin(in + t * kRows, bias);
        const auto add = [&](int64_t i) ZOO_INLINE { next.add_inputs(offsets[i], weights + 4 * kInts * V * i); };
        if (t) unroll<kGroups>([&](auto g) ZOO_INLINE { add(g.value), finish(g, (t - 1) * kRows); });
        for (int64_t i = t ? kGroups : 0; i < steps; ++i) add(i);
        unroll<kRows>([&](auto r) ZOO_INLINE { unroll<V>([&](auto v) ZOO_INLINE { sums[r.value][v.value] = next.values[r.value][v.value]; }); });
    }
    if (count) unroll<kGroups>([&](auto g) ZOO_INLINE { finish(g, (count - 1) * kRows); });
    return count * kRows;
}

template <class Results>
void dense_panel(const typename Results::Panel &p) {
    constexpr int V = Results::kVectors;
    int64_t done = 0;
    if constexpr (kInts == 16 && V < 4 && sizeof(**p.out) == 1)  // registers for two tiles
        if (p.inputs() >= 16 && p.inputs() <= kShortInputs / (V == 3 ? 3 : 1)) done = short_tiles<Results>(p);
    int64_t n = p.n - done;
    if constexpr (kInts == 16 && V == 4 && Results::kResult == End::kSummed) {  // of five rows, gcc 12 keeps weights on the stack: six, then four and three
        const int64_t shorter = n % 6, sixes = n / 6 - (n > 6 && shorter != 0 && shorter != 3 && shorter != 4);
        dense_rows<Results>(6, p, done, sixes, 0);
        done += 6 * sixes, n -= 6 * sixes;
        for (int64_t tile = sixes, rows; n > 0; ++tile, done += rows, n -= rows) rows = n >= 7 ? 4 : n > 4 ? 3 : n, dense_rows<Results>(rows, p, done, 1, tile);
        return;
    }
    const int64_t tiles = (n + kTileRows<V> - 1) / kTileRows<V>;  // of as equal heights as can be
    if (!tiles) return;
    const int64_t rows = n / tiles, higher = n % tiles;
    if (higher) dense_rows<Results>(rows + 1, p, done, higher, 0);
    dense_rows<Results>(rows, p, done + higher * (rows + 1), tiles - higher, higher);
}

template <template <End, int> class Results, End kEnd, class Out>
inline void dense_panels(const Dense &d, const uint8_t *const *in, Out *const *out, const Out *const *others, int64_t n) {
    const Panels panels(d.outputs);
    const auto *w = static_cast<const int8_t *>(d.packed);
    int64_t column = 0;
    for (int64_t p = 0; p < panels.count; ++p) {
        const int64_t vectors = panels.vectors(p);
        of_vectors(vectors, [&](auto v) { dense_panel<Results<kEnd, v.value>>({d, w, in, out, others, n, column}); });
        w += (d.stretches * d.stretch + 8) * kInts * vectors, column += kInts * vectors;
    }
}

inline void dense(const Dense &d, const uint8_t *const *in, uint8_t *const *out, const uint8_t *const *others, int64_t n) {
    switch (end_of(d)) {
        case End::kScaled: return dense_panels<ByteResults, End::kScaled>(d, in, out, others, n);
        case End::kActivated: return dense_panels<ByteResults, End::kActivated>(d, in, out, others, n);
        case End::kSummed: return dense_panels<ByteResults, End::kSummed>(d, in, out, others, n);
        case End::kClipped: return dense_panels<ByteResults, End::kClipped>(d, in, out, others, n);
        default: return dense_panels<ByteResults, End::kBytes>(d, in, out, others, n);
    }
}

inline void dense_floats(const Dense &d, const uint8_t *const *in, float *const *out, const float *const *added, int64_t n) {
    if (added) dense_panels<FloatResults, End::kAdded>(d, in, out, added, n);
    else dense_panels<FloatResults, End::kFloats>(d, in, out, added, n);
}

}  // namespace
}  // namespace zoo
