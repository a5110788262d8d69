// Rows of Python, {column: value} each, as the fields of a log.
#pragma once

#include <Python.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <vector>

#include "logs/log_columns.h"

namespace clicks::logs {

constexpr double HUGE_NUMBER = 9223372036854775808.0; // from here on whole numbers keep the exponent

// Texts one after the other, with bytes behind them that may be read.
struct Texts {
    explicit Texts(size_t capacity) : bytes(capacity + PAD) {}
    void append(const void *text, size_t count) {
        if (bytes.size() - size < count + PAD)
            bytes.resize(2 * bytes.size() + count);
        std::memcpy(bytes.data() + size, text, count);
        size += count;
    }
    std::vector<uint8_t> bytes;
    size_t size = 0;
};

// Appends the text of a value, as as_text of zoo/recommenders writes it; false for a value of another type than text, number, boolean and
// None, or of a number beyond 64 bits.
inline bool append_value(PyObject *value, Texts &texts) {
    char digits[24];
    const auto whole = [&](long long number) { texts.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr - digits); };
    if (value == Py_None)
        return true;
    if (PyUnicode_CheckExact(value)) {
        Py_ssize_t size = 0;
        const char *text;
        if (PyUnicode_IS_COMPACT_ASCII(value))
            text = static_cast<const char *>(PyUnicode_DATA(value)), size = PyUnicode_GET_LENGTH(value);
        else if (!(text = PyUnicode_AsUTF8AndSize(value, &size))) {
            PyErr_Clear(); // half of a surrogate pair
            return false;
        }
        if (std::string_view(text, size) != "<NA>" && std::string_view(text, size) != "NaT") // no value, in any form
            texts.append(text, static_cast<size_t>(size));
        return true;
    }
    if (PyBool_Check(value)) {
        whole(value == Py_True);
        return true;
    }
    if (PyLong_CheckExact(value)) {
        int overflow = 0;
        const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (!overflow)
            whole(number);
        return !overflow;
    }
    if (PyFloat_CheckExact(value)) {
        const double number = PyFloat_AS_DOUBLE(value);
        if (std::isnan(number))
            return true;
        if (std::trunc(number) == number && std::fabs(number) < HUGE_NUMBER) {
            whole(static_cast<long long>(number));
            return true;
        }
        char *const text = PyOS_double_to_string(number, 'r', 0, Py_DTSF_ADD_DOT_0, nullptr);
        if (!text) {
            PyErr_Clear();
            return false;
        }
        texts.append(text, std::strlen(text));
        PyMem_Free(text);
        return true;
    }
    return false;
}

// Appends the text of a list's items that are not missing; false for items of other types.
inline bool append_items(PyObject *items, uint8_t separator, const Missing &missing, Texts &texts) {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    bool first = true;
    for (Py_ssize_t i = 0; i < count; ++i) {
        const size_t before = texts.size;
        if (!first)
            texts.append(&separator, 1);
        const size_t begin = texts.size;
        if (!append_value(PySequence_Fast_GET_ITEM(items, i), texts))
            return false;
        const bool none = missing(texts.bytes.data() + begin, texts.size - begin);
        if (none)
            texts.size = before;
        first = first && none;
    }
    return true;
}

// Whether a value is a number with a fraction, which a column of numbers takes as it is: its text would be read as the same number.
inline bool has_fraction(PyObject *value) {
    if (!PyFloat_CheckExact(value))
        return false;
    const double number = PyFloat_AS_DOUBLE(value);
    return std::isfinite(number) && std::trunc(number) != number;
}

constexpr size_t AT_ONCE = 16; // rows

// Loads a dictionary, and the keys of one that was loaded before, so that lookups find them in the cache.
inline void load_ahead(PyObject *rows, size_t row, size_t end) {
    constexpr size_t NEAR = 4, FAR = 8;
    if (row + FAR < end)
        __builtin_prefetch(PyList_GET_ITEM(rows, row + FAR));
    if (PyObject *const near = row + NEAR < end ? PyList_GET_ITEM(rows, row + NEAR) : nullptr; near && PyDict_Check(near)) {
        const auto *const keys = reinterpret_cast<const char *>(reinterpret_cast<PyDictObject *>(near)->ma_keys);
        __builtin_prefetch(keys);
        __builtin_prefetch(keys + 64);
    }
}

