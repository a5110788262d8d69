// Tab separated rows of text (an optional label, numbers, categories) to arrays, and columns back to lines of text.
//
// Everything here equals what the callers' numpy and pyarrow code gives, or declines (None, or a list of what is left to do) and leaves
// the case to that code. The interpreter's lock is released while bytes are worked on.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "recommenders/arrays.h"
#include "logs/farmhash.h"
#include "logs/row_fields.h"

namespace nb = nanobind;
using clicks::Modulo;
using clicks::owned;
using namespace clicks::rows;

namespace {

template <class T> using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// ------------------------------------------------------------------------------------------------------------------------ rows

// Buckets of the fields: one number of them for all, or each its own, where a missing value has a bucket of its own behind them.
struct Buckets {
    std::vector<Modulo> fields; // one, or as many as there are categories
    bool apart;
    const Modulo &of(size_t field) const { return fields[apart ? field % fields.size() : 0]; }
};

struct Shape {
    size_t numeric, categorical;
    Buckets buckets;
    bool labelled;
};

struct Parsed {
    size_t count = 0;
    std::unique_ptr<float[]> labels, numbers;
    std::unique_ptr<int32_t[]> ids;
};

// Fields of some rows on their way into vector registers: where each begins, its length, and the eight bytes at its end (numbers) or
// begin (categories). What is not of the common kind is done one by one afterwards.
struct Fields {
    explicit Fields(size_t size) : begins(size), words(size), lengths(size), odd(size) {}
    std::vector<const uint8_t *> begins;
    std::vector<uint64_t> words, lengths, odd;
};

// Whole numbers of up to eight digits as float32, NaN where there are none. The digits of a word are added up in three multiplications
// (D. Lemire, "Quickly parsing eight digits", 2018).
ALWAYS_INLINE uint64_t whole_numbers(
    size_t count, const uint64_t *__restrict words, const uint64_t *__restrict lengths, uint64_t *__restrict odd,
    float *__restrict values) {
    constexpr uint64_t zeros = 0x3030303030303030u, mask = 0x000000ff000000ffu;
    uint64_t any = 0;
    for (size_t i = 0; i < count; ++i) {
        const uint64_t all = lengths[i], first = words[i] >> ((64 - 8 * all) & 63) & 0xff;
        const uint64_t minus = uint64_t{all - 1 < 8} & uint64_t{first == '-'}, length = all - minus;
        const uint64_t empty = length == 0, before = (64 - 8 * length) & 63;
        uint64_t word = (words[i] ^ zeros) >> before << before;
        word &= empty - 1;
        const uint64_t other = ((word + 0x7676767676767676u) | word) & 0x8080808080808080u; // a byte over 9
        const uint64_t large = uint64_t{length > 8}, alone = minus & empty;
        odd[i] = other | large | alone;
        any |= other | large | alone;
        word = word * 10 + (word >> 8);
        word = ((word & mask) * 0x000f424000000064u + (word >> 16 & mask) * 0x0000271000000001u) >> 32;
        const float whole = static_cast<float>(static_cast<int64_t>(word));
        uint32_t bits;
        std::memcpy(&bits, &whole, 4);
        bits |= static_cast<uint32_t>(minus << 31 | ((0 - empty) & 0x7fc00000u));
        std::memcpy(values + i, &bits, 4);
    }
    return any;
}

// Buckets of fields of eight bytes (a 32-bit number in hexadecimal) and of none.
ALWAYS_INLINE uint64_t short_hashes(size_t count, const uint64_t *words, const uint64_t *lengths, const Modulo modulo, int32_t *ids) {
    const int32_t empty = modulo(farmhash::K2);
    uint64_t any = 0;
    for (size_t i = 0; i < count; ++i) {
        const int32_t bucket = modulo(farmhash::hash8(words[i]));
        ids[i] = lengths[i] == 0 ? empty : bucket;
        any |= lengths[i] & ~uint64_t{8};
    }
    return any;
}

// The same with buckets of their own.
ALWAYS_INLINE uint64_t short_hashes(size_t count, const uint64_t *words, const uint64_t *lengths, const Buckets &buckets, int32_t *ids) {
    const size_t fields = buckets.fields.size();
    uint64_t any = 0;
    for (size_t i = 0; i < count; i += fields)
        for (size_t k = 0; k < fields; ++k) {
            const Modulo &modulo = buckets.fields[k];
            ids[i + k] = lengths[i + k] == 0 ? modulo.divisor() : modulo(farmhash::hash8(words[i + k]));
            any |= lengths[i + k] & ~uint64_t{8};
        }
    return any;
}

// Rows of a block of whole lines; false where a row is not as it should be.
ALWAYS_INLINE bool parse(const uint8_t *data, size_t size, const Shape &shape, Parsed &out) {
    constexpr size_t step = 4096; // bytes at a time: what is known of them stays in the nearest cache
    const size_t numeric = shape.numeric, categorical = shape.categorical, width = shape.labelled + numeric + categorical;
    if (!width || !size || data[size - 1] != FEED || size > std::numeric_limits<uint32_t>::max() - 64)
        return false;
    out.count = count_lines(data, size);
    if (out.count > size / width)
        return false;
    if (shape.labelled)
        out.labels.reset(new float[out.count]);
    out.numbers.reset(new float[out.count * numeric]);
    out.ids.reset(new int32_t[out.count * categorical]);
    Fields numbers(numeric ? step + width : 0), categories(categorical ? step + width : 0);
    const Buckets &buckets = shape.buckets;
    const uint8_t *const data_end = data + size;
    std::vector<uint32_t> marks(width + step + 64); // the last row's line feed, then the fields' ends
    marks[0] = ~uint32_t{0};
    size_t row = 0, waiting = 0; // rows done, and fields of the next one that were met before
    for (size_t at = 0; at < size; at += step) {
        const size_t fields = split(data, at, std::min(at + step, size), &marks[1 + waiting]) - &marks[1], rows = fields / width;
        if (rows > out.count - row)
            return false;
        size_t n = 0, c = 0;
        for (size_t i = 0; i < rows; ++i) {
            const uint32_t *mark = &marks[1 + i * width], *const last = mark + width - 1;
            if (data[*last] != FEED) // then all line feeds end a row, since there are as many
                return false;
            const bool crlf = *last != last[-1] + 1 && data[*last - 1] == RETURN;
            const auto field = [&]() __attribute__((always_inline)) { // begin and end of the next field
                const uint8_t *const begin = data + (mark[-1] + 1), *const end = data + *mark - (mark == last && crlf);
                ++mark;
                return std::pair(begin, end);
            };
            if (shape.labelled) {
                const auto [begin, end] = field();
                float &label = out.labels[row + i];
                label = *begin == '1';
                if ((end - begin != 1 || *begin < '0' || *begin > '1') &&
                    (begin == end || !odd_number(begin, end, label) || !(label == 0 || label == 1)))
                    return false;
            }
            for (size_t k = 0; k < numeric; ++k, ++n) {
                const auto [begin, end] = field();
                numbers.begins[n] = begin;
                numbers.lengths[n] = end - begin;
                if (end - data >= 8)
                    numbers.words[n] = farmhash::fetch64(end - 8);
                else { // nothing in front of the buffer may be read
                    uint8_t bytes[8] = {};
                    std::memcpy(bytes + 8 - (end - data), data, end - data);
                    numbers.words[n] = farmhash::fetch64(bytes);
                }
            }
            for (size_t k = 0; k < categorical; ++k, ++c) {
                const auto [begin, end] = field();
                categories.begins[c] = begin;
                categories.lengths[c] = end - begin;
                categories.words[c] = data_end - begin >= 8 ? farmhash::fetch64(begin) : 0; // what has eight bytes is inside
            }
        }
        float *values = out.numbers.get() + row * numeric;
        if (whole_numbers(n, numbers.words.data(), numbers.lengths.data(), numbers.odd.data(), values))
            for (size_t i = 0; i < n; ++i)
                if (numbers.odd[i] && !odd_number(numbers.begins[i], numbers.begins[i] + numbers.lengths[i], values[i]))
                    return false;
        int32_t *ids = out.ids.get() + row * categorical;
        const uint64_t *const words = categories.words.data(), *const lengths = categories.lengths.data();
        if (buckets.apart ? short_hashes(c, words, lengths, buckets, ids) : short_hashes(c, words, lengths, buckets.fields[0], ids))
            for (size_t i = 0; i < c; ++i)
                if (lengths[i] & ~uint64_t{8})
                    ids[i] = buckets.of(i)(farmhash::fingerprint64(categories.begins[i], lengths[i]));
        row += rows;
        waiting = fields - rows * width;
        std::copy(&marks[rows * width], &marks[fields] + 1, &marks[0]);
    }
    return row == out.count && !waiting;
}

// ------------------------------------------------------------------------------------------------------------------- normalizing

// What becomes of a number, one entry a number: the columns' values, repeated.
struct Scales {
    std::vector<float> lo, hi, span, fill;
};

// (clip(table[max(x, 0)], lo, hi) - lo) / span, `fill` where x is NaN; odd where x is not an index of the table up to `largest`. Floats
// are compared as integers, which without a sign have the same order, so that no branch stands between this loop and vectors.
ALWAYS_INLINE uint32_t scale_some(
    size_t count, const float *__restrict numbers, const float *__restrict table, float largest, const Scales &scales,
    uint32_t *__restrict odd, float *__restrict out) {
    const float *const lo = scales.lo.data(), *const hi = scales.hi.data();
    const float *const span = scales.span.data(), *const fill = scales.fill.data();
    uint32_t any = 0, limit;
    std::memcpy(&limit, &largest, 4);
    for (size_t i = 0; i < count; ++i) {
        uint32_t bits, filled, scaled, same;
        std::memcpy(&bits, numbers + i, 4);
        std::memcpy(&filled, fill + i, 4);
        const uint32_t missing = (bits & 0x7fffffffu) > 0x7f800000u ? ~uint32_t{0} : 0;
        const uint32_t positive = bits & ((bits >> 31) - 1), inside = positive < limit ? positive : limit;
        float value;
        std::memcpy(&value, &inside, 4);
        const auto index = static_cast<int32_t>(value);
        const auto back = static_cast<float>(index);
        std::memcpy(&same, &back, 4);
        float y = table[index];
        y = y > lo[i] ? y : lo[i];
        y = y < hi[i] ? y : hi[i];
        y = (y - lo[i]) / span[i];
        std::memcpy(&scaled, &y, 4);
        scaled = (scaled & ~missing) | (filled & missing);
        std::memcpy(out + i, &scaled, 4);
        odd[i] = (same ^ positive) & ~missing;
        any |= odd[i];
    }
    return any;
}

// ------------------------------------------------------------------------------------------------------------------- the versions

// The same functions for what the CPU offers; results are the same bits.
struct Version {
    bool (*parse)(const uint8_t *, size_t, const Shape &, Parsed &);
    uint32_t (*scale)(size_t, const float *, const float *, float, const Scales &, uint32_t *, float *);
};

#define VERSION(name, attributes)                                                                                                          \
    attributes bool parse_##name(const uint8_t *data, size_t size, const Shape &shape, Parsed &out) {                                      \
        return parse(data, size, shape, out);                                                                                              \
    }                                                                                                                                      \
    attributes uint32_t scale_##name(                                                                                                      \
        size_t count, const float *numbers, const float *table, float largest, const Scales &scales, uint32_t *odd, float *out) {          \
        return scale_some(count, numbers, table, largest, scales, odd, out);                                                               \
    }                                                                                                                                      \
    constexpr Version name{parse_##name, scale_##name};

VERSION(portable, )
#if defined(__x86_64__)
VERSION(avx2, AVX2)
VERSION(avx512, AVX512)
constexpr clicks::Versions<Version> versions{portable, avx2, avx512};
#else
constexpr clicks::Versions<Version> versions{portable};
#endif

// ------------------------------------------------------------------------------------------------------------------- for Python

nb::object parse_rows(
    nb::bytes block, size_t numeric, size_t categorical, const std::variant<int64_t, std::vector<int64_t>> &buckets, bool labelled,
    const std::string &isa) {
    Shape shape{numeric, categorical, {{}, buckets.index() == 1}, labelled};
    if (shape.buckets.apart)
        for (const int64_t each : std::get<1>(buckets))
            shape.buckets.fields.emplace_back(each);
    else
        shape.buckets.fields.emplace_back(std::get<0>(buckets));
    if (shape.buckets.apart && shape.buckets.fields.size() != categorical)
        throw std::invalid_argument("wanted the buckets of every category");
    const Version version = versions.of(isa);
    Parsed out;
    {
        const auto *data = reinterpret_cast<const uint8_t *>(block.c_str());
        const size_t size = block.size();
        nb::gil_scoped_release released;
        if (!version.parse(data, size, shape, out))
            out.count = 0;
    }
    if (!out.count)
        return nb::none();
    const size_t count = out.count;
    return nb::make_tuple(
        labelled ? nb::cast(owned(std::move(out.labels), {count})) : nb::none(), owned(std::move(out.numbers), {count, numeric}),
        owned(std::move(out.ids), {count, categorical}));
}

nb::ndarray<nb::numpy, int32_t> hash_buckets(Column<uint8_t> data, Column<int64_t> starts, Column<int64_t> lengths, int64_t buckets) {
    const Modulo modulo(buckets);
    const size_t count = starts.size();
    const auto size = static_cast<int64_t>(data.size());
    if (lengths.size() != count)
        throw std::invalid_argument("wanted as many lengths as starts");
    std::unique_ptr<int32_t[]> out(new int32_t[count]);
    bool inside = true;
    {
        nb::gil_scoped_release released;
        for (size_t i = 0; inside && i < count; ++i) {
            const int64_t start = starts.data()[i], length = lengths.data()[i];
            inside = start >= 0 && length >= 0 && start <= size && length <= size - start;
            if (inside)
                out[i] = modulo(length == 8 ? farmhash::hash8(farmhash::fetch64(data.data() + start))
                                            : farmhash::fingerprint64(data.data() + start, length));
        }
    }
    if (!inside)
        throw std::invalid_argument("a string is outside the data");
    return owned(std::move(out), {count});
}

nb::tuple scale(
    Table<float> numbers, Column<float> table, Column<float> lo, Column<float> hi, Column<float> span, Column<float> fill,
    const std::string &isa) {
    const size_t columns = numbers.shape(1), count = numbers.size();
    if (lo.size() != columns || hi.size() != columns || span.size() != columns || fill.size() != columns || !table.size() ||
        table.size() > (1 << 24))
        throw std::invalid_argument("wanted a value of lo, hi, span and fill for every column, and a table of 1 to 2^24 entries");
    const Version version = versions.of(isa);
    const size_t step = std::max<size_t>(1, 512 / std::max<size_t>(1, columns)) * columns; // whole rows
    Scales scales;
    for (size_t done = 0; done < step; done += columns) {
        scales.lo.insert(scales.lo.end(), lo.data(), lo.data() + columns);
        scales.hi.insert(scales.hi.end(), hi.data(), hi.data() + columns);
        scales.span.insert(scales.span.end(), span.data(), span.data() + columns);
        scales.fill.insert(scales.fill.end(), fill.data(), fill.data() + columns);
    }
    std::unique_ptr<float[]> out(new float[count]);
    std::vector<uint32_t> odd(step);
    std::vector<int64_t> left;
    {
        nb::gil_scoped_release released;
        const auto largest = static_cast<float>(table.size() - 1);
        for (size_t at = 0; at < count; at += step) {
            const size_t some = std::min(step, count - at);
            if (version.scale(some, numbers.data() + at, table.data(), largest, scales, odd.data(), out.get() + at))
                for (size_t i = 0; i < some; ++i)
                    if (odd[i])
                        left.push_back(static_cast<int64_t>(at + i));
        }
    }
    std::unique_ptr<int64_t[]> positions(new int64_t[left.size()]);
    std::copy(left.begin(), left.end(), positions.get());
    return nb::make_tuple(owned(std::move(out), {numbers.shape(0), columns}), owned(std::move(positions), {left.size()}));
}

// ----------------------------------------------------------------------------------------------------------------------- writing

constexpr size_t LONGEST = 24; // characters of a cell and what follows it

// The shortest decimal that reads back as the same float32: plain from 1e-6 to below 1e10, else with an exponent, as pyarrow writes it.
char *write(char *to, float value) {
    if (value != value)
        return static_cast<char *>(std::memcpy(to, "nan", 3)) + 3;
    if (std::signbit(value)) {
        *to++ = '-';
        value = -value;
    }
    if (std::isinf(value))
        return static_cast<char *>(std::memcpy(to, "inf", 3)) + 3;
    if (value == 0) {
        *to++ = '0';
        return to;
    }
    char text[24]; // d[.ddd]e[+-]dd
    char *const text_end = std::to_chars(text, text + sizeof text, value, std::chars_format::scientific).ptr;
    char *mark = text_end - 3;
    while (*mark != 'e')
        --mark;
    int exponent = 0;
    std::from_chars(mark + 2, text_end, exponent);
    exponent = mark[1] == '-' ? -exponent : exponent;
    char digits[16];
    digits[0] = text[0];
    const int count = mark == text + 1 ? 1 : static_cast<int>(mark - text) - 1;
    std::memcpy(digits + 1, text + 2, count - 1);
    if (exponent < -6 || exponent >= 10) {
        std::memcpy(to, text, mark - text + 2); // up to the exponent's sign
        to += mark - text + 2;
        return std::to_chars(to, to + 4, std::abs(exponent)).ptr;
    }
    if (exponent < 0) {
        std::memcpy(to, "0.00000", 7);
        to += 1 - exponent;
        return static_cast<char *>(std::memcpy(to, digits, count)) + count;
    }
    const int whole = exponent + 1, before = std::min(count, whole);
    std::memcpy(to, digits, before);
    to += before;
    for (int i = count; i < whole; ++i)
        *to++ = '0';
    if (count > whole) {
        *to++ = '.';
        std::memcpy(to, digits + whole, count - whole);
        to += count - whole;
    }
    return to;
}

nb::bytes csv_lines(nb::list columns) {
    struct Cells {
        const int64_t *whole;
        const float *real;
    };
    std::vector<Cells> cells;
    size_t count = 0;
    for (nb::handle column : columns) {
        nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu> array;
        if (!nb::try_cast(column, array, false) || (array.dtype() != nb::dtype<int64_t>() && array.dtype() != nb::dtype<float>()))
            throw std::invalid_argument("wanted contiguous columns of int64 or float32");
        if (!cells.empty() && array.size() != count)
            throw std::invalid_argument("wanted columns of one length");
        count = array.size();
        const bool whole = array.dtype() == nb::dtype<int64_t>();
        const void *data = array.data();
        cells.push_back({whole ? static_cast<const int64_t *>(data) : nullptr, whole ? nullptr : static_cast<const float *>(data)});
    }
    std::unique_ptr<char[]> text(new char[count * cells.size() * LONGEST]);
    char *to = text.get();
    {
        nb::gil_scoped_release released;
        for (size_t i = 0; i < count; ++i) {
            for (const Cells &each : cells) {
                to = each.whole ? std::to_chars(to, to + LONGEST, each.whole[i]).ptr : write(to, each.real[i]);
                *to++ = ',';
            }
            to[-1] = '\n';
        }
    }
    return nb::bytes(text.get(), to - text.get());
}

} // namespace

