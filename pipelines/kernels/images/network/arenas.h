// Memory of one network's calls.
#pragma once
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "isa/arrays.h"

namespace zoo {

// Arenas of calls that are over, for the next ones: their pages have been touched. As many as have been in use at once.
class Arenas {
  public:
    // `count` arenas of `bytes`, until the end of a block.
    class Lent {
      public:
        Lent(Arenas &from, int64_t count, int64_t bytes) : from_(from) {
            for (int64_t i = 0; i < count; ++i) taken_.push_back(from_.take(bytes));
        }
        ~Lent() {
            const std::lock_guard<std::mutex> hold(from_.mutex_);
            for (auto &arena : taken_) from_.spare_.push_back(std::move(arena));
        }
        Lent(const Lent &) = delete;
        Lent &operator=(const Lent &) = delete;
        uint8_t *operator[](int64_t i) const { return taken_[static_cast<size_t>(i)].get(); }

      private:
        Arenas &from_;
        std::vector<Memory> taken_;
    };

  private:
    Memory take(int64_t bytes) {
        {
            const std::lock_guard<std::mutex> hold(mutex_);
            if (!spare_.empty()) {
                Memory last = std::move(spare_.back());
                spare_.pop_back();
                return last;
            }
            spare_.reserve(++made_);  // giving back allocates nothing
        }
        Memory fresh = memory_of(bytes);
        std::memset(fresh.get(), 0, static_cast<size_t>(bytes));
        return fresh;
    }
    std::mutex mutex_;
    std::vector<Memory> spare_;
    size_t made_ = 0;
};

}  // namespace zoo
