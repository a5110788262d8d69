#include "transformer/text/text_encoder.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <mutex>
#include <utility>

#include "isa/threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

constexpr int64_t kTokensAtOnce = 192;  // texts are encoded together up to so many tokens
constexpr int64_t kMostKept = 1024;     // tokens whose memory is kept for the next call
constexpr int64_t kLeastShared = 24;    // tokens of a text that several threads compute: of fewer they would be slower than one
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

TextEncoder::TextEncoder(const Encoder &encoder, int64_t types, const std::vector<std::string> &poolings)
    : encoder_(encoder), types_(types), longest_(0), width_(0) {
    if (!encoder.complete()) refuse("texts", "the encoder has no result yet");
    const int64_t places = encoder.places();
    if (types < 1 || types > places || places % types) refuse("texts", text(places) + " positions are not " + text(types) + " tables of them");
    const std::pair<const char *, Pooling> kinds[] = {{"mean", Pooling::kMean}, {"cls", Pooling::kCls}, {"max", Pooling::kMax}, {"last", Pooling::kLast},
                                                      {"weighted_mean", Pooling::kWeightedMean}, {"mean_sqrt_len", Pooling::kMeanSqrtLength}};
    for (const std::string &name : poolings) {
        const auto *kind = std::find_if(std::begin(kinds), std::end(kinds), [&](const auto &entry) { return name == entry.first; });
        if (kind == std::end(kinds)) refuse("texts", "there is no pooling " + name);
        poolings_.push_back(kind->second);
    }
    width_ = encoder.width() * std::max<int64_t>(static_cast<int64_t>(poolings_.size()), 1);
    if (poolings_.size() == 1 && poolings_[0] == Pooling::kCls) picked_ = Encoder::Picked::kFirst;
    if (poolings_.size() == 1 && poolings_[0] == Pooling::kLast) picked_ = Encoder::Picked::kLast;
    longest_ = encoder.by_position() ? places / types : encoder.positions();
    if (encoder.reach() < longest_) refuse("texts", "a table of attention is of " + text(encoder.reach()) + " tokens, positions of " + text(longest_));
}

void TextEncoder::dense(const Array &weight, const Array &bias, const std::string &activation) {
    const auto *w = data_of<float>(weight, "weight", 2), *b = data_of<float>(bias, "bias", 1);
    const auto outputs = static_cast<int64_t>(weight.shape(0)), inputs = static_cast<int64_t>(weight.shape(1));
    if (inputs != width() || !outputs || outputs > kMaxWidth || static_cast<int64_t>(bias.shape(0)) != outputs)
        refuse("dense", "weights of " + text(outputs) + " x " + text(inputs) + " do not fit " + text(width()) + " inputs and the bias");
    const auto finite = [](float x) { return std::isfinite(x); };
    if (!std::all_of(w, w + outputs * inputs, finite) || !std::all_of(b, b + outputs, finite)) refuse("dense", "weights are not finite");
    const int64_t stride = round_up(inputs, kWidth);
    Step layer{Kind::kDense, inputs, outputs, {}, {b, b + outputs}, activation_named(activation)};
    layer.weight.resize(static_cast<size_t>(outputs * stride));
    for (int64_t j = 0; j < outputs; ++j) std::copy_n(w + j * inputs, inputs, layer.weight.begin() + j * stride);
    steps_.push_back(std::move(layer)), width_ = outputs;
}

void TextEncoder::layer_norm(const Array &scale, const Array &bias, float epsilon) {
    const auto *s = data_of<float>(scale, "scale", 1), *b = data_of<float>(bias, "bias", 1);
    if (static_cast<int64_t>(scale.shape(0)) != width_ || static_cast<int64_t>(bias.shape(0)) != width_ || !(epsilon >= 0))
        refuse("norm", "scale and bias do not fit " + text(width_) + " numbers");
    Step step{Kind::kLayerNorm, width_, width_, {s, s + width_}, {b, b + width_}, Activation::kNone, epsilon};
    for (auto *values : {&step.weight, &step.bias}) values->resize(static_cast<size_t>(round_up(width_, kColumns)));
    steps_.push_back(std::move(step));
}

