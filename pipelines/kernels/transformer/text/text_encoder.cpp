#include "transformer/text/text_encoder.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <mutex>

#include "isa/threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

constexpr int64_t kTokensAtOnce = 192;  // texts are encoded together up to so many tokens
constexpr int64_t kWidth = 16;          // lanes of a sum
constexpr float kShortest = 1e-12f;     // length of a vector, at least, that is divided by

std::string text(int64_t value) { return std::to_string(value); }

// The upper half of sixteen sums added to the lower one until one is left.
float reduce_lanes(float *sums) {
    for (int64_t half = kWidth / 2; half; half /= 2)
        for (int64_t l = 0; l < half; ++l) sums[l] = sums[l] + sums[l + half];
    return sums[0];
}

// sum_j x_j y_j in sixteen lanes; width: whole sixteens.
float dot(const float *x, const float *y, int64_t width) {
    float sums[kWidth] = {};
    for (int64_t j = 0; j < width; j += kWidth)
        for (int64_t l = 0; l < kWidth; ++l) sums[l] = sums[l] + x[j + l] * y[j + l];
    return reduce_lanes(sums);
}

}  // namespace

TextEncoder::TextEncoder(const Encoder &encoder, int64_t types, const std::string &pooling, bool normalize)
    : encoder_(encoder), types_(types), longest_(0), normalize_(normalize) {
    if (!encoder.complete()) refuse("texts", "the encoder has no result yet");
    const int64_t places = encoder.places();
    if (types < 1 || types > places || places % types) refuse("texts", text(places) + " positions are not " + text(types) + " tables of them");
    if (pooling != "mean" && pooling != "cls" && pooling != "max") refuse("texts", "there is no pooling " + pooling);
    pooling_ = pooling == "mean" ? Pooling::kMean : pooling == "cls" ? Pooling::kCls : Pooling::kMax;
    longest_ = encoder.by_position() ? places / types : encoder.positions();
    if (encoder.reach() < longest_) refuse("texts", "a bias of attention is of " + text(encoder.reach()) + " tokens, positions of " + text(longest_));
}

void TextEncoder::dense(const Array &weight, const Array &bias, const std::string &activation) {
    const auto *w = data_of<float>(weight, "weight", 2), *b = data_of<float>(bias, "bias", 1);
    const auto outputs = static_cast<int64_t>(weight.shape(0)), inputs = static_cast<int64_t>(weight.shape(1));
    if (inputs != width() || !outputs || outputs > kMaxWidth || static_cast<int64_t>(bias.shape(0)) != outputs)
        refuse("dense", "weights of " + text(outputs) + " x " + text(inputs) + " do not fit " + text(width()) + " inputs and the bias");
    if (activation != "" && activation != "tanh" && activation != "relu") refuse("dense", "there is no " + activation);
    const auto finite = [](float x) { return std::isfinite(x); };
    if (!std::all_of(w, w + outputs * inputs, finite) || !std::all_of(b, b + outputs, finite)) refuse("dense", "weights are not finite");
    const int64_t stride = round_up(inputs, kWidth);
    Dense layer{inputs, outputs, {}, {b, b + outputs}, activation == "" ? Then::kNothing : activation == "tanh" ? Then::kTanh : Then::kRelu};
    layer.weight.resize(static_cast<size_t>(outputs * stride));
    for (int64_t j = 0; j < outputs; ++j) std::copy_n(w + j * inputs, inputs, layer.weight.begin() + j * stride);
    layers_.push_back(std::move(layer));
}

void TextEncoder::pool(const Rows &rows, int64_t begin, int64_t count, std::vector<float> &x, std::vector<float> &y, float *out) const {
    const int64_t width = encoder_.width();
    const float *row = rows.values + begin * rows.stride;
    x.assign(static_cast<size_t>(round_up(width, kWidth)), 0.0f);
    std::copy_n(row, width, x.data());
    if (pooling_ != Pooling::kCls)
        for (int64_t i = 1; i < count; ++i) {
            row += rows.stride;
            if (pooling_ == Pooling::kMean)
                for (int64_t j = 0; j < width; ++j) x[static_cast<size_t>(j)] = x[static_cast<size_t>(j)] + row[j];
            else
                for (int64_t j = 0; j < width; ++j) x[static_cast<size_t>(j)] = row[j] > x[static_cast<size_t>(j)] ? row[j] : x[static_cast<size_t>(j)];
        }
    if (pooling_ == Pooling::kMean) {
        const float number = static_cast<float>(count);
        for (float &each : x) each = each / number;
    }
    for (const Dense &layer : layers_) {
        y.assign(static_cast<size_t>(round_up(layer.outputs, kWidth)), 0.0f);
        const int64_t stride = round_up(layer.inputs, kWidth);
        for (int64_t j = 0; j < layer.outputs; ++j)
            y[static_cast<size_t>(j)] = dot(x.data(), layer.weight.data() + j * stride, stride) + layer.bias[static_cast<size_t>(j)];
        if (layer.then == Then::kTanh)
            encoder_.tanh(y.data(), static_cast<int64_t>(y.size()));
        else if (layer.then == Then::kRelu)
            for (float &each : y) each = each < 0 ? 0 : each;
        x.swap(y);
    }
    if (normalize_) {
        const float length = std::sqrt(dot(x.data(), x.data(), static_cast<int64_t>(x.size())));
        const float divisor = length > kShortest ? length : kShortest;
        for (float &each : x) each = each / divisor;
    }
    std::copy_n(x.data(), this->width(), out);
}

