// Products on the CPU's tile unit (AMX), for the layouts of ../avx512: sixteen rows of bytes by sixteen columns, 64 inputs at a time. Layers
// of few rows stay with AVX-512: a product of tiles takes as long for one row as for sixteen.
// Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter "Intel AMX".
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "isa/isa.h"
#include "isa/x86/avx512/linear.h"
#include "isa/x86/bytes/dense.h"

namespace zoo {
namespace ZOO_BASE {
extern const Isa kIsa;
}
namespace {
namespace tiles {

constexpr int64_t kRows = 16, kInputs = 64;  // of a tile
constexpr int64_t kLeast = 4;                // rows that are worth a tile
constexpr int64_t kSums = 64;                // columns of the sums' memory
constexpr int64_t kMostRows = 256;           // rows that pass through all columns at a time

bool supported() {
    constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of Linux: a process asks for the memory that tiles take
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!ZOO_BASE::kIsa.supported() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kTile | kInt8)) != (kTile | kInt8)) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Configures eight tiles of sixteen rows of 64 bytes; the destructor releases them.
struct Configured {
    Configured() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~Configured() { _tile_release(); }
    Configured(const Configured &) = delete;
};

// The compiler does not know which memory loads and stores of tiles touch.
inline void settle() { asm volatile("" ::: "memory"); }

// Sixteen rows of bytes, the 64 inputs of step i at steps[i] from their begin.
struct TileRows {
    const uint8_t *base;
    int64_t stride;
    const int64_t *steps;
};

// Memory of the next columns, fetched meanwhile: `lines` of 64 bytes a step and pair of columns.
struct Ahead {
    const char *next;
    int64_t lines;
    ZOO_INLINE inline void fetch() {
        for (int64_t i = 0; i < lines; ++i, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    }
};

// Sums of Blocks times sixteen rows and `Columns` times sixteen columns -> sums [16 Blocks, kSums]. b: [4 inputs][columns][4], a row of it
// every b_stride bytes.
template <int Blocks, int Columns>
ZOO_INLINE inline void multiply(const TileRows *a, int64_t steps, const int8_t *b, int64_t b_stride, Ahead &ahead, int32_t *sums) {
    constexpr int64_t kPitch = kSums * 4;
    _tile_zero(0);
    if constexpr (Columns > 1) _tile_zero(1);
    if constexpr (Blocks > 1) _tile_zero(2);
    if constexpr (Blocks > 1 && Columns > 1) _tile_zero(3);
    for (int64_t i = 0; i < steps; ++i, b += 16 * b_stride) {
        ahead.fetch();
        _tile_loadd(4, a[0].base + a[0].steps[i], a[0].stride);
        _tile_loadd(6, b, b_stride);
        _tile_dpbusd(0, 4, 6);
        if constexpr (Columns > 1) {
            _tile_loadd(7, b + 64, b_stride);
            _tile_dpbusd(1, 4, 7);
        }
        if constexpr (Blocks > 1) {
            _tile_loadd(5, a[1].base + a[1].steps[i], a[1].stride);
            _tile_dpbusd(2, 5, 6);
            if constexpr (Columns > 1) _tile_dpbusd(3, 5, 7);
        }
    }
    _tile_stored(0, sums, kPitch);
    if constexpr (Columns > 1) _tile_stored(1, sums + 16, kPitch);
    if constexpr (Blocks > 1) _tile_stored(2, sums + 16 * kSums, kPitch);
    if constexpr (Blocks > 1 && Columns > 1) _tile_stored(3, sums + 16 * kSums + 16, kPitch);
}

// The same of a panel of `vectors` times sixteen columns.
template <int Vectors>
ZOO_INLINE inline void multiply_panel(const TileRows *a, int64_t blocks, int64_t steps, const int8_t *b, int64_t b_stride, Ahead ahead,
                                      int32_t *sums) {
    settle();
    unroll<(Vectors + 1) / 2>([&](auto pair) ZOO_INLINE {
        constexpr int first = 2 * pair.value, columns = Vectors - first < 2 ? 1 : 2;
        if (blocks > 1) multiply<2, columns>(a, steps, b + 64 * first, b_stride, ahead, sums + 16 * first);
        else multiply<1, columns>(a, steps, b + 64 * first, b_stride, ahead, sums + 16 * first);
    });
    settle();
}

// Memory of one call: rows that tiles cannot read where they are, in whole 64 inputs and an odd number of lines apart, so that sixteen of
// them do not fall on the same lines of the cache.
struct Scratch {
    int64_t steps, stride;
    int32_t *sums;        // [32, kSums]
    int64_t *straight;    // steps of rows whose inputs follow each other
    TileRows *rows;
    uint8_t *copies;
    Scratch(int64_t inputs, int64_t n) : steps(round_up(inputs, kInputs) / kInputs), stride((steps | 1) * kInputs) {
        const int64_t blocks = round_up(n, kRows) / kRows;
        const int64_t lists = round_up(steps * 16 + blocks * static_cast<int64_t>(sizeof(TileRows)), 64);
        auto *memory = static_cast<uint8_t *>(kernel_scratch(32 * kSums * 4 + lists + blocks * kRows * stride + kInputs));
        sums = reinterpret_cast<int32_t *>(memory), memory += 32 * kSums * 4;
        straight = reinterpret_cast<int64_t *>(memory);
        rows = reinterpret_cast<TileRows *>(memory + steps * 16);
        copies = memory + lists;
        for (int64_t i = 0; i < steps; ++i) straight[i] = i * kInputs;
    }
    int64_t *apart() const { return straight + steps; }  // steps of rows in stretches
};

// A panel of weights is fetched by the `blocks` pairs of sixteen rows that pass through the one before.
inline Ahead fetched(const int8_t *panel, int64_t steps, int64_t pairs, int64_t block, int64_t blocks) {
    const int64_t lines = (64 + pairs * blocks - 1) / (pairs * blocks);
    return {reinterpret_cast<const char *>(panel) + block * lines * pairs * steps * 64, lines};
}

void linear(const Linear &l, const RowEpilogue &epilogue, const uint8_t *x, int64_t x_stride, int64_t n, void *out, int64_t out_stride) {
    if (l.outputs <= kNarrow || n < kLeast) return ZOO_BASE::kIsa.linear(l, epilogue, x, x_stride, n, out, out_stride);
    const Scratch scratch(l.inputs, n < kMostRows ? n : kMostRows);
    const int64_t panel = round_up(l.inputs, 4) * 64, cut = l.inputs % kInputs;
    const Configured tiles;
    for (int64_t first = 0; first < n; first += kMostRows) {
        const int64_t rows = n - first < kMostRows ? n - first : kMostRows, blocks = round_up(rows, kRows) / kRows;
        for (int64_t i = 0; i < blocks; ++i) {
            const uint8_t *from = x + (first + i * kRows) * x_stride;
            const int64_t count = rows - i * kRows < kRows ? rows - i * kRows : kRows;
            scratch.rows[i] = {from, x_stride, scratch.straight};
            if (count == kRows && cut == 0 && x_stride % 2048 != 0) continue;
            uint8_t *to = scratch.copies + i * kRows * scratch.stride;
            scratch.rows[i] = {to, scratch.stride, scratch.straight};
            for (int64_t r = 0; r < count; ++r, from += x_stride, to += scratch.stride) {
                int64_t k = 0;
                for (; k + kInputs <= l.inputs; k += kInputs) _mm512_storeu_si512(to + k, load(from + k));
                if (cut) _mm512_storeu_si512(to + k, _mm512_maskz_loadu_epi8(~0ULL >> (64 - cut), from + k));
            }
        }
        const auto *weight = static_cast<const int8_t *>(l.weight);
        for (int64_t column = 0; column < l.outputs; column += kColumns, weight += panel)
            for (int64_t i = 0; i < blocks; i += 2) {
                const int64_t begin = i * kRows, count = rows - begin < 2 * kRows ? rows - begin : 2 * kRows;
                multiply_panel<4>(scratch.rows + i, blocks - i, scratch.steps, weight, 256,
                                  fetched(weight + panel, scratch.steps, 2, i / 2, (blocks + 1) / 2), scratch.sums);
                const int32_t *sums = scratch.sums;
                for (int64_t j = 0; j < 64; j += 16)
                    for (int64_t r = 0; r < count; r += 4) {
                        const int32_t *tile_sums = sums + r * kSums + j;
                        const __m512i s0 = load(tile_sums), s1 = load(tile_sums + kSums), s2 = load(tile_sums + 2 * kSums),
                                      s3 = load(tile_sums + 3 * kSums), none = s0;
                        const int64_t row = first + begin + r;
                        if (count - r >= 4) finish<4>(l, epilogue, row, column + j, out, out_stride, s0, s1, s2, s3, none, none);
                        else if (count - r == 3) finish<3>(l, epilogue, row, column + j, out, out_stride, s0, s1, s2, none, none, none);
                        else if (count - r == 2) finish<2>(l, epilogue, row, column + j, out, out_stride, s0, s1, none, none, none, none);
                        else finish<1>(l, epilogue, row, column + j, out, out_stride, s0, none, none, none, none, none);
                    }
            }
    }
}

// A last step reads up to 15 rows of weights that are another panel's or none, times zeros: the last panel is followed by that many.
int64_t packed_bytes(int64_t inputs, int64_t outputs) { return ZOO_BASE::kIsa.packed_bytes(inputs, outputs) + 15 * 256; }

int64_t dense_bytes(int64_t inputs, int64_t outputs) {
    const int64_t beyond = round_up(inputs, kInputs) - inputs - 8, last = 16 * Panels(outputs).vectors(Panels(outputs).count - 1);
    return ZOO_BASE::kIsa.images->dense_bytes(inputs, outputs) + (beyond > 0 ? beyond * last : 0);
}

// take(sums with their bias, scales, row) of each row and one panel.
template <int V, class Take>
ZOO_INLINE inline void dense_sums(const Dense &d, const Scratch &scratch, const int8_t *w, const int8_t *next, int64_t n, Take take) {
    const int8_t *bias_of = w + d.stretches * d.stretch * 16 * V, *scales = bias_of + 64 * V;
    Floats scale[4] = {};
    Ints bias[4] = {};
    unroll<V>([&](auto v) ZOO_INLINE {
        bias[v.value] = load(bias_of + 64 * v.value);
        scale[v.value] = _mm512_loadu_ps(scales + 64 * v.value);
    });
    const int64_t blocks = round_up(n, kRows) / kRows;
    for (int64_t i = 0; i < blocks; i += 2) {
        const int64_t begin = i * kRows, count = n - begin < 2 * kRows ? n - begin : 2 * kRows;
        multiply_panel<V>(scratch.rows + i, blocks - i, scratch.steps, w, 64 * V, fetched(next, scratch.steps, (V + 1) / 2, i / 2, (blocks + 1) / 2),
                          scratch.sums);
        for (int64_t r = 0; r < count; ++r) {
            Ints sums[4] = {};
            unroll<V>([&](auto v) ZOO_INLINE { sums[v.value] = add(load(scratch.sums + r * kSums + 16 * v.value), bias[v.value]); });
            take(sums, scale, begin + r);
        }
    }
}

template <int V>
void dense_panel(const Dense &d, const Scratch &scratch, const int8_t *w, const int8_t *next, uint8_t *const *out, const uint8_t *const *others,
                 int64_t n, int64_t column) {
    const auto rows_of = [&](const auto &bytes_of, auto then) ZOO_INLINE {
        dense_sums<V>(d, scratch, w, next, n, [&](const Ints(&sums)[4], const Floats(&scale)[4], int64_t row) ZOO_INLINE {
            Ints q[4] = {};
            unroll<V>([&](auto v) ZOO_INLINE { q[v.value] = requantized(sums[v.value], scale[v.value]); });
            store_panel<V>(out[row] + column, then(bytes_of.template pack<V>(q), row));
        });
    };
    const auto alone = [](__m512i bytes, int64_t) ZOO_INLINE { return bytes; };
    if (d.gains) return rows_of(ScaledActivationOf<V>(d, column), alone);
    if (d.activation) return rows_of(ActivationOf(*d.activation), alone);
    const BytesOf<true> bytes_of(d.bytes);
    if (!d.sum) return rows_of(bytes_of, alone);
    const SumOf other(*d.sum);
    if (d.other_first)
        rows_of(bytes_of, [&](__m512i bytes, int64_t r) ZOO_INLINE { return other.of<V>(load_panel<V>(others[r] + column), bytes); });
    else
        rows_of(bytes_of, [&](__m512i bytes, int64_t r) ZOO_INLINE { return other.of<V>(bytes, load_panel<V>(others[r] + column)); });
}

// The same as floats, plus others where there are any.
template <int V>
void dense_panel(const Dense &d, const Scratch &scratch, const int8_t *w, const int8_t *next, float *const *out, const float *const *others,
                 int64_t n, int64_t column) {
    dense_sums<V>(d, scratch, w, next, n, [&](const Ints(&sums)[4], const Floats(&scale)[4], int64_t row) ZOO_INLINE {
        store_floats_of<V>(sums, scale, out[row] + column, others ? others[row] + column : nullptr);
    });
}

// Windows of sixteen pixels as rows of tiles: where they are, if they follow each other at one distance and their stretches are whole 64
// bytes, else copied.
inline void list_windows(const Dense &d, const Scratch &scratch, const uint8_t *const *in, int64_t n) {
    const bool whole = d.stretch % kInputs == 0;
    for (int64_t s = 0, i = 0; s < d.stretches && whole; ++s)
        for (int64_t k = 0; k < d.stretch; k += kInputs) scratch.apart()[i++] = d.offsets[s] + k;
    for (int64_t begin = 0, i = 0; begin < n; begin += kRows, ++i) {
        const int64_t count = n - begin < kRows ? n - begin : kRows, step = count > 1 ? in[begin + 1] - in[begin] : 0;
        bool even = whole && count == kRows && step % 2048 != 0;
        for (int64_t r = 2; r < count && even; ++r) even = in[begin + r] - in[begin + r - 1] == step;
        if (even) {
            scratch.rows[i] = {in[begin], step, scratch.apart()};
            continue;
        }
        uint8_t *to = scratch.copies + begin * scratch.stride;
        scratch.rows[i] = {to, scratch.stride, scratch.straight};
        for (int64_t r = 0; r < count; ++r, to += scratch.stride) {
            uint8_t *copy = to;
            for (int64_t s = 0; s < d.stretches; copy += d.stretch, ++s) {  // bytes behind a stretch are overwritten by the next
                const uint8_t *from = in[begin + r] + d.offsets[s];
                if (d.stretch <= 32)
                    _mm256_storeu_si256(reinterpret_cast<__m256i *>(copy), _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
                else
                    for (int64_t k = 0; k < d.stretch; k += kInputs) _mm512_storeu_si512(copy + k, load(from + k));
            }
            _mm512_storeu_si512(copy, _mm512_setzero_si512());
        }
    }
}

template <class Out>
void dense_panels(const Dense &d, const uint8_t *const *in, Out *const *out, const Out *const *others, int64_t n) {
    const Scratch scratch(d.stretches * d.stretch, n);
    list_windows(d, scratch, in, n);
    const Panels panels(d.outputs);
    const Configured tiles;
    const auto *w = static_cast<const int8_t *>(d.packed);
    for (int64_t p = 0, column = 0; p < panels.count; ++p) {
        const int64_t vectors = panels.vectors(p);
        const int8_t *next = w + (d.stretches * d.stretch + 8) * 16 * vectors;
        of_vectors(vectors, [&](auto v) { dense_panel<v.value>(d, scratch, w, next, out, others, n, column); });
        w = next, column += 16 * vectors;
    }
}

void dense(const Dense &d, const uint8_t *const *in, uint8_t *const *out, const uint8_t *const *others, int64_t n) {
    if (n < kLeast) return ZOO_BASE::kIsa.images->dense(d, in, out, others, n);
    dense_panels(d, in, out, others, n);
}

void dense_floats(const Dense &d, const uint8_t *const *in, float *const *out, const float *const *added, int64_t n) {
    if (n < kLeast) return ZOO_BASE::kIsa.images->dense_floats(d, in, out, added, n);
    dense_panels(d, in, out, added, n);
}

int64_t products(int64_t rounds) {
    const Configured tiles;
    for (int64_t i = 0; i < rounds; ++i) {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    return rounds * 4 * 16 * 16 * 64;
}

ImageKernels image_kernels() {
    ImageKernels kernels = *ZOO_BASE::kIsa.images;
    kernels.dense_bytes = dense_bytes, kernels.dense = dense, kernels.dense_floats = dense_floats, kernels.products = products;
    return kernels;
}
const ImageKernels kKernels = image_kernels();

Isa isa() {
    Isa isa = ZOO_BASE::kIsa;
    isa.name = "amx", isa.needs = "AMX-INT8, whose tiles take the larger products, and AVX512-VNNI";
    isa.supported = supported, isa.packed_bytes = packed_bytes, isa.linear = linear, isa.images = &kKernels;
    return isa;
}

}  // namespace tiles
}  // namespace

const Isa ZOO_SET::kIsa = tiles::isa();

}  // namespace zoo
