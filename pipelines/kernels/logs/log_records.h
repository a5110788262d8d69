// Blocks of a log to records: fields are found, and given to the columns of the schema some rows at a time.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "recommenders/arrays.h"
#include "logs/log_bits.h"
#include "logs/log_columns.h"

namespace clicks::logs {

constexpr uint8_t FEED = '\n', RETURN = '\r', QUOTE = '"';

// Bit i: is the number of bits up to the i-th odd?
ALWAYS_INLINE uint64_t parity(uint64_t bits) {
    for (int shift = 1; shift < 64; shift *= 2)
        bits ^= bits << shift;
    return bits;
}

struct Counts {
    size_t feeds = 0, returns = 0, quotes = 0;
    bool high = false; // a byte beyond ASCII
};

// A bit for each byte from `offset` on that is in front of `end`, up to 64.
ALWAYS_INLINE uint64_t in_front(size_t offset, size_t end) { return end - offset < 64 ? (uint64_t{1} << (end - offset)) - 1 : ~uint64_t{0}; }

// All of these bytes.
template <class Bits> ALWAYS_INLINE Counts count(const uint8_t *data, size_t begin, size_t end, bool quotes) {
    Counts counts;
    uint64_t high = 0;
    for (size_t offset = begin; offset < end; offset += 64) {
        const uint64_t mask = in_front(offset, end);
        counts.feeds += __builtin_popcountll(Bits::equal(data + offset, FEED) & mask);
        counts.returns += __builtin_popcountll(Bits::equal(data + offset, RETURN) & mask);
        counts.quotes += quotes ? __builtin_popcountll(Bits::equal(data + offset, QUOTE) & mask) : 0;
        high |= Bits::high(data + offset) & mask;
    }
    counts.high = high;
    return counts;
}

// Positions of separators outside quotes, and what was met on the way.
struct Marks {
    Marks(size_t width, size_t rows)
        : ends(new uint32_t[(2 * TOGETHER + 1) * width + STEP + 64]), columns(new uint32_t[(width + 4) * rows]) {
        ends[0] = ~uint32_t{0};
    }
    std::unique_ptr<uint32_t[]> ends;    // the last row's line feed, then the ends of the fields
    std::unique_ptr<uint32_t[]> columns; // the same of some rows, a column after the other, the line feeds in front
    uint64_t inside = 0;                 // all ones where a quote is open
    size_t feeds = 0, quoted_feeds = 0, quoted_returns = 0;
};

template <class Bits>
ALWAYS_INLINE uint32_t *split(
    const uint8_t *data, size_t begin, size_t end, uint8_t delimiter, bool quotes, Marks &marks, uint32_t *to) {
    uint64_t inside = marks.inside;
    size_t feeds = 0;
    for (size_t offset = begin; offset < end; offset += 64) {
        const uint64_t mask = in_front(offset, end);
        const uint64_t ends = Bits::equal(data + offset, FEED) & mask;
        feeds += __builtin_popcountll(ends);
        uint64_t bits = (Bits::equal(data + offset, delimiter) & mask) | ends;
        if (quotes) {
            const uint64_t quote_bits = Bits::equal(data + offset, QUOTE) & mask;
            if (quote_bits | inside) {
                const uint64_t within = (parity(quote_bits) ^ inside) & mask;
                marks.quoted_feeds += __builtin_popcountll(ends & within);
                marks.quoted_returns += __builtin_popcountll(Bits::equal(data + offset, RETURN) & within);
                bits &= ~within;
                inside ^= 0 - uint64_t(__builtin_popcountll(quote_bits) & 1);
            }
        }
        to = Bits::places(bits, static_cast<uint32_t>(offset), to);
    }
    marks.feeds += feeds;
    marks.inside = inside;
    return to;
}

// Of rows that begin `width` apart the first `columns`, and up to three more, one after the other; four by four.
ALWAYS_INLINE void transpose(const uint32_t *from, size_t rows, size_t width, size_t columns, uint32_t *to) {
    for (size_t i = 0; i < rows; i += 4)
        for (size_t k = 0; k < columns; k += 4) {
            const uint32_t *const corner = from + i * width + k;
            uint32_t *const turned = to + k * rows + i;
#if defined(__SSE2__)
            const auto row = [&](size_t j) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(corner + j * width)); };
            const auto put = [&](size_t j, __m128i four) { _mm_storeu_si128(reinterpret_cast<__m128i *>(turned + j * rows), four); };
            const __m128i low01 = _mm_unpacklo_epi32(row(0), row(1)), high01 = _mm_unpackhi_epi32(row(0), row(1));
            const __m128i low23 = _mm_unpacklo_epi32(row(2), row(3)), high23 = _mm_unpackhi_epi32(row(2), row(3));
            put(0, _mm_unpacklo_epi64(low01, low23));
            put(1, _mm_unpackhi_epi64(low01, low23));
            put(2, _mm_unpacklo_epi64(high01, high23));
            put(3, _mm_unpackhi_epi64(high01, high23));
#else
            for (size_t j = 0; j < 16; ++j)
                turned[j / 4 * rows + j % 4] = corner[j % 4 * width + j / 4];
#endif
        }
}

