// An image classifier as steps on tensors of bytes, channels last. Arithmetic: images/steps/, each with its reference in numpy.
//
// Tensors lie in a sample's arena, or, where samples pass through steps one after the other, in memory that these share; those that are never
// needed at once lie over each other. A pixel takes whole 16 bytes (the first tensor's may take 4), and around a tensor is the padding of its
// widest reader, so that no kernel checks for borders.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "images/network/arenas.h"
#include "isa/arrays.h"
#include "isa/dispatch.h"

namespace zoo {

using Pair = std::array<int64_t, 2>;
using Sides = std::array<int64_t, 4>;  // top, left, bottom, right

// A convolution's sizes, and how its weights are packed: in blocks of groups that together have whole 16 outputs, or as a depthwise one.
struct ConvolutionShape {
    int64_t outputs, rows, columns, inputs;  // weight [outputs, rows, columns, inputs], inputs of one group
    int64_t groups, pitch;                   // pitch: bytes a pixel of x
    bool dilated;                            // along a row

    bool depthwise() const { return groups > 1 && inputs == 1 && outputs == groups; }
    int64_t tap_groups() const { return side() == 3 ? 3 : (rows * columns + 3) / 4; }
    int64_t side() const { return rows == columns && (rows == 3 || rows == 5) ? rows : 0; }  // of `Depthwise`
    Pair tap(int64_t t) const;  // row and column of the depthwise tap t, {-1, 0} for one that is none
    int64_t joined() const;     // groups of a block
    int64_t blocks() const { return (groups + joined() - 1) / joined(); }
    int64_t width(int64_t block) const;    // outputs of it, whole 16
    bool whole_rows() const;               // a stretch is a row of the window
    int64_t stretches() const { return whole_rows() ? rows : rows * columns; }
    int64_t stretch() const { return whole_rows() ? columns * pitch : round_up(joined() * inputs, 4); }
    int64_t packed_bytes(const Isa &) const;
    // weight int8 [outputs, rows, columns, inputs], bias, scale [outputs]
    void pack(const Isa &, const int8_t *weight, const int32_t *bias, const float *scale, uint8_t *packed) const;
};

// A tensor that a float step reads or writes: float32 (scale 0), or bytes, real = scale (byte - zero).
struct Operand {
    int64_t tensor;
    float scale;
    int32_t zero;
    bool floats() const { return scale == 0; }
};

// The sum of a convolution's result with another tensor.
struct SumArguments {
    ByteSum sum;
    int64_t other;
    bool other_first;
};

// A convolution of floats.
struct FloatConvolutionShape {
    std::array<int64_t, 4> weight;  // outputs, rows, columns, inputs of a group
    int64_t groups;
    Pair strides;
    Sides pads;
    Pair dilations;
};

// Weighted sums of pixels along an axis: [outputs, count] places and weights.
struct Taps {
    int64_t count;
    std::vector<int64_t> places;
    std::vector<float> weights;
};

class Network {
  public:
    explicit Network(const std::string &isa) : isa_(choose_isa(isa)) {}
    const char *isa() const { return isa_.name; }

