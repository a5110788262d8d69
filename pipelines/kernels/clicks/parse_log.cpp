// Blocks of a click log of any schema (CSV with any delimiter, quotes by RFC 4180) to a model's inputs, in one pass.
//
// Results equal those of pyarrow and numpy in zoo/clicks/features.py bit for bit, or the block is declined and left to that code. A block
// is first split into fields: quickly, by counting quotes (inside is where their number is odd) and checking afterwards that every quote
// stood where this holds; where one did not, a second time a byte at a time, as pyarrow's parser does it. Then come the columns that the
// schema uses, some rows of a column at a time. The interpreter's lock is released meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "clicks/arrays.h"
#include "clicks/farmhash.h"

namespace nb = nanobind;
using clicks::Modulo;
using clicks::owned;

namespace {

constexpr uint8_t FEED = '\n', RETURN = '\r', QUOTE = '"';
constexpr size_t PAD = 64;    // bytes behind the data that may be read
constexpr size_t STEP = 16384; // bytes at a time: what is known of them stays in the nearest caches
constexpr size_t TOGETHER = 16; // rows that loops of vectors take: none is left to be done one by one
constexpr int64_t LOWEST = 16; // tables of numbers begin at its negative
constexpr double NOTHING = std::numeric_limits<double>::quiet_NaN(), NEVER = -std::numeric_limits<double>::infinity();

// The first `length` bytes, at most eight, as a little-endian word; eight are read.
ALWAYS_INLINE uint64_t short_word(const uint8_t *p, size_t length) {
    const uint64_t word = farmhash::fetch64(p);
    return length >= 8 ? word : word & ((uint64_t{1} << 8 * length) - 1);
}

// A bit for each of 64 bytes: is it this one?
struct Bits {
    static ALWAYS_INLINE uint64_t equal(const uint8_t *p, uint8_t byte) {
        return of(p, [byte](const uint8_t *q) {
#if defined(__SSE2__)
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(q));
            return _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(static_cast<char>(byte))));
#else
            int bits = 0;
            for (int i = 0; i < 16; ++i)
                bits |= (q[i] == byte) << i;
            return bits;
#endif
        });
    }
    // Is it beyond ASCII?
    static ALWAYS_INLINE uint64_t high(const uint8_t *p) {
        return of(p, [](const uint8_t *q) {
#if defined(__SSE2__)
            return _mm_movemask_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(q)));
#else
            int bits = 0;
            for (int i = 0; i < 16; ++i)
                bits |= (q[i] >> 7) << i;
            return bits;
#endif
        });
    }
    // Writes `at` + the places of the bits, and more; returns their end.
    static ALWAYS_INLINE uint32_t *places(uint64_t bits, uint32_t at, uint32_t *to) {
        const int count = __builtin_popcountll(bits);
        for (int done = 0; done < count; done += 8) // eight at a time, more than there may be: few branches surprise the CPU
            for (int i = 0; i < 8; ++i) {
                to[done + i] = at + __builtin_ctzll(bits | uint64_t{1} << 63);
                bits &= bits - 1;
            }
        return to + count;
    }

  private:
    template <class Sixteen> static ALWAYS_INLINE uint64_t of(const uint8_t *p, const Sixteen &sixteen) {
        uint64_t bits = 0;
        for (int i = 0; i < 4; ++i)
            bits |= uint64_t{static_cast<uint16_t>(sixteen(p + 16 * i))} << 16 * i;
        return bits;
    }
};

#if defined(__x86_64__)
// The same in registers of 64 bytes.
struct Bits512 {
    AVX512 static inline uint64_t equal(const uint8_t *p, uint8_t byte) {
        return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(byte)));
    }
    AVX512 static inline uint64_t high(const uint8_t *p) { return _mm512_movepi8_mask(_mm512_loadu_si512(p)); }
    AVX512 static inline uint32_t *places(uint64_t bits, uint32_t at, uint32_t *to) {
        const __m512i first = _mm512_add_epi32(
            _mm512_set1_epi32(static_cast<int>(at)), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        for (int i = 0; i < 4; ++i) {
            const auto some = static_cast<__mmask16>(bits >> 16 * i);
            _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(some, _mm512_add_epi32(first, _mm512_set1_epi32(16 * i))));
            to += __builtin_popcount(some);
        }
        return to;
    }
};
#endif

// ---------------------------------------------------------------------------------------------------------------------- texts

