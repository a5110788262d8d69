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

// Appends the text of a value, as as_text of zoo/recommenders writes it; false for a value of another type than text, number, boolean and
// None, or of a number beyond 64 bits.
inline bool append_value(PyObject *value, std::vector<uint8_t> &bytes) {
    const auto append = [&](const char *text, size_t size) { bytes.insert(bytes.end(), text, text + size); };
    char digits[24];
    const auto whole = [&](long long number) { append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr - digits); };
    if (value == Py_None)
        return true;
    if (PyUnicode_CheckExact(value)) {
        Py_ssize_t size = 0;
        const char *const text = PyUnicode_AsUTF8AndSize(value, &size);
        if (!text) {
            PyErr_Clear(); // half of a surrogate pair
            return false;
        }
        if (std::string_view(text, size) != "<NA>" && std::string_view(text, size) != "NaT") // no value, in any form
            append(text, static_cast<size_t>(size));
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
        append(text, std::strlen(text));
        PyMem_Free(text);
        return true;
    }
    return false;
}

// Appends the text of a list's items that are not missing; false for items of other types.
inline bool append_items(PyObject *items, uint8_t separator, const Missing &missing, std::vector<uint8_t> &bytes) {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    bool first = true;
    for (Py_ssize_t i = 0; i < count; ++i) {
        const size_t before = bytes.size();
        if (!first)
            bytes.push_back(separator);
        const size_t begin = bytes.size();
        if (!append_value(PySequence_Fast_GET_ITEM(items, i), bytes))
            return false;
        const uint32_t size = static_cast<uint32_t>(bytes.size() - begin);
        bytes.resize(bytes.size() + PAD); // that may be read
        const bool none = missing(bytes.data() + begin, size);
        bytes.resize(none ? before : begin + size);
        first = first && none;
    }
    return true;
}

constexpr size_t AT_ONCE = 16; // rows

// Loads a dictionary, and the keys of one that was loaded before, so that lookups find them in the cache.
inline void load_ahead(PyObject *rows, size_t at, size_t end) {
    constexpr size_t NEAR = 4, FAR = 8;
    if (at + FAR < end)
        __builtin_prefetch(PyList_GET_ITEM(rows, at + FAR));
    if (PyObject *const near = at + NEAR < end ? PyList_GET_ITEM(rows, at + NEAR) : nullptr; near && PyDict_Check(near)) {
        const auto *const keys = reinterpret_cast<const char *>(reinterpret_cast<PyDictObject *>(near)->ma_keys);
        __builtin_prefetch(keys);
        __builtin_prefetch(keys + 64);
    }
}

// The fields of the columns of the schema of some rows, [begin, begin + count). A row is read at once, since its values are seldom in the
// cache, and the values of some rows are found before their texts are. False where a row is no dictionary or lacks a column, or a value has
// no text here.
inline bool fields_of_rows(
    PyObject *rows, size_t begin, size_t count, const Schema &schema, const std::vector<PyObject *> &names, Fields &fields,
    std::vector<uint8_t> &bytes, std::vector<size_t> &starts) {
    bytes.clear();
    starts.clear();
    fields.reserve(schema.width);
    const size_t width = schema.columns.size();
    std::vector<PyObject *> values(AT_ONCE * width);
    for (size_t first = 0; first < count; first += AT_ONCE) {
        const size_t end = std::min(count, first + AT_ONCE);
        PyObject **next = values.data();
        for (size_t i = first; i < end; ++i) {
            load_ahead(rows, begin + i, begin + count);
            PyObject *const row = PyList_GET_ITEM(rows, begin + i);
            if (!PyDict_Check(row))
                return false;
            for (const Column &column : schema.columns) {
                PyObject *const value = PyDict_GetItemWithError(row, names[column.place]);
                if (!value) {
                    PyErr_Clear();
                    return false;
                }
                __builtin_prefetch(value);
                *next++ = value;
            }
        }
        next = values.data();
        for (size_t i = first; i < end; ++i)
            for (const Column &column : schema.columns) {
                PyObject *const value = *next++;
                starts.push_back(bytes.size());
                const bool items = PyList_CheckExact(value) || PyTuple_CheckExact(value);
                if (items ? column.kind != Kind::list || !append_items(value, column.separator, schema.missing, bytes)
                          : !append_value(value, bytes))
                    return false;
            }
    }
    starts.push_back(bytes.size());
    if (bytes.size() > std::numeric_limits<uint32_t>::max())
        return false;
    bytes.resize(bytes.size() + PAD);
    const size_t *start = starts.data();
    for (size_t i = 0; i < count; ++i)
        for (const Column &column : schema.columns) {
            const size_t to = column.place * fields.most + i;
            fields.begins[to] = bytes.data() + start[0];
            fields.lengths[to] = static_cast<uint32_t>(start[1] - start[0]);
            ++start;
        }
    fields.rows = count;
    return true;
}

} // namespace clicks::logs