void bind_parse_rows(nb::module_ &module) {
    module.def(
        "parse_rows", &parse_rows, nb::arg("block"), nb::arg("numeric"), nb::arg("categorical"), nb::arg("buckets"), nb::arg("labelled"),
        nb::arg("isa") = "",
        "Rows of a block of whole lines: (labels float32 [n] or None, numbers float32 [n, numeric], NaN = missing, ids int32\n"
        "[n, categorical], each the FarmHash Fingerprint64 of a field modulo buckets). buckets may be a list, one of each category: an\n"
        "empty field is then the number of its buckets. None where any row has another number of columns,\n"
        "a number that is none or that float32 does not hold, or a label other than 0 and 1. Runs the quickest version that the CPU has,\n"
        "or the one named by isa: avx512, avx2 or portable. Raises ValueError for impossible buckets or an isa that the CPU has not.");
    module.def(
        "hash_buckets", &hash_buckets, nb::arg("data"), nb::arg("starts"), nb::arg("lengths"), nb::arg("buckets"),
        "FarmHash Fingerprint64 modulo buckets of the strings data[starts[i]:starts[i] + lengths[i]], int32 [n]. Raises ValueError where\n"
        "a string is outside the data.");
    module.def(
        "scale", &scale, nb::arg("numbers"), nb::arg("table"), nb::arg("lo"), nb::arg("hi"), nb::arg("span"), nb::arg("fill"),
        nb::arg("isa") = "",
        "(clip(table[max(x, 0)], lo, hi) - lo) / span of each number x, fill where it is NaN: float32 [n, columns]; and the flat\n"
        "positions of the numbers that are no index of the table, whose results are undefined, int64 [m]. The table has at most 2^24\n"
        "entries. isa: see parse_rows.");
    module.def(
        "csv_lines", &csv_lines, nb::arg("columns"),
        "The lines of a table of int64 and float32 columns [n], C-contiguous, comma separated, as pyarrow writes them. Raises ValueError\n"
        "for other columns.");
}