// Takes the quotes off a field that has such; returns how many these were, -1 where they do not stand as they should.
ALWAYS_INLINE int64_t unquote(const uint8_t *&begin, uint32_t &length, std::vector<uint8_t> &to) {
    if (length < 2 || begin[length - 1] != QUOTE)
        return -1;
    const uint8_t *p = begin + 1;
    const uint8_t *const end = begin + length - 1;
    const auto *inner = static_cast<const uint8_t *>(std::memchr(p, QUOTE, end - p));
    if (!inner) {
        begin = p;
        length -= 2;
        return 2;
    }
    int64_t quotes = 2;
    const size_t start = to.size();
    while (inner) {
        if (inner + 1 == end || inner[1] != QUOTE)
            return -1;
        quotes += 2;
        to.insert(to.end(), p, inner + 1);
        p = inner + 2;
        inner = static_cast<const uint8_t *>(std::memchr(p, QUOTE, end - p));
    }
    to.insert(to.end(), p, end);
    begin = to.data() + start;
    length = static_cast<uint32_t>(to.size() - start);
    return quotes;
}

// Rows of a block as quickly as it goes; false where there is anything unusual, which may be wrong rows or none.
template <class Bits>
ALWAYS_INLINE bool parse_quickly(
    const uint8_t *data, size_t size, const Schema &schema, const Outputs &outputs, EncodeColumn encode_one, Fields &fields, Parsed &out) {
    const size_t width = schema.width;
    const bool lines = schema.lines;
    const bool uncounted = lines && size / width <= outputs.rows; // the arrays of the caller hold as many rows as there may be
    const Counts all = uncounted ? Counts{} : count<Bits>(data, 0, size, schema.quotes);
    const bool quotes = all.quotes, beyond_ascii = all.high && !lines;
    out = {};
    out.reserve(schema, uncounted ? size / width : std::min(all.feeds, size / width), outputs);
    Marks marks(width, fields.most);
    size_t waiting = 0, known_quotes = 0, returns = 0; // waiting: fields of the next row that were met before
    bool high = false, quoted = false;
    for (size_t offset = 0; offset < size; offset += STEP) {
        const size_t end = std::min(offset + STEP, size);
        const Counts here = beyond_ascii || quotes ? count<Bits>(data, offset, end, quotes) : Counts{};
        high |= here.high;
        quoted |= here.quotes != 0;
        uint32_t *const ends = marks.ends.get();
        const size_t end_count = split<Bits>(data, offset, end, schema.delimiter, quotes, marks, &ends[1 + waiting]) - &ends[1];
        const size_t met = end_count / width, rows = fields.rows = end == size ? met : met - met % TOGETHER;
        const size_t whole = (rows + TOGETHER - 1) / TOGETHER * TOGETHER;
        const auto place = [&](size_t column, size_t to) __attribute__((always_inline)) {
            const uint8_t **const begins = &fields.begins[to];
            uint32_t *const lengths = &fields.lengths[to];
            const uint32_t *const before = &marks.columns[column * whole], *const field_ends = before + whole;
            for (size_t i = 0; i < whole; i += TOGETHER)
                for (size_t k = i; k < i + TOGETHER; ++k) {
                    const uint32_t begin = before[k] + 1; // 0 of the first row
                    begins[k] = data + begin;
                    lengths[k] = field_ends[k] - begin;
                }
            if (column + 1 == width)
                for (size_t i = 0; i < rows; ++i) {
                    const bool crlf = lengths[i] && begins[i][lengths[i] - 1] == RETURN;
                    lengths[i] -= crlf;
                    returns += crlf;
                }
        };
        if (rows) {
            for (size_t i = 1; i <= rows; ++i)
                if (data[ends[i * width]] != FEED) // then all line feeds end a row, since there are as many
                    return false;
            if (width == 1 && !lines)
                for (size_t i = 0; i < rows; ++i)
                    if (ends[i] + 1 == ends[i + 1] || (ends[i] + 2 == ends[i + 1] && data[ends[i] + 1] == RETURN)) // an empty line
                        return false;
            transpose(ends, whole, width, width + 1, marks.columns.get());
            bool right;
            if (quoted) {
                fields.reserve(width);
                fields.unquoted.clear();
                fields.unquoted.reserve(ends[rows * width] - ends[0] + PAD);
                for (size_t column = 0; column < width; ++column) {
                    const size_t to = column * fields.most;
                    place(column, to);
                    for (size_t i = to; i < to + rows; ++i)
                        if (fields.lengths[i] && *fields.begins[i] == QUOTE) {
                            const int64_t taken = unquote(fields.begins[i], fields.lengths[i], fields.unquoted);
                            if (taken < 0)
                                return false;
                            known_quotes += taken;
                        }
                }
                right = encode(schema, fields, high, encode_one, out);
            } else {
                bool last = false;
                right = encode(schema, fields, high, encode_one, out, [&](size_t column) __attribute__((always_inline)) {
                    place(column, 0);
                    last |= column + 1 == width;
                    return size_t{0};
                });
                if (!last && all.returns) // carriage returns at the ends of rows
                    place(width - 1, 0);
            }
            if (!right)
                return false;
            high = here.high;
            quoted = here.quotes;
            out.consumed = ends[rows * width] + 1;
        }
        waiting = end_count - rows * width;
        std::copy(ends + rows * width, ends + end_count + 1, ends);
    }
    out.records = out.count;
    if (lines)
        return out.count && marks.feeds == out.count && out.consumed == size;
    Counts left;
    size_t quoted_returns = 0;
    bool inside = false;
    for (size_t offset = out.consumed; offset < size; ++offset) { // an unfinished row
        inside ^= quotes && data[offset] == QUOTE;
        left.quotes += quotes && data[offset] == QUOTE;
        quoted_returns += inside && data[offset] == RETURN;
        left.returns += !inside && data[offset] == RETURN;
    }
    return all.feeds - marks.quoted_feeds == out.count && all.quotes == known_quotes + left.quotes && !left.returns &&
           all.returns - marks.quoted_returns == returns;
}

