/*
 * schema: prints the names, dtypes and shapes of a checkpoint as JSON, to be committed beside the model. The text is a
 * function of these alone, a line for each tensor, so that a diff shows what changed. formats/schema reads it back.
 */
#include "command.h"
#include "json_out.h"

#include "fsdpckpt/unflatten.h"

#include <stdlib.h>
#include <string.h>

enum { SCHEMA_VERSION = 1 };

/* The path is told only where the name does not say it. */
static void write_name(json_out *j, const fc_tensor *t) {
    JSON_MEMBER(j, string, "name", t->name);
    if (t->path.count != 1 || t->path.elements[0].is_index || strcmp(t->path.elements[0].key, t->name) != 0) {
        jw_key(j, "path");
        jw_path(j, &t->path);
    }
}

static void write_entry(json_out *j, const fc_tensor *t, const fc_tensor *same_as) {
    jw_open(j, '{');
    write_name(j, t);
    if (!t->object) {
        JSON_MEMBER(j, string, "dtype", fc_dtype_get(t->dtype)->torch_name);
        jw_key(j, "shape");
        jw_ints(j, t->ndim, t->shape);
    }
    if (same_as) {
        JSON_MEMBER(j, string, "same_as", same_as->name);
    }
    jw_close(j, '}');
}

static void write_entries(json_out *j, const fc_checkpoint *c, const char *key, bool objects, const size_t *same_as) {
    jw_key(j, key);
    jw_open(j, '[');
    for (size_t i = 0; i < c->ntensors && j->out->error == 0; i++) {
        if ((c->tensors[i].object != NULL) == objects) {
            write_entry(j, &c->tensors[i], same_as[i] != i ? &c->tensors[same_as[i]] : NULL);
        }
    }
    jw_close(j, ']');
}

/* Which tensors are one, with the number of the first for each. */
static fc_code find_ties(const fc_checkpoint *c, size_t **same_as, fc_error *err) {
    const fc_tensor **tensors = calloc(c->ntensors + 1, sizeof *tensors);
    *same_as = calloc(c->ntensors + 1, sizeof **same_as);
    for (size_t i = 0; tensors && i < c->ntensors; i++) {
        tensors[i] = &c->tensors[i];
    }
    fc_code rc = tensors && *same_as ? fc_find_ties(c, tensors, c->ntensors, *same_as, err)
                                     : fc_fail(err, FC_ENOMEM, "out of memory");
    free(tensors);
    return rc;
}

static fc_code run(cli_call *call, fc_error *err) {
    /* The data files may be elsewhere: nothing is asked of them. */
    fc_open_options how = {.headers_only = true, .follow_external = call->options->follow_external};
    fc_checkpoint *checkpoint = NULL;
    fc_code rc = fc_checkpoint_open(call->options->operands[0], &how, &checkpoint, err);
    if (rc != FC_OK) {
        return rc;
    }
    size_t *same_as = NULL;
    rc = find_ties(checkpoint, &same_as, err);
    if (rc != FC_OK) {
        free(same_as);
        fc_checkpoint_close(checkpoint);
        return rc;
    }
    json_out j;
    jw_begin(&j, call->out, 2);
    jw_open(&j, '{');
    JSON_MEMBER(&j, string, "fsdpckpt", "schema");
    JSON_MEMBER(&j, uint, "version", SCHEMA_VERSION);
    if (fc_knows_model_order(checkpoint, NULL)) {
        JSON_MEMBER(&j, string, "order", "model");
    }
    write_entries(&j, checkpoint, "tensors", false, same_as);
    write_entries(&j, checkpoint, "objects", true, same_as);
    jw_close(&j, '}');
    text_puts(call->out, "\n");
    free(same_as);
    fc_checkpoint_close(checkpoint);
    return FC_OK;
}

static const char *const examples[] = {
    "fsdpckpt schema ckpt/ > model.json",
    "to commit beside the model",
    "fsdpckpt reshard model.json --dp 512 --tp 8 --dry-run",
    "plan with it, without the checkpoint",
    NULL,
};

const command command_schema = {
    .name = "schema",
    .operands = "SRC",
    .min_operands = 1,
    .max_operands = 1,
    .summary = "print names, dtypes and shapes as JSON, to commit beside the model",
    .description =
        "Prints the names, dtypes and shapes of the tensors of SRC, and the names of its objects, as JSON: the "
        "same for every layout of the same state, in the order of SRC, a line each. Reads headers only.\n\n"
        "The file is itself a SRC, one without data: inspect shows it, and reshard --dry-run plans with it.",
    .examples = examples,
    .takes = TAKES_COMMON | TAKES(OPT_FOLLOW_EXTERNAL),
    .run = run,
};
