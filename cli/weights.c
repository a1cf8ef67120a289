/*
 * --delta, --dequantize, --adapter and --quantize: see weights.h.
 */
#include "weights.h"

#include "source.h"

#include "fsdpckpt/delta.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/weights.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static fc_code patch_source(const options *o, fc_checkpoint **source, fc_error *err) {
    fc_checkpoint *made = NULL;
    FC_TRY(fc_delta_patch(*source, (const char *const *)o->delta.items, o->delta.count,
                          option_given(o, OPT_UP_TO) ? o->up_to : FC_DELTA_NO_NUMBER, &made, err));
    *source = made;
    return FC_OK;
}

static fc_code dequantize_source(const options *o, fc_arena *arena, fc_checkpoint **source, fc_error *err) {
    const char *config = NULL;
    fc_checkpoint *made = NULL;
    FC_TRY(source_config(o, *source, arena, &config, err));
    FC_TRY(fc_dequantize(*source, o->dequantize, config, &made, err));
    *source = made;
    return FC_OK;
}

/* Parses DIR[=W]. The folder may have "=" if what follows is no number. */
static fc_code parse_adapter(const char *text, fc_arena *arena, fc_adapter *out, fc_error *err) {
    const char *equal = strrchr(text, '=');
    char *end = NULL;
    double weight = equal ? strtod(equal + 1, &end) : 1;
    const bool has_weight = equal && end != equal + 1 && *end == '\0';
    if (has_weight && !isfinite(weight)) {
        return fc_fail(err, FC_EUSAGE, "--adapter %s: the weight is not a finite number", text);
    }
    *out = (fc_adapter){fc_arena_strndup(arena, text, has_weight ? (size_t)(equal - text) : strlen(text)),
                        has_weight ? weight : 1};
    return out->path ? FC_OK : fc_no_memory(err, text);
}

static fc_code merge_adapters(const options *o, fc_arena *arena, fc_checkpoint **source, fc_error *err) {
    fc_adapter *adapters = fc_arena_calloc(arena, o->adapter.count, sizeof *adapters);
    fc_checkpoint *made = NULL;
    size_t merged = 0;
    FC_NEED(adapters, err, NULL);
    for (size_t i = 0; i < o->adapter.count; i++) {
        FC_TRY(parse_adapter(o->adapter.items[i], arena, &adapters[i], err));
    }
    FC_TRY(fc_merge_adapters(*source, adapters, o->adapter.count, &made, &merged, err));
    *source = made;
    return FC_OK;
}

fc_code weights_compute(const options *o, fc_checkpoint **source, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_code rc;
    FC_TRY_GOTO(arena ? FC_OK : fc_no_memory(err, NULL), rc, out);
    FC_TRY_GOTO(o->delta.count > 0 ? patch_source(o, source, err) : FC_OK, rc, out);
    FC_TRY_GOTO(option_given(o, OPT_DEQUANTIZE) ? dequantize_source(o, arena, source, err) : FC_OK, rc, out);
    rc = o->adapter.count > 0 ? merge_adapters(o, arena, source, err) : FC_OK;
out:
    fc_arena_free(arena);
    return rc;
}

fc_code weights_quantize(const options *o, fc_checkpoint **source, fc_error *err) {
    fc_checkpoint *made = NULL;
    if (o->quantize.count == 0) {
        return FC_OK;
    }
    FC_TRY(fc_quantize(*source, o->quantize.items, &made, err));
    *source = made;
    return FC_OK;
}
