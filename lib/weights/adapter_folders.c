/*
 * Opens adapters in the folders in which PEFT saved them, and merges them.
 */
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "io/path.h"
#include "weights/adapters.h"

#include <unistd.h>

/* Opens the weights of an adapter, which PEFT stores in one of two files. */
static fc_code open_values(const char *folder, fc_arena *arena, fc_checkpoint **out, fc_error *err) {
    const char *path = fc_arena_printf(arena, "%s/adapter_model.safetensors", folder);
    const char *older = fc_arena_printf(arena, "%s/adapter_model.bin", folder);
    FC_NEED(path && older, err, folder);
    path = fc_access(path, F_OK) != 0 && fc_access(older, F_OK) == 0 ? older : path;
    FC_TRY(fc_check_given(path, "the weights of an adapter", err));
    return fc_checkpoint_open(path, NULL, out, err);
}

static fc_code open_adapters(const fc_adapter *adapters, size_t count, fc_arena *arena, fc_opened_adapter *out,
                             fc_error *err) {
    for (size_t i = 0; i < count; i++) {
        out[i].weight = adapters[i].weight;
        FC_TRY(fc_adapter_config_load(adapters[i].path, arena, &out[i].config, err));
        FC_TRY(open_values(adapters[i].path, arena, &out[i].values, err));
    }
    return FC_OK;
}

fc_code fc_merge_adapters(fc_checkpoint *source, const fc_adapter *adapters, size_t count, fc_checkpoint **out,
                          size_t *merged, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_opened_adapter *opened = arena ? fc_arena_calloc(arena, count + 1, sizeof *opened) : NULL;
    fc_code rc;
    *out = NULL;
    *merged = 0;
    FC_TRY_GOTO(opened ? FC_OK : fc_no_memory(err, source->path), rc, out);
    FC_TRY_GOTO(open_adapters(adapters, count, arena, opened, err), rc, out);
    rc = fc_merge_opened(source, opened, count, out, merged, err);
out:
    for (size_t i = 0; opened && rc != FC_OK && i < count; i++) {
        fc_checkpoint_close(opened[i].values);
    }
    fc_arena_free(arena);
    return rc;
}
