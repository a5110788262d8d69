// Texts of a log as values, as pyarrow and numpy read them: white space, missing ones, numbers, times.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "logs/farmhash.h"

namespace clicks::logs {

constexpr int64_t LOWEST = 16; // tables of numbers begin at its negative
constexpr double NOTHING = std::numeric_limits<double>::quiet_NaN(), NEVER = -std::numeric_limits<double>::infinity();

// The first `length` bytes, at most eight, as a little-endian word; eight are read.
ALWAYS_INLINE uint64_t short_word(const uint8_t *p, size_t length) {
    const uint64_t word = farmhash::fetch64(p);
    return length >= 8 ? word : word & ((uint64_t{1} << 8 * length) - 1);
}

inline bool is_utf8(const uint8_t *p, size_t length) {
    const uint8_t *const end = p + length;
    while (p < end) {
        if (end - p >= 8 && !(farmhash::fetch64(p) & 0x8080808080808080u)) {
            p += 8;
            continue;
        }
        const uint8_t lead = *p++;
        if (lead < 0x80)
            continue;
        const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
        if (lead < 0xc2 || lead > 0xf4 || end - p < more)
            return false;
        const uint8_t least = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80, most = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
        if (*p < least || *p > most)
            return false;
        for (int i = 1; i < more; ++i)
            if ((p[i] & 0xc0) != 0x80)
                return false;
        p += more;
    }
    return true;
}

struct Text {
    const uint8_t *begin, *end;
};

// Bytes of the white space (of Unicode, as pyarrow's utf8_trim_whitespace has it) that a text of valid UTF-8 begins with; 0 for none.
inline int space_at(const uint8_t *p, const uint8_t *end) {
    if (*p < 0x80)
        return (*p >= 9 && *p <= 13) || (*p >= 0x1c && *p <= 0x20);
    if (end - p >= 2 && p[0] == 0xc2)
        return p[1] == 0x85 || p[1] == 0xa0 ? 2 : 0;
    if (end - p < 3)
        return 0;
    const uint32_t code = p[0] << 16 | p[1] << 8 | p[2];
    return code == 0xe19a80 || (code >= 0xe28080 && code <= 0xe2808a) || code == 0xe280a8 || code == 0xe280a9 || code == 0xe280af ||
                   code == 0xe2819f || code == 0xe38080
               ? 3
               : 0;
}

ALWAYS_INLINE bool may_be_space(uint8_t byte) { return byte <= 0x20 || byte >= 0x80; }

inline Text trimmed_slowly(Text text) {
    while (text.begin < text.end) {
        const int size = space_at(text.begin, text.end);
        if (!size)
            break;
        text.begin += size;
    }
    while (text.begin < text.end) {
        const uint8_t *last = text.end - 1;
        while (last > text.begin && (*last & 0xc0) == 0x80)
            --last;
        if (space_at(last, text.end) != text.end - last)
            break;
        text.end = last;
    }
    return text;
}

ALWAYS_INLINE Text trimmed(Text text) {
    return text.begin < text.end && (may_be_space(*text.begin) || may_be_space(text.end[-1])) ? trimmed_slowly(text) : text;
}

// Words that stand for a missing value, of at most eight bytes; and what first byte and length of a text say of it.
class Missing {
  public:
    // It may be such a word; or it may have another canonical form: a number or list, a boolean, <NA>, NaT.
    enum Form : uint8_t { word = 1, number = 2, truth = 4, na = 8, nat = 16, other_form = number | truth | na | nat };
    explicit Missing(const std::vector<std::string> &words) {
        for (const std::string &value : words) {
            if (value.size() > 8)
                throw std::invalid_argument("found a word for missing values of more than 8 bytes");
            uint8_t bytes[8] = {};
            std::memcpy(bytes, value.data(), value.size());
            words_.emplace_back(farmhash::fetch64(bytes), value.size());
            longest_ = std::max(longest_, value.size());
            first_[bytes[0]] |= word;
            sizes_[value.size()] |= word;
        }
        const auto begins = [&](const std::string &bytes, Form form) {
            for (const char byte : bytes)
                first_[static_cast<uint8_t>(byte)] |= form;
        };
        begins("0123456789-[(", number);
        begins("tTfF", truth);
        begins("<", na);
        begins("N", nat);
        for (uint8_t &forms : sizes_)
            forms |= number;
        sizes_[3] |= nat;
        sizes_[4] |= truth | na;
        sizes_[5] |= truth;
    }
    ALWAYS_INLINE bool operator()(const uint8_t *p, size_t length) const {
        return !length || (length <= longest_ && first_[*p] & word && among(p, length));
    }
    ALWAYS_INLINE uint8_t forms(const uint8_t *p, size_t length) const { return first_[*p] & sizes_[length < 15 ? length : 15]; }

