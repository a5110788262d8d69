// The float kernels of a decoder, written once and lowered for each instruction set (see lanes.h); operators.py says what they compute.
// Rows are padded with zeros to whole cache lines.
#pragma once
#include <cmath>

#include "isa/lanes.h"
#include "isa/isa.h"

namespace zoo {
namespace {

inline uint8_t byte_of(float value, int32_t zero) {
    const float shifted = value + kWhole;
    int32_t whole;
    std::memcpy(&whole, &shifted, 4);
    return static_cast<uint8_t>(whole + zero);  // kWhole's own lowest byte is 0
}

// The bytes and the scale of a row by given levels. A row with NaN or infinity has no finite scale, whatever is made of it has none either.
inline void quantize_fixed(const float *x, int64_t stride, const Levels &levels, uint8_t *bytes, float *scale) {
    const float step = levels.scale, low = static_cast<float>(-levels.zero), high = static_cast<float>(255 - levels.zero);
    const int32_t zero = levels.zero;
    int32_t most = 0;
    for (int64_t j = 0; j < stride; ++j) {
        int32_t bits;
        std::memcpy(&bits, x + j, 4);
        bits &= 0x7FFFFFFF;
        most = bits > most ? bits : most;
        float value = x[j] / step;
        value = value > low ? value : low;  // also NaN
        value = value < high ? value : high;
        bytes[j] = byte_of(value, zero);
    }
    *scale = most < 0x7F800000 ? step : NAN;
}

// The same by the row's own range: rint(x / scale) + 128, scale = max|x| / 127; of a row that is nowhere negative rint(x / scale), scale =
// max / 255.
inline void quantize_row(const float *x, int64_t stride, const Levels &levels, uint8_t *bytes, float *scale) {
    if (levels.scale > 0) return quantize_fixed(x, stride, levels, bytes, scale);
    Words found{};
    for (int64_t j = 0; j < stride; j += kPart) {
        const Words bits = reinterpret_cast<Words>(get<Part>(x + j)) & 0x7FFFFFFF;  // ordered like the magnitudes, NaN above all
        found = bits > found ? bits : found;
    }
    const int32_t bits = most<int32_t>(found);
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    const float steps = levels.zero ? 127.0f : 255.0f;
    const bool some = !(magnitude < kSmallest);
    *scale = some ? magnitude / steps : 1.0f;
    const float times = some ? steps / magnitude : 0.0f;
    const int32_t zero = levels.zero;
    for (int64_t j = 0; j < stride; ++j) bytes[j] = byte_of(x[j] * times, zero);
}

void quantize(const Rows &rows, int64_t stride, const Levels &levels, int64_t n) {
    for (int64_t r = 0; r < n; ++r)
        quantize_row(rows.real + r * rows.stride, stride, levels, rows.bytes + r * rows.stride, rows.scale + r);
}

void norm(const Norm &norm, const float *x, int64_t x_stride, const Rows &out, int64_t n) {
    const int64_t width = norm.width, stride = round_up(width, kColumns), whole = width / kLanes * kLanes;
    const float count = static_cast<float>(width);
    float tail[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) tail[l] = whole + l < width ? 1.0f : 0.0f;
    auto *spare = static_cast<float *>(kernel_scratch(stride * 4));
    for (int64_t r = 0; r < n; ++r, x += x_stride) {
        float *y = out.real ? out.real + r * out.stride : spare;
        Lanes total = all<Lanes>(0);
        for (int64_t j = 0; j < width; j += kLanes) total = total + get<Lanes>(x + j);
        const Lanes mean = all<Lanes>(sum(total) / count);
        Lanes squares = all<Lanes>(0);
        for (int64_t j = 0; j < width; j += kLanes) {
            Lanes off = get<Lanes>(x + j) - mean;
            if (j == whole) off = off * get<Lanes>(tail);
            squares = squares + off * off;
        }
        const Lanes rate = all<Lanes>(1.0f / std::sqrt(sum(squares) / count + norm.epsilon));
        for (int64_t j = 0; j < stride; j += kLanes)
            put(y + j, ((get<Lanes>(x + j) - mean) * rate) * get<Lanes>(norm.scale + j) + get<Lanes>(norm.bias + j));
        if (out.bytes) quantize_row(y, stride, norm.levels, out.bytes + r * out.stride, out.scale + r);
    }
}

void halve(const float *x, int64_t count, Half *out) {
    for (int64_t j = 0; j < count; j += kPart) halve(x + j, out + j);
}

// Scores of `Count` keys: their dot products with the query in each head, [heads, room].
template <int Count>
inline void score(const float *q, const Half *const *keys, int64_t heads, int64_t size, int64_t room, float *scores) {
    for (int64_t h = 0; h < heads; ++h, scores += room) {
        Lanes a = all<Lanes>(0), b = a, c = a, d = a;
        for (int64_t j = h * size; j < (h + 1) * size; j += kLanes) {
            const Lanes query = get<Lanes>(q + j);
            a = a + query * get<Lanes>(keys[0] + j);
            if constexpr (Count > 1) b = b + query * get<Lanes>(keys[1] + j);
            if constexpr (Count > 1) c = c + query * get<Lanes>(keys[2] + j);
            if constexpr (Count > 1) d = d + query * get<Lanes>(keys[3] + j);
        }
        scores[0] = sum(a);
        if constexpr (Count > 1) scores[1] = sum(b), scores[2] = sum(c), scores[3] = sum(d);
    }
}

// Adds the values of `Count` keys, as weighted in each head, one after the other.
template <int Count>
inline void weigh(const float *weights, int64_t room, const Half *const *keys, int64_t heads, int64_t size, float *out) {
    const int64_t width = heads * size;
    for (int64_t h = 0; h < heads; ++h, weights += room)
        for (int64_t j = h * size; j < (h + 1) * size; j += kLanes) {
            Lanes found = get<Lanes>(out + j);
            for (int i = 0; i < Count; ++i) found = found + all<Lanes>(weights[i]) * get<Lanes>(keys[i] + width + j);
            put(out + j, found);
        }
}

// Scores to weights of a softmax over `count` of them, but for their sum, of which the inverse is returned; room for whole sixteens.
inline float soften(float *weights, int64_t count) {
    const int64_t room = round_up(count, kLanes);
    for (int64_t t = count; t < room; ++t) weights[t] = -INFINITY;
    const Lanes base = all<Lanes>(largest(weights, room));
    Lanes total = all<Lanes>(0);
    for (int64_t t = 0; t < room; t += kLanes) {
        const Lanes each = exponential(get<Lanes>(weights + t) - base);
        put(weights + t, each);
        total = total + each;
    }
    return 1.0f / sum(total);
}

// q: heads * size floats; keys[t]: as many, the values behind them. Scores are dot products, a softmax over t, then the values so weighted.
// Four keys at a time, all heads of them: memory is read in order.
void attend(const float *q, const Half *const *keys, int64_t count, int64_t heads, int64_t size, float *out) {
    const int64_t room = round_up(count, kLanes), fours = count / 4 * 4;
    auto *scores = static_cast<float *>(kernel_scratch((heads * room + heads) * 4)), *shares = scores + heads * room;
    for (int64_t t = 0; t < fours; t += 4) score<4>(q, keys + t, heads, size, room, scores + t);
    for (int64_t t = fours; t < count; ++t) score<1>(q, keys + t, heads, size, room, scores + t);
    for (int64_t h = 0; h < heads; ++h) shares[h] = soften(scores + h * room, count);
    for (int64_t j = 0; j < heads * size; j += kLanes) put(out + j, all<Lanes>(0));
    for (int64_t t = 0; t < fours; t += 4) weigh<4>(scores + t, room, keys + t, heads, size, out);
    for (int64_t t = fours; t < count; ++t) weigh<1>(scores + t, room, keys + t, heads, size, out);
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t j = h * size; j < (h + 1) * size; j += kLanes) put(out + j, get<Lanes>(out + j) * all<Lanes>(shares[h]));
}

// out[row][column] = share[row] * sum over i, in order, of times[row][i] * x[i][column]: Count rows, Wide vectors of columns.
template <int Count, int Wide, class T>
inline void combine(const float *times, int64_t times_stride, int64_t count, const T *x, int64_t stride, const float *share, float *out,
                    int64_t out_stride) {
    Part a = all<Part>(0), b = a, c = a, d = a, e = a, f = a, g = a, h = a;
    for (int64_t i = 0; i < count; ++i, ++times, x += stride) {
        const Part low = get<Part>(x), high = get<Part>(x + (Wide > 1 ? kPart : 0));
        a = a + low * times[0];
        if constexpr (Count > 1) c = c + low * times[times_stride];
        if constexpr (Count > 2) e = e + low * times[2 * times_stride], g = g + low * times[3 * times_stride];
        if constexpr (Wide > 1) b = b + high * times[0];
        if constexpr (Wide > 1 && Count > 1) d = d + high * times[times_stride];
        if constexpr (Wide > 1 && Count > 2) f = f + high * times[2 * times_stride], h = h + high * times[3 * times_stride];
    }
    const Part sums[4][2] = {{a, b}, {c, d}, {e, f}, {g, h}};
    for (int row = 0; row < Count; ++row)
        for (int part = 0; part < Wide; ++part) put(out + row * out_stride + part * kPart, sums[row][part] * share[row]);
}

// The same for `width` columns, whole sixteens.
template <int Count, class T>
inline void combine_all(const float *times, int64_t times_stride, int64_t count, const T *x, int64_t stride, int64_t width,
                        const float *share, float *out, int64_t out_stride) {
    int64_t j = 0;
    for (; j + 2 * kPart <= width; j += 2 * kPart) combine<Count, 2>(times, times_stride, count, x + j, stride, share, out + j, out_stride);
    for (; j < width; j += kPart) combine<Count, 1>(times, times_stride, count, x + j, stride, share, out + j, out_stride);
}

// Count queries in all heads.
template <int Count, class T>
void look_some(const float *q, int64_t q_stride, const Looked<T> &at, int64_t heads, int64_t size, float *out, int64_t out_stride) {
    const int64_t room = round_up(at.count, kLanes);
    auto *scores = static_cast<float *>(kernel_scratch(Count * room * 4));
    constexpr float ones[] = {1, 1, 1, 1};
    for (int64_t h = 0; h < heads; ++h) {
        combine_all<Count>(q + h * size, q_stride, size, at.keys + h * size * room, room, room, ones, scores, room);
        float shares[Count];
        for (int row = 0; row < Count; ++row) shares[row] = soften(scores + row * room, at.count);
        combine_all<Count>(scores, room, at.count, at.values + h * size, at.stride, size, shares, out + h * size, out_stride);
    }
}

// As `attend`, but that a dot product is summed from its first column to its last.
template <class T>
void look(const float *q, int64_t q_stride, int64_t n, const Looked<T> &at, int64_t heads, int64_t size, float *out, int64_t out_stride) {
    const auto some = [&](auto function, int64_t count) {
        function(q, q_stride, at, heads, size, out, out_stride);
        q += count * q_stride, out += count * out_stride, n -= count;
    };
    while (n >= 4) some(look_some<4, T>, 4);
    if (n >= 2) some(look_some<2, T>, 2);
    if (n >= 1) some(look_some<1, T>, 1);
}

// Logits of every row, [n, stride], those of `count` tokens from `first` on, padded with -infinity to whole 64: the likeliest stay, all
// count in the sum of exponentials, 64 at a time.
void rank(const float *logits, int64_t stride, int64_t first, int64_t count, const Ranking &ranking, int64_t n) {
    const int64_t last = ranking.count - 1;
    for (int64_t r = 0; r < n; ++r, logits += stride) {
        float *values = ranking.values + r * ranking.count, top = ranking.largest[r];
        int32_t *tokens = ranking.tokens + r * ranking.count;
        Lanes total = get<Lanes>(ranking.sums + r * kLanes);
        for (int64_t panel = 0; panel < count; panel += kColumns) {
            const float *at = logits + panel, most = largest(at, kColumns);
            if (most > top) {
                total = total * exponential(all<Lanes>(top - most));
                top = most;
            }
            const Lanes base = all<Lanes>(top);
            for (int64_t j = 0; j < kColumns; j += kLanes) total = total + exponential(get<Lanes>(at + j) - base);
            if (!(most > values[last])) continue;
            for (int64_t j = 0; j < kColumns && panel + j < count; ++j) {
                if (!(at[j] > values[last])) continue;  // of equals the first stays
                int64_t place = last;
                for (; place > 0 && at[j] > values[place - 1]; --place)
                    values[place] = values[place - 1], tokens[place] = tokens[place - 1];
                values[place] = at[j], tokens[place] = static_cast<int32_t>(first + panel + j);
            }
        }
        put(ranking.sums + r * kLanes, total);
        ranking.largest[r] = top;
    }
}

float rank_sum(const float *sums) { return sum(get<Lanes>(sums)); }

constexpr RowKernels kRowKernels = {quantize, norm, halve, attend, look<float>, look<Half>, rank, rank_sum};

}  // namespace
}  // namespace zoo
