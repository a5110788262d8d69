// Runs the work of one call on several threads, in pieces that threads take in order. The call waits only for threads that have begun.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace zoo {

// Calls work() here and on up to `threads` - 1 others at once; it must take its share as it comes. Returns when this thread's call and
// those of the others that have begun are over: on a busy machine the scheduler may begin a thread 100 ms later, which then finds no
// work left. Throws what work() has thrown: this thread's error (Ctrl-C), or else the first one.
inline void on_threads(int64_t threads, const std::function<void(bool main_thread)> &work) {
    struct Call {
        std::mutex mutex;
        std::condition_variable left;
        int64_t inside = 0;
        bool over = false;
        std::exception_ptr error;
    };
    const auto call = std::make_shared<Call>();
    const auto guarded = [call, &work](bool main_thread) {
        try {
            work(main_thread);
        } catch (...) {
            const std::lock_guard<std::mutex> lock(call->mutex);
            if (!call->error || main_thread) call->error = std::current_exception();
        }
    };
    const auto help = [call, guarded] {
        {
            const std::lock_guard<std::mutex> lock(call->mutex);
            if (call->over) return;
            ++call->inside;
        }
        guarded(false);
        const std::lock_guard<std::mutex> lock(call->mutex);
        if (!--call->inside) call->left.notify_one();
    };
    try {
        for (int64_t i = 1; i < threads; ++i) std::thread(help).detach();
    } catch (const std::system_error &) {  // no more threads: those that are there do the work
    }
    guarded(true);
    std::exception_ptr error;  // not in `call`, which a thread that begins later may hold for longer
    {
        std::unique_lock<std::mutex> lock(call->mutex);
        call->over = true;
        call->left.wait(lock, [&] { return !call->inside; });
        error.swap(call->error);
    }
    if (error) std::rethrow_exception(error);
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
    // Ends a piece that was taken, also by an error: others may wait for it.
    class Taken {
      public:
        explicit Taken(Pieces &pieces) : pieces_(pieces) {}
        Taken(const Taken &) = delete;
        Taken &operator=(const Taken &) = delete;
        ~Taken() { pieces_.done(); }

      private:
        Pieces &pieces_;
    };

  private:
    void done() {
        ++done_;
        if (!asleep_.load()) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        woken_.notify_all();
    }

    static constexpr int64_t kSpins = 2000;  // some 50 us: longer than most steps
    const int64_t count_;
    std::atomic<int64_t> next_{0}, done_{0}, asleep_{0};
    std::mutex mutex_;
    std::condition_variable woken_;
};

}  // namespace zoo
