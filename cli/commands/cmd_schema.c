/*
 * schema: writes the names, dtypes and shapes of a checkpoint as JSON, to be committed next to the model. The text
 * depends on nothing else and has one line per tensor, so a diff shows what changed. formats/schema reads it.
 */
#include "options/command.h"
#include "out_file.h"
#include "output/json_out.h"
#include "recipe.h"
#include "source.h"
#include "target.h"

#include "fsdpckpt/select.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"

#include <stdlib.h>
#include <string.h>

/* The content of the document. */
typedef struct schema {
    const fc_checkpoint *source;
    fc_target target;
    size_t *same_as; /* malloc'ed: the index of the first tensor that each one is tied to */
} schema;

/* The path is written only if the name does not determine it. */
static void write_name(json_out *j, const fc_target_tensor *t) {
    JSON_MEMBER(j, string, "name", t->name);
    if (t->path.count != 1 || t->path.elements[0].is_index || strcmp(t->path.elements[0].key, t->name) != 0) {
        JSON_MEMBER(j, path, "path", &t->path);
    }
}

static void write_entry(json_out *j, const fc_target_tensor *t, const fc_target_tensor *same_as) {
    jw_open(j, '{');
    write_name(j, t);
    if (!t->source->object) {
        JSON_MEMBER(j, string, "dtype", fc_dtype_get(t->dtype)->torch_name);
        jw_member_ints(j, "shape", t->source->ndim, t->source->shape);
    }
    if (same_as != t) {
        JSON_MEMBER(j, string, "same_as", same_as->name);
    }
    jw_close(j, '}');
}

static void write_entries(json_out *j, const schema *s, const char *key, bool objects) {
    const fc_target_tensor *tensors = s->target.tensors;
    jw_member_open(j, key, '[');
    for (size_t i = 0; i < s->target.ntensors && j->out->error == 0; i++) {
        if ((tensors[i].source->object != NULL) == objects) {
            write_entry(j, &tensors[i], &tensors[s->same_as[i]]);
        }
    }
    jw_close(j, ']');
}

static fc_code write_schema(void *context, text_out *out, fc_error *err) {
    const schema *s = context;
    json_out j;
    (void)err;
    jw_document(&j, out, 2, "schema");
    if (fc_knows_model_order(s->source, NULL)) {
        JSON_MEMBER(&j, string, "order", "model");
    }
    write_entries(&j, s, "tensors", false);
    write_entries(&j, s, "objects", true);
    jw_end_document(&j);
    return FC_OK;
}

/* Finds tied tensors. */
static fc_code find_ties(schema *s, fc_error *err) {
    size_t n = s->target.ntensors;
    const fc_tensor **tensors = calloc(n + 1, sizeof *tensors);
    s->same_as = calloc(n + 1, sizeof *s->same_as);
    for (size_t i = 0; tensors && i < n; i++) {
        tensors[i] = s->target.tensors[i].source;
    }
    fc_code rc = tensors && s->same_as ? fc_find_ties(s->source, tensors, n, s->same_as, err)
                                       : fc_no_memory(err, s->source->path);
    free(tensors);
    return rc;
}

static fc_code select_and_write(const cli_call *call, const fc_checkpoint *checkpoint, fc_error *err) {
    const options *o = call->options;
    const fc_selection selection = source_selection(o);
    schema s = {.source = checkpoint};
    fc_selected counts;
    fc_code rc = FC_OK;
    if (checkpoint->ntensors > 0) { /* no tensors are no error: the schema is empty, too */
        FC_TRY_GOTO(fc_target_new(checkpoint, &selection, call->arena, &s.target, &counts, err), rc, out);
    }
    FC_TRY_GOTO(find_ties(&s, err), rc, out);
    rc = out_result(call, checkpoint, 0, write_schema, &s, err);
out:
    free(s.same_as);
    return rc;
}

static fc_code run_schema(cli_call *call, fc_error *err) {
    /* The data files are not read, and may be absent. */
    fc_checkpoint *checkpoint = NULL;
    const options *o = call->options;
    options rest;
    if (o->output) {
        FC_TRY(target_check(o->output, &target_json, err));
    }
    FC_TRY(recipe_open(call, &rest, o->operands[0], true, &checkpoint, err));
    source_report(o, checkpoint);
    fc_code rc = source_note_selection(call, checkpoint, true, err);
    rc = rc == FC_OK ? select_and_write(call, checkpoint, err) : rc;
    fc_checkpoint_close(checkpoint);
    return rc;
}

static const option_help helps[] = {
    {OPT_OUTPUT,
     "write to the file DST, which must not exist unless --force is given; - is standard output, the default"},
    {OPT_QUIET, "print errors only"},
    {OPT_CONFIG, RECIPE_CONFIG_HELP},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt schema ckpt/ -o model.json --model-only",
    "a schema to commit next to the model, without the optimizer",
    "fsdpckpt reshard model.json --dp 512 --tp 8 --dry-run",
    "plan a layout from the schema, without the checkpoint",
    NULL,
};

const command command_schema = {
    .name = "schema",
    .operands = "SRC",
    .summary = "print names, dtypes and shapes as JSON, to commit next to the model",
    .description =
        "Prints the names, dtypes and shapes of the tensors of SRC, and the names of its objects, as JSON, one line "
        "each in the order of SRC. All layouts of the same state give the same schema. Reads headers only.\n\nOther "
        "commands accept the file as a SRC without data: inspect shows it, and reshard --dry-run plans with it.",
    .examples = examples,
    .helps = helps,
    .takes = TAKES_COMMON | TAKES_RECIPE | TAKES(OPT_OUTPUT) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) |
             TAKES(OPT_EXCLUDE) | TAKES(OPT_STRIP_PREFIX) | TAKES(OPT_RENAME) | TAKES(OPT_FORCE) | TAKES_EXTERNAL,
    .usual = TAKES(OPT_OUTPUT) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) | TAKES(OPT_FORCE),
    .run = run_schema,
};
