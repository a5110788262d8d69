// The Python module `pipelines.kernels._native`: every part binds itself.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_decoder(nb::module_ &module);
void bind_network(nb::module_ &module);
void bind_resize(nb::module_ &module);
void bind_rows(nb::module_ &module);
void bind_rowwise(nb::module_ &module);

NB_MODULE(_native, module) {
    bind_decoder(module);
    bind_network(module);
    bind_resize(module);
    bind_rows(module);
    bind_rowwise(module);
}
