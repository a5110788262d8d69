// What instruction sets of x86 ask of a CPU.
#pragma once
#include <cpuid.h>

namespace zoo {
namespace {

inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

// Registers of CPUID's leaf 7, subleaf 1, whose features gcc 12 has no names for.
struct Features {
    unsigned eax, ebx, ecx, edx;
};
inline Features features() {
    Features f{};
    return __get_cpuid_count(7, 1, &f.eax, &f.ebx, &f.ecx, &f.edx) ? f : Features{};
}

}  // namespace
}  // namespace zoo