void TextEncoder::truncate(int64_t components) {
    if (components < 1 || components > width_) refuse("truncate", text(components) + " of " + text(width_) + " numbers");
    steps_.push_back({Kind::kTruncate, width_, components, {}, {}}), width_ = components;
}

void TextEncoder::normalize() { steps_.push_back({Kind::kNormalize, width_, width_, {}, {}}); }

void TextEncoder::vocabulary(const Array &weight, const Array &scale, const Array &bias) {
    if (pools() || !steps_.empty() || vocabulary_) refuse("vocabulary", "it follows a pooling or another step");
    if (weight.ndim() != 2 || static_cast<int64_t>(weight.shape(0)) != width_) refuse("vocabulary", "its weights do not take " + text(width_) + " numbers");
    vocabulary_.emplace(encoder_.kernels(), weight, scale, bias, StaticQParams{}, false);
    width_ = vocabulary_->outputs();
}

void TextEncoder::largest(const Rows &rows, const int64_t *first, int64_t begin, int64_t end, float *out) const {
    thread_local Buffer<uint8_t> codes;
    thread_local Buffer<float> scales, panel;
    codes.reserve(kTokensAtOnce * rows.stride), scales.reserve(kTokensAtOnce), panel.reserve(kTokensAtOnce * kPanel);
    std::fill_n(out + begin * width_, (end - begin) * width_, 0.0f);
    int64_t text = begin;  // that of a block's first row
    for (int64_t token = first[begin]; token < first[end]; token += kTokensAtOnce) {
        const int64_t n = std::min(kTokensAtOnce, first[end] - token);
        const Rows block{rows.values + (token - first[begin]) * rows.stride, codes.data(), scales.data(), rows.stride};
        encoder_.kernels().rows->quantize_rows(block, rows.stride, vocabulary_->qparams(), n);
        while (first[text + 1] <= token) ++text;
        for (int64_t column = 0; column < width_; column += kPanel) {
            vocabulary_->panel(block, n, column, panel.data());
            const int64_t columns = std::min(kPanel, width_ - column);
            int64_t own = text;
            for (int64_t i = 0; i < n; ++i) {
                while (first[own + 1] <= token + i) ++own;
                float *to = out + own * width_ + column;
                const float *from = panel.data() + i * kPanel;
                for (int64_t j = 0; j < columns; ++j) to[j] = from[j] > to[j] ? from[j] : to[j];
            }
        }
    }
    for (int64_t j = begin * width_; j < end * width_; ++j)
        if (out[j] > 0) out[j] = static_cast<float>(std::log1p(static_cast<double>(out[j])));
}

void TextEncoder::pool(const Rows &rows, int64_t begin, int64_t count, std::vector<float> &x) const {
    const int64_t width = encoder_.width();
    x.assign(static_cast<size_t>(round_up(width * static_cast<int64_t>(poolings_.size()), kColumns)), 0.0f);
    float *to = x.data();
    for (const Pooling pooling : poolings_) {
        const float *row = rows.values + (begin + (pooling == Pooling::kLast ? count - 1 : 0)) * rows.stride;
        std::copy_n(row, width, to);
        if (pooling != Pooling::kCls && pooling != Pooling::kLast) {
            for (int64_t i = 1; i < count; ++i) {
                row += rows.stride;
                const float place = static_cast<float>(i + 1);
                if (pooling == Pooling::kMax)
                    for (int64_t j = 0; j < width; ++j) to[j] = row[j] > to[j] ? row[j] : to[j];
                else if (pooling == Pooling::kWeightedMean)
                    for (int64_t j = 0; j < width; ++j) to[j] = to[j] + row[j] * place;
                else
                    for (int64_t j = 0; j < width; ++j) to[j] = to[j] + row[j];
            }
            const float number = static_cast<float>(count);
            const float divisor = pooling == Pooling::kMax              ? 1.0f
                                  : pooling == Pooling::kMean           ? number
                                  : pooling == Pooling::kMeanSqrtLength ? std::sqrt(number)
                                                                        : static_cast<float>(count * (count + 1) / 2);
            for (int64_t j = 0; j < width; ++j) to[j] = to[j] / divisor;
        }
        to += width;
    }
}

