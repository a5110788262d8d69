// The kernels for AVX-512 with VNNI.
#include <immintrin.h>

#include <cstring>

#include "isa/isa.h"
#include "isa/vectors/click_kernels.h"
#include "isa/vectors/row_kernels.h"
#include "isa/x86/avx512/images.h"
#include "isa/x86/avx512/linear.h"

#include "isa/images/table.h"  // behind the kernels

namespace zoo {
namespace {

// A weight is 2^16 a + 2^8 b + c in signed bytes (a fits: Resize says how large weights are); the dwords are the as, bs and cs of four.
void pack_weights(int32_t *four) {
    int8_t digits[16] = {};
    for (int i = 0; i < 4; ++i) {
        int32_t rest = four[i];
        for (int digit = 2; digit >= 0; --digit) {
            digits[4 * digit + i] = static_cast<int8_t>(rest);
            rest = (rest - digits[4 * digit + i]) >> 8;
        }
    }
    std::memcpy(four, digits, sizeof digits);
}

void resample(const Resampling &r, int64_t outputs, const uint8_t *in, int64_t in_stride, int64_t width, uint8_t *out, int64_t out_stride) {
    const __m512i rounding = _mm512_set1_epi32(1 << (kWeightBits - 1)), zero = _mm512_setzero_si512();
    for (int64_t i = 0; i < outputs; ++i, out += out_stride)
        for (int64_t begin = 0; begin < width; begin += 64) {
            const uint8_t *row = in + r.first[i] * in_stride + begin;
            const int32_t *weight = r.weights + i * r.stride;
            __m512i a0 = zero, a1 = zero, a2 = zero, a3 = zero, b0 = zero, b1 = zero, b2 = zero, b3 = zero, c0 = rounding, c1 = rounding,
                    c2 = rounding, c3 = rounding;
            for (int64_t t = 0; t < r.tap_groups[i]; ++t, row += 4 * in_stride, weight += 4) {
                const __m512i p = load(row), q = load(row + in_stride), s = load(row + 2 * in_stride), u = load(row + 3 * in_stride);
                const __m512i a = _mm512_set1_epi32(weight[0]), b = _mm512_set1_epi32(weight[1]), c = _mm512_set1_epi32(weight[2]);
                const __m512i pq = _mm512_unpacklo_epi8(p, q), su = _mm512_unpacklo_epi8(s, u);
                const __m512i PQ = _mm512_unpackhi_epi8(p, q), SU = _mm512_unpackhi_epi8(s, u);
                const __m512i x0 = _mm512_unpacklo_epi16(pq, su), x1 = _mm512_unpackhi_epi16(pq, su);
                const __m512i x2 = _mm512_unpacklo_epi16(PQ, SU), x3 = _mm512_unpackhi_epi16(PQ, SU);
                dot_u8s8(a0, x0, a), dot_u8s8(a1, x1, a), dot_u8s8(a2, x2, a), dot_u8s8(a3, x3, a);
                dot_u8s8(b0, x0, b), dot_u8s8(b1, x1, b), dot_u8s8(b2, x2, b), dot_u8s8(b3, x3, b);
                dot_u8s8(c0, x0, c), dot_u8s8(c1, x1, c), dot_u8s8(c2, x2, c), dot_u8s8(c3, x3, c);
            }
            const auto result = [](__m512i a, __m512i b, __m512i c) {
                const __m512i ab = _mm512_add_epi32(_mm512_slli_epi32(a, 8), b);
                return _mm512_srai_epi32(_mm512_add_epi32(_mm512_slli_epi32(ab, 8), c), kWeightBits);
            };
            const __m512i first = _mm512_packs_epi32(result(a0, b0, c0), result(a1, b1, c1));
            const __m512i second = _mm512_packs_epi32(result(a2, b2, c2), result(a3, b3, c3));
            _mm512_storeu_si512(out + begin, _mm512_packus_epi16(first, second));
        }
}

bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const Isa ZOO_SET::kIsa = {
    .name = "avx512",
    .supported = supported,
    .packed_bytes = packed_bytes,
    .pack_linear = pack_linear,
    .unpack_column = unpack_column,
    .gather_columns = gather_columns,
    .linear = linear,
    .pack_weights = pack_weights,
    .resample = resample,
    .rows = &kRowKernels,
    .clicks = &kClickKernels,
    .images = &kImageKernels,
    .tables = &ZOO_SET::kTables,
    .sequences = &ZOO_SET::kSequences,
    .late_interaction = &ZOO_SET::kLateInteraction,
};

}  // namespace zoo