void TextEncoder::compute(const int32_t *tokens, const int32_t *types, const int64_t *first, int64_t count, int64_t threads,
                          float *out) const {
    // Every thread gets the same number of batches, each of about the same number of tokens. Results do not depend on them.
    const int64_t share = threads * kTokensAtOnce, target = threads * ((first[count] + share - 1) / share);
    const int64_t most = threads == 1 ? kTokensAtOnce : (first[count] + target - 1) / target;
    std::vector<int64_t> batches{0};  // the first text of each, and the end
    for (int64_t i = 1; i < count; ++i)
        if (first[i + 1] - first[batches.back()] > most) batches.push_back(i);
    batches.push_back(count);
    const int64_t number = static_cast<int64_t>(batches.size()) - 1;
    std::atomic<int64_t> next{0};
    std::exception_ptr error;
    std::mutex error_mutex;
    on_threads(std::min(threads, number), [&](bool) {
        try {
            Encoding memory;
            std::vector<float> x, y;
            for (int64_t batch; (batch = next++) < number;) {
                const int64_t begin = batches[static_cast<size_t>(batch)], end = batches[static_cast<size_t>(batch) + 1], at = first[begin];
                const Rows rows = encoder_.encode(memory, tokens + at, first + begin, end - begin, types + at, longest_);
                for (int64_t i = begin; i < end; ++i) pool(rows, first[i] - at, first[i + 1] - first[i], x, y, out + i * width());
            }
        } catch (...) {
            next = number;
            const std::lock_guard<std::mutex> locked(error_mutex);
            error = std::current_exception();
        }
    });
    if (error) std::rethrow_exception(error);
}

namespace {

// Values int32 [n] from 0 on below `limit`, as a copy: nobody can change them after the check.
std::vector<int32_t> checked(const Array &array, const char *name, int64_t limit) {
    const auto *data = data_of<int32_t>(array, name, 1);
    std::vector<int32_t> copy(data, data + array.shape(0));
    for (const int32_t each : copy)
        if (each < 0 || each >= limit) refuse(name, "found " + text(each) + ", expected 0 to " + text(limit - 1));
    return copy;
}

NewArray<float> compute(const TextEncoder &encoder, const Array &tokens, const Array &types, const Array &lengths, int64_t threads) {
    const std::vector<int32_t> token = checked(tokens, "tokens", encoder.tokens()), type = checked(types, "types", encoder.types());
    const auto *length = data_of<int64_t>(lengths, "lengths", 1);
    std::vector<int64_t> first{0};
    for (size_t i = 0; i < lengths.shape(0); ++i) {
        const int64_t each = length[i];
        if (each < 1 || each > encoder.longest()) refuse("lengths", "a text of " + text(each) + " tokens, expected 1 to " + text(encoder.longest()));
        first.push_back(first.back() + each);
    }
    if (first.back() != static_cast<int64_t>(token.size()) || token.size() != type.size()) refuse("lengths", "they are not those of the tokens");
    if (threads < 1) refuse("threads", "there are none");
    const auto count = static_cast<int64_t>(first.size()) - 1;
    Buffer<float> out(std::max<int64_t>(count * encoder.width(), 1));
    {
        nb::gil_scoped_release unlocked;
        if (count) encoder.compute(token.data(), type.data(), first.data(), count, threads, out.data());
    }
    return array_of(out.data(), count, encoder.width(), encoder.width());
}

}  // namespace
}  // namespace zoo

void bind_text_encoder(nb::module_ &module) {
    using namespace zoo;
    nb::class_<TextEncoder>(module, "TextEncoder")
        .def(nb::init<const Encoder &, int64_t, const std::string &, bool>(), nb::keep_alive<1, 2>(), "encoder"_a, "types"_a, "pooling"_a,
             "normalize"_a)
        .def("dense", &TextEncoder::dense, "weight"_a, "bias"_a, "activation"_a)
        .def("compute", &compute, "tokens"_a, "types"_a, "lengths"_a, "threads"_a);
}
