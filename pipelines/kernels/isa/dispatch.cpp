// The choice among the instruction sets that were compiled in, by what the CPU supports.
#include "isa/dispatch.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <string>
#include <tuple>
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

// Those of this build that the CPU runs, best first, the portable one at the end. Asked once: CPUID takes microseconds in a virtual machine.
const std::vector<const Isa *> &supported_isas() {
    static const auto isas = [] {
        std::vector<const Isa *> runnable;
#define ZOO_ADD(set) if (set::kIsa.supported()) runnable.push_back(&set::kIsa);
        ZOO_FOR_EACH_SET(ZOO_ADD)
#undef ZOO_ADD
        return runnable;
    }();
    return isas;
}

// Those that are listed, each name once, from the one that $ZOO_ISA names on.
std::vector<const Isa *> listed_isas(const std::string &cap) {
    std::vector<const Isa *> isas;
    bool allowed = cap.empty();
    for (const Isa *isa : supported_isas()) {
        const bool named = cap == isa->name, repeated = !isas.empty() && std::string(isas.back()->name) == isa->name;
        allowed |= named;
        if (allowed && !repeated && (isa->listed || named)) isas.push_back(isa);
    }
    return isas;
}

std::string cap_of_user() {
    const char *name = std::getenv("ZOO_ISA");
    return name ? name : "";
}

thread_local Buffer<uint8_t> scratch;

}  // namespace

const Isa &choose_isa(const std::string &name) {
    const std::string cap = cap_of_user();
    if (name.empty()) {
        const auto isas = listed_isas(cap);
        if (!isas.empty()) return *isas.front();
    }
    for (const Isa *isa : supported_isas())
        if (name == isa->name) return *isa;
    throw nb::value_error(("no kernels for " + (name.empty() ? "ZOO_ISA=" + cap : name) + " on this CPU").c_str());
}

Activation activation_named(const std::string &name) {
    constexpr std::pair<const char *, Activation> kinds[] = {
        {"", Activation::kNone},  {"tanh", Activation::kTanh},   {"relu", Activation::kRelu},      {"gelu", Activation::kGelu},
        {"gelu_tanh", Activation::kGeluTanh}, {"swish", Activation::kSwish}, {"sigmoid", Activation::kSigmoid}};
    for (const auto &[kind_name, kind] : kinds)
        if (name == kind_name) return kind;
    throw nb::value_error(("there is no activation " + name).c_str());
}

int64_t vector_bits(const std::string &name) { return choose_isa(name).vector_bits; }

void *kernel_scratch(int64_t bytes) {
    scratch.reserve(bytes);
    return scratch.data();
}

}  // namespace zoo

void bind_isas(nb::module_ &module) {
    module.def(
        "isas",
        [] {
            std::vector<std::string> names;
            for (const zoo::Isa *isa : zoo::listed_isas(zoo::cap_of_user())) names.emplace_back(isa->name);
            return names;
        },
        "Instruction sets of this build and CPU, fastest first, from the one that $ZOO_ISA names on; none where it is not there.");
    module.def(
        "instruction_sets",
        [] {
            std::vector<std::tuple<std::string, std::string, bool, bool, bool>> all_sets;
#define ZOO_ADD(set) all_sets.emplace_back(zoo::set::kIsa.name, zoo::set::kIsa.needs, zoo::set::kIsa.vnni, zoo::set::kIsa.supported(), zoo::set::kIsa.listed);
            ZOO_FOR_EACH_SET(ZOO_ADD)
#undef ZOO_ADD
            return all_sets;
        },
        "All of this build, fastest first: name, what it needs of a CPU, whether it has VNNI, whether the CPU runs it, and whether it is in\n"
        "isas() without being named.");
}
