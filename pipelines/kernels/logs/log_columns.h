// The columns that a schema uses of some rows of a log: ids, lists, numbers, labels, weights and times.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "recommenders/arrays.h"
#include "logs/farmhash.h"
#include "logs/log_bits.h"
#include "logs/log_values.h"

namespace clicks::logs {

constexpr size_t PAD = 64; // bytes behind the data that may be read
constexpr size_t STEP = 32768; // bytes at a time: what is known of them stays in the nearest caches
constexpr size_t TOGETHER = 16; // rows that loops of vectors take: none is left to be done one by one
constexpr uint32_t NUMBER = ~uint32_t{0}; // the length of a field that holds a float64 in place of its text

// Texts to ids: hash modulo buckets from 0 or 1 on, or the place in a vocabulary from 1 on, 0 for none of it.
class Ids {
  public:
    explicit Ids(int64_t buckets) : modulo_(buckets), last(modulo_.divisor() + 1), first(1), hashed(true) {}
    Ids(int64_t buckets, int32_t missing) : modulo_(buckets), last(missing), first(0), hashed(true) {}
    explicit Ids(const std::vector<std::string> &values)
        : modulo_(1), last(static_cast<int32_t>(values.size()) + 1), first(1), hashed(false) {
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
            return modulo_(length == 8 ? farmhash::hash8(farmhash::fetch64(p)) : farmhash::fingerprint64(p, length)) + first;
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
        const uint64_t text_key = key(p, length), mixed = (text_key ^ text_key >> 32) * farmhash::K2;
        for (size_t slot = mixed >> 32;; ++slot) {
            Entry &entry = entries_[slot & (entries_.size() - 1)];
            if (!entry.id ||
                (entry.key == text_key && entry.length == length && (length <= 8 || !std::memcmp(&bytes_[entry.start], p, length))))
                return entry;
        }
    }
    Modulo modulo_;
    std::vector<Entry> entries_;
    std::vector<uint8_t> bytes_;

  public:
    int32_t last; // of a missing value
    int32_t first;
    bool hashed;
};

enum class Kind { category, list, number, label, weight, seconds, milliseconds, instant };
enum Scaling { other, standard, min_max, identity }; // of a number that is not in its table; identity: of every number, without a table

struct Column {
    Kind kind;
    size_t place; // in the log
    size_t offset = 0;
    std::shared_ptr<Ids> ids{};
    size_t width = 1; // of a list, from here on
    uint8_t separator = 0;
    bool repeated = false;
    int64_t scale = -1;
    bool newest_first = false; // the last item comes first
    int64_t gap = -1; // of a number, from here on
    Scaling scaling = other;
    double minus = 0, divisor = 1;
    float fill = 0; // of a missing number
    std::vector<float> table{};
};

struct Schema {
    size_t width; // columns of the log
    uint8_t delimiter;
    bool quotes;
    bool lines; // every line feed ends a row, other bytes are those of a field; a number that is none is a fault
    bool canonical; // texts are read in their canonical form, but for those that are hashed from 0 on
    Missing missing;
    size_t ids, numbers, scales;
    std::vector<Column> columns{};
    bool labels = false, weights = false, times = false;
};

struct Left {
    std::vector<int64_t> places, columns;
    std::vector<double> values;
};

// Arrays of the caller for the ids, numbers and scales of so many rows.
struct Outputs {
    int32_t *ids = nullptr;
    float *numbers = nullptr, *scales = nullptr;
    size_t rows = 0;
};

struct Parsed {
    size_t count = 0;    // rows
    size_t records = 0;  // met before the end, right or wrong
    size_t consumed = 0; // bytes of them
    int32_t *ids = nullptr; // where rows go: into the caller's arrays, or into own memory where there may be more rows
    float *numbers = nullptr, *scales = nullptr;
    std::unique_ptr<int32_t[]> own_ids;
    std::unique_ptr<float[]> own_numbers, own_scales, labels, weights;
    std::unique_ptr<double[]> times;
    Left left; // numbers that are to be scaled

