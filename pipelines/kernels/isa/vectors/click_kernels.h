// The kernels of click programs, on int16 codes and float vectors. Written once and lowered for each instruction set (see lanes.h);
// recommenders/steps/ defines what they compute.
#pragma once
#include <cmath>

#include "isa/isa.h"
#include "isa/vectors/field_kernels.h"
#include "isa/vectors/mixed_linear.h"
#include "isa/vectors/words.h"

namespace zoo {
namespace {

void gather(const WordRows &r, const uint32_t *ids, int64_t ids_stride, const float *means, int64_t means_stride, int64_t n, int16_t *out,
            int64_t out_stride) {
    constexpr int64_t kAhead = 4, kFitting = 8;  // so many codes fit an int16 sum
    for (int64_t s = 0; s < n; ++s, ids += ids_stride, out += out_stride) {
        if (r.far && s + kAhead < n)
            for (int64_t l = 0; l < r.count; ++l) {
                const int16_t *ahead = r.table + ids[kAhead * ids_stride + l] * r.stride;
                for (int64_t j = 0; j < r.width; j += 32) __builtin_prefetch(ahead + j);
            }
        if (r.pool == Pool::kNone) {
            const int16_t *row = r.table + ids[0] * r.stride;
            for (int64_t j = 0; j < r.width; j += kWords) store_as(out + j, load_as<Words>(row + j));
        } else if (r.pool == Pool::kMax) {
            for (int64_t j = 0; j < r.width; j += kWords) {
                Words largest = load_as<Words>(r.table + ids[0] * r.stride + j);
                for (int64_t l = 1; l < r.count; ++l) {
                    const Words row = load_as<Words>(r.table + ids[l] * r.stride + j);
                    largest = row > largest ? row : largest;
                }
                store_as(out + j, largest);
            }
        } else {
            float factor = r.pool == Pool::kMean ? means[s * means_stride] * r.factor : r.factor;
            if (!(factor - factor == 0)) factor = 0;  // infinite, or NaN
            int64_t j = 0;
            for (; j + kVecLanes < r.width; j += kWords) {
                IntVec low{}, high{};
                for (int64_t l = 0; l < r.count;) {
                    Words sum{};
                    for (const int64_t end = r.count - l < kFitting ? r.count : l + kFitting; l < end; ++l)
                        sum += load_as<Words>(r.table + ids[l] * r.stride + j);
                    HalfWords half[2];
                    std::memcpy(half, &sum, sizeof sum);
                    low += __builtin_convertvector(half[0], IntVec), high += __builtin_convertvector(half[1], IntVec);
                }
                store_words(out + j, round_clipped(to_float(low) * factor, -kCodeLimit, kCodeLimit));
                store_words(out + j + kVecLanes, round_clipped(to_float(high) * factor, -kCodeLimit, kCodeLimit));
            }
            if (j < r.width) {
                IntVec sum{};
                for (int64_t l = 0; l < r.count; ++l) sum += load_words(r.table + ids[l] * r.stride + j);
                store_words(out + j, round_clipped(to_float(sum) * factor, -kCodeLimit, kCodeLimit));
            }
        }
    }
}

void numbers(const float *x, int64_t x_stride, const int32_t *columns, const float *scale, int64_t width, int64_t n, int16_t *out,
             int64_t out_stride) {
    for (int64_t s = 0; s < n; ++s, x += x_stride, out += out_stride)
        for (int64_t k = 0; k < width; k += kVecLanes) {
            Vec value;
            for (int64_t l = 0; l < kVecLanes; ++l) value[l] = x[columns[k + l]];
            value *= load_float<Vec>(scale + k);
            store_words(out + k, round_clipped(value == value ? value : Vec{}, -kCodeLimit, kCodeLimit));
        }
}

void quantize(const float *x, int64_t x_stride, float factor, float low, int64_t width, int64_t n, int16_t *out, int64_t out_stride) {
    for (int64_t s = 0; s < n; ++s)
        for (int64_t j = 0; j < width; j += kVecLanes)
            store_words(out + s * out_stride + j,
                        round_clipped(load_float<Vec>(x + s * x_stride + j) * factor, low, kCodeLimit));
}

void code_bytes(const int16_t *x, int64_t x_stride, int64_t width, int64_t n, uint8_t *out, int64_t out_stride) {
    using Bytes = Vector<uint8_t, kWords>::type;
    for (int64_t s = 0; s < n; ++s)
        for (int64_t j = 0; j < width; j += kWords) {
            const Words high = ((load_as<Words>(x + s * x_stride + j) + 16) >> 5) + 128;
            const Words byte = high > 255 ? Words{} + 255 : high;  // codes are -4095 and more, so that none is below 0
            const Bytes bytes = __builtin_convertvector(byte, Bytes);
            const int64_t left = width - j;
            std::memcpy(out + s * out_stride + j, &bytes, static_cast<size_t>(left < kWords ? left : kWords));
        }
}

void column_bytes(const int16_t *x, int64_t x_stride, const float *factor, int64_t width, int64_t n, uint8_t *out, int64_t out_stride) {
    for (int64_t s = 0; s < n; ++s, x += x_stride, out += out_stride)
        for (int64_t j = 0; j < width; j += kVecLanes)
            store_signed(out + j, to_float(load_words(x + j)) * load_float<Vec>(factor + j));
}

template <int Size>
inline void copy_bytes(const uint8_t *from, uint8_t *to, int64_t width, int64_t &j) {
    for (; j + Size <= width; j += Size) std::memcpy(to + j, from + j, Size);
}

void gather_bytes(const uint8_t *table, int64_t stride, int64_t width, const uint32_t *ids, int64_t ids_stride, int64_t n, uint8_t *out,
                  int64_t out_stride) {
    constexpr int64_t kAhead = 8;
    for (int64_t s = 0; s < n; ++s, ids += ids_stride, out += out_stride) {
        if (s + kAhead < n) __builtin_prefetch(table + ids[kAhead * ids_stride] * stride);
        const uint8_t *row = table + ids[0] * stride;
        int64_t j = 0;
        copy_bytes<64>(row, out, width, j), copy_bytes<16>(row, out, width, j), copy_bytes<8>(row, out, width, j), copy_bytes<1>(row, out, width, j);
    }
}

// Sixteen lanes as vectors of this instruction set.
constexpr int64_t kParts = kLanes / kVecLanes;
struct Lanes {
    Vec part[kParts];
};
inline float reduce_lanes(const Lanes &lanes) {
    float sums[kLanes];
    std::memcpy(sums, &lanes, sizeof sums);
    return reduce_add(load_float<Vec16>(sums));
}

void factorization(const int16_t *x, int64_t x_stride, const int32_t *begins, int64_t fields, int64_t width, float scale, int64_t n, float *out,
                   int64_t out_stride) {
    const IntVec lane = lane_numbers();
    for (int64_t s = 0; s < n; ++s, x += x_stride) {
        Lanes total{};
        for (int64_t j = 0; j < width; j += kVecLanes) {
            IntVec sum{}, squares{};
            for (int64_t f = 0; f < fields; ++f) {
                const IntVec k = load_words(x + begins[f] + j);
                sum += k, squares += k * k;
            }
            const Vec value = to_float(sum) * to_float(sum) - to_float(squares);
            Vec &part = total.part[j / kVecLanes % kParts];
            part += lane + static_cast<int32_t>(j) < static_cast<int32_t>(width) ? value : Vec{};
        }
        out[s * out_stride] = reduce_lanes(total) * scale;
    }
}

void cross(const Cross &c, const int16_t *x, int64_t x_stride, const float *u, int64_t u_stride, float *g, int64_t stride, int64_t n, int16_t *out,
           int64_t out_stride, uint8_t *bytes, int64_t bytes_stride, float *total, int64_t total_stride) {
    for (int64_t s = 0; s < n; ++s, x += x_stride, u += u_stride, g += stride) {
        Lanes sums{};
        for (int64_t j = 0; j < c.width; j += kVecLanes) {
            const Vec grown = (c.first ? broadcast<Vec>(1.0f) : load_float<Vec>(g + j)) + load_float<Vec>(u + j);
            const Vec value = to_float(load_words(x + j)) * grown;
            store_float(g + j, grown);
            if (out) store_words(out + s * out_stride + j, round_clipped(value * c.factor, -kCodeLimit, kCodeLimit));
            if (bytes) store_signed(bytes + s * bytes_stride + j, value * load_float<Vec>(c.factors + j));
            if (c.weight) {
                const Vec weight = load_float<Vec>(c.weight + j);
                sums.part[j / kVecLanes % kParts] += weight == Vec{} ? Vec{} : value * weight;
            }
        }
        if (c.weight) total[s * total_stride] = reduce_lanes(sums);
    }
}

// The vectors stand as columns, so that a vector's dots with all others come out side by side.
void dots(const int16_t *x, int64_t x_stride, const int32_t *begins, int64_t vectors, int64_t width, const float *factor, int64_t n, int16_t *out,
          int64_t out_stride) {
    const int64_t pairs = (width + 1) / 2, columns = round_up(vectors, kLanes);
    auto *turned = static_cast<int32_t *>(kernel_scratch(pairs * columns * 4));
    std::memset(turned, 0, static_cast<size_t>(pairs * columns * 4));
    for (int64_t s = 0; s < n; ++s, x += x_stride, out += out_stride) {
        for (int64_t v = 0; v < vectors; ++v) {
            const int16_t *from = x + begins[v];
            for (int64_t p = 0; p < pairs; ++p) std::memcpy(turned + p * columns + v, from + 2 * p, 4);
        }
        if (width % 2)
            for (int64_t v = 0; v < vectors; ++v) turned[(pairs - 1) * columns + v] &= 0xFFFF;
        int16_t *to = out;
        const float *by = factor;
        for (int64_t i = 1; i < vectors; by += i, ++i) {
            for (int64_t j = 0; j < i; j += kVecLanes) {
                IntVec even{}, odd{};
                int64_t p = 0;
                for (; p + 2 <= pairs; p += 2) {
                    dot_pairs(even, reinterpret_cast<Words>(turned[p * columns + i] - IntVec{}), load_as<Words>(turned + p * columns + j));
                    dot_pairs(odd, reinterpret_cast<Words>(turned[(p + 1) * columns + i] - IntVec{}),
                              load_as<Words>(turned + (p + 1) * columns + j));
                }
                if (p < pairs)
                    dot_pairs(even, reinterpret_cast<Words>(turned[p * columns + i] - IntVec{}), load_as<Words>(turned + p * columns + j));
                store_words(to + j, round_clipped(to_float(even + odd) * load_float<Vec>(by + j), -kCodeLimit, kCodeLimit));
            }
            to += i;
        }
    }
}

// The dots of samples that have all vectors but these in common: of the first sample all of them, of the others those of these vectors.
void dots_of(const int16_t *x, int64_t x_stride, const int32_t *begins, int64_t vectors, int64_t width, const float *factor, const int32_t *own,
             int64_t own_count, const float *own_factor, int64_t n, int16_t *out, int64_t out_stride) {
    constexpr int64_t kMost = 128;
    alignas(64) int16_t row[kMost + 2 * kVecLanes];
    const int64_t pairs = (width + 1) / 2, columns = round_up(vectors, kLanes), size = pairs * columns;
    kernel_scratch(2 * size * 4);
    dots(x, x_stride, begins, vectors, width, factor, n < 1 ? n : 1, out, out_stride);
    auto *turned = static_cast<int32_t *>(kernel_scratch(2 * size * 4)); // first the vectors of the first sample
    std::memcpy(turned + size, turned, static_cast<size_t>(size) * 4);
    const auto turn = [&](int64_t s) {
        int32_t *to = turned + s % 2 * size;
        for (int64_t k = 0; k < own_count; ++k) {
            const int16_t *from = x + s * x_stride + begins[own[k]];
            for (int64_t p = 0; p < pairs; ++p) std::memcpy(to + p * columns + own[k], from + 2 * p, 4);
            if (width % 2) to[(pairs - 1) * columns + own[k]] &= 0xFFFF;
        }
    };
    if (n > 1) turn(1);
    for (int64_t s = 1; s < n; ++s) {
        if (s + 1 < n) turn(s + 1); // before its loads, which are wider than the stores
        const int32_t *turned_now = turned + s % 2 * size;
        int16_t *to = out + s * out_stride;
        std::memcpy(to, out, static_cast<size_t>(vectors * (vectors - 1) / 2) * 2);
        for (int64_t k = 0; k < own_count; ++k) {
            const int64_t v = own[k];
            for (int64_t j = 0; j < vectors; j += kVecLanes) {
                IntVec even{}, odd{};
                int64_t p = 0;
                for (; p + 2 <= pairs; p += 2) {
                    dot_pairs(even, reinterpret_cast<Words>(turned_now[p * columns + v] - IntVec{}), load_as<Words>(turned_now + p * columns + j));
                    dot_pairs(odd, reinterpret_cast<Words>(turned_now[(p + 1) * columns + v] - IntVec{}),
                              load_as<Words>(turned_now + (p + 1) * columns + j));
                }
                if (p < pairs)
                    dot_pairs(even, reinterpret_cast<Words>(turned_now[p * columns + v] - IntVec{}), load_as<Words>(turned_now + p * columns + j));
                store_words(row + j, round_clipped(to_float(even + odd) * load_float<Vec>(own_factor + k * columns + j), -kCodeLimit, kCodeLimit));
            }
            std::memcpy(to + v * (v - 1) / 2, row, static_cast<size_t>(v) * 2);
            for (int64_t i = v + 1; i < vectors; ++i) to[i * (i - 1) / 2 + v] = row[i];
        }
    }
}

// sum x y over sixteen lanes, then the tree.
inline float dot_floats(const float *x, const float *y, int64_t width) {
    const IntVec lane = lane_numbers();
    Lanes sums{};
    for (int64_t j = 0; j < width; j += kVecLanes) {
        const Vec value = load_float<Vec>(x + j) * load_float<Vec>(y + j);
        sums.part[j / kVecLanes % kParts] += lane + static_cast<int32_t>(j) < static_cast<int32_t>(width) ? value : Vec{};
    }
    return reduce_lanes(sums);
}

void weighted(const int16_t *x, int64_t x_stride, const float *weight, int64_t width, int64_t n, float *out, int64_t out_stride) {
    for (int64_t s = 0; s < n; ++s, x += x_stride) {
        Lanes sums{};
        for (int64_t j = 0; j < width; j += kLanes)  // weights are padded with zeros
            for (int64_t p = 0; p < kParts; ++p)
                sums.part[p] += to_float(load_words(x + j + p * kVecLanes)) * load_float<Vec>(weight + j + p * kVecLanes);
        out[s * out_stride] = reduce_lanes(sums);
    }
}

void normalize(const float *x, int64_t stride, int64_t width, float epsilon, float least, bool relu, int64_t n, float *out) {
    for (int64_t s = 0; s < n; ++s, x += stride, out += stride) {
        for (int64_t j = 0; j < width; j += kVecLanes) {
            const Vec value = load_float<Vec>(x + j);
            store_float(out + j, relu ? (value < Vec{} ? Vec{} : value) : value);
        }
        const float squares = dot_floats(out, out, width) + epsilon;
        const float norm = __builtin_sqrtf(squares > least ? squares : least);
        for (int64_t j = 0; j < width; j += kVecLanes) store_float(out + j, load_float<Vec>(out + j) / norm);
    }
}

void leaky(const float *x, int64_t stride, const float *slope, int64_t width, int64_t n, float *out) {
    for (int64_t s = 0; s < n; ++s, x += stride, out += stride)
        for (int64_t j = 0; j < width; j += kVecLanes) {
            const Vec value = load_float<Vec>(x + j), scaled = value * load_float<Vec>(slope + j);
            store_float(out + j, value < Vec{} ? scaled : value);
        }
}

// (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x.
void tanh(const float *x, int64_t stride, int64_t width, int64_t n, float *out) {
    for (int64_t s = 0; s < n; ++s, x += stride, out += stride)
        for (int64_t j = 0; j < width; j += kVecLanes) {
            const Vec value = load_float<Vec>(x + j), down = value < Vec{} ? value : -value;
            const Vec e = exponential(down * 2.0f), size = (1.0f - e) / (1.0f + e);
            store_float(out + j, value < Vec{} ? -size : size);
        }
}

// The softmax of so many gates, sums from the first on.
inline void softmax_of(const float *gates, int64_t experts, float *weights) {
    float most = gates[0], sum = 0;
    for (int64_t e = 1; e < experts; ++e) most = gates[e] > most ? gates[e] : most;
    for (int64_t e = 0; e < experts; ++e) sum += weights[e] = exponential(broadcast<Vec>(gates[e] - most))[0];
    for (int64_t e = 0; e < experts; ++e) weights[e] /= sum;
}

// Slice e of x times softmax(gates)_e.
void mixture(const float *x, int64_t stride, const float *gates, int64_t gates_stride, int64_t experts, int64_t width, int64_t n,
             float *out) {
    auto *weights = static_cast<float *>(kernel_scratch(experts * 4));
    for (int64_t s = 0; s < n; ++s, x += stride, gates += gates_stride, out += stride) {
        softmax_of(gates, experts, weights);
        for (int64_t e = 0; e < experts; ++e)
            for (int64_t j = 0; j < width; ++j) out[e * width + j] = x[e * width + j] * weights[e];
    }
}

void gated_sum(const float *const *x, int64_t stride, const float *gates, int64_t gates_stride, int64_t experts, int64_t width, bool relu,
               int64_t n, float *out) {
    auto *weights = static_cast<float *>(kernel_scratch(experts * 4));
    for (int64_t s = 0; s < n; ++s, gates += gates_stride) {
        softmax_of(gates, experts, weights);
        for (int64_t j = s * stride; j < s * stride + width; j += kVecLanes) {
            Vec total{};
            for (int64_t e = 0; e < experts; ++e) {
                const Vec value = load_float<Vec>(x[e] + j);
                total += (relu ? (value < Vec{} ? Vec{} : value) : value) * weights[e];
            }
            store_float(out + j, total);
        }
    }
}

void product(const float *x, const float *y, int64_t stride, int64_t width, int64_t n, float *out, int64_t out_stride) {
    for (int64_t s = 0; s < n; ++s, x += stride, y += stride) out[s * out_stride] = dot_floats(x, y, width);
}

void code_product(const float *x, int64_t x_stride, const int16_t *y, int64_t y_stride, int64_t width, float scale, int64_t n, float *out,
                  int64_t out_stride) {
    const IntVec lane = lane_numbers();
    for (int64_t s = 0; s < n; ++s, x += x_stride, y += y_stride) {
        Lanes sums{};
        for (int64_t j = 0; j < width; j += kVecLanes) {
            const Vec value = load_float<Vec>(x + j) * to_float(load_words(y + j));
            sums.part[j / kVecLanes % kParts] += lane + static_cast<int32_t>(j) < static_cast<int32_t>(width) ? value : Vec{};
        }
        out[s * out_stride] = reduce_lanes(sums) * scale;
    }
}

constexpr ClickKernels kClickKernels = {
    .lanes = kVecLanes,
    .mixed = mixed,
    .gather = gather,
    .numbers = numbers,
    .quantize = quantize,
    .gather_bytes = gather_bytes,
    .code_bytes = code_bytes,
    .column_bytes = column_bytes,
    .factorization = factorization,
    .cross = cross,
    .dots = dots,
    .dots_of = dots_of,
    .weighted = weighted,
    .normalize = normalize,
    .leaky = leaky,
    .tanh = tanh,
    .mixture = mixture,
    .gated_sum = gated_sum,
    .product = product,
    .code_product = code_product,
    .sigmoid_product = sigmoid_product,
    .gate_codes = gate_codes,
    .field_attention = field_attention,
};

}  // namespace
}  // namespace zoo
