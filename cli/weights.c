/*
 * --dequantize: see weights.h.
 */
#include "weights.h"

#include "source.h"

#include "fsdpckpt/try.h"
#include "fsdpckpt/weights.h"

static fc_code dequantize(const options *o, fc_arena *arena, fc_checkpoint **source, fc_error *err) {
    const char *config = NULL;
    fc_checkpoint *made = NULL;
    FC_TRY(source_config(o, *source, arena, &config, err));
    FC_TRY(fc_dequantize(*source, o->dequantize, config, &made, err));
    *source = made;
    return FC_OK;
}

fc_code weights_compute(const options *o, fc_checkpoint **source, fc_error *err) {
    if (!option_given(o, OPT_DEQUANTIZE)) {
        return FC_OK;
    }
    fc_arena *arena = fc_arena_new();
    fc_code rc = arena ? dequantize(o, arena, source, err) : fc_no_memory(err, NULL);
    fc_arena_free(arena);
    return rc;
}
