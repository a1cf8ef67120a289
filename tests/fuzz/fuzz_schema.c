/*
 * Fuzzes a schema. If it opens, its names are unique and its shapes have a number of elements.
 */
#include "fsdpckpt/checkpoint.h"

#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *path = fuzz_file(data, size);
    fc_checkpoint *c;
    fc_error err;
    if (fc_checkpoint_open(path, NULL, &c, &err) == FC_OK) {
        for (size_t i = 0; i < c->ntensors; i++) {
            const fc_tensor *t = &c->tensors[i];
            int64_t elements;
            if (!t->name || t->ndim < 0 || t->ndim > FC_MAX_DIMS ||
                (!t->object && !fc_numel(t->ndim, t->shape, &elements)) ||
                (i > 0 && i < 64 && strcmp(t->name, t[-1].name) == 0)) {
                abort();
            }
        }
        fc_checkpoint_close(c);
    } else if (strncmp(err.message, path, strlen(path)) != 0) {
        abort(); /* every message must start with the file */
    }
    return 0;
}
