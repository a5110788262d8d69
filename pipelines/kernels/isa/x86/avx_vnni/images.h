// The image kernels for AVX-VNNI.
#pragma once
#include "isa/x86/avx2/lookup.h"
#include "isa/x86/avx_vnni/bytes.h"
#include "isa/x86/bytes/depthwise.h"
#include "isa/x86/bytes/product.h"
#include "isa/x86/bytes/products.h"
