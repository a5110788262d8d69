// The choice among the instruction sets that were compiled in, by what the CPU supports.
#include "isa/dispatch.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "isa/arrays.h"
#include "sets.h"  // ZOO_FOR_EACH_SET, written by CMakeLists.txt

namespace nb = nanobind;

namespace zoo {
#define ZOO_DECLARE(set) namespace set { extern const Isa kIsa; }
ZOO_FOR_EACH_SET(ZOO_DECLARE)
#undef ZOO_DECLARE

namespace {

// Those of this build that the CPU runs: best first, and the portable one at the end.
std::vector<const Isa *> supported_isas() {
    std::vector<const Isa *> isas;
#define ZOO_ADD(set) if (set::kIsa.supported()) isas.push_back(&set::kIsa);
    ZOO_FOR_EACH_SET(ZOO_ADD)
#undef ZOO_ADD
    return isas;
}

thread_local Buffer<uint8_t> scratch;

}  // namespace

const Isa &choose_isa(const std::string &name) {
    for (const Isa *isa : supported_isas())
        if (name.empty() || name == isa->name) return *isa;
    throw nb::value_error(("no kernels for " + name + " on this CPU").c_str());
}

Activation activation_named(const std::string &name) {
    constexpr std::pair<const char *, Activation> kinds[] = {
        {"", Activation::kNone},  {"tanh", Activation::kTanh},   {"relu", Activation::kRelu},      {"gelu", Activation::kGelu},
        {"gelu_tanh", Activation::kGeluTanh}, {"swish", Activation::kSwish}, {"sigmoid", Activation::kSigmoid}};
    for (const auto &[known, kind] : kinds)
        if (name == known) return kind;
    throw nb::value_error(("there is no activation " + name).c_str());
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
