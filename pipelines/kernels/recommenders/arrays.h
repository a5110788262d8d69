// What the kernels of clicks share: versions of functions for the CPU, arrays for numpy, and the remainder of a hash.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>

#include "isa/dispatch.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define AVX2 __attribute__((target("avx2,bmi,popcnt")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,popcnt,prefer-vector-width=512")))

namespace clicks {

// The same function, or functions, compiled for what CPUs offer; results are the same bits.
template <class T> struct Versions {
    T portable;
#if defined(__x86_64__)
    T avx2, avx512;
#endif
    // That of the vectors of an instruction set.
    T of(const std::string &isa) const {
        [[maybe_unused]] const int64_t vectors = zoo::vector_bits(isa);
#if defined(__x86_64__)
        if (!__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("popcnt"))
            return portable;
        if (vectors == 512)
            return avx512;
        if (vectors == 256)
            return avx2;
#endif
        return portable;
    }
};

// A numpy array that owns its memory.
template <class T> nanobind::ndarray<nanobind::numpy, T> owned(std::unique_ptr<T[]> values, std::initializer_list<size_t> shape) {
    T *data = values.get();
    nanobind::capsule owner(data, [](void *p) noexcept { delete[] static_cast<T *>(p); });
    values.release();
    return {data, shape, owner};
}

// The remainder of any 64-bit number without a division.
class Modulo {
  public:
    explicit Modulo(int64_t divisor) : divisor_(divisor), inverse_(divisor > 0 ? ~uint64_t{0} / divisor_ : 0) {
        if (divisor < 1 || divisor > 0x7fffffff)
            throw std::invalid_argument("found " + std::to_string(divisor) + " hash buckets, expected 1 to 2147483647");
    }
    int32_t divisor() const { return static_cast<int32_t>(divisor_); }
    int32_t operator()(uint64_t value) const {
        // The upper half of value * inverse in halves, which a compiler turns into vectors; the quotient is at most 1 too small.
        const uint64_t low = value & HALF, high = value >> 32, inverse_low = inverse_ & HALF, inverse_high = inverse_ >> 32;
        const uint64_t middle = high * inverse_low + (low * inverse_low >> 32);
        const uint64_t quotient = high * inverse_high + (middle >> 32) + ((low * inverse_high + (middle & HALF)) >> 32);
        const uint64_t reduced = value - quotient * divisor_;
        return static_cast<int32_t>(std::min(reduced, reduced - divisor_)); // what is below 0 wraps around
    }

  private:
    static constexpr uint64_t HALF = 0xffffffffu;
    uint64_t divisor_, inverse_;
};

} // namespace clicks
