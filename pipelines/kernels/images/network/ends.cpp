// Steps that read the inputs of an image network and write its results.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "images/network/network.h"

namespace zoo {

void Network::pixels(int64_t out, int64_t channels, const std::vector<int64_t> &fills, bool last, bool floats, float scale, int32_t zero,
                     int64_t offset) {
    const int64_t height = layout(existing(out, false)).height, width = layout(out).width, size = channels * height * width;
    const bool real = layout(out).floats();
    require(channels >= 1 && channels + static_cast<int64_t>(fills.size()) == layout(out).channels, "the input");
    require(offset >= 0 && offset <= 1 << 28 && (steps_.empty() || floats_ == floats) && (!real || (floats && fills.empty())), "the input");
    sample_ = std::max(sample_, offset + size), floats_ = floats;
    step(out, {}, height, [=](const Sample &s, int64_t begin, int64_t end) {
        const Tensor &t = layout(out);
        const auto *reals = static_cast<const float *>(s.x) + offset;
        const auto *input_bytes = static_cast<const uint8_t *>(s.x) + offset;
        if (real) {
            for (int64_t y = begin; y < end; ++y)
                for (int64_t x = 0; x < width; ++x) {
                    auto *to = reinterpret_cast<float *>(s.pixel(t, y, x));
                    if (last) std::copy_n(reals + (y * width + x) * channels, channels, to);
                    for (int64_t c = 0; c < channels && !last; ++c) to[c] = reals[(c * height + y) * width + x];
                    std::fill(to + channels, to + t.pitch / 4, 0.0f);
                }
            return;
        }
        Buffer<uint8_t> bytes(floats ? channels * width : 0);
        std::vector<const uint8_t *> planes(static_cast<size_t>(channels));
        for (int64_t y = begin; y < end; ++y) {
            const int64_t lines = last ? 1 : channels, line = last ? channels * width : width;
            for (int64_t c = 0; c < lines; ++c) {
                const int64_t from = (last ? y * line : (c * height + y) * width);
                if (floats) isa_.images->quantize(reals + from, scale, zero, line, bytes.data() + c * width);
                planes[static_cast<size_t>(c)] = floats ? bytes.data() + c * width : input_bytes + from;
            }
            uint8_t *to = s.pixel(t, y, 0);
            if (channels == 3 && !last && t.pitch == 4) {
                isa_.images->interleave(planes.data(), static_cast<uint8_t>(fills.empty() ? 0 : fills[0]), width, to);
                continue;
            }
            for (int64_t x = 0; x < width; ++x, to += t.pitch) {
                if (last) std::copy_n(planes[0] + x * channels, channels, to);
                for (int64_t c = 0; c < channels && !last; ++c) to[c] = planes[static_cast<size_t>(c)][x];
                for (size_t c = 0; c < fills.size(); ++c) to[channels + static_cast<int64_t>(c)] = static_cast<uint8_t>(fills[c]);
            }
        }
    });
}

namespace {

using Sixteen = uint8_t __attribute__((vector_size(16)));

// Sixteen bytes of each of sixteen pixels to sixteen pixels of each byte: interleaved with what lies eight rows below, four times.
void transpose(const uint8_t *from, int64_t step, uint8_t *to, int64_t pitch) {
    Sixteen rows[16], next[16];
    for (int64_t i = 0; i < 16; ++i) std::memcpy(rows + i, from + i * step, sizeof(Sixteen));
    for (int round = 0; round < 4; ++round) {
        for (int i = 0; i < 8; ++i) {
            next[2 * i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        std::copy_n(next, 16, rows);
    }
    for (int64_t i = 0; i < 16; ++i) std::memcpy(to + i * pitch, rows + i, sizeof(Sixteen));
}

constexpr int64_t kTile = 320;  // pixels at a time, at most: results of a channel that processors fetch ahead

// The channels of n pixels, whole 16, each byte of `step` in a row: of(rows of bytes, the first one's channel, how many) of up to 16.
template <class Of>
void each_plane(const uint8_t *pixels, int64_t step, int64_t channels, int64_t n, Of of) {
    alignas(64) uint8_t planes[16 * kTile];
    for (int64_t c = 0; c < channels; c += 16) {
        for (int64_t p = 0; p < n; p += 16) transpose(pixels + p * step + c, step, planes + p, kTile);
        of(PixelRow<const uint8_t>{planes, kTile}, c, std::min<int64_t>(16, channels - c));
    }
}

}  // namespace

void Network::dequantize(int64_t x, float scale, int32_t zero, bool last, const float *table, int64_t offset, int64_t pitch) {
    const int64_t height = layout(existing(x, true)).height, width = layout(x).width, channels = layout(x).channels, pixels = height * width;
    const int64_t runs = last ? pixels : channels, run = last ? channels : pixels;
    require(offset >= 0 && offset <= 1 << 28 && pitch >= run && pitch <= 1 << 28 && !(table && layout(x).floats()), "the results");
    const int64_t before = std::exchange(result_count_, dequantized_ ? 0 : result_count_);
    std::array<float, 256> reals;
    for (int32_t byte = 0; byte < 256; ++byte) reals[static_cast<size_t>(byte)] = table ? table[byte] : static_cast<float>(byte - zero) * scale;
    const auto write = [=](const Sample &s, int64_t begin, int64_t end, auto real, auto plane) {
        const int64_t step = layout(x).pitch, rows = layout(x).row() == width * step ? end - begin : 1;  // that follow each other
        for (int64_t y = begin; y < end; y += rows) {
            const uint8_t *row = s.pixel(layout(x), y, 0);
            float *out = s.out + offset + y * width * (last ? pitch : 1);
            const int64_t count = rows * width;
            for (int64_t p = 0; last && p < count; ++p, out += pitch)
                if (!layout(x).floats() && !table && channels % 16 == 0) isa_.images->dequantize(row + p * step, scale, zero, channels, out);
                else for (int64_t c = 0; c < channels; ++c) out[c] = real(row + p * step, c);
            int64_t p = 0;
            for (int64_t n; !last && !layout(x).floats() && step >= 16 && p + 16 <= count; p += n) {
                n = std::min(kTile, (count - p) / 16 * 16);
                each_plane(row + p * step, step, channels, n, [&](const PixelRow<const uint8_t> &bytes, int64_t c, int64_t planes) {
                    plane(bytes, PixelRow<float>{out + c * pitch + p, pitch}, planes, n);
                });
            }
            for (constexpr int64_t kLine = 16; !last && p < count; p += kLine)  // pixels whose results of a channel are a cache line
                for (int64_t c = 0; c < channels; ++c)
                    for (int64_t i = p; i < std::min(count, p + kLine); ++i) out[c * pitch + i] = real(row + i * step, c);
        }
    };
    step(-1, {x}, height, [=, floats = layout(x).floats(), looks_up = table != nullptr](const Sample &s, int64_t begin, int64_t end) {
        const auto real_of = [](const uint8_t *pixel, int64_t c) { return reinterpret_cast<const float *>(pixel)[c]; };
        if (floats) return write(s, begin, end, real_of, [](const PixelRow<const uint8_t> &, const PixelRow<float> &, int64_t, int64_t) {});
        const float *of = reals.data();
        write(s, begin, end, [of](const uint8_t *pixel, int64_t c) { return of[pixel[c]]; }, [=](const PixelRow<const uint8_t> &bytes, const PixelRow<float> &out, int64_t planes, int64_t n) {
            if (looks_up) return isa_.images->lookup_floats(of, bytes, out, planes, n);
            for (int64_t c = 0; c < planes; ++c) isa_.images->dequantize(bytes.data + c * bytes.pitch, scale, zero, n, out.data + c * out.pitch);
        });
    });
    result_count_ = before + pixels * channels;
    results_end_ = std::max(results_end_, offset + (runs - 1) * pitch + run);
    dequantized_ = true;
}

}  // namespace zoo
