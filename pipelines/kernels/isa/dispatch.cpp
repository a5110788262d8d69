// The choice among the instruction sets that were compiled in, by what the CPU supports.
#include "isa/dispatch.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "isa/arrays.h"

namespace nb = nanobind;

namespace zoo {
namespace {

// Best first; the portable one is always there.
std::vector<const Isa *> supported_isas() {
    std::vector<const Isa *> isas;
#ifdef ZOO_AMX
    if (kAmx.supported()) isas.push_back(&kAmx);
#endif
#ifdef ZOO_AVX512
    if (kAvx512.supported()) isas.push_back(&kAvx512);
#endif
#ifdef ZOO_AVX2
    if (kAvx2.supported()) isas.push_back(&kAvx2);
#endif
    isas.push_back(&kPortable);
    return isas;
}

thread_local Buffer<uint8_t> scratch;

}  // namespace

const Isa &choose_isa(const std::string &name) {
    for (const Isa *isa : supported_isas())
        if (name.empty() || name == isa->name) return *isa;
    throw nb::value_error(("no kernels for " + name + " on this CPU").c_str());
}

void *kernel_scratch(int64_t bytes) {
    scratch.reserve(bytes);
    return scratch.data();
}

}  // namespace zoo

void bind_isas(nb::module_ &module) {
    module.def("isas", [] {
        std::vector<std::string> names;
        for (const zoo::Isa *isa : zoo::supported_isas()) names.emplace_back(isa->name);
        return names;
    });
}