void TextEncoder::finish(std::vector<float> &x, std::vector<float> &y, float *out) const {
    for (const Step &step : steps_) {
        if (step.kind == Kind::kTruncate) {
            std::fill(x.begin() + step.outputs, x.end(), 0.0f);
        } else if (step.kind == Kind::kNormalize) {
            const float length = std::sqrt(dot(x.data(), x.data(), static_cast<int64_t>(x.size())));
            const float divisor = length > kShortest ? length : kShortest;
            for (float &value : x) value = value / divisor;
        } else {
            y.assign(static_cast<size_t>(round_up(step.outputs, kColumns)), 0.0f);
            if (step.kind == Kind::kLayerNorm) {
                encoder_.normalize({step.inputs, step.weight.data(), step.bias.data(), step.epsilon, {}}, x.data(), y.data());
            } else {
                const int64_t stride = round_up(step.inputs, kWidth);
                for (int64_t j = 0; j < step.outputs; ++j)
                    y[static_cast<size_t>(j)] = dot(x.data(), step.weight.data() + j * stride, stride) + step.bias[static_cast<size_t>(j)];
                if (step.activation != Activation::kNone) encoder_.activate(step.activation, y.data(), static_cast<int64_t>(y.size()));
                std::fill(y.begin() + step.outputs, y.end(), 0.0f);  // a sigmoid of 0 is not
            }
            x.swap(y);
        }
    }
    std::copy_n(x.data(), width_, out);
}

std::unique_ptr<Encoding> TextEncoder::take() const {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (idle_.empty()) return std::make_unique<Encoding>();
    std::unique_ptr<Encoding> memory = std::move(idle_.back());
    idle_.pop_back();
    return memory;
}

void TextEncoder::give_back(std::unique_ptr<Encoding> memory) const {
    if (memory->largest > kMostKept) return;
    const std::lock_guard<std::mutex> locked(mutex_);
    idle_.push_back(std::move(memory));
}

void TextEncoder::compute(const int32_t *tokens, const int32_t *types, const int64_t *first, int64_t count, const int64_t *attended,
                          int64_t threads, float *out) const {
    // Every thread gets the same number of batches, each of about the same number of tokens. Results do not depend on them.
    const int64_t share = threads * kTokensAtOnce, target = threads * ((first[count] + share - 1) / share);
    const int64_t most = threads == 1 ? kTokensAtOnce : (first[count] + target - 1) / target;
    std::vector<int64_t> batches{0};  // the first text of each, and the end
    for (int64_t i = 1; i < count; ++i)
        if (first[i + 1] - first[batches.back()] > most) batches.push_back(i);
    batches.push_back(count);
    const int64_t number = static_cast<int64_t>(batches.size()) - 1;
    const auto result = [&](const Rows &rows, Encoder::Picked picked, int64_t begin, int64_t end, std::vector<float> &x, std::vector<float> &y) {
        const int64_t first_token = first[begin];
        for (int64_t i = begin; pools() && i < end; ++i) {
            if (picked == Encoder::Picked::kAll)
                pool(rows, first[i] - first_token, first[i + 1] - first[i], x);
            else
                pool(rows, i - begin, 1, x);
            finish(x, y, out + i * width_);
        }
        if (vocabulary_) largest(rows, first, begin, end, out);
        for (int64_t i = first_token; by_token() && i < first[end]; ++i) {
            const float *row = rows.values + (i - first_token) * rows.stride;
            x.assign(row, row + rows.stride);
            finish(x, y, out + i * width_);
        }
    };
    // A text far beyond the tokens of a thread is computed by all threads, before the other batches.
    std::vector<int64_t> others;
    std::vector<std::unique_ptr<Encoding>> works;
    for (int64_t batch = 0; batch < number; ++batch) {
        const int64_t begin = batches[static_cast<size_t>(batch)], end = batches[static_cast<size_t>(batch) + 1], size = first[end] - first[begin];
        if (end - begin > 1 || size < kLeastShared || 2 * size * threads <= 3 * first[count]) {
            others.push_back(batch);
            continue;
        }
        while (static_cast<int64_t>(works.size()) < threads) works.push_back(take());
        std::vector<float> x, y;
        const int64_t keys = attended ? attended[begin] : size;
        result(encoder_.encode_together(works, tokens + first[begin], size, types + first[begin], longest_, keys),
               Encoder::Picked::kAll, begin, end, x, y);
    }
    for (std::unique_ptr<Encoding> &memory : works) give_back(std::move(memory));
    const auto left = static_cast<int64_t>(others.size());
    std::atomic<int64_t> next{0};
    if (left) on_threads(std::min(threads, left), [&](bool) {
        std::unique_ptr<Encoding> memory = take();
        std::vector<float> x, y;
        for (int64_t index; (index = next++) < left;) {
            const auto batch = static_cast<size_t>(others[static_cast<size_t>(index)]);
            const int64_t begin = batches[batch], end = batches[batch + 1], first_token = first[begin];
            result(encoder_.encode(*memory, tokens + first_token, first + begin, end - begin, types + first_token, longest_,
                                   attended ? attended + begin : nullptr, picked_),
                   picked_, begin, end, x, y);
        }
        give_back(std::move(memory));
    });
}

