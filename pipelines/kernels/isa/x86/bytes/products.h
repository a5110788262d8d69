// Products of bytes in registers, to time an instruction set.
#pragma once
#include "isa/vectors/unroll.h"

namespace zoo {
namespace {

inline int64_t products(int64_t rounds) {
    constexpr int kSums = 12;  // more than the latency of a product
    Ints sums[kSums];
    unroll<kSums>([&](auto i) ZOO_INLINE { sums[i.value] = same(0); });
    const Ints x = same(0x01020304), w = same(0x7F81FF01);
    for (int64_t n = 0; n < rounds; ++n) {
        unroll<kSums>([&](auto i) ZOO_INLINE { dot_u8s8(sums[i.value], x, w); });
        asm volatile("" ::: "memory");
    }
    unroll<kSums>([&](auto i) ZOO_INLINE { asm volatile("" ::"v"(sums[i.value])); });
    return rounds * kSums * 4 * kInts;
}

}  // namespace
}  // namespace zoo