bool is_utf8(const uint8_t *p, size_t length) {
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
int space_at(const uint8_t *p, const uint8_t *end) {
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

Text trimmed_slowly(Text text) {
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

// Words that stand for a missing value, of at most eight bytes.
class Missing {
  public:
    explicit Missing(const std::vector<std::string> &words) {
        for (const std::string &each : words) {
            if (each.size() > 8)
                throw std::invalid_argument("found a word for missing values of more than 8 bytes");
            uint8_t bytes[8] = {};
            std::memcpy(bytes, each.data(), each.size());
            words_.emplace_back(farmhash::fetch64(bytes), each.size());
            longest_ = std::max(longest_, each.size());
            first_[bytes[0]] = true;
        }
    }
    ALWAYS_INLINE bool operator()(const uint8_t *p, size_t length) const {
        return !length || (length <= longest_ && first_[*p] && among(p, length));
    }

  private:
    bool among(const uint8_t *p, size_t length) const {
        for (const auto &[word, size] : words_)
            if (size == length && word == short_word(p, length))
                return true;
        return false;
    }
    std::vector<std::pair<uint64_t, size_t>> words_;
    size_t longest_ = 0;
    bool first_[256] = {};
};

// -------------------------------------------------------------------------------------------------------------------- numbers

// [+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)? with white space around it, correctly rounded; NaN for what is none and beyond float64.
double number(Text text) {
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

// Places in a table of `known` entries: 0 for no text, 1 + LOWEST + x for the whole number x of up to eight characters; and which are
// others, whose places are 0. The digits of a word are added up in three multiplications (D. Lemire, "Quickly parsing eight digits",
// 2018).
ALWAYS_INLINE uint64_t places_of_numbers(
    size_t count, const uint64_t *__restrict words, const uint32_t *__restrict lengths, uint64_t known, int32_t *__restrict places,
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
        other |= uint64_t{place - 1 >= known - 1}; // what is far below 0 wraps around
        other &= uint64_t{all != 0};
        others[i] = static_cast<uint8_t>(other);
        any |= other;
        places[i] = static_cast<int32_t>(place & (0 - uint64_t{all != 0}) & (other - 1));
    }
    return any;
}

// Seconds since 1970 of YYYY-MM-DD[(T| )HH:MM[:SS[.f]][Z|(+|-)HH[:]MM]], f of up to six digits; -infinity for what is no such time.
double instant(Text text) {
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
    const auto wanted = [&](uint8_t byte) {
        formed = formed && is(byte);
        ++p;
    };
    int64_t hour = 0, minute = 0, second = 0, micro = 0, zone_hour = 0, zone_minute = 0;
    int sign = 1;
    const int64_t year = digits(4);
    wanted('-');
    const int64_t month = digits(2);
    wanted('-');
    const int64_t day = digits(2);
    if (formed && p < end) {
        formed = is('T') || is(' ');
        ++p;
        hour = digits(2);
        wanted(':');
        minute = digits(2);
        if (formed && is(':')) {
            ++p;
            second = digits(2);
            if (formed && is('.')) {
                ++p;
                int count = 0;
                for (; count < 6 && p < end && *p >= '0' && *p <= '9'; ++count)
                    micro = micro * 10 + (*p++ - '0');
                formed = count > 0;
                for (; count < 6; ++count)
                    micro *= 10;
            }
        }
        if (formed && is('Z'))
            ++p;
        else if (formed && (is('+') || is('-'))) {
            sign = is('-') ? -1 : 1;
            ++p;
            zone_hour = digits(2);
            p += is(':');
            zone_minute = digits(2);
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

// ------------------------------------------------------------------------------------------------------------------------ ids

// Texts to ids: 1 + hash modulo buckets, or the place in a vocabulary from 1 on, 0 for none of it.
class Ids {
  public:
    explicit Ids(int64_t buckets) : modulo_(buckets), last(modulo_.divisor() + 1), hashed(true) {}
    explicit Ids(const std::vector<std::string> &values) : modulo_(1), last(static_cast<int32_t>(values.size()) + 1), hashed(false) {
        size_t size = 16;
        while (size < values.size() * 2)
            size *= 2;
        entries_.resize(size);
        for (size_t i = 0; i < values.size(); ++i) {
            const size_t start = bytes_.size();
            bytes_.insert(bytes_.end(), values[i].begin(), values[i].end());
            bytes_.resize(bytes_.size() + 8); // of every text, eight bytes may be read
            Entry &entry = find(bytes_.data() + start, values[i].size());
            if (!entry.id)
                entry = {key(bytes_.data() + start, values[i].size()), static_cast<uint32_t>(start), static_cast<uint32_t>(values[i].size()),
                         static_cast<int32_t>(i) + 1};
        }
    }
    ALWAYS_INLINE int32_t operator()(const uint8_t *p, size_t length) const {
        if (hashed)
            return modulo_(length == 8 ? farmhash::hash8(farmhash::fetch64(p)) : farmhash::fingerprint64(p, length)) + 1;
        return const_cast<Ids *>(this)->find(p, length).id;
    }
    const Modulo &modulo() const { return modulo_; }

  private:
    struct Entry {
        uint64_t key = 0;
        uint32_t start = 0, length = 0;
        int32_t id = 0; // 0 is an empty place
    };
    static ALWAYS_INLINE uint64_t key(const uint8_t *p, size_t length) {
        return length <= 8 ? short_word(p, length) : farmhash::fingerprint64(p, length);
    }
    ALWAYS_INLINE Entry &find(const uint8_t *p, size_t length) {
        const uint64_t wanted = key(p, length), mixed = (wanted ^ wanted >> 32) * farmhash::K2;
        for (size_t at = mixed >> 32;; ++at) {
            Entry &entry = entries_[at & (entries_.size() - 1)];
            if (!entry.id ||
                (entry.key == wanted && entry.length == length && (length <= 8 || !std::memcmp(&bytes_[entry.start], p, length))))
                return entry;
        }
    }
    Modulo modulo_;
    std::vector<Entry> entries_;
    std::vector<uint8_t> bytes_;

  public:
    int32_t last;
    bool hashed;
};

// -------------------------------------------------------------------------------------------------------------------- columns

enum class Kind { category, list, number, label, weight, seconds, milliseconds, instant };
enum Scaling { other, standard, min_max }; // of a number that is not in its table

struct Column {
    Kind kind;
    size_t place; // in the log
    size_t at = 0;
    std::shared_ptr<Ids> ids{};
    size_t width = 1; // of a list, from here on
    uint8_t separator = 0;
    bool repeated = false;
    int64_t scale = -1;
    int64_t gap = -1; // of a number, from here on
    Scaling scaling = other;
    double minus = 0, divisor = 1;
    std::vector<float> table{};
};

struct Schema {
    size_t width; // columns of the log
    uint8_t delimiter;
    bool quotes;
    Missing missing;
    size_t ids, numbers, scales;
    std::vector<Column> columns{};
    bool labels = false, weights = false, times = false;
};

struct Left {
    std::vector<int64_t> places, columns;
    std::vector<double> values;
};

struct Parsed {
    size_t count = 0;    // rows
    size_t records = 0;  // met before the end, right or wrong
    size_t consumed = 0; // bytes of them
    std::unique_ptr<int32_t[]> ids;
    std::unique_ptr<float[]> numbers, scales, labels, weights;
    std::unique_ptr<double[]> times;
    Left left; // numbers that are to be scaled

    void reserve(const Schema &schema, size_t rows) {
        ids.reset(new int32_t[rows * schema.ids]);
        numbers.reset(new float[rows * schema.numbers]);
        scales.reset(new float[rows * schema.scales]);
        labels.reset(schema.labels ? new float[rows] : nullptr);
        weights.reset(schema.weights ? new float[rows] : nullptr);
        times.reset(schema.times ? new double[rows] : nullptr);
    }
};

// Some rows of the log: the fields of one column, or of one column after the other.
struct Fields {
    explicit Fields(size_t width)
        : most((STEP / width + 3 * TOGETHER) / TOGETHER * TOGETHER), words(new uint64_t[most]()), values(new int32_t[most]),
          others(new uint8_t[most]) {
        room(1);
    }
    // Makes room for so many columns.
    void room(size_t columns) {
        if (columns > columns_) {
            begins.reset(new const uint8_t *[most * columns]);
            lengths.reset(new uint32_t[most * columns]);
            columns_ = columns;
        }
    }
    size_t most, rows = 0; // of a column, whole vectors of them
    std::unique_ptr<const uint8_t *[]> begins;
    std::unique_ptr<uint32_t[]> lengths;
    std::unique_ptr<uint64_t[]> words; // of one column, on their way into vectors
    std::unique_ptr<int32_t[]> values;
    std::unique_ptr<uint8_t[]> others;
    std::vector<uint8_t> unquoted; // texts without their quotes

  private:
    size_t columns_ = 0;
};

ALWAYS_INLINE void categories(
    const Column &column, const Missing &missing, const uint8_t *const *begins, const uint32_t *lengths, Fields &fields, size_t stride,
    int32_t *to) {
    const Ids &ids = *column.ids;
    const size_t rows = fields.rows;
    size_t eights = 0, empty = 0;
    for (size_t i = 0; i < rows; ++i) {
        eights += lengths[i] == 8;
        empty += lengths[i] == 0;
    }
    const bool many = ids.hashed && eights * 4 >= rows;
    if (many) { // a 32-bit number in hexadecimal, say
        uint64_t *const words = fields.words.get();
        int32_t *const values = fields.values.get();
        const Modulo modulo = ids.modulo();
        const int32_t last = ids.last;
        for (size_t i = 0; i < rows; ++i)
            words[i] = farmhash::fetch64(begins[i]);
        for (size_t i = 0; i < rows; i += TOGETHER)
            for (size_t k = i; k < i + TOGETHER; ++k) {
                const int32_t id = modulo(farmhash::hash8(words[k])) + 1;
                values[k] = lengths[k] ? id : last;
            }
        for (size_t i = 0; i < rows; ++i)
            to[i * stride] = values[i];
        if (eights + empty == rows)
            return;
    }
    for (size_t i = 0; i < rows; ++i)
        if (!many || (lengths[i] && lengths[i] != 8))
            to[i * stride] = missing(begins[i], lengths[i]) ? ids.last : ids(begins[i], lengths[i]);
}

ALWAYS_INLINE void lists(
    const Column &column, const Missing &missing, const uint8_t *const *begins, const uint32_t *lengths, size_t rows, const Schema &schema,
    int32_t *to, float *scales) {
    std::vector<Text> ring(column.width); // the last items
    for (size_t i = 0; i < rows; ++i, to += schema.ids) {
        size_t count = 0, next = 0;
        if (!missing(begins[i], lengths[i])) {
            const uint8_t *const end = begins[i] + lengths[i];
            const bool within = lengths[i] < 64;
            const uint64_t last = within ? uint64_t{1} << lengths[i] : 1;
            uint64_t marks = (Bits::equal(begins[i], column.separator) & (last - 1)) | last;
            for (const uint8_t *p = begins[i], *stop; p <= end; p = stop + 1) {
                if (within) {
                    stop = begins[i] + __builtin_ctzll(marks);
                    marks &= marks - 1;
                } else
                    stop = std::find(p, end, column.separator);
                const Text item = trimmed({p, stop});
                if (item.begin < item.end) {
                    ring[next] = item;
                    next = next + 1 == column.width ? 0 : next + 1;
                    ++count;
                }
            }
        }
        const size_t kept = std::min(count, column.width);
        size_t from = count > column.width ? next : 0;
        for (size_t k = 0; k < kept; ++k) {
            to[k] = (*column.ids)(ring[from].begin, ring[from].end - ring[from].begin);
            from = from + 1 == column.width ? 0 : from + 1;
        }
        const int32_t rest = column.repeated && kept ? to[0] : column.ids->last;
        for (size_t k = kept; k < column.width; ++k)
            to[k] = rest;
        if (column.scale >= 0)
            scales[i * schema.scales + column.scale] = kept ? 1.0f / static_cast<float>(kept) : 0.0f;
    }
}

ALWAYS_INLINE void numbers(
    const Column &column, const uint8_t *const *begins, const uint32_t *lengths, Fields &fields, size_t stride, float *to, size_t row,
    Left &left) {
    const size_t rows = fields.rows;
    for (size_t i = 0; i < rows; ++i)
        fields.words[i] = farmhash::fetch64(begins[i]);
    const float *const table = column.table.data();
    int32_t *const places = fields.values.get();
    const uint64_t any = places_of_numbers(rows, fields.words.get(), lengths, column.table.size(), places, fields.others.get());
    float *const values = to + column.at, *const gaps = column.gap < 0 ? nullptr : to + column.gap;
    for (size_t i = 0; i < rows; ++i)
        values[i * stride] = table[places[i]];
    if (gaps)
        for (size_t i = 0; i < rows; ++i)
            gaps[i * stride] = lengths[i] ? 0 : 1;
    if (!any)
        return;
    for (size_t i = 0; i < rows; ++i) {
        if (!fields.others[i])
            continue;
        const double x = number({begins[i], begins[i] + lengths[i]});
        float *const value = values + i * stride, *const gap = gaps ? gaps + i * stride : nullptr;
        if (x != x) {
            *value = 0;
            if (gap)
                *gap = 1;
        } else if (column.scaling == other) {
            left.places.push_back(static_cast<int64_t>((row + i) * stride + column.at));
            left.columns.push_back(static_cast<int64_t>(column.at));
            left.values.push_back(x);
        } else {
            const double low = column.scaling == standard ? -8.0 : 0.0, high = column.scaling == standard ? 8.0 : 1.0;
            const double scaled = (x - column.minus) / column.divisor;
            const double above = scaled < low ? low : scaled, inside = above > high ? high : above; // keeps -0, as numpy's clip
            *value = scaled == scaled ? static_cast<float>(inside) : 0;
            if (gap)
                *gap = scaled != scaled;
        }
    }
}

// The columns of some rows; false where one holds what pyarrow refuses, or a label or weight that is none. high: whether there may be
// bytes beyond ASCII. find: gives where a column's begins and lengths stand in `fields`.
template <class Find> ALWAYS_INLINE bool encode(const Schema &schema, Fields &fields, bool high, Parsed &out, const Find &find) {
    const size_t rows = fields.rows, row = out.count;
    for (const Column &column : schema.columns) {
        const size_t at = find(column.place);
        const uint8_t *const *const begins = &fields.begins[at];
        const uint32_t *const lengths = &fields.lengths[at];
        if (high)
            for (size_t i = 0; i < rows; ++i)
                if (!is_utf8(begins[i], lengths[i]))
                    return false;
        const auto real = [&](size_t i) { return lengths[i] ? number({begins[i], begins[i] + lengths[i]}) : NOTHING; };
        switch (column.kind) {
        case Kind::category:
            categories(column, schema.missing, begins, lengths, fields, schema.ids, &out.ids[row * schema.ids] + column.at);
            break;
        case Kind::list:
            lists(
                column, schema.missing, begins, lengths, rows, schema, &out.ids[row * schema.ids] + column.at,
                out.scales.get() + row * schema.scales);
            break;
        case Kind::number:
            numbers(column, begins, lengths, fields, schema.numbers, out.numbers.get() + row * schema.numbers, row, out.left);
            break;
        case Kind::label:
        case Kind::weight: {
            float *const to = (column.kind == Kind::label ? out.labels : out.weights).get() + row;
            for (size_t i = 0; i < rows; ++i) {
                const bool digit = lengths[i] == 1 && *begins[i] >= '0' && *begins[i] <= '9';
                to[i] = digit ? static_cast<float>(*begins[i] - '0') : static_cast<float>(real(i));
                if (!(column.kind == Kind::label ? to[i] == 0 || to[i] == 1 : to[i] >= 0))
                    return false;
            }
            break;
        }
        case Kind::seconds:
        case Kind::milliseconds: {
            const double divisor = column.kind == Kind::milliseconds ? 1000 : 1;
            for (size_t i = 0; i < rows; ++i) {
                const double value = real(i) / divisor;
                out.times[row + i] = value == value ? value : NEVER;
            }
            break;
        }
        case Kind::instant:
            for (size_t i = 0; i < rows; ++i)
                out.times[row + i] = instant({begins[i], begins[i] + lengths[i]});
        }
    }
    out.count += rows;
    return true;
}

// ------------------------------------------------------------------------------------------------------------------ splitting

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

// A bit for each byte from `at` on that is in front of `end`, up to 64.
ALWAYS_INLINE uint64_t in_front(size_t at, size_t end) { return end - at < 64 ? (uint64_t{1} << (end - at)) - 1 : ~uint64_t{0}; }

// All of these bytes.
template <class Bits> ALWAYS_INLINE Counts count(const uint8_t *data, size_t begin, size_t end, bool quotes) {
    Counts found;
    uint64_t high = 0;
    for (size_t at = begin; at < end; at += 64) {
        const uint64_t mask = in_front(at, end);
        found.feeds += __builtin_popcountll(Bits::equal(data + at, FEED) & mask);
        found.returns += __builtin_popcountll(Bits::equal(data + at, RETURN) & mask);
        found.quotes += quotes ? __builtin_popcountll(Bits::equal(data + at, QUOTE) & mask) : 0;
        high |= Bits::high(data + at) & mask;
    }
    found.high = high;
    return found;
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
    size_t quoted_feeds = 0, quoted_returns = 0;
};

template <class Bits>
ALWAYS_INLINE uint32_t *split(
    const uint8_t *data, size_t begin, size_t end, uint8_t delimiter, bool quotes, Marks &marks, uint32_t *to) {
    uint64_t inside = marks.inside;
    for (size_t at = begin; at < end; at += 64) {
        const uint64_t mask = in_front(at, end);
        uint64_t bits = (Bits::equal(data + at, delimiter) | Bits::equal(data + at, FEED)) & mask;
        if (quotes) {
            const uint64_t found = Bits::equal(data + at, QUOTE) & mask;
            if (found | inside) {
                const uint64_t within = (parity(found) ^ inside) & mask;
                marks.quoted_feeds += __builtin_popcountll(Bits::equal(data + at, FEED) & within);
                marks.quoted_returns += __builtin_popcountll(Bits::equal(data + at, RETURN) & within);
                bits &= ~within;
                inside ^= 0 - uint64_t(__builtin_popcountll(found) & 1);
            }
        }
        to = Bits::places(bits, static_cast<uint32_t>(at), to);
    }
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
template <class Bits> ALWAYS_INLINE bool parse_quickly(const uint8_t *data, size_t size, const Schema &schema, Fields &fields, Parsed &out) {
    const size_t width = schema.width;
    const Counts all = count<Bits>(data, 0, size, schema.quotes);
    const bool quotes = all.quotes;
    out = {};
    out.reserve(schema, std::min(all.feeds, size / width));
    Marks marks(width, fields.most);
    size_t waiting = 0, known_quotes = 0, returns = 0; // waiting: fields of the next row that were met before
    bool high = false, quoted = false;
    for (size_t at = 0; at < size; at += STEP) {
        const size_t end = std::min(at + STEP, size);
        const Counts here = all.high || quotes ? count<Bits>(data, at, end, quotes) : Counts{};
        high |= here.high;
        quoted |= here.quotes != 0;
        uint32_t *const ends = marks.ends.get();
        const size_t found = split<Bits>(data, at, end, schema.delimiter, quotes, marks, &ends[1 + waiting]) - &ends[1];
        const size_t met = found / width, rows = fields.rows = end == size ? met : met - met % TOGETHER;
        const size_t whole = (rows + TOGETHER - 1) / TOGETHER * TOGETHER;
        const auto place = [&](size_t column, size_t to) __attribute__((always_inline)) {
            const uint8_t **const begins = &fields.begins[to];
            uint32_t *const lengths = &fields.lengths[to];
            const uint32_t *const before = &marks.columns[column * whole], *const at = before + whole;
            for (size_t i = 0; i < whole; i += TOGETHER)
                for (size_t k = i; k < i + TOGETHER; ++k) {
                    const uint32_t begin = before[k] + 1; // 0 of the first row
                    begins[k] = data + begin;
                    lengths[k] = at[k] - begin;
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
            if (width == 1)
                for (size_t i = 0; i < rows; ++i)
                    if (ends[i] + 1 == ends[i + 1] || (ends[i] + 2 == ends[i + 1] && data[ends[i] + 1] == RETURN)) // an empty line
                        return false;
            transpose(ends, whole, width, width + 1, marks.columns.get());
            bool right;
            if (quoted) {
                fields.room(width);
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
                right = encode(schema, fields, high, out, [&](size_t column) { return column * fields.most; });
            } else {
                bool last = false;
                right = encode(schema, fields, high, out, [&](size_t column) __attribute__((always_inline)) {
                    place(column, 0);
                    last |= column + 1 == width;
                    return size_t{0};
                });
                if (!last && all.returns)
                    place(width - 1, 0);
            }
            if (!right)
                return false;
            high = here.high;
            quoted = here.quotes;
            out.consumed = ends[rows * width] + 1;
        }
        waiting = found - rows * width;
        std::copy(ends + rows * width, ends + found + 1, ends);
    }
    out.records = out.count;
    Counts left;
    size_t quoted_returns = 0;
    bool inside = false;
    for (size_t at = out.consumed; at < size; ++at) { // an unfinished row
        inside ^= quotes && data[at] == QUOTE;
        left.quotes += quotes && data[at] == QUOTE;
        quoted_returns += inside && data[at] == RETURN;
        left.returns += !inside && data[at] == RETURN;
    }
    return all.feeds - marks.quoted_feeds == out.count && all.quotes == known_quotes + left.quotes && !left.returns &&
           all.returns - marks.quoted_returns == returns;
}

// The same a byte at a time, as pyarrow does it: a return alone ends a row, empty lines are none, quotes begin only where a field does.
template <class Bits> ALWAYS_INLINE bool parse_slowly(const uint8_t *data, size_t size, const Schema &schema, Fields &fields, Parsed &out) {
    const size_t width = schema.width;
    const Counts all = count<Bits>(data, 0, size, false);
    out = {};
    out.reserve(schema, std::min(all.feeds + all.returns, size / width));
    const uint8_t *const end = data + size;
    const uint8_t *p = data;
    bool right = true;
    const auto encoded = [&]() __attribute__((always_inline)) {
        return encode(schema, fields, all.high, out, [&](size_t column) { return column * fields.most; });
    };
    fields.room(width);
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
            if (quoted)
                for (++p; p < end; fields.unquoted.push_back(*p++))
                    if (*p == QUOTE && (++p == end || *p != QUOTE)) // of two, the second one stays
                        break;
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
            right = encoded();
            fields.rows = 0;
        }
    }
    return right && encoded();
}

using Parse = bool (*)(const uint8_t *, size_t, const Schema &, Fields &, Parsed &);

#define VERSION(name, attributes, Bits)                                                                                                    \
    attributes bool parse_##name(const uint8_t *data, size_t size, const Schema &schema, Fields &fields, Parsed &out) {                    \
        return parse_quickly<Bits>(data, size, schema, fields, out) || parse_slowly<Bits>(data, size, schema, fields, out);                \
    }

VERSION(portable, , Bits)
#if defined(__x86_64__)
VERSION(avx2, AVX2, Bits)
VERSION(avx512, AVX512, Bits512)
constexpr clicks::Versions<Parse> versions{parse_portable, parse_avx2, parse_avx512};
#else
constexpr clicks::Versions<Parse> versions{parse_portable};
#endif

// ----------------------------------------------------------------------------------------------------------------- for Python

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

class LogParser {
  public:
    LogParser(
        size_t width, const std::string &delimiter, bool quotes, const std::vector<std::string> &missing, size_t ids, size_t numbers,
        size_t scales, const std::string &isa)
        : schema_{width, byte(delimiter), quotes, Missing(missing), ids, numbers, scales}, parse_(versions.of(isa)) {
        if (!width || width > 1 << 20 || schema_.delimiter == FEED || schema_.delimiter == RETURN || schema_.delimiter == QUOTE)
            throw std::invalid_argument("wanted 1 to 2^20 columns and a delimiter that is no quote and no end of a line");
    }
    void hashed(size_t place, size_t at, int64_t buckets) { category(place, at, std::make_shared<Ids>(buckets)); }
    void known(size_t place, size_t at, const std::vector<std::string> &values) { category(place, at, vocabulary(values)); }
    void hashed_list(size_t place, size_t at, int64_t buckets, size_t width, const std::string &separator, bool repeated, int64_t scale) {
        list(place, at, std::make_shared<Ids>(buckets), width, separator, repeated, scale);
    }
    void known_list(
        size_t place, size_t at, const std::vector<std::string> &values, size_t width, const std::string &separator, bool repeated,
        int64_t scale) {
        list(place, at, vocabulary(values), width, separator, repeated, scale);
    }
    void number(size_t place, size_t at, int64_t gap, const std::string &scaling, double minus, double divisor, Table table) {
        check(place, at, 1, schema_.numbers);
        if (gap < -1 || gap >= static_cast<int64_t>(schema_.numbers))
            throw std::invalid_argument("found a column of gaps outside the numbers");
        Column column{Kind::number, place, at};
        column.gap = gap;
        column.scaling = scaling == "standard" ? standard : scaling == "min-max" ? min_max : other;
        column.minus = minus;
        column.divisor = divisor;
        column.table.assign(table.size() + 1, 0); // the first entry is that of a missing number
        std::copy(table.data(), table.data() + table.size(), column.table.begin() + 1);
        schema_.columns.push_back(std::move(column));
    }
    void real(size_t place, const std::string &kind) {
        check(place, 0, 0, 0);
        Kind found = Kind::label;
        if (kind == "label")
            schema_.labels = true;
        else if (kind == "weight") {
            found = Kind::weight;
            schema_.weights = true;
        } else if (kind == "s" || kind == "ms" || kind == "text") {
            found = kind == "s" ? Kind::seconds : kind == "ms" ? Kind::milliseconds : Kind::instant;
            schema_.times = true;
        } else
            throw std::invalid_argument("found the kind " + kind + ", wanted label, weight, s, ms or text");
        schema_.columns.push_back({found, place});
    }
    nb::tuple parse(Bytes data, size_t size) const {
        if (size > data.size() || data.size() - size < PAD || size > std::numeric_limits<uint32_t>::max() - PAD)
            throw std::invalid_argument("wanted 64 bytes behind the data, and fewer of them than 2^32");
        Parsed out;
        bool right;
        {
            const uint8_t *const bytes = data.data();
            nb::gil_scoped_release released;
            Fields fields(schema_.width);
            right = parse_(bytes, size, schema_, fields, out);
        }
        if (!right)
            return nb::make_tuple(out.consumed, out.records, nb::none());
        const size_t count = out.count;
        const auto copy = [](const auto &from) {
            using T = typename std::decay_t<decltype(from)>::value_type;
            std::unique_ptr<T[]> to(new T[from.size()]);
            std::copy(from.begin(), from.end(), to.get());
            return owned(std::move(to), {from.size()});
        };
        const auto some = [&](auto &values) { return values ? nb::cast(owned(std::move(values), {count})) : nb::none(); };
        return nb::make_tuple(
            out.consumed, out.records,
            nb::make_tuple(
                owned(std::move(out.ids), {count, schema_.ids}), owned(std::move(out.numbers), {count, schema_.numbers}),
                owned(std::move(out.scales), {count, schema_.scales}), some(out.labels), some(out.weights), some(out.times), copy(out.left.places),
                copy(out.left.columns), copy(out.left.values)));
    }

  private:
    static uint8_t byte(const std::string &text) {
        if (text.size() != 1 || static_cast<uint8_t>(text[0]) >= 0x80)
            throw std::invalid_argument("wanted one ASCII character");
        return static_cast<uint8_t>(text[0]);
    }
    static std::shared_ptr<Ids> vocabulary(const std::vector<std::string> &values) {
        size_t size = 0;
        for (const std::string &each : values)
            size += each.size() + 8;
        if (size > std::numeric_limits<int32_t>::max())
            throw std::invalid_argument("found a vocabulary of more than 2^31 bytes");
        return std::make_shared<Ids>(values);
    }
    void check(size_t place, size_t at, size_t width, size_t columns) const {
        if (place >= schema_.width || width > columns || at > columns - width)
            throw std::invalid_argument("found a column outside the log or the outputs");
    }
    void category(size_t place, size_t at, std::shared_ptr<Ids> ids) {
        check(place, at, 1, schema_.ids);
        schema_.columns.push_back({Kind::category, place, at, std::move(ids)});
    }
    void list(
        size_t place, size_t at, std::shared_ptr<Ids> ids, size_t width, const std::string &separator, bool repeated, int64_t scale) {
        check(place, at, width, schema_.ids);
        if (!width || scale < -1 || scale >= static_cast<int64_t>(schema_.scales))
            throw std::invalid_argument("found a list without places or with a scale outside the outputs");
        schema_.columns.push_back({Kind::list, place, at, std::move(ids), width, byte(separator), repeated, scale});
    }
    Schema schema_;
    Parse parse_;
};

} // namespace

void bind_parse_log(nb::module_ &module) {
    nb::class_<LogParser>(
        module, "LogParser",
        "Blocks of a log to a model's inputs. Columns are added by their place in the log (0-based) and in the outputs. isa: see\n"
        "parse_rows. Methods raise ValueError for what is outside either.")
        .def(
            nb::init<size_t, const std::string &, bool, const std::vector<std::string> &, size_t, size_t, size_t, const std::string &>(),
            nb::arg("width"), nb::arg("delimiter"), nb::arg("quotes"), nb::arg("missing"), nb::arg("ids"), nb::arg("numbers"),
            nb::arg("scales"), nb::arg("isa") = "")
        .def("hashed", &LogParser::hashed, nb::arg("place"), nb::arg("at"), nb::arg("buckets"), "A category that is hashed.")
        .def("known", &LogParser::known, nb::arg("place"), nb::arg("at"), nb::arg("values"), "A category with a vocabulary.")
        .def(
            "hashed_list", &LogParser::hashed_list, nb::arg("place"), nb::arg("at"), nb::arg("buckets"), nb::arg("width"),
            nb::arg("separator"), nb::arg("repeated"), nb::arg("scale"), "A list; repeated: its first item fills it up; scale: or -1.")
        .def(
            "known_list", &LogParser::known_list, nb::arg("place"), nb::arg("at"), nb::arg("values"), nb::arg("width"),
            nb::arg("separator"), nb::arg("repeated"), nb::arg("scale"), "A list with a vocabulary.")
        .def(
            "number", &LogParser::number, nb::arg("place"), nb::arg("at"), nb::arg("gap"), nb::arg("scaling"), nb::arg("minus"),
            nb::arg("divisor"), nb::arg("table"),
            "A number. gap: the column that is 1 where it is missing, or -1. table: float32 [k], what -16 to k - 17 become. Others become\n"
            "(x - minus) / divisor, clipped, where scaling is standard or min-max; else they are left to the caller.")
        .def("real", &LogParser::real, nb::arg("place"), nb::arg("kind"), "A label, a weight, or a timestamp: s, ms or text.")
        .def(
            "parse", &LogParser::parse, nb::arg("data"), nb::arg("size"),
            "Whole records of data[:size], uint8 [size + 64 or more]: (bytes taken, records in them, arrays). arrays: None where pyarrow\n"
            "refuses a record, or a label is neither 0 nor 1 or a weight below 0 or none; else ids int32 [n, ids], numbers float32 [n, numbers], scales float32 [n, scales], labels and weights\n"
            "float32 [n] and times float64 [n] or None, and of what is left to the caller the flat places int64 [m] in\n"
            "the numbers, their columns int64 [m] and their values float64 [m].");
}
