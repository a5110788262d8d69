// Columns of numbers to lines of CSV, as pyarrow writes them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace {

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
            throw std::invalid_argument("expected contiguous columns of int64 or float32");
        if (!cells.empty() && array.size() != count)
            throw std::invalid_argument("expected columns of one length");
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
            for (const Cells &cell : cells) {
                to = cell.whole ? std::to_chars(to, to + LONGEST, cell.whole[i]).ptr : write(to, cell.real[i]);
                *to++ = ',';
            }
            to[-1] = '\n';
        }
    }
    return nb::bytes(text.get(), to - text.get());
}

} // namespace

void bind_csv_lines(nb::module_ &module) {
    module.def(
        "csv_lines", &csv_lines, nb::arg("columns"),
        "The lines of a table of int64 and float32 columns [n], C-contiguous, comma separated, as pyarrow writes them. Raises ValueError\n"
        "for other columns.");
}
