/*
 * Fuzzes the pickle machine in both modes, and the JSON decoding of what it loads.
 */
#include "torch/object/item.h"
#include "torch/pickle/pickle.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fc_pickle_source source = {"fuzz", 0, size, -1, data};
    for (int mode = FC_PICKLE_STRICT; mode <= FC_PICKLE_ITEM; mode++) {
        fc_pickle *p;
        fc_error err = {FC_OK, ""};
        if (fc_pickle_load(&source, (fc_pickle_mode)mode, &p, &err) != FC_OK) {
            if (err.message[0] == '\0') {
                abort(); /* an error without a message */
            }
            continue;
        }
        fc_arena *arena = fc_arena_new();
        const char *json;
        fc_torch_tensor tensor;
        if (fc_torch_is_tensor(p, p->root)) {
            fc_torch_tensor_decode(p, p->root, &tensor, &err);
        }
        if (fc_torch_json(p, p->root, 4096, arena, &json, &err) != FC_OK || strlen(json) > (1 << 20)) {
            abort();
        }
        fc_arena_free(arena);
        fc_pickle_free(p);
    }
    return 0;
}
