// Which instruction set's kernels run, and their scratch memory.
#pragma once
#include <string>

#include "isa/isa.h"

namespace zoo {

// The best version that this CPU runs and $ZOO_ISA allows, or the one called `name`; ValueError where there is none.
const Isa &choose_isa(const std::string &name);

// The activation of this name, "" for none; ValueError where there is none.
Activation activation_named(const std::string &name);

// The vectors of that one, for code that is compiled for vectors alone.
int64_t vector_bits(const std::string &name);

}  // namespace zoo
