// The vectors of AVX-VNNI-INT8: those of AVX-VNNI, and products of signed bytes.
#pragma once
#define ZOO_SIGNED
#include "isa/x86/avx_vnni/vectors.h"
#include "isa/x86/avx_vnni_int8/products.h"

namespace zoo {
namespace {

constexpr bool kSignedQueries = true;
inline void add_query_products(IntVec &sum, IntVec x, IntVec w) { dot_s8s8(sum, x, w); }

}  // namespace
}  // namespace zoo