// The keys of the first row, in its order: most rows have the same objects as keys, in this order. A column's values are found by its place
// in it, without a lookup, or else by its name.
class Keys {
  public:
    Keys(PyObject *row, const Schema &schema, const std::vector<PyObject *> &names) {
        PyObject *key, *value;
        for (Py_ssize_t position = 0; PyDict_CheckExact(row) && PyDict_Next(row, &position, &key, &value);)
            keys_.push_back(key);
        for (const Column &column : schema.columns) {
            PyObject *const name = names[column.place];
            size_t key_place = 0;
            while (key_place < keys_.size() && !same(keys_[key_place], name))
                ++key_place;
            key_places_.push_back(key_place);
            names_.push_back(key_place < keys_.size() ? keys_[key_place] : name);
        }
        for (const Column &column : schema.columns)
            alone.push_back(std::count_if(schema.columns.begin(), schema.columns.end(), [&](const Column &other) { return other.place == column.place; }) == 1);
        ordered_ = keys_.size() <= 4 * key_places_.size() &&
                           std::all_of(key_places_.begin(), key_places_.end(), [&](size_t key_place) { return key_place < keys_.size(); });
        values_.resize(keys_.size());
        for (PyObject *key : keys_)
            Py_INCREF(key);
    }
    Keys(const Keys &) = delete;
    Keys &operator=(const Keys &) = delete;
    ~Keys() {
        for (PyObject *key : keys_)
            Py_DECREF(key);
    }
    // The values of a row by column; false where it lacks one.
    bool values(PyObject *row, PyObject **to) {
        if (ordered_ && in_order(row)) {
            for (size_t key_place : key_places_)
                *to++ = values_[key_place];
            return true;
        }
        for (PyObject *name : names_)
            if (!(*to++ = PyDict_GetItemWithError(row, name))) {
                PyErr_Clear();
                return false;
            }
        return true;
    }
    std::vector<bool> alone; // of every column: whether no other one has its place

  private:
    static bool same(PyObject *a, PyObject *b) { return a == b || (PyUnicode_CheckExact(a) && PyUnicode_Compare(a, b) == 0); }
    bool in_order(PyObject *row) {
        PyObject *key, *value;
        size_t count = 0;
        for (Py_ssize_t position = 0; PyDict_Next(row, &position, &key, &value);) {
            if (count == keys_.size() || key != keys_[count])
                return false;
            values_[count++] = value;
        }
        return count == keys_.size();
    }
    std::vector<PyObject *> keys_, names_, values_; // names: the objects of the first row, where it has them
    std::vector<size_t> key_places_;                     // of every column: its place among the keys
    bool ordered_;
};

// The fields of the columns of the schema of some rows, [begin, begin + count). A row is read at once, since its values are seldom in the
// cache, and the values of some rows are found before their texts are. False where a row is no dictionary or lacks a column, or a value has
// no text here.
inline bool fields_of_rows(
    PyObject *rows, size_t begin, size_t count, const Schema &schema, Keys &keys, Fields &fields, Texts &texts, std::vector<size_t> &starts,
    std::vector<uint32_t> &lengths) {
    texts.size = 0;
    starts.clear();
    lengths.clear();
    fields.reserve(schema.width);
    const size_t width = schema.columns.size();
    std::vector<PyObject *> values(AT_ONCE * width);
    for (size_t first = 0; first < count; first += AT_ONCE) {
        const size_t end = std::min(count, first + AT_ONCE);
        PyObject **next = values.data();
        for (size_t i = first; i < end; ++i, next += width) {
            load_ahead(rows, begin + i, begin + count);
            PyObject *const row = PyList_GET_ITEM(rows, begin + i);
            if (!PyDict_Check(row) || !keys.values(row, next))
                return false;
            for (size_t c = 0; c < width; ++c)
                __builtin_prefetch(next[c]);
        }
        next = values.data();
        for (size_t i = first; i < end; ++i)
            for (size_t c = 0; c < width; ++c) {
                const Column &column = schema.columns[c];
                PyObject *const value = *next++;
                const size_t start = texts.size;
                const bool raw = column.kind == Kind::number && keys.alone[c] && has_fraction(value);
                if (raw) {
                    const double number = PyFloat_AS_DOUBLE(value);
                    texts.append(&number, sizeof number);
                } else if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
                    if (column.kind != Kind::list || !append_items(value, column.separator, schema.missing, texts))
                        return false;
                } else if (!append_value(value, texts))
                    return false;
                const size_t length = texts.size - start;
                if (length >= NUMBER)
                    return false;
                starts.push_back(start);
                lengths.push_back(raw ? NUMBER : static_cast<uint32_t>(length));
            }
    }
    size_t text = 0;
    for (size_t i = 0; i < count; ++i)
        for (const Column &column : schema.columns) {
            const size_t to = column.place * fields.most + i;
            fields.begins[to] = texts.bytes.data() + starts[text];
            fields.lengths[to] = lengths[text++];
        }
    fields.rows = count;
    return true;
}

} // namespace clicks::logs
