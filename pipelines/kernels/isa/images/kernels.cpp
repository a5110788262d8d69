// The kernels of images, compiled for every instruction set: images.h of its folder has those that differ.
#include "isa/isa.h"
#include ZOO_IMAGES

#include "isa/images/table.h"  // behind the kernels

namespace zoo {
const ImageKernels ZOO_SET::kImages = kImageKernels;
}  // namespace zoo
