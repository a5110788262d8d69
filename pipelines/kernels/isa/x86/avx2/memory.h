// Loads and stores of 256 bits.
#pragma once
#include <immintrin.h>

namespace zoo {
namespace {

inline __m256i load(const void *address) { return _mm256_loadu_si256(static_cast<const __m256i *>(address)); }
inline void store(void *address, __m256i value) { _mm256_storeu_si256(static_cast<__m256i *>(address), value); }

}  // namespace
}  // namespace zoo
