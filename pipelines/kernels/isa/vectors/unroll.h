// Loops over constant indices, with which gcc keeps arrays of vectors in registers.
#pragma once

namespace zoo {
namespace {

#define ZOO_INLINE __attribute__((always_inline))
template <int I>
struct Index {
    static constexpr int value = I;
};
// f(Index<0>), f(Index<1>), ...
template <int Count, int I = 0, class F>
ZOO_INLINE inline void unroll(F f) {
    if constexpr (I < Count) {
        f(Index<I>{});
        unroll<Count, I + 1>(f);
    }
}

}  // namespace
}  // namespace zoo
