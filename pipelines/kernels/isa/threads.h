// Runs the work of one call on several threads, in pieces that threads take in order. The call waits only for threads that have begun.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace zoo {

// Calls work() here and on up to `threads` - 1 others at once; it must take its share as it comes and throw nothing. Returns when this
// thread's call and those of the others that have begun are over: on a busy machine the scheduler may begin a thread 100 ms later,
// which then finds no work left.
inline void on_threads(int64_t threads, const std::function<void(bool main_thread)> &work) {
    struct Call {
        std::mutex mutex;
        std::condition_variable left;
        int64_t inside = 0;
        bool over = false;
    };
    const auto call = std::make_shared<Call>();
    const auto help = [call, &work] {
        {
            const std::lock_guard<std::mutex> lock(call->mutex);
            if (call->over) return;
            ++call->inside;
        }
        work(false);
        const std::lock_guard<std::mutex> lock(call->mutex);
        if (!--call->inside) call->left.notify_one();
    };
    try {
        for (int64_t i = 1; i < threads; ++i) std::thread(help).detach();
    } catch (const std::system_error &) {  // no more threads: those that are there do the work
    }
    work(true);
    std::unique_lock<std::mutex> lock(call->mutex);
    call->over = true;
    call->left.wait(lock, [&] { return !call->inside; });
}

// Pieces of work in an order, which threads take as they come. A thread that the machine has taken off its core holds the others up only
// while it holds a piece, and one that has nothing to do for long sleeps.
class Pieces {
  public:
    explicit Pieces(int64_t count) : count_(count) {}
    // The next piece, or -1 where none is left; begins when all of the first before(piece) pieces are done.
    template <class Before>
    int64_t take(const Before &before) {
        for (int64_t spins = 0;;) {
            int64_t piece = next_.load();
            if (piece >= count_) return -1;
            const int64_t needed = before(piece);
            if (done_.load() >= needed) {
                if (next_.compare_exchange_weak(piece, piece + 1)) return piece;
            } else if (++spins < kSpins) {
#ifdef __x86_64__
                __builtin_ia32_pause();
#endif
            } else {
                std::unique_lock<std::mutex> lock(mutex_);
                ++asleep_;
                woken_.wait(lock, [&] { return done_.load() >= needed; });
                --asleep_;
                spins = 0;
            }
        }
    }
    void done() {
        ++done_;
        if (!asleep_.load()) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        woken_.notify_all();
    }

  private:
    static constexpr int64_t kSpins = 2000;  // some 50 us: longer than most steps
    const int64_t count_;
    std::atomic<int64_t> next_{0}, done_{0}, asleep_{0};
    std::mutex mutex_;
    std::condition_variable woken_;
};

}  // namespace zoo