    // The next tensor. Sizes are checked in Python (images/program.py, images/steps/) and here, where memory depends on them: ValueError.
    int64_t tensor(int64_t height, int64_t width, int64_t channels, int64_t pitch);
    int64_t channels(int64_t tensor) const { return tensors_.at(static_cast<size_t>(tensor)).channels; }
    int64_t pixels_in(int64_t tensor) const { return tensors_.at(static_cast<size_t>(tensor)).height * tensors_.at(static_cast<size_t>(tensor)).width; }
    // An input of `sample()`'s elements from `offset` on; floats stay floats where `out` has them.
    void pixels(int64_t out, int64_t channels, const std::vector<int64_t> &fills, bool last, bool floats, float scale, int32_t zero, int64_t offset);
    // packed: see ConvolutionShape::pack; it must outlive the network. out -1: the results. residual: floats to add to floats, or -1. gains
    // [outputs], or null: of the activation's words. table [256], or null: of the bytes
    void convolution(int64_t x, int64_t out, const ConvolutionShape &, const uint8_t *packed, int64_t bytes, Pair strides, Sides pads,
                     Pair dilations, int32_t fill, Requantization, const SumArguments *, int64_t residual, const ActivationTable *,
                     const int16_t *gains, const uint8_t *table);
    void product(int64_t x, int64_t gate, int64_t out, const ByteProduct &);
    void addition(int64_t a, int64_t b, int64_t out, const ByteSum &);
    void max_pool(int64_t x, int64_t out, Pair kernel, Pair strides, Sides pads);
    void average_pool(int64_t x, int64_t out, Pair kernel, Pair strides, Sides pads, Mean, bool padded);
    void global_average(int64_t x, int64_t out, int32_t x_zero, float scale, int32_t zero);  // out -1: the results
    void lookup(int64_t x, int64_t out, const uint8_t *tables, int64_t count);
    void concatenation(const std::vector<int64_t> &xs, int64_t out);
    void stacking(const std::vector<int64_t> &xs, int64_t out);  // all pixels, below each other
    void selection(int64_t x, int64_t out, const std::vector<int64_t> &channels);
    void resampling(int64_t x, int64_t out, const std::vector<int64_t> &rows, const std::vector<int64_t> &columns);
    // Steps on tensors of float32: images/steps/floats.py. x and out may be the bytes of one.
    void float_copy(Operand x, Operand out);
    void float_sum(Operand a, Operand b, Operand out);
    void float_difference(Operand a, Operand b, Operand out);
    // gain, bias: [pixels, channels], of all pixels or of one for all
    void channel_scale(Operand x, Operand out, const float *gain, const float *bias, int64_t pixels, int64_t channels);
    // Functions of bytes: table [256]
    void float_lookup(int64_t x, int64_t out, const float *table);
    // Over each run of `size` channels, from `first` on
    void softmax(Operand x, Operand out, int64_t first, int64_t size);
    // Of each run of `inputs` channels: weight [outputs, inputs], bias [outputs]
    void group_linear(Operand x, Operand out, const float *weight, const float *bias, int64_t inputs, int64_t outputs);
    void activation(Operand x, Operand out, Activation);
    void layer_norm(Operand x, Operand out, const float *gain, const float *bias, int64_t channels, float epsilon);  // bias null: RMS
    void group_norm(Operand x, Operand out, const float *gain, const float *bias, int64_t channels, int64_t groups, float epsilon);
    void float_product(Operand a, Operand b, Operand out);
    // Of each output row so many of x's as there are weights, then of each column
    void interpolation(Operand x, Operand out, const Taps &rows, const Taps &columns);
    // Parts of pixels of x, or zeros where a place is -1, plus added [height, width, channels] of `out`, or null. places: as many of each pixel
    // as it has parts, numbers of the parts of x
    void gathering(Operand x, Operand out, const std::vector<int64_t> &places, const float *added);
    // x: floats, in each head [query | key | value] of `size` columns, each padded with zeros to whole 16; windows follow each other. keys: -1, or
    // floats with [key | value], then x has queries alone. bias [biased, heads, queries of a window, keys of a window], biased: 1 for all windows
    // alike, or windows; 0: none
    void attention(int64_t x, int64_t keys, Operand out, int64_t heads, int64_t size, int64_t windows, const float *bias, int64_t biased);
    // Of floats, in each group of pixels: rows of a times rows of b, as many as a has channels
    void matrix_product(int64_t a, int64_t b, int64_t out, int64_t groups);
    void float_mean(Operand x, Operand out);  // out: floats
    void float_clip(Operand x, Operand out, float low, float high);
    void response_gate(Operand x, Operand out, float epsilon);  // out: floats
    // Of floats: pixels of x at coordinates from -1 to 1, `grid` [height, width, 2]; rows of x, grid and out are in so many groups. plane: first
    // pixel, height and width of an image in x instead, whose channels are in as many groups
    void sampling(int64_t x, int64_t grid, int64_t out, int64_t groups, int64_t taps, const std::string &outside, bool align,
                  const std::optional<std::array<int64_t, 3>> &plane);
    // Of floats: places: as many of each pixel of out
    void pixel_sums(int64_t x, int64_t out, const std::vector<int64_t> &places);
    // In each pixel of `out`, floats, `count` values and their indices
    void top_k(Operand x, int64_t out, int64_t count, bool largest);
    // Pixels of x at indices, floats, as many as out has pixels
    void choice(int64_t x, int64_t indices, int64_t out);
    // Of floats: boxes [n, 4], scores [n, classes]; out: [1 + classes most, 3], the number of boxes first
    void suppression(int64_t boxes, int64_t scores, int64_t out, int64_t most, float overlap, float least, bool centered);
    void float_log(Operand x, Operand out);
    void float_floor(Operand x, Operand out, float divisor);
    void float_quotient(Operand a, Operand b, Operand out);
    // weight: of shape.weight, floats or, where there is a scale [outputs], int8; residual: floats to add to the sums, or -1
    void float_convolution(int64_t x, Operand out, const FloatConvolutionShape &, const void *weight, const float *scale, const float *bias,
                           int64_t residual, float low, float high);
    // weight [rows, columns, channels]
    void float_depthwise(int64_t x, int64_t out, const float *weight, const float *bias, Pair kernel, int64_t channels, Pair strides, Sides pads,
                         Pair dilations);
    // Results from `offset` on, of bytes, by a table [256], or of floats. From channel to channel, or pixel to pixel if `last`, are `pitch` results.
    void dequantize(int64_t x, float scale, int32_t zero, bool last, const float *table, int64_t offset, int64_t pitch);
    // No step follows: lays out the tensors.
    void finish(int64_t results);

