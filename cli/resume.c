/*
 * Writes the options of a conversion as texts, so that a run with --resume can tell whether it has those of the run
 * that began: see resume.h.
 */
#include "resume.h"

#include "fsdpckpt/try.h"

#include <inttypes.h>

/* Options that do not change a byte of the target. */
#define WITHOUT_INFLUENCE                                                                                              \
    (TAKES_COMMON | TAKES(OPT_OUTPUT) | TAKES(OPT_FORCE) | TAKES(OPT_RESUME) | TAKES(OPT_DRY_RUN) | TAKES(OPT_JOBS) |  \
     TAKES(OPT_MEMORY) | TAKES(OPT_COMM) | TAKES(OPT_JSON) | TAKES(OPT_TRUST_OBJECTS))

/* @return how many texts an option has. */
static size_t count_texts(const options *o, option_id id) {
    const option_row *row = &option_table[id];
    const char *field = (const char *)o + row->offset;
    if (!option_given(o, id) || (WITHOUT_INFLUENCE & TAKES(id)) != 0) {
        return 0;
    }
    return row->kind == KIND_LIST ? ((const option_list *)(const void *)field)->count : 1;
}

/* Writes text `index` of an option, as on the command line. @return NULL when out of memory. */
static const char *option_text(const options *o, option_id id, size_t index, fc_arena *arena) {
    const option_row *row = &option_table[id];
    const void *field = (const char *)o + row->offset;
    switch (row->kind) {
    case KIND_TEXT:
        return fc_arena_printf(arena, "--%s %s", row->name, *(const char *const *)field);
    case KIND_LIST:
        return fc_arena_printf(arena, "--%s %s", row->name, ((const option_list *)field)->items[index]);
    case KIND_NUMBER:
    case KIND_INDEX:
        return fc_arena_printf(arena, "--%s %" PRId64, row->name, *(const int64_t *)field);
    case KIND_BYTES:
    case KIND_SIZE:
        return fc_arena_printf(arena, "--%s %" PRIu64 "B", row->name, *(const uint64_t *)field);
    case KIND_REAL:
        return fc_arena_printf(arena, "--%s %a", row->name, *(const double *)field);
    case KIND_DTYPE:
        return fc_arena_printf(arena, "--%s %s", row->name, fc_dtype_get(*(const fc_dtype *)field)->torch_name);
    case KIND_LEVEL:
        return fc_arena_printf(arena, "--%s %d", row->name, *(const int *)field);
    case KIND_CHOICE:
        return fc_arena_printf(arena, "--%s %s", row->name, row->choices[*(const int *)field]);
    case KIND_FLAG:
    case KIND_COUNT:
        break;
    }
    return fc_arena_printf(arena, "--%s", row->name);
}

fc_code resume_prepare(const cli_call *call, fc_convert_options *how, fc_error *err) {
    const options *o = call->options;
    size_t count = 0;
    if (!o->resume) {
        return FC_OK;
    }
    if (o->local) {
        return fc_fail(
            err, FC_EUNSUPPORTED,
            "--resume does not work with --local, whose ranks copy their files anew each time: leave one of the two "
            "out");
    }
    for (int id = 0; id < OPT_COUNT; id++) {
        count += count_texts(o, (option_id)id);
    }
    const char **texts = fc_arena_calloc(call->arena, count + 1, sizeof *texts);
    FC_NEED(texts, err, NULL);
    count = 0;
    for (int id = 0; id < OPT_COUNT; id++) {
        const size_t n = count_texts(o, (option_id)id);
        for (size_t i = 0; i < n; i++) {
            texts[count] = option_text(o, (option_id)id, i, call->arena);
            FC_NEED(texts[count], err, NULL);
            count++;
        }
    }
    how->resumable = true;
    how->texts = texts;
    return FC_OK;
}
