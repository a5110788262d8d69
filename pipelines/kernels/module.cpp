// The Python module `pipelines.kernels._native`: every part binds itself.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_click_program(nb::module_ &module);
void bind_image_network(nb::module_ &module);
void bind_isas(nb::module_ &module);
void bind_csv_lines(nb::module_ &module);
void bind_embedding_bags(nb::module_ &module);
void bind_max_sim(nb::module_ &module);
void bind_parse_log(nb::module_ &module);
void bind_resize(nb::module_ &module);
void bind_row_kernels(nb::module_ &module);
void bind_text_encoder(nb::module_ &module);
void bind_top_k(nb::module_ &module);
void bind_transformer(nb::module_ &module);

NB_MODULE(_native, module) {
    bind_click_program(module);
    bind_image_network(module);
    bind_isas(module);
    bind_csv_lines(module);
    bind_embedding_bags(module);
    bind_max_sim(module);
    bind_parse_log(module);
    bind_resize(module);
    bind_row_kernels(module);
    bind_text_encoder(module);
    bind_top_k(module);
    bind_transformer(module);
}
