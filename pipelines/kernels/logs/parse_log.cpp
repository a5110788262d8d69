// Blocks of a click log of any schema (CSV with any delimiter, quotes by RFC 4180; lines without quotes) to a model's inputs, in one pass.
//
// Results equal those of pyarrow and numpy in zoo/recommenders bit for bit, or the block is declined and left to that code. A block
// is first split into fields: quickly, by counting quotes (inside is where their number is odd) and checking afterwards that every quote
// stood where this holds; where one did not, a second time a byte at a time, as pyarrow's parser does it. Then come the columns that the
// schema uses, some rows of a column at a time. The interpreter's lock is released meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "recommenders/arrays.h"
#include "logs/log_records.h"
#include "logs/row_values.h"

namespace nb = nanobind;
using clicks::owned;
using namespace clicks::logs;

namespace {

constexpr size_t TYPICAL = 16; // bytes of a value

using Parse = bool (*)(const uint8_t *, size_t, const Schema &, const Outputs &, Fields &, Parsed &);

#define VERSION(name, attributes, Bits)                                                                                                    \
    attributes bool encode_##name(                                                                                                         \
        const Schema &schema, const Column &column, const uint8_t *const *begins, const uint32_t *lengths, Fields &fields, bool high,      \
        Parsed &out) {                                                                                                                     \
        return encode_column(schema, column, begins, lengths, fields, high, out);                                                          \
    }                                                                                                                                      \
    attributes bool parse_##name(const uint8_t *data, size_t size, const Schema &schema, const Outputs &outputs, Fields &fields, Parsed &out) { \
        return parse_quickly<Bits>(data, size, schema, outputs, encode_##name, fields, out) ||                                             \
               (!schema.lines && parse_slowly(data, size, schema, outputs, encode_##name, fields, out));                                   \
    }

VERSION(portable, , Bits)
#if defined(__x86_64__)
VERSION(avx2, AVX2, Bits)
VERSION(avx512, AVX512, Bits512)
constexpr clicks::Versions<Parse> versions{parse_portable, parse_avx2, parse_avx512};
constexpr clicks::Versions<EncodeColumn> encoders{encode_portable, encode_avx2, encode_avx512};
#else
constexpr clicks::Versions<Parse> versions{parse_portable};
constexpr clicks::Versions<EncodeColumn> encoders{encode_portable};
#endif

// ----------------------------------------------------------------------------------------------------------------- for Python

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using NewArray = nb::ndarray<nb::numpy, T>;
template <class T> using MaybeArray = std::optional<NewArray<T>>;
// Rows, ids, numbers, scales, labels, weights and times; then places, columns and values of numbers that the caller scales.
using Arrays = std::tuple<
    size_t, MaybeArray<int32_t>, MaybeArray<float>, MaybeArray<float>, MaybeArray<float>, MaybeArray<float>, MaybeArray<double>,
    NewArray<int64_t>, NewArray<int64_t>, NewArray<double>>;
template <class T> using Rows = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

class LogParser {
  public:
    LogParser(
        size_t width, const std::string &delimiter, const std::string &form, const std::vector<std::string> &missing, size_t ids,
        size_t numbers, size_t scales, const std::string &isa, bool canonical)
        : schema_{width, byte(delimiter), form == "quoted", form == "lines", canonical, Missing(missing), ids, numbers, scales},
          parse_(versions.of(isa)), encode_(encoders.of(isa)) {
        if (form != "quoted" && form != "unquoted" && form != "lines")
            throw std::invalid_argument("found the form " + form + ", expected quoted, unquoted or lines");
        if (!width || width > 1 << 20 || schema_.delimiter == FEED || schema_.delimiter == RETURN || schema_.delimiter == QUOTE)
            throw std::invalid_argument("expected 1 to 2^20 columns and a delimiter that is no quote and no end of a line");
    }
    void hashed(size_t place, size_t offset, int64_t buckets) { category(place, offset, std::make_shared<Ids>(buckets)); }
    void hash_bucket(size_t place, size_t offset, int64_t buckets, int32_t missing) {
        category(place, offset, std::make_shared<Ids>(buckets, missing));
    }
    void vocabulary(size_t place, size_t offset, const std::vector<std::string> &values) { category(place, offset, make_ids(values)); }
    void hashed_list(
        size_t place, size_t offset, int64_t buckets, size_t width, const std::string &separator, bool repeated, int64_t scale, bool newest_first) {
        list(place, offset, std::make_shared<Ids>(buckets), width, separator, repeated, scale, newest_first);
    }
    void vocabulary_list(
        size_t place, size_t offset, const std::vector<std::string> &values, size_t width, const std::string &separator, bool repeated,
        int64_t scale, bool newest_first) {
        list(place, offset, make_ids(values), width, separator, repeated, scale, newest_first);
    }
    void number(size_t place, size_t offset, int64_t gap, const std::string &scaling, double minus, double divisor, float fill, Table table) {
        check(place, offset, 1, schema_.numbers);
        if (gap < -1 || gap >= static_cast<int64_t>(schema_.numbers))
            throw std::invalid_argument("found a column of gaps outside the numbers");
        Column column{Kind::number, place, offset};
        column.gap = gap;
        column.scaling = scaling == "standard" ? standard : scaling == "min-max" ? min_max : scaling == "value" ? identity : other;
        column.minus = minus;
        column.divisor = divisor;
        column.fill = fill;
        column.table.assign(table.size() + 1, fill); // the first entry is that of a missing number
        std::copy(table.data(), table.data() + table.size(), column.table.begin() + 1);
        schema_.columns.push_back(std::move(column));
    }
    void real(size_t place, const std::string &kind) {
        check(place, 0, 0, 0);
        Kind column_kind = Kind::label;
        if (kind == "label")
            schema_.labels = true;
        else if (kind == "weight") {
            column_kind = Kind::weight;
            schema_.weights = true;
        } else if (kind == "s" || kind == "ms" || kind == "text") {
            column_kind = kind == "s" ? Kind::seconds : kind == "ms" ? Kind::milliseconds : Kind::instant;
            schema_.times = true;
        } else
            throw std::invalid_argument("found the kind " + kind + ", expected label, weight, s, ms or text");
        schema_.columns.push_back({column_kind, place});
    }
    std::tuple<size_t, size_t, std::optional<Arrays>> parse(Bytes data, size_t size, Rows<int32_t> ids, Rows<float> numbers, Rows<float> scales) const {
        if (size > data.size() || data.size() - size < PAD || size > std::numeric_limits<uint32_t>::max() - PAD)
            throw std::invalid_argument("expected 64 bytes behind the data, and fewer of them than 2^32");
        const Outputs outputs = outputs_of(ids, numbers, scales);
        Parsed out;
        bool right;
        {
            const uint8_t *const bytes = data.data();
            nb::gil_scoped_release released;
            Fields fields(schema_.width);
            right = parse_(bytes, size, schema_, outputs, fields, out);
        }
        if (!right)
            return {out.consumed, out.records, std::nullopt};
        return {out.consumed, out.records, arrays(out)};
    }
    std::optional<Arrays> parse_rows(nb::list rows, const std::vector<nb::str> &names, Rows<int32_t> ids, Rows<float> numbers, Rows<float> scales) const {
        const Outputs outputs = outputs_of(ids, numbers, scales);
        const size_t count = rows.size();
        if (names.size() != schema_.width || outputs.rows < count)
            throw std::invalid_argument("expected a name for every column, and arrays of as many rows as are given");
        std::vector<PyObject *> column_names;
        for (const nb::str &name : names)
            column_names.push_back(name.ptr());
        Keys keys(count ? PyList_GET_ITEM(rows.ptr(), 0) : Py_None, schema_, column_names);
        Fields fields(schema_.width, count);
        const size_t most = std::min(count, fields.most) * schema_.columns.size();
        Texts texts(most * TYPICAL);
        std::vector<size_t> starts;
        std::vector<uint32_t> lengths;
        starts.reserve(most);
        lengths.reserve(most);
        Parsed out;
        out.reserve(schema_, count, outputs);
        for (size_t begin = 0; begin < count; begin += fields.rows) {
            if (!fields_of_rows(rows.ptr(), begin, std::min(fields.most, count - begin), schema_, keys, fields, texts, starts, lengths))
                return std::nullopt;
            bool right;
            {
                nb::gil_scoped_release released;
                right = encode(schema_, fields, false, encode_, out);
            }
            if (!right || rows.size() != count)
                return std::nullopt;
        }
        return arrays(out);
    }

  private:
    Arrays arrays(Parsed &out) const {
        const size_t count = out.count;
        const auto copy = [](const auto &from) {
            using T = typename std::decay_t<decltype(from)>::value_type;
            std::unique_ptr<T[]> to(new T[from.size()]);
            std::copy(from.begin(), from.end(), to.get());
            return owned(std::move(to), {from.size()});
        };
        const auto matrix = [&](auto &values, size_t width) {
            return values ? std::optional(owned(std::move(values), {count, width})) : std::nullopt;
        };
        const auto vector = [&](auto &values) { return values ? std::optional(owned(std::move(values), {count})) : std::nullopt; };
        return Arrays(
            count, matrix(out.own_ids, schema_.ids), matrix(out.own_numbers, schema_.numbers), matrix(out.own_scales, schema_.scales),
            vector(out.labels), vector(out.weights), vector(out.times), copy(out.left.places), copy(out.left.columns), copy(out.left.values));
    }
    Outputs outputs_of(const Rows<int32_t> &ids, const Rows<float> &numbers, const Rows<float> &scales) const {
        const size_t rows = ids.shape(0);
        if (ids.shape(1) != schema_.ids || numbers.shape(1) != schema_.numbers || scales.shape(1) != schema_.scales ||
            numbers.shape(0) != rows || scales.shape(0) != rows)
            throw std::invalid_argument("found arrays of other rows and columns than the outputs have");
        return {ids.data(), numbers.data(), scales.data(), rows};
    }
    static uint8_t byte(const std::string &text) {
        if (text.size() != 1 || static_cast<uint8_t>(text[0]) >= 0x80)
            throw std::invalid_argument("expected one ASCII character");
        return static_cast<uint8_t>(text[0]);
    }
    static std::shared_ptr<Ids> make_ids(const std::vector<std::string> &values) {
        size_t size = 0;
        for (const std::string &value : values)
            size += value.size() + 8;
        if (size > std::numeric_limits<int32_t>::max())
            throw std::invalid_argument("found a vocabulary of more than 2^31 bytes");
        return std::make_shared<Ids>(values);
    }
    void check(size_t place, size_t offset, size_t width, size_t columns) const {
        if (place >= schema_.width || width > columns || offset > columns - width)
            throw std::invalid_argument("found a column outside the log or the outputs");
    }
    void category(size_t place, size_t offset, std::shared_ptr<Ids> ids) {
        check(place, offset, 1, schema_.ids);
        schema_.columns.push_back({Kind::category, place, offset, std::move(ids)});
    }
    void list(
        size_t place, size_t offset, std::shared_ptr<Ids> ids, size_t width, const std::string &separator, bool repeated, int64_t scale,
        bool newest_first) {
        check(place, offset, width, schema_.ids);
        if (!width || scale < -1 || scale >= static_cast<int64_t>(schema_.scales))
            throw std::invalid_argument("found a list without places or with a scale outside the outputs");
        schema_.columns.push_back({Kind::list, place, offset, std::move(ids), width, byte(separator), repeated, scale, newest_first});
    }
    Schema schema_;
    Parse parse_;
    EncodeColumn encode_;
};

template <class T> using Values = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::ndarray<nb::numpy, int32_t> hash_buckets(Values<uint8_t> data, Values<int64_t> starts, Values<int64_t> lengths, int64_t buckets) {
    const clicks::Modulo modulo(buckets);
    const size_t count = starts.size();
    const auto size = static_cast<int64_t>(data.size());
    if (lengths.size() != count)
        throw std::invalid_argument("expected as many lengths as starts");
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

} // namespace

void bind_parse_log(nb::module_ &module) {
    nb::class_<LogParser>(
        module, "LogParser",
        "Blocks of a log to a model's inputs. Columns are added by their place in the log (0-based) and in the outputs.\n"
        "form: quoted (CSV, RFC 4180) or unquoted, both as pyarrow reads them; or lines: each line feed ends a row, a carriage return in\n"
        "front of it does not count, any other byte may stand in a field, an empty field alone is missing.\n"
        "canonical: read texts in their canonical form (51.0 is 51, True is 1), but for those of hash_bucket; a block with others is declined.\n"
        "isa: the version to run, avx512, avx2 or portable; empty for the quickest that the CPU has. Methods raise ValueError for a column\n"
        "that is outside the log or the outputs, impossible buckets, and an isa that the CPU has not.")
        .def(
            nb::init<size_t, const std::string &, const std::string &, const std::vector<std::string> &, size_t, size_t, size_t, const std::string &, bool>(),
            nb::arg("width"), nb::arg("delimiter"), nb::arg("form"), nb::arg("missing"), nb::arg("ids"), nb::arg("numbers"),
            nb::arg("scales"), nb::arg("isa") = "", nb::arg("canonical") = false)
        .def("hashed", &LogParser::hashed, nb::arg("place"), nb::arg("offset"), nb::arg("buckets"), "A category that is hashed.")
        .def(
            "hash_bucket", &LogParser::hash_bucket, nb::arg("place"), nb::arg("offset"), nb::arg("buckets"), nb::arg("missing"),
            "A category whose id is its hash modulo buckets; missing: the id of a missing value.")
        .def("vocabulary", &LogParser::vocabulary, nb::arg("place"), nb::arg("offset"), nb::arg("values"), "A category with a vocabulary.")
        .def(
            "hashed_list", &LogParser::hashed_list, nb::arg("place"), nb::arg("offset"), nb::arg("buckets"), nb::arg("width"),
            nb::arg("separator"), nb::arg("repeated"), nb::arg("scale"), nb::arg("newest_first") = false,
            "A list; repeated: its first item fills it up; scale: or -1; newest_first: its items are turned around.")
        .def(
            "vocabulary_list", &LogParser::vocabulary_list, nb::arg("place"), nb::arg("offset"), nb::arg("values"), nb::arg("width"),
            nb::arg("separator"), nb::arg("repeated"), nb::arg("scale"), nb::arg("newest_first") = false, "A list with a vocabulary.")
        .def(
            "number", &LogParser::number, nb::arg("place"), nb::arg("offset"), nb::arg("gap"), nb::arg("scaling"), nb::arg("minus"),
            nb::arg("divisor"), nb::arg("fill"), nb::arg("table"),
            "A number. gap: the column that is 1 where it is missing, or -1. table: float32 [k], what -16 to k - 17 become. Others become\n"
            "(x - minus) / divisor, clipped, where scaling is standard or min-max; else they are left to the caller. Of the scaling value all\n"
            "numbers become themselves. fill: what a missing number becomes.")
        .def("real", &LogParser::real, nb::arg("place"), nb::arg("kind"), "A label, a weight, or a timestamp: s, ms or text.")
        .def(
            "parse", &LogParser::parse, nb::arg("data"), nb::arg("size"), nb::arg("ids"), nb::arg("numbers"), nb::arg("scales"),
            "Whole records of data[:size], uint8 [size + 64 or more]: (bytes taken, records in them, arrays). arrays: None where pyarrow\n"
            "refuses a record, a quoted cell of several lines ends within a value, or a label is neither 0 nor 1 or a weight below 0 or none; of the form lines also where data do not end with a\n"
            "whole row, a row has another number of columns, or a number is none or none that float32 holds; else n, ids int32 [n, ids], numbers float32\n"
            "[n, numbers] and scales float32 [n, scales], each None where the rows stand in the first n of the arrays given, as they do\n"
            "where there can be no more of them; labels and weights float32 [n] and times float64 [n] or None; and of what is left to\n"
            "the caller the flat places int64 [m] in\n"
            "the numbers, their columns int64 [m] and their values float64 [m].")
        .def(
            "parse_rows", &LogParser::parse_rows, nb::arg("rows"), nb::arg("names"), nb::arg("ids"), nb::arg("numbers"), nb::arg("scales"),
            "Rows of Python, {column: text, number, boolean or None, or a list of them for a list} each, whose columns have these names: the\n"
            "arrays of `parse`, in the first n rows of those given. None for other values, and where a row lacks a column.");
    module.def(
        "hash_buckets", &hash_buckets, nb::arg("data"), nb::arg("starts"), nb::arg("lengths"), nb::arg("buckets"),
        "FarmHash Fingerprint64 modulo buckets of the strings data[starts[i]:starts[i] + lengths[i]], int32 [n]. Raises ValueError where\n"
        "a string is outside the data.");
}