    void reserve(const Schema &schema, size_t rows, const Outputs &outputs) {
        if (rows <= outputs.rows)
            ids = outputs.ids, numbers = outputs.numbers, scales = outputs.scales;
        else {
            own_ids.reset(ids = new int32_t[rows * schema.ids]);
            own_numbers.reset(numbers = new float[rows * schema.numbers]);
            own_scales.reset(scales = new float[rows * schema.scales]);
        }
        labels.reset(schema.labels ? new float[rows] : nullptr);
        weights.reset(schema.weights ? new float[rows] : nullptr);
        times.reset(schema.times ? new double[rows] : nullptr);
    }
};

// Some rows of the log: the fields of one column, or of one column after the other.
struct Fields {
    // rows: that there are at most.
    explicit Fields(size_t width, size_t rows = STEP)
        : most((std::min(STEP / width + 2 * TOGETHER, rows) + TOGETHER) / TOGETHER * TOGETHER), words(new uint64_t[most]()),
          values(new int32_t[most]), others(new uint8_t[most]) {
        reserve(1);
    }
    // Allocates the begins and lengths of so many columns.
    void reserve(size_t columns) {
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

// False where a text has a canonical form that is left to the caller.
ALWAYS_INLINE bool categories(
    const Column &column, const Missing &missing, const uint8_t *const *begins, const uint32_t *lengths, Fields &fields, size_t stride,
    bool canonical_form, int32_t *to) {
    const Ids &ids = *column.ids;
    const size_t rows = fields.rows;
    size_t eights = 0, empty = 0;
    for (size_t i = 0; i < rows; ++i) {
        eights += lengths[i] == 8;
        empty += lengths[i] == 0;
    }
    const bool many = ids.hashed && eights * 4 >= rows;
    uint64_t any = 0; // nonzero where a text of eight bytes may have another form
    if (many) { // a 32-bit number in hexadecimal, say
        uint64_t *const words = fields.words.get();
        int32_t *const values = fields.values.get();
        const Modulo modulo = ids.modulo();
        const int32_t last = ids.last, first = ids.first;
        for (size_t i = 0; i < rows; ++i)
            words[i] = farmhash::fetch64(begins[i]);
        for (size_t i = 0; i < rows; i += TOGETHER)
            for (size_t k = i; k < i + TOGETHER; ++k) {
                const int32_t id = modulo(farmhash::hash8(words[k])) + first;
                values[k] = lengths[k] ? id : last;
            }
        for (size_t i = 0; i < rows; ++i)
            to[i * stride] = values[i];
        if (canonical_form)
            for (size_t i = 0; i < rows; ++i)
                any |= eight_may_change(words[i], lengths[i]);
        if (eights + empty == rows && !any)
            return true;
    }
    const uint8_t mask = canonical_form ? Missing::word | Missing::other_form : Missing::word;
    for (size_t i = 0; i < rows; ++i) {
        if (many && (!lengths[i] || (lengths[i] == 8 && !any)))
            continue;
        const uint8_t *const p = begins[i];
        const uint32_t length = lengths[i];
        if (!length)
            to[i * stride] = ids.last;
        else if (const uint8_t forms = missing.forms(p, length) & mask; __builtin_expect(!forms, 1))
            to[i * stride] = ids(p, length);
        else {
            Text text{p, p + length};
            if (forms & Missing::other_form && may_change(farmhash::fetch64(p), length) && !canonical(text))
                return false;
            const size_t text_length = text.end - text.begin;
            to[i * stride] = missing(text.begin, text_length) ? ids.last : ids(text.begin, text_length);
        }
    }
    return true;
}

// False where a text has a canonical form that is left to the caller.
ALWAYS_INLINE bool lists(
    const Column &column, const Missing &missing, const uint8_t *const *begins, const uint32_t *lengths, size_t rows, const Schema &schema,
    int32_t *to, float *scales) {
    std::vector<Text> ring(column.width); // the last items
    for (size_t i = 0; i < rows; ++i, to += schema.ids) {
        size_t count = 0, next = 0;
        if (schema.canonical && may_be_list(begins[i], lengths[i]))
            return false;
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
                Text item = trimmed({p, stop});
                if (schema.canonical && item.begin < item.end && missing.forms(item.begin, item.end - item.begin)) {
                    const uint32_t length = static_cast<uint32_t>(item.end - item.begin);
                    if (may_change(farmhash::fetch64(item.begin), length) && !canonical(item))
                        return false;
                    if (missing(item.begin, item.end - item.begin))
                        item.end = item.begin;
                }
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
            to[column.newest_first ? kept - 1 - k : k] = (*column.ids)(ring[from].begin, ring[from].end - ring[from].begin);
            from = from + 1 == column.width ? 0 : from + 1;
        }
        const int32_t fill = column.repeated && kept ? to[0] : column.ids->last;
        for (size_t k = kept; k < column.width; ++k)
            to[k] = fill;
        if (column.scale >= 0)
            scales[i * schema.scales + column.scale] = kept ? 1.0f / static_cast<float>(kept) : 0.0f;
    }
    return true;
}

// False where text that is no number is a fault, and there is such.
ALWAYS_INLINE bool numbers(
    const Column &column, const uint8_t *const *begins, const uint32_t *lengths, Fields &fields, const Schema &schema, float *to, size_t row,
    Left &left) {
    constexpr size_t EIGHT_DIGITS = 100'000'000;
    const size_t rows = fields.rows, stride = schema.numbers;
    for (size_t i = 0; i < rows; ++i)
        fields.words[i] = farmhash::fetch64(begins[i]);
    const bool plain = column.scaling == identity;
    const float *const table = column.table.data();
    int32_t *const places = fields.values.get();
    const size_t table_size = plain ? EIGHT_DIGITS + LOWEST + 1 : column.table.size();
    const uint64_t any = places_of_numbers(rows, fields.words.get(), lengths, table_size, places, fields.others.get());
    float *const values = to + column.offset, *const gaps = column.gap < 0 ? nullptr : to + column.gap;
    if (plain)
        for (size_t i = 0; i < rows; ++i)
            values[i * stride] = places[i] ? static_cast<float>(places[i] - static_cast<int32_t>(LOWEST + 1)) : column.fill;
    else
        for (size_t i = 0; i < rows; ++i)
            values[i * stride] = table[places[i]];
    if (gaps)
        for (size_t i = 0; i < rows; ++i)
            gaps[i * stride] = lengths[i] ? 0 : 1;
    if (!any)
        return true;
    for (size_t i = 0; i < rows; ++i) {
        if (!fields.others[i])
            continue;
        double x;
        if (lengths[i] == NUMBER)
            std::memcpy(&x, begins[i], sizeof x);
        else if (schema.lines) {
            float exact;
            if (!exact_number(begins[i], begins[i] + lengths[i], exact))
                return false;
            x = exact;
        } else
            x = number({begins[i], begins[i] + lengths[i]});
        if (schema.canonical && x != x) {
            if (may_be_list(begins[i], lengths[i]))
                return false;
            if (const int truth = boolean(begins[i], lengths[i]); truth >= 0)
                x = truth;
        }
        if (schema.canonical && x == 0)
            x = 0; // not -0
        float *const value = values + i * stride, *const gap = gaps ? gaps + i * stride : nullptr;
        if (x != x) {
            *value = column.fill;
            if (gap)
                *gap = 1;
        } else if (plain)
            *value = static_cast<float>(x);
        else if (column.scaling == other) {
            left.places.push_back(static_cast<int64_t>((row + i) * stride + column.offset));
            left.columns.push_back(static_cast<int64_t>(column.offset));
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
    return true;
}

// A column of some rows; false where it holds what pyarrow refuses, or a label or weight that is none. high: whether there may be bytes
// beyond ASCII.
ALWAYS_INLINE bool encode_column(
    const Schema &schema, const Column &column, const uint8_t *const *begins, const uint32_t *lengths, Fields &fields, bool high, Parsed &out) {
    const size_t rows = fields.rows, row = out.count;
    if (high)
        for (size_t i = 0; i < rows; ++i)
            if (!is_utf8(begins[i], lengths[i]))
                return false;
    const auto real = [&](size_t i) {
        float exact;
        if (schema.lines)
            return exact_number(begins[i], begins[i] + lengths[i], exact) ? exact : NOTHING;
        const int truth = schema.canonical ? boolean(begins[i], lengths[i]) : -1;
        const double x = truth >= 0 ? truth : lengths[i] ? number({begins[i], begins[i] + lengths[i]}) : NOTHING;
        return schema.canonical && x == 0 ? 0 : x;
    };
    switch (column.kind) {
    case Kind::category:
        if (!categories(
                column, schema.missing, begins, lengths, fields, schema.ids, schema.canonical && column.ids->first,
                &out.ids[row * schema.ids] + column.offset))
            return false;
        break;
    case Kind::list:
        if (!lists(
                column, schema.missing, begins, lengths, rows, schema, &out.ids[row * schema.ids] + column.offset,
                out.scales + row * schema.scales))
            return false;
        break;
    case Kind::number:
        if (!numbers(column, begins, lengths, fields, schema, out.numbers + row * schema.numbers, row, out.left))
            return false;
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
            const double value = (lengths[i] ? number({begins[i], begins[i] + lengths[i]}) : NOTHING) / divisor;
            out.times[row + i] = value == value ? value : NEVER;
        }
        break;
    }
    case Kind::instant:
        for (size_t i = 0; i < rows; ++i)
            out.times[row + i] = instant({begins[i], begins[i] + lengths[i]});
    }
    return true;
}

// `encode_column`, compiled once for an instruction set: inlined at every call it takes long to compile.
using EncodeColumn = bool (*)(const Schema &, const Column &, const uint8_t *const *, const uint32_t *, Fields &, bool, Parsed &);

// The columns of some rows. find: gives where a column's begins and lengths stand in `fields`.
template <class Find> ALWAYS_INLINE bool encode(const Schema &schema, Fields &fields, bool high, EncodeColumn encode_one, Parsed &out, const Find &find) {
    for (const Column &column : schema.columns) {
        const size_t field = find(column.place);
        if (!encode_one(schema, column, &fields.begins[field], &fields.lengths[field], fields, high, out))
            return false;
    }
    out.count += fields.rows;
    return true;
}

// The same of fields that stand by columns.
inline bool encode(const Schema &schema, Fields &fields, bool high, EncodeColumn encode_one, Parsed &out) {
    return encode(schema, fields, high, encode_one, out, [&](size_t column) { return column * fields.most; });
}

} // namespace clicks::logs
