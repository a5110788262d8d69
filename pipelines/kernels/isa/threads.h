// A call's work on several threads, none of which it waits for unless it has begun.
#pragma once
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
// which then finds that it is not wanted.
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

}  // namespace zoo
