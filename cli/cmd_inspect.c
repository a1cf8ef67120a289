/*
 * inspect: opens a checkpoint and shows what is in it and how it is cut.
 */
#include "command.h"
#include "inspect.h"
#include "out_file.h"
#include "source.h"
#include "suggest.h"

#include "fsdpckpt/format.h"

#include <string.h>
#include <sys/stat.h>

static uint64_t add_saturated(uint64_t a, uint64_t b) {
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

uint64_t inspect_elements(const fc_tensor *tensor) {
    int64_t n;
    return fc_numel(tensor->ndim, tensor->shape, &n) ? (uint64_t)n : UINT64_MAX;
}

uint64_t inspect_bytes(const fc_tensor *tensor) {
    uint64_t bytes;
    return __builtin_mul_overflow(inspect_elements(tensor), (uint64_t)fc_dtype_size(tensor->dtype), &bytes) ? UINT64_MAX
                                                                                                            : bytes;
}

void inspect_totals(const inspection *in, totals *out) {
    const fc_checkpoint *c = in->checkpoint;
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i];
        if (t->object) {
            out->objects++;
            continue;
        }
        out->tensors++;
        out->chunks += t->nchunks;
        out->elements = add_saturated(out->elements, inspect_elements(t));
        out->bytes = add_saturated(out->bytes, inspect_bytes(t));
        out->by_dtype[t->dtype]++;
        out->elements_by_dtype[t->dtype] = add_saturated(out->elements_by_dtype[t->dtype], inspect_elements(t));
    }
    for (size_t i = 0; i < c->nfiles && !in->headers_only; i++) {
        struct stat st;
        if (stat(c->files[i].path, &st) == 0) {
            out->file_bytes = add_saturated(out->file_bytes, (uint64_t)st.st_size);
        }
    }
}

const char *inspect_placements(const inspection *in, const fc_tensor *tensor, const fc_cut *c, char *buf, size_t size) {
    const fc_mesh *mesh = &in->checkpoint->mesh;
    if (tensor->placements && mesh->ndim > 0) {
        fc_placements_format(mesh->ndim, tensor->placements, buf, (int)size);
    } else if (c->placed) {
        fc_placements_format(c->mesh_ndim, c->placements, buf, (int)size);
    } else {
        buf[0] = '\0';
    }
    return buf;
}

const char *inspect_object(inspection *in, const fc_tensor *object, fc_arena *arena, fc_error *err) {
    const char *json = NULL;
    if (in->headers_only || !in->checkpoint->format->object_json) {
        err->message[0] = '\0';
        return NULL;
    }
    fc_code rc = fc_checkpoint_object_json(in->checkpoint, object, arena, &json, err);
    if (rc == FC_OK) {
        return json;
    }
    /* What only this build cannot show is said in its place; damage is the result of the command. */
    if (in->worst == FC_OK && rc != FC_EUNSUPPORTED) {
        in->worst = rc;
        in->first = *err;
    }
    return NULL;
}

fc_code inspect_no_memory(const inspection *in, fc_error *err) {
    return fc_fail(err, FC_ENOMEM, "%s: out of memory", in->checkpoint->path);
}

static fc_code show_one(inspection *in, const options *o, fc_error *err) {
    for (size_t i = 0; i < in->checkpoint->ntensors; i++) {
        const fc_tensor *t = &in->checkpoint->tensors[i];
        if (strcmp(t->name, o->tensor) == 0) {
            return o->json ? inspect_tensor_json(in, t, err) : inspect_tensor(in, t, err);
        }
    }
    const fc_checkpoint *c = in->checkpoint;
    return suggest_name(c->path, c->ntensors ? &c->tensors[0].name : NULL, sizeof *c->tensors, c->ntensors, o->tensor,
                        err);
}

static fc_code write_page(void *context, text_out *out, fc_error *err) {
    inspection *in = context;
    text_out *before = in->out;
    in->out = out;
    fc_code rc = inspect_html(in, err);
    in->out = before;
    return rc;
}

static fc_code show(inspection *in, const options *o, fc_error *err) {
    if (o->html) {
        return out_file(in->checkpoint, o->html, o->force, 0, write_page, in, err);
    }
    if (o->quiet) {
        return FC_OK; /* opening it was the question */
    }
    if (o->tensor) {
        return show_one(in, o, err);
    }
    return o->json ? inspect_json(in, err) : o->tree ? inspect_tree(in, err) : inspect_text(in, err);
}

static fc_code run(cli_call *call, fc_error *err) {
    const options *o = call->options;
    if ((o->tree && (o->json || o->tensor)) || (o->html && (o->tree || o->json || o->tensor))) {
        return fc_fail(err, FC_EUSAGE,
                       "inspect: choose one of --tree, --json, --tensor and --html (--tensor NAME --json is "
                       "the only pair)");
    }
    fc_checkpoint *checkpoint = NULL;
    fc_code rc = source_open(o, o->operands[0], o->headers_only, &checkpoint, err);
    if (rc != FC_OK) {
        return rc;
    }
    inspection in = {.checkpoint = checkpoint, .out = call->out, .headers_only = o->headers_only, .worst = FC_OK};
    rc = show(&in, o, err);
    if (rc == FC_OK && in.worst != FC_OK) {
        rc = in.worst;
        *err = in.first;
    }
    fc_cut_scratch_free(&in.scratch);
    fc_checkpoint_close(checkpoint);
    return rc;
}

static const option_help helps[] = {
    {OPT_TP_PLAN, SOURCE_TP_PLAN_HELP},
    {OPT_FORCE, "replace the file of --html if it exists"},
    {OPT_QUIET, "print nothing: the exit status says whether SRC opens and all its files are there"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt inspect ckpt/",
    "a summary and a table of the tensors",
    "fsdpckpt inspect ckpt/ --tensor model.tok_embeddings.weight",
    "one tensor, its pieces drawn as a grid of ranks",
    "fsdpckpt inspect ckpt/ --headers-only --json | jq '.tensors[].name'",
    "names only, also when the data files are elsewhere",
    NULL,
};

const command command_inspect = {
    .name = "inspect",
    .operands = "SRC",
    .min_operands = 1,
    .max_operands = 1,
    .summary = "show what is in a checkpoint and how it is cut",
    .description =
        "Shows the format, the layout, the files and every tensor of SRC: its type, its shape and the grid of pieces "
        "it is cut into. Reads headers only, plus the few bytes of the objects (step, lr, ...), which are decoded "
        "without executing anything.",
    .examples = examples,
    .helps = helps,
    .takes = TAKES_COMMON | TAKES(OPT_TREE) | TAKES(OPT_TENSOR) | TAKES(OPT_HTML) | TAKES(OPT_HEADERS_ONLY) |
             TAKES(OPT_FOLLOW_EXTERNAL) | TAKES(OPT_SCHEMA) | TAKES(OPT_TP_PLAN) | TAKES(OPT_JSON) | TAKES(OPT_FORCE),
    .run = run,
};
