// Attention in windows of pixels: `Attention` of images/steps/tokens.py.
#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <vector>

#include "images/network/network.h"

namespace zoo {
namespace {

// What is added to the scores of windows, as `QuantizedAttention::added` has it. Windows that are alike share it.
struct WindowBiases {
    std::vector<float> added;
    std::vector<int64_t> places;  // of a window in `added`

    // bias [windows, rows, keys]
    WindowBiases(const float *bias, int64_t windows, int64_t rows, int64_t keys) {
        const int64_t values = rows * keys, room = round_up(keys, 16);
        std::vector<const float *> different;
        for (const float *own = bias; own < bias + windows * values; own += values) {
            const auto place = std::find_if(different.begin(), different.end(), [&](const float *other) { return std::equal(own, own + values, other); });
            places.push_back((place - different.begin()) * rows * room);
            if (place != different.end()) continue;
            different.push_back(own);
            for (const float *row = own; row < own + values; row += keys) {
                std::transform(row, row + keys, std::back_inserter(added), [](float value) { return value * kLog2E; });
                added.resize(added.size() + static_cast<size_t>(room - keys), -std::numeric_limits<float>::infinity());
            }
        }
    }
    int64_t place(int64_t window) const { return places[places.size() > 1 ? static_cast<size_t>(window) : 0]; }
};

}  // namespace

void Network::attention(int64_t x, int64_t keys, Operand out, int64_t heads, int64_t size, int64_t windows, const float *bias, int64_t biased) {
    const bool apart = keys >= 0;
    const int64_t b = out.tensor, room = round_up(size, 16), own = (apart ? 1 : 3) * room;
    const int64_t height = layout(checked(x, true, true)).height, width = layout(x).width;
    require(heads >= 1 && size >= 1 && windows >= 1 && height * width % windows == 0 && layout(x).channels == heads * own, "an attention");
    require(written(out).height == height && layout(b).width == width && layout(b).channels == heads * size, "an attention");
    require(!apart || (layout(checked(keys, true, true)).channels == heads * 2 * room && pixels_in(keys) % windows == 0), "an attention");
    for (int64_t tensor : {x, b, apart ? keys : x}) {
        require(layout(tensor).borders == Sides{}, "an attention");
        tensors_[static_cast<size_t>(tensor)].joined = true;
    }
    const int64_t tokens = height * width / windows, attended = apart ? pixels_in(keys) / windows : tokens, keys_room = round_up(attended, 16);
    require(biased == 0 || biased == 1 || biased == windows, "an attention");
    const WindowBiases biases(bias, biased, heads * tokens, attended);
    std::vector<int64_t> order(static_cast<size_t>(windows));  // those that share a bias one after the other
    std::iota(order.begin(), order.end(), 0);
    if (biased > 1) std::stable_sort(order.begin(), order.end(), [&](int64_t one, int64_t other) { return biases.place(one) < biases.place(other); });
    // few keys are packed again for some of the queries
    const int64_t block = apart ? std::min(tokens, round_up(std::max<int64_t>(4 * attended, 256), 16)) : tokens, blocks = (tokens + block - 1) / block;
    step(b, apart ? std::vector<int64_t>{x, keys} : std::vector<int64_t>{x}, windows * heads * blocks, [=](const Sample &s, int64_t begin, int64_t end) {
        const int64_t pitch = layout(b).pitch, pixel = layout(x).channels;
        Buffer<float> results(block * room);
        Buffer<uint8_t> bytes(out.floats() ? 0 : block * room);
        for (int64_t r = begin; r < end; ++r) {
            const int64_t h = r / blocks / windows, window = order[static_cast<size_t>(r / blocks % windows)], query = r % blocks * block, first = window * tokens + query;
            const int64_t n = std::min(block, tokens - query);
            QuantizedAttention attention{};
            attention.centered = true;
            attention.heads = attention.key_heads = 1, attention.size = room, attention.before = attention.after = tokens + attended;
            if (biased) attention.added = biases.added.data() + biases.place(window) + (h * tokens + query) * keys_room;
            if (apart) {
                attention.key_stride = layout(keys).channels;
                attention.keys = reinterpret_cast<const float *>(s.pixel(layout(keys), 0, 0)) + window * attended * attention.key_stride + h * 2 * room;
            }
            const auto *rows = reinterpret_cast<const float *>(s.pixel(layout(x), 0, 0)) + first * pixel + h * own;
            isa_.rows->quantized_attention(attention, rows, pixel, n, attended, results.data(), room);
            if (!out.floats()) isa_.images->quantize_floats(results.data(), 1 / out.scale, out.zero, n * room, bytes.data());
            for (int64_t t = 0; t < n; ++t) {
                uint8_t *target = s.pixel(layout(b), 0, 0) + (first + t) * pitch;
                if (!out.floats()) {
                    std::copy_n(bytes.data() + t * room, size, target + h * size);
                    continue;
                }
                auto *floats = reinterpret_cast<float *>(target);
                std::copy_n(results.data() + t * room, size, floats + h * size);
                if (h == 0) std::fill(floats + heads * size, floats + pitch / 4, 0.0f);
            }
        }
    });
}

}  // namespace zoo
