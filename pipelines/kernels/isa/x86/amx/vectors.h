// The vectors beside tiles: those of AVX-512.
#pragma once
#include "isa/x86/avx512/vectors.h"