// The same a byte at a time, as pyarrow does it: a return alone ends a row, empty lines are none, quotes begin only where a field does.
inline bool parse_slowly(
    const uint8_t *data, size_t size, const Schema &schema, const Outputs &outputs, EncodeColumn encode_one, Fields &fields, Parsed &out) {
    const size_t width = schema.width;
    const Counts all = count<Bits>(data, 0, size, false);
    out = {};
    out.reserve(schema, std::min(all.feeds + all.returns, size / width), outputs);
    const uint8_t *const end = data + size;
    const uint8_t *p = data;
    bool right = true;
    fields.reserve(width);
    fields.unquoted.clear();
    fields.unquoted.reserve(size + PAD);
    fields.rows = 0;
    while (p < end) {
        if (*p == FEED || *p == RETURN) {
            if (*p == RETURN && p + 1 == end)
                break; // a line feed may follow
            p += 1 + (*p == RETURN && p[1] == FEED);
            out.consumed = p - data;
            continue;
        }
        bool whole = false;
        size_t column = 0;
        while (!whole) { // a field
            const uint8_t *const begin = p;
            const size_t start = fields.unquoted.size();
            const bool quoted = schema.quotes && p < end && *p == QUOTE;
            bool several_lines = false;
            if (quoted)
                for (++p; p < end; fields.unquoted.push_back(*p++)) {
                    if (*p == QUOTE && (++p == end || *p != QUOTE)) // of two, the second one stays
                        break;
                    several_lines |= *p == FEED || *p == RETURN;
                }
            // a quote that was opened in another row and closed here by that of another value
            right &= !several_lines || p == end || *p == schema.delimiter || *p == FEED || *p == RETURN;
            for (; p < end && *p != schema.delimiter && *p != FEED && *p != RETURN; ++p)
                if (quoted)
                    fields.unquoted.push_back(*p);
            if (p == end || (*p == RETURN && p + 1 == end))
                break;
            if (column < width) {
                fields.begins[column * fields.most + fields.rows] = quoted ? fields.unquoted.data() + start : begin;
                fields.lengths[column * fields.most + fields.rows] =
                    static_cast<uint32_t>(quoted ? fields.unquoted.size() - start : p - begin);
            }
            ++column;
            whole = *p != schema.delimiter;
            p += 1 + (*p == RETURN && p[1] == FEED);
        }
        if (!whole)
            break;
        ++out.records;
        out.consumed = p - data;
        right = right && column == width;
        if (right && ++fields.rows == fields.most) {
            right = encode(schema, fields, all.high, encode_one, out);
            fields.rows = 0;
        }
    }
    return right && encode(schema, fields, all.high, encode_one, out);
}

} // namespace clicks::logs
