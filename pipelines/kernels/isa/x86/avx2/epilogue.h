// The epilogue of layers of bytes in vectors of 256 bits.
#pragma once
#include <cstring>

#include "isa/isa.h"
#include "isa/x86/avx2/memory.h"

namespace zoo {
namespace {

// The results of the first `count` of 8 columns of a row.
inline __m256 result_of(const Linear &l, const RowEpilogue &epilogue, __m256i sum, int64_t row, int64_t column, size_t count) {
    __m256 value = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, load(l.bias + column)));
    if (!epilogue.scale) return _mm256_mul_ps(value, _mm256_loadu_ps(l.scale + column));
    value = _mm256_mul_ps(value, _mm256_mul_ps(_mm256_set1_ps(epilogue.scale[row]), _mm256_loadu_ps(l.scale + column)));
    value = _mm256_add_ps(value, _mm256_loadu_ps(epilogue.bias + column));
    if (epilogue.relu) value = _mm256_max_ps(_mm256_setzero_ps(), value);  // in this order NaN stays
    if (epilogue.residual) {
        const float *residual = epilogue.residual + row * epilogue.residual_stride + column;
        float padded[8] = {};
        if (count < 8) residual = static_cast<const float *>(std::memcpy(padded, residual, 4 * count));
        value = _mm256_add_ps(value, _mm256_loadu_ps(residual));
    }
    return value;
}

// Stores 16 columns of a row of the result from their sums, or as many as there are.
inline void finish(const Linear &l, const RowEpilogue &epilogue, __m256i low, __m256i high, int64_t row, int64_t column, void *out, int64_t out_stride) {
    const int64_t left = l.outputs - column < 16 ? l.outputs - column : 16;
    const auto part = [&](int64_t begin) { return static_cast<size_t>(left - begin > 8 ? 8 : left - begin); };
    const __m256 first = result_of(l, epilogue, low, row, column, part(0));
    const __m256 second = left > 8 ? result_of(l, epilogue, high, row, column + 8, part(8)) : first;
    if (l.float_output) {
        float *to = static_cast<float *>(out) + row * out_stride + column;
        if (left == 16) return _mm256_storeu_ps(to, first), _mm256_storeu_ps(to + 8, second);
        float values[16];
        _mm256_storeu_ps(values, first), _mm256_storeu_ps(values + 8, second);
        std::memcpy(to, values, 4 * static_cast<size_t>(left));
        return;
    }
    const auto rounded = [&](__m256 value) {
        const __m256i q = _mm256_add_epi32(_mm256_cvtps_epi32(value), _mm256_set1_epi32(l.zero_point));
        return _mm256_min_epi32(_mm256_max_epi32(q, _mm256_set1_epi32(l.low)), _mm256_set1_epi32(255));
    };
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(rounded(first), rounded(second)), 0xD8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    uint8_t *to = static_cast<uint8_t *>(out) + row * out_stride + column;
    if (left == 16)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to), bytes);
    else
        std::memcpy(to, &bytes, static_cast<size_t>(left));
}

}  // namespace
}  // namespace zoo
