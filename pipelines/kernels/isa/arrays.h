// numpy arrays as the kernels take them, and aligned buffers.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "isa/isa.h"

namespace zoo {

// Memory aligned to cache lines, not initialized.
template <class T>
class Buffer {
  public:
    explicit Buffer(int64_t count = 0) { reserve(count); }
    void reserve(int64_t count) {
        if (count <= size_) return;
        data_.reset(), size_ = 0;
        const auto bytes = static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
        data_.reset(static_cast<T *>(std::aligned_alloc(64, bytes)));
        if (!data_) throw std::bad_alloc();
        size_ = count;
    }
    T *data() const { return data_.get(); }
    T &operator[](int64_t index) const { return data_.get()[index]; }

  private:
    struct Free {
        void operator()(T *data) const { std::free(data); }
    };
    std::unique_ptr<T, Free> data_;
    int64_t size_ = 0;
};

struct Free {
    void operator()(void *data) const { std::free(data); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

// Aligned to cache lines, or whole huge pages, if it fills one and the system has them.
inline Memory memory_of(int64_t bytes) {
    constexpr int64_t kHugePage = 1 << 21;
    const int64_t page = bytes < kHugePage ? 64 : kHugePage;
    bytes = round_up(bytes, page);
    Memory memory(static_cast<uint8_t *>(std::aligned_alloc(static_cast<size_t>(page), static_cast<size_t>(bytes))));
    if (!memory) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (page == kHugePage) madvise(memory.get(), static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
    return memory;
}

// Memory with the lifetime of a model, freed at once. Huge pages, if the system has them: a step of a decoder reads all weights, and the
// address translation of small pages takes up to a third of its time.
class Arena {
  public:
    void *take(int64_t bytes) {
        bytes = round_up(bytes, 64);
        if (bytes > left_) {
            left_ = std::max(bytes, kChunk);
            chunks_.push_back(memory_of(left_));
            next_ = chunks_.back().get();
        }
        left_ -= bytes;
        return std::exchange(next_, next_ + bytes);
    }

  private:
    static constexpr int64_t kChunk = 1 << 23;  // what nobody writes takes no memory
    std::vector<Memory> chunks_;
    uint8_t *next_ = nullptr;
    int64_t left_ = 0;
};

// A part of an arena that may grow, like a Buffer; what it held before then is lost to the arena, at most as much as it holds in the end.
template <class T>
class Part {
  public:
    void reserve(int64_t count, Arena &arena) {
        if (count <= size_) return;
        size_ = std::max(count, 2 * size_);
        data_ = static_cast<T *>(arena.take(size_ * static_cast<int64_t>(sizeof(T))));
    }
    T *data() const { return data_; }

  private:
    T *data_ = nullptr;
    int64_t size_ = 0;
};

using Array = nanobind::ndarray<nanobind::ro, nanobind::device::cpu>;

inline bool contiguous(const Array &array) {
    int64_t expected = 1;
    for (size_t i = array.ndim(); i-- > 0;) {
        if (array.shape(i) != 1 && array.stride(i) != expected) return false;
        expected *= static_cast<int64_t>(array.shape(i));
    }
    return true;
}

// The data of an aligned C-contiguous array of this type and number of dimensions, else an error.
template <class T>
const T *data_of(const Array &array, const char *name, size_t dims) {
    const bool aligned = reinterpret_cast<uintptr_t>(array.data()) % alignof(T) == 0;
    if (array.dtype() != nanobind::dtype<T>() || array.ndim() != dims || (array.size() && !(contiguous(array) && aligned)))
        throw nanobind::type_error(
            (std::string(name) + " has another type, number of dimensions or layout than this kernel takes").c_str());
    return static_cast<const T *>(array.data());
}

// A new numpy array [n, width].
template <class T>
using NewArray = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<2>>;

// A new array of this shape, from rows of `stride`.
template <class T>
NewArray<T> array_of(const T *data, int64_t n, int64_t width, int64_t stride) {
    auto *buffer = new Buffer<T>(std::max<int64_t>(n * width, 1));
    nanobind::capsule owner(buffer, [](void *pointer) noexcept { delete static_cast<Buffer<T> *>(pointer); });
    for (int64_t r = 0; r < n; ++r) std::copy_n(data + r * stride, width, buffer->data() + r * width);
    return {buffer->data(), {static_cast<size_t>(n), static_cast<size_t>(width)}, owner};
}

}  // namespace zoo
