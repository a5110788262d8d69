// The memory of an image network, and its calls: samples and steps on several threads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>
#include <utility>
#include <vector>

#include "images/network/network.h"
#include "isa/threads.h"

namespace zoo {
namespace {

constexpr int64_t kSamples = 8;  // that pass through layers of many weights together

// Seconds of this thread's processor time: others may be at work.
double now() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

// Where the tensors of steps by row do not stay in L2, and the weights do, as many rows as do pass through these steps before the next ones.
void Network::block_rows() {
    constexpr int64_t kBytes = 256 << 10;
    for (size_t begin = 0, end = 0; begin < steps_.size(); begin = end) {
        const Step &first = steps_[begin];
        int64_t row = 0, weights = 0;
        const auto joins = [&](const Step &step) { return step.by_row && !step.together && step.rows == first.rows && step.weights + weights <= kBytes; };
        for (end = begin; end < steps_.size() && joins(steps_[end]); ++end) row += layout(steps_[end].out).row(), weights += steps_[end].weights;
        const bool blocks = end > begin + 1 && row * first.rows > 2 * kBytes;
        if (!blocks) end = begin + 1;
        steps_[begin].end = end, steps_[begin].block = blocks ? std::max<int64_t>(kBytes / row, 1) : first.rows;
        const auto within = [&](int64_t step) { return step >= static_cast<int64_t>(begin) && step < static_cast<int64_t>(end); };
        for (Tensor &t : tensors_) {  // which are needed at once
            if (within(t.first)) t.first = static_cast<int64_t>(begin);
            if (within(t.last)) t.last = static_cast<int64_t>(end) - 1;
        }
    }
}

// Marks the tensors of steps that a sample passes through alone: the next sample writes over them.
void Network::find_local() {
    std::vector<int64_t> runs;  // of steps that samples pass through together, or one after the other
    for (const Step &step : steps_) runs.push_back(runs.empty() ? 0 : runs.back() + (step.together != steps_[runs.size() - 1].together));
    for (Tensor &t : tensors_) {
        const auto first = static_cast<size_t>(t.first), last = static_cast<size_t>(t.last);
        t.local = !steps_[first].together && runs[first] == runs[last];
    }
}

void Network::finish(int64_t results) {
    require(!finished_ && results == result_count_ && results > 0 && results_end_ <= results, "the results");
    finished_ = true, results_ = results;
    for (const Tensor &t : tensors_) require(t.first >= 0, "a tensor that no step writes");
    find_local();
    for (Tensor &t : tensors_)
        if (t.over >= 0 && (layout(t.over).last != t.first || layout(t.over).borders != t.borders || layout(t.over).local != t.local)) t.over = -1;
    block_rows();
    for (size_t i = 0; i < tensors_.size(); ++i) {  // at the lowest address that is free from its first to its last step
        Tensor &t = tensors_[i];
        std::vector<std::pair<int64_t, int64_t>> taken;
        for (size_t j = 0; j < i; ++j)
            if (static_cast<int64_t>(j) != t.over && tensors_[j].local == t.local && tensors_[j].first <= t.last && t.first <= tensors_[j].last)
                taken.emplace_back(tensors_[j].offset, tensors_[j].offset + tensors_[j].bytes());
        std::sort(taken.begin(), taken.end());
        if (t.over >= 0) {
            t.offset = layout(t.over).offset;
            const auto overlaps = [&](const auto &other) { return other.first < t.offset + t.bytes() && t.offset < other.second; };
            if (std::none_of(taken.begin(), taken.end(), overlaps)) continue;
            taken.emplace_back(t.offset, t.offset + t.bytes());
            std::sort(taken.begin(), taken.end());
        }
        t.offset = 0;
        for (const auto &[begin, end] : taken)
            if (begin < t.offset + t.bytes()) t.offset = std::max(t.offset, end);
        int64_t &size = t.local ? scratch_ : arena_;
        size = std::max(size, t.offset + t.bytes());
    }
}

void Network::borders(const Sample &s, const Tensor &t, int64_t begin, int64_t end) const {
    if (t.fill < 0) return;
    const auto size = [](int64_t bytes) { return static_cast<size_t>(bytes); };
    const auto [top, left, bottom, right] = t.borders;
    uint8_t *first = s.memory(t) + t.offset;
    if (begin == 0) std::memset(first, t.fill, size(top * t.row()));
    if (end == t.height) std::memset(first + (top + t.height) * t.row(), t.fill, size(bottom * t.row()));
    for (int64_t y = begin; y < end; ++y) {
        uint8_t *row = first + (top + y) * t.row();
        std::memset(row, t.fill, size(left * t.pitch));
        std::memset(row + t.row() - right * t.pitch, t.fill, size(right * t.pitch));
    }
}

void Network::compute(const Step &step, const Sample *samples, int64_t n, int64_t begin, int64_t end) const {
    if (begin >= end) return;
    step.compute(samples, n, begin, end);
    for (int64_t i = 0; i < n && step.out >= 0; ++i)
        if (step.rows < layout(step.out).height) borders(samples[i], layout(step.out), 0, layout(step.out).height);  // of the whole tensor at once
        else borders(samples[i], layout(step.out), begin, end);
}

void Network::compute(const std::vector<Sample> &samples) const {
    for (size_t s = 0, end = 0; s < steps_.size(); s = end) {
        for (end = s + 1; end < steps_.size() && steps_[end].together == steps_[s].together;) ++end;
        const auto n = static_cast<int64_t>(samples.size()), at_once = steps_[s].together ? n : int64_t{1};
        for (int64_t i = 0; i < n; i += at_once)
            for (size_t first = s; first < end; first = steps_[first].end)
                for (int64_t y = 0, rows = steps_[first].rows; y < rows; y += steps_[first].block)
                    for (size_t step = first; step < steps_[first].end; ++step)
                        compute(steps_[step], samples.data() + i, at_once, y, std::min(rows, y + steps_[first].block));
    }
}

void Network::run(const void *x, int64_t n, float *out, int64_t threads) const {
    const auto input = [&](int64_t i) { return static_cast<const uint8_t *>(x) + i * sample_ * (floats_ ? 4 : 1); };
    const int64_t apart = threads > 1 ? n / threads * threads : n;  // samples that a thread computes alone; all share the others
    struct Piece {
        size_t step;
        int64_t begin, end, before;  // its rows, and the pieces of the steps before it
    };
    std::vector<Piece> pieces;  // of a sample
    for (size_t s = 0; s < steps_.size() && apart < n; ++s) {
        const int64_t rows = steps_[s].rows, count = std::min(rows, 2 * threads), before = static_cast<int64_t>(pieces.size());
        for (int64_t i = 0; i < count; ++i) pieces.push_back({s, rows * i / count, rows * (i + 1) / count, before});
    }
    const auto sample_pieces = std::max<int64_t>(static_cast<int64_t>(pieces.size()), 1);
    const int64_t own = std::min(threads, apart), most = std::min(kSamples, own ? apart / own : 0);
    const int64_t groups = own ? own * ((apart / own + most - 1) / most) : 0;
    const Arenas::Lent arenas(arenas_, own * most + (apart < n), arena_), scratches(scratches_, own + (apart < n), scratch_);
    Pieces alone(groups), shared((n - apart) * sample_pieces);
    std::atomic<int64_t> entered{0};
    on_threads(threads, [&](bool) {
        if (const int64_t mine = entered++; mine < own)
            for (int64_t group; (group = alone.take([](int64_t) { return 0; })) >= 0;) {
                std::vector<Sample> samples;
                for (int64_t i = apart * group / groups, arena = mine * most; i < apart * (group + 1) / groups; ++i)
                    samples.push_back({arenas[arena++], scratches[mine], input(i), out + i * results_});
                compute(samples);
            }
        const auto before = [&](int64_t index) { return index / sample_pieces * sample_pieces + pieces[static_cast<size_t>(index % sample_pieces)].before; };
        for (int64_t index; (index = shared.take(before)) >= 0;) {
            const Pieces::Taken taken(shared);
            const Piece &piece = pieces[static_cast<size_t>(index % sample_pieces)];
            const int64_t i = apart + index / sample_pieces;
            const Sample sample{arenas[own * most], scratches[own], input(i), out + i * results_};
            compute(steps_[piece.step], &sample, 1, piece.begin, piece.end);
        }
    });
}

std::vector<double> Network::time_steps(const void *x, double seconds) const {
    const Arenas::Lent arena(arenas_, 1, arena_), scratch(scratches_, 1, scratch_);
    std::vector<float> out(static_cast<size_t>(results_));
    const Sample sample{arena[0], scratch[0], x, out.data()};
    std::vector<double> spent(steps_.size());
    const double start = now();
    int64_t rounds = 0;
    do {
        for (size_t i = 0; i < steps_.size(); ++i) {
            const double before = now();
            compute(steps_[i], &sample, 1, 0, steps_[i].rows);
            spent[i] += now() - before;
        }
        ++rounds;
    } while (now() - start < seconds);
    for (double &step_seconds : spent) step_seconds /= static_cast<double>(rounds);
    return spent;
}

double product_limit(const std::string &isa, double seconds) {
    const ImageKernels &kernels = *choose_isa(isa).images;
    double most = 0;
    for (const double start = now(); now() - start < seconds;) {
        const double before = now();
        const auto products = static_cast<double>(kernels.products(1 << 16));
        most = std::max(most, products / (now() - before));
    }
    return most;
}

}  // namespace zoo
