/*
 * The table of formats. A new format is a folder and a line in format_list.h.
 */
#include "registry.h"

#include "torch/item.h"
#include "torch/verdict.h"

#include <string.h>

/* clang-format off */
static const fc_format *const formats[] = {
#define X(folder) &fc_format_##folder,
#include "format_list.h"
#undef X
    NULL,
};
/* clang-format on */

const fc_format *const *fc_formats(void) {
    return formats;
}

const fc_object_encoding *fc_object_encoding_find(const char *name) {
    static const fc_object_encoding torch_save = {"torch.save", fc_torch_verdict, fc_torch_verdict_memory,
                                                  fc_torch_json_memory};
    return strcmp(name, torch_save.name) == 0 ? &torch_save : NULL;
}

const fc_format *fc_format_find(const char *name) {
    for (const fc_format *const *f = formats; *f; f++) {
        if (strcmp((*f)->name, name) == 0) {
            return *f;
        }
    }
    return NULL;
}
