// Loads and stores of 256 bits.
#pragma once
#include <immintrin.h>

namespace zoo {
namespace {

inline __m256i load(const void *at) { return _mm256_loadu_si256(static_cast<const __m256i *>(at)); }
inline void store(void *at, __m256i value) { _mm256_storeu_si256(static_cast<__m256i *>(at), value); }

}  // namespace
}  // namespace zoo