  private:
    bool among(const uint8_t *p, size_t length) const {
        for (const auto &[word, size] : words_)
            if (size == length && word == short_word(p, length))
                return true;
        return false;
    }
    std::vector<std::pair<uint64_t, size_t>> words_;
    size_t longest_ = 0;
    uint8_t first_[256] = {}, sizes_[16] = {};
};

// Whether a text is a boolean: 1 for true, 0 for false, -1 for none.
ALWAYS_INLINE int boolean(const uint8_t *p, size_t length) {
    if (length != 4 && length != 5)
        return -1;
    const char *const text = reinterpret_cast<const char *>(p);
    const auto is = [&](const char *word) { return !std::memcmp(text, word, length); };
    if (length == 4)
        return is("True") || is("true") || is("TRUE") ? 1 : -1;
    return is("False") || is("false") || is("FALSE") ? 0 : -1;
}

// A list in the notation of Python, JSON or numpy, perhaps.
ALWAYS_INLINE bool may_be_list(const uint8_t *p, size_t length) {
    return length && ((*p == '[' && p[length - 1] == ']') || (*p == '(' && p[length - 1] == ')'));
}

// Writes a text in the canonical form of zoo/recommenders/data/cell_values.py: 51.0 as 51, True as 1, and <NA> and NaT empty. False where
// only that code can: long numbers, numbers with an exponent, and lists in the notation of Python.
inline bool canonical(Text &text) {
    if (text.begin == text.end)
        return true;
    static const uint8_t digits[2][16] = {{'0'}, {'1'}}; // of every text, eight bytes may be read
    const size_t length = text.end - text.begin;
    if (const int truth = boolean(text.begin, length); truth >= 0) {
        text = {digits[truth], digits[truth] + 1};
        return true;
    }
    if (may_be_list(text.begin, length))
        return false;
    if ((length == 4 && !std::memcmp(text.begin, "<NA>", 4)) || (length == 3 && !std::memcmp(text.begin, "NaT", 3))) {
        text.end = text.begin;
        return true;
    }
    const auto skip = [&](const uint8_t *p) {
        while (p < text.end && *p >= '0' && *p <= '9')
            ++p;
        return p;
    };
    const uint8_t *const from = text.begin + (*text.begin == '-'), *const point = skip(from);
    const size_t whole = point - from;
    if (!whole || point == text.end)
        return true;
    const uint8_t *p = point;
    if (*p == '.') {
        while (++p < text.end && *p == '0') {
        }
        if (p == text.end) { // a whole number
            if (std::all_of(from, point, [](uint8_t digit) { return digit == '0'; }))
                text = {digits[0], digits[0] + 1};
            else if (whole > 18)
                return false;
            else
                text.end = point;
            return true;
        }
        if (whole == 1 && *from == '0' && p - point > 4)
            return false;
        const uint8_t *const fraction = point + 1;
        p = skip(fraction);
        if (p == fraction)
            return true;
    }
    if (whole != 1 || *from == '0' || p == text.end || (*p != 'e' && *p != 'E'))
        return true;
    p += 1 + (p + 1 < text.end && (p[1] == '+' || p[1] == '-'));
    const uint8_t *const exponent = p;
    p = skip(p);
    return p != text.end || p == exponent || p - exponent > 3;
}

// Nonzero where a byte of a word is a given one.
ALWAYS_INLINE uint64_t holds(uint64_t word, uint8_t byte) {
    const uint64_t others = word ^ 0x0101010101010101u * byte;
    return (others - 0x0101010101010101u) & ~others & 0x8080808080808080u;
}

// 1 where a text may have another canonical form; word: its first eight bytes. A number of eight bytes or more with an exponent has a
// point too.
ALWAYS_INLINE uint64_t may_change(uint64_t word, uint64_t length) {
    const auto less = [](uint64_t a, uint64_t b) __attribute__((always_inline)) { return (a - b) >> 63; };
    const uint64_t first = word & 0xff, letter = first | 0x20, minus = less(first ^ '-', 1), before = (64 - 8 * length) & 63;
    word = word << before >> before; // shorter texts without the bytes behind them
    const uint64_t exponent = (less((word >> 8 & 0xdf) ^ 'E', 1) | (minus & less((word >> 16 & 0xdf) ^ 'E', 1))) & less(length, 8);
    const uint64_t number = (minus | less(first ^ '0', 10)) & (less(8, length) | exponent | less(0, holds(word, '.') >> 7));
    const uint64_t truth = (less(letter ^ 't', 1) | less(letter ^ 'f', 1)) & less(length ^ 4, 2);
    const uint64_t missing = less(first ^ '<', 1) | (less(first ^ 'N', 1) & less(length ^ 3, 1));
    return (number | truth | missing | less(first ^ '[', 1) | less(first ^ '(', 1)) & less(0, length);
}

// The same of texts of eight bytes, 0 for others.
ALWAYS_INLINE uint64_t eight_may_change(uint64_t word, uint64_t length) {
    const uint64_t first = word & 0xff, list = ((first ^ '[') - 1) | ((first ^ '(') - 1);
    return (holds(word, '.') | list >> 63) & (0 - (((length ^ 8) - 1) >> 63));
}

// [+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)? with white space around it, correctly rounded; NaN for what is none and beyond float64.
inline double number(Text text) {
    static constexpr double powers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                        1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    text = trimmed(text);
    const uint8_t *p = text.begin;
    const uint8_t *const end = text.end;
    if (p == end)
        return NOTHING;
    const bool minus = *p == '-';
    const uint8_t *const from = p + (*p == '+');
    p += minus || *p == '+';
    uint64_t whole = 0;
    int64_t digits = 0, counted = 0, exponent = 0; // counted: from the first that is not 0
    const auto take = [&] {
        const uint8_t *const first = p;
        for (; p < end && *p >= '0' && *p <= '9'; ++p) {
            counted += counted || *p != '0';
            if (counted <= 18)
                whole = whole * 10 + (*p - '0');
        }
        digits += p - first;
        return p - first;
    };
    take();
    if (p < end && *p == '.') {
        ++p;
        exponent = -take();
    }
    if (!digits)
        return NOTHING;
    if (p < end && (*p == 'e' || *p == 'E')) {
        ++p;
        const bool down = p < end && *p == '-';
        p += p < end && (*p == '+' || *p == '-');
        const uint8_t *const first = p;
        int64_t more = 0;
        for (; p < end && *p >= '0' && *p <= '9'; ++p)
            more = std::min<int64_t>(more * 10 + (*p - '0'), 1'000'000'000);
        if (p == first)
            return NOTHING;
        exponent += down ? -more : more;
    }
    if (p != end)
        return NOTHING;
    if (counted <= 18 && whole <= uint64_t{1} << 53 && exponent >= -22 && exponent <= 22) { // both are exact (W. Clinger, 1990)
        const auto exact = static_cast<double>(whole);
        const double value = exponent < 0 ? exact / powers[-exponent] : exact * powers[exponent];
        return minus ? -value : value;
    }
    double value = 0;
    const auto [stop, error] = std::from_chars(reinterpret_cast<const char *>(from), reinterpret_cast<const char *>(end), value);
    if (error == std::errc::result_out_of_range) // then far above 1, or far below
        return !counted || counted + exponent < 0 ? (minus ? -0.0 : 0.0) : NOTHING;
    return error == std::errc() && stop == reinterpret_cast<const char *>(end) && std::isfinite(value) ? value : NOTHING;
}

// [+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})? as float32, by way of double; false for other text, and for what float32 does not hold.
inline bool exact_number(const uint8_t *p, const uint8_t *end, float &value) {
    if (p == end)
        return false;
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

// Places in a table of `table_size` entries: 0 for no text, 1 + LOWEST + x for the whole number x of up to eight characters; and which are
// others, whose places are 0. The digits of a word are added up in three multiplications (D. Lemire, "Quickly parsing eight digits",
// 2018).
ALWAYS_INLINE uint64_t places_of_numbers(
    size_t count, const uint64_t *__restrict words, const uint32_t *__restrict lengths, uint64_t table_size, int32_t *__restrict places,
    uint8_t *__restrict others) {
    constexpr uint64_t zeros = 0x3030303030303030u, mask = 0x000000ff000000ffu;
    uint64_t any = 0;
    for (size_t i = 0; i < count; ++i) {
        const uint64_t all = lengths[i], minus = uint64_t{(words[i] & 0xff) == '-'}, length = all - minus, before = (64 - 8 * length) & 63;
        uint64_t word = ((words[i] >> 8 * minus) ^ zeros) << before;
        const uint64_t stray = ((word + 0x7676767676767676u) | word) & 0x8080808080808080u; // a byte over 9
        word = word * 10 + (word >> 8);
        const uint64_t whole = ((word & mask) * 0x000f424000000064u + (word >> 16 & mask) * 0x0000271000000001u) >> 32;
        const uint64_t place = (minus ? 0 - whole : whole) + (LOWEST + 1);
        uint64_t other = uint64_t{stray != 0} | uint64_t{all > 8} | uint64_t{length - 1 > 7} | (minus & uint64_t{whole == 0});
        other |= uint64_t{place - 1 >= table_size - 1}; // what is far below 0 wraps around
        other &= uint64_t{all != 0};
        others[i] = static_cast<uint8_t>(other);
        any |= other;
        places[i] = static_cast<int32_t>(place & (0 - uint64_t{all != 0}) & (other - 1));
    }
    return any;
}

// Seconds since 1970 of YYYY-MM-DD[(T| )HH:MM[:SS[.f]][[ ](Z|UTC|GMT|(+|-)HH[[:]MM])]], f of up to nine digits, of which six count; -infinity for what is no such time.
inline double instant(Text text) {
    const uint8_t *p = text.begin;
    const uint8_t *const end = text.end;
    bool formed = true;
    const auto digits = [&](int count) {
        int64_t value = 0;
        for (int i = 0; i < count; ++i, ++p) {
            if (p >= end || *p < '0' || *p > '9') {
                formed = false;
                return int64_t{0};
            }
            value = value * 10 + (*p - '0');
        }
        return value;
    };
    const auto is = [&](uint8_t byte) { return p < end && *p == byte; };
    const auto expect = [&](uint8_t byte) {
        formed = formed && is(byte);
        ++p;
    };
    int64_t hour = 0, minute = 0, second = 0, micro = 0, zone_hour = 0, zone_minute = 0;
    int sign = 1;
    const int64_t year = digits(4);
    expect('-');
    const int64_t month = digits(2);
    expect('-');
    const int64_t day = digits(2);
    if (formed && p < end) {
        formed = is('T') || is(' ');
        ++p;
        hour = digits(2);
        expect(':');
        minute = digits(2);
        if (formed && is(':')) {
            ++p;
            second = digits(2);
            if (formed && is('.')) {
                ++p;
                int count = 0;
                for (; count < 9 && p < end && *p >= '0' && *p <= '9'; ++count, ++p)
                    micro = count < 6 ? micro * 10 + (*p - '0') : micro;
                formed = count > 0;
                for (; count < 6; ++count)
                    micro *= 10;
            }
        }
        if (formed && is(' ') && end - p > 1)
            ++p;
        if (formed && is('Z'))
            ++p;
        else if (formed && end - p == 3 && (!std::memcmp(p, "UTC", 3) || !std::memcmp(p, "GMT", 3)))
            p = end;
        else if (formed && (is('+') || is('-'))) {
            sign = is('-') ? -1 : 1;
            ++p;
            zone_hour = digits(2);
            if (p != end) {
                p += is(':');
                zone_minute = digits(2);
            }
        }
    }
    if (!formed || p != end)
        return NEVER;
    const bool leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    const int64_t days_of_month = month == 2 ? 28 + leap : 30 + ((month + (month > 7)) & 1);
    if (month < 1 || month > 12 || day < 1 || day > days_of_month || hour > 23 || minute > 59 || second > 59 || zone_hour > 23 ||
        zone_minute > 59)
        return NEVER;
    // Days from the civil calendar (H. Hinnant, "chrono-compatible low-level date algorithms"), of years that begin in March.
    const int64_t y = year - (month <= 2), era = (y >= 0 ? y : y - 399) / 400, of_era = y - era * 400;
    const int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
    const int64_t days = era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
    const int64_t minutes = (days * 24 + hour) * 60 + minute - sign * (zone_hour * 60 + zone_minute);
    return static_cast<double>((minutes * 60 + second) * 1'000'000 + micro) / 1e6;
}

} // namespace clicks::logs