namespace {

// Values int32 [n] from 0 on below `limit`, as a copy: nobody can change them after the check.
std::vector<int32_t> checked(const Array &array, const char *name, int64_t limit) {
    const auto *data = data_of<int32_t>(array, name, 1);
    std::vector<int32_t> copy(data, data + array.shape(0));
    for (const int32_t id : copy)
        if (id < 0 || id >= limit) refuse(name, "found " + text(id) + ", expected 0 to " + text(limit - 1));
    return copy;
}

NewArray<float> compute(const TextEncoder &encoder, const Array &tokens, const Array &types, const Array &lengths, int64_t threads,
                        const std::optional<Array> &attended) {
    const std::vector<int32_t> token = checked(tokens, "tokens", encoder.tokens()), type = checked(types, "types", encoder.types());
    const auto *length = data_of<int64_t>(lengths, "lengths", 1);
    std::vector<int64_t> first{0};
    for (size_t i = 0; i < lengths.shape(0); ++i) {
        const int64_t text_length = length[i];
        if (text_length < 1 || text_length > encoder.longest())
            refuse("lengths", "a text of " + text(text_length) + " tokens, expected 1 to " + text(encoder.longest()));
        first.push_back(first.back() + text_length);
    }
    if (first.back() != static_cast<int64_t>(token.size()) || token.size() != type.size()) refuse("lengths", "they are not those of the tokens");
    if (threads < 1) refuse("threads", "there are none");
    const auto count = static_cast<int64_t>(first.size()) - 1;
    std::vector<int64_t> keys;
    if (attended) {
        const auto *data = data_of<int64_t>(*attended, "attended", 1);
        keys.assign(data, data + attended->shape(0));
        if (static_cast<int64_t>(keys.size()) != count) refuse("attended", "they are not those of the texts");
        for (size_t i = 0; i < keys.size(); ++i)
            if (keys[i] < 1 || keys[i] > first[i + 1] - first[i]) refuse("attended", text(keys[i]) + " of a text's " + text(first[i + 1] - first[i]) + " tokens");
    }
    const int64_t rows = encoder.by_token() ? first.back() : count;
    Buffer<float> out(std::max<int64_t>(rows * encoder.width(), 1));
    {
        nb::gil_scoped_release unlocked;
        if (count) encoder.compute(token.data(), type.data(), first.data(), count, attended ? keys.data() : nullptr, threads, out.data());
    }
    return array_of(out.data(), rows, encoder.width(), encoder.width());
}

}  // namespace
}  // namespace zoo

void bind_text_encoder(nb::module_ &module) {
    using namespace zoo;
    nb::class_<TextEncoder>(module, "TextEncoder")
        .def(nb::init<const Encoder &, int64_t, const std::vector<std::string> &>(), nb::keep_alive<1, 2>(), "encoder"_a, "types"_a, "poolings"_a)
        .def("dense", &TextEncoder::dense, "weight"_a, "bias"_a, "activation"_a)
        .def("layer_norm", &TextEncoder::layer_norm, "scale"_a, "bias"_a, "epsilon"_a)
        .def("truncate", &TextEncoder::truncate, "components"_a)
        .def("normalize", &TextEncoder::normalize)
        .def("vocabulary", &TextEncoder::vocabulary, "weight"_a, "scale"_a, "bias"_a)
        .def("compute", &compute, "tokens"_a, "types"_a, "lengths"_a, "threads"_a, "attended"_a = nb::none());
}
