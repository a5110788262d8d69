// Tab separated rows of text: where their fields end, and numbers that are no whole ones of a few digits.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <system_error>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "recommenders/arrays.h"

namespace clicks::rows {

constexpr uint8_t TAB = '\t', FEED = '\n', RETURN = '\r';

// A bit for each of 64 bytes: is it one of these two?
inline uint64_t bits_of(const uint8_t *p, uint8_t one, uint8_t other) {
    uint64_t bits = 0;
#if defined(__SSE2__)
    for (int i = 0; i < 4; ++i) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p) + i);
        const __m128i first = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(static_cast<char>(one)));
        const __m128i found = _mm_or_si128(first, _mm_cmpeq_epi8(bytes, _mm_set1_epi8(static_cast<char>(other))));
        bits |= uint64_t{static_cast<uint16_t>(_mm_movemask_epi8(found))} << 16 * i;
    }
#else
    for (int i = 0; i < 64; ++i)
        bits |= uint64_t{p[i] == one || p[i] == other} << i;
#endif
    return bits;
}

// `use(position, bits)` for every 64 bytes; behind the end stand zeros.
template <class Use> ALWAYS_INLINE void scan(const uint8_t *data, size_t begin, size_t end, uint8_t one, uint8_t other, const Use &use) {
    for (; begin + 64 <= end; begin += 64)
        use(begin, bits_of(data + begin, one, other));
    uint8_t rest[64] = {};
    std::memcpy(rest, data + begin, end - begin);
    use(begin, bits_of(rest, one, other));
}

ALWAYS_INLINE size_t count_lines(const uint8_t *data, size_t size) {
    size_t count = 0;
    scan(data, 0, size, FEED, FEED, [&](size_t, uint64_t bits) { count += __builtin_popcountll(bits); });
    return count;
}

// Positions of all tabs and line feeds, ascending; returns their end. Eight are written at a time, more than there may be: the CPU meets
// few branches that surprise it.
ALWAYS_INLINE uint32_t *split(const uint8_t *data, size_t begin, size_t end, uint32_t *to) {
    scan(data, begin, end, TAB, FEED, [&](size_t at, uint64_t bits) {
        const int count = __builtin_popcountll(bits);
        for (int done = 0; done < count; done += 8)
            for (int i = 0; i < 8; ++i) {
                to[done + i] = static_cast<uint32_t>(at) + __builtin_ctzll(bits | uint64_t{1} << 63);
                bits &= bits - 1;
            }
        to += count;
    });
    return to;
}


// [+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})? as float32, by way of double; false for what is none, or what no float32 holds.
inline bool odd_number(const uint8_t *p, const uint8_t *end, float &value) {
    const auto *begin = reinterpret_cast<const char *>(p) + (*p == '+');
    const auto digits = [&] {
        const uint8_t *from = p;
        while (p < end && *p >= '0' && *p <= '9')
            ++p;
        return p - from;
    };
    p += *p == '+' || *p == '-';
    auto count = digits();
    if (p < end && *p == '.') {
        ++p;
        count += digits();
    }
    if (!count)
        return false;
    if (p < end && (*p == 'e' || *p == 'E')) {
        ++p;
        p += p < end && (*p == '+' || *p == '-');
        const auto exponent = digits();
        if (exponent < 1 || exponent > 4)
            return false;
    }
    double number;
    const auto [stop, error] = std::from_chars(begin, reinterpret_cast<const char *>(end), number);
    if (p != end || error != std::errc() || stop != reinterpret_cast<const char *>(end))
        return false;
    value = static_cast<float>(number);
    return std::abs(number) <= std::numeric_limits<float>::max();
}

} // namespace clicks::rows