    // x: n samples; out [n, results]
    void run(const void *x, int64_t n, float *out, int64_t threads) const;
    int64_t results() const { return results_; }
    int64_t sample() const { return sample_; }  // elements of the inputs
    bool floats() const { return floats_; }
    int64_t arena() const { return arena_ + scratch_; }  // bytes of a sample
    // The steps of a sample again and again for `seconds`, each alone: its mean seconds.
    std::vector<double> time_steps(const void *x, double seconds) const;

  private:
    struct Tensor {
        int64_t height, width, channels, pitch;
        Sides borders{};
        bool joined = false;  // its pixels follow each other, without borders
        int32_t fill = -1;
        int64_t first = -1, last = -1;  // steps that write and last read it
        bool local = false;             // its memory is in the scratch memory, not in the sample's arena
        int64_t offset = 0;                 // of its memory there
        int64_t over = -1;                  // a tensor in whose memory it may be written, pixel by pixel
        bool floats() const { return pitch == 4 * round_up(channels, 16); }
        int64_t row() const { return (width + borders[1] + borders[3]) * pitch; }
        int64_t origin() const { return offset + borders[0] * row() + borders[1] * pitch; }
        int64_t bytes() const { return round_up((height + borders[0] + borders[2]) * row() + (floats() ? 256 : 64), 64); }
    };
    struct Sample {
        uint8_t *arena, *scratch;
        const void *x;
        float *out;
        uint8_t *memory(const Tensor &t) const { return t.local ? scratch : arena; }
        uint8_t *pixel(const Tensor &t, int64_t y, int64_t x_at) const { return memory(t) + t.origin() + y * t.row() + x_at * t.pitch; }
    };
    using Compute = std::function<void(const Sample *samples, int64_t n, int64_t begin, int64_t end)>;
    struct Step {
        int64_t rows, out, weights;
        bool together;  // of several samples at once: it reads twice as many weights as pixels
        Compute compute;
        bool by_row = false;  // its row y depends on rows y alone
        size_t end = 0;       // behind the last of the steps through which `block` rows pass before the next ones
        int64_t block = 0;
    };
    void step(int64_t out, const std::vector<int64_t> &reads, int64_t rows, std::function<void(const Sample &, int64_t, int64_t)> compute);
    void step_of_samples(int64_t out, const std::vector<int64_t> &reads, int64_t rows, int64_t weights, Compute compute);
    const Tensor &layout(int64_t tensor) const { return tensors_[static_cast<size_t>(tensor)]; }
    int64_t existing(int64_t tensor, bool written) const;
    int64_t checked(int64_t tensor, bool written, bool floats = false) const;
    const Tensor &read(const Operand &x) const { return layout(checked(x.tensor, true, x.floats())); }
    const Tensor &written(const Operand &out) const { return layout(checked(out.tensor, false, out.floats())); }
    static void require(bool fits, const char *what);
    void pad(int64_t x, Pair kernel, Pair strides, Pair dilations, Sides pads, int32_t fill, int64_t height, int64_t width);
    void pool(int64_t x, int64_t out, Pair kernel, Pair strides, Sides pads,
              std::function<void(const Window &, int64_t taps, uint8_t *out, int64_t channels)> of);
    // xs: `pixels` of each operand, from pixel `first` on, out: as many
    // quantized: null, or the same to a tensor of bytes
    using FloatRow = std::function<void(const float *const *xs, int64_t pixels, float *out, int64_t first)>;
    using ByteRow = std::function<void(const float *const *xs, int64_t pixels, uint8_t *out)>;
    void float_step(const std::vector<Operand> &xs, const Operand &out, FloatRow of, ByteRow quantized = nullptr);
    template <class Add, class Finish>
    void reduce_pixels(Operand x, Operand out, Add add, Finish finish);
    void find_local();
    void block_rows();
    void borders(const Sample &, const Tensor &, int64_t begin, int64_t end) const;
    void compute(const Step &, const Sample *samples, int64_t n, int64_t begin, int64_t end) const;
    void compute(const std::vector<Sample> &samples) const;

    const Isa &isa_;
    std::vector<Tensor> tensors_;
    std::vector<Step> steps_;
    mutable Arenas arenas_, scratches_;
    int64_t sample_ = 0, results_ = 0, arena_ = 64, scratch_ = 64, result_count_ = 0, results_end_ = 0;
    bool floats_ = false, finished_ = false, dequantized_ = false;
};

// Rows of `columns` floats, each padded with zeros to a multiple of `whole`.
std::vector<float> padded_rows(const float *x, int64_t rows, int64_t columns, int64_t whole = 16);

// Exact products of 8 bits a second that this thread's core can make in registers, of `seconds` of its processor time.
double product_limit(const std::string &isa, double seconds);

}  // namespace zoo
