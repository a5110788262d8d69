// The vectors of AVX-VNNI, see ../../vectors/lanes.h.
#pragma once
#include "isa/x86/avx2/lanes.h"
#include "isa/x86/avx_vnni/products.h"

namespace zoo {
namespace {

inline void dot_pairs(IntVec &sum, Words a, Words b) { dot_s16s16(sum, a, b); }
template <class V>
inline void add_pairs(V &sum, V a, V b) { dot_s16s16(sum, a, b); }

constexpr int64_t kTerms = 4;
using Code = int8_t;
inline void add_products(IntVec &sum, IntVec x, IntVec w) { dot_u8s8(sum, x, w); }
#ifndef ZOO_SIGNED
constexpr bool kSignedQueries = false;
inline void add_query_products(IntVec &sum, IntVec x, IntVec w) { add_products(sum, x, w); }
#endif

}  // namespace
}  // namespace zoo
