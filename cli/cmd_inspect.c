/*
 * inspect: opens a checkpoint and shows what is in it and how it is cut.
 */
#include "command.h"
#include "inspect.h"
#include "suggest.h"

#include "fsdpckpt/format.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

const char *inspect_placements(const inspection *in, const fc_tensor *tensor, const cut *c, char *buf, size_t size) {
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

/* Names that contain the word come first: people remember the end of a name, not its prefix. */
static fc_code unknown_tensor(const fc_checkpoint *c, const char *name, fc_error *err) {
    const char *near[3] = {NULL, NULL, NULL};
    size_t n = 0, score = SUGGEST_NONE, len = strlen(name);
    const char *best = NULL;
    for (size_t i = 0; i < c->ntensors; i++) {
        if (n < 2 && strstr(c->tensors[i].name, name)) {
            near[n++] = c->tensors[i].name;
        }
        suggest_consider(name, len, c->tensors[i].name, &best, &score);
    }
    if (best && best != near[0] && best != near[1]) {
        near[n++] = best;
    }
    if (n == 0) {
        return fc_fail(err, FC_EUSAGE, "%s: no tensor or object '%s' among %zu; see 'fsdpckpt inspect'", c->path, name,
                       c->ntensors);
    }
    return fc_fail(err, FC_EUSAGE, "%s: no tensor or object '%s'; did you mean '%s'%s%s%s%s%s%s?", c->path, name,
                   near[0], n > 1 ? " or '" : "", n > 1 ? near[1] : "", n > 1 ? "'" : "", n > 2 ? " or '" : "",
                   n > 2 ? near[2] : "", n > 2 ? "'" : "");
}

static fc_code show_one(inspection *in, const options *o, fc_error *err) {
    for (size_t i = 0; i < in->checkpoint->ntensors; i++) {
        const fc_tensor *t = &in->checkpoint->tensors[i];
        if (strcmp(t->name, o->tensor) == 0) {
            return o->json ? inspect_tensor_json(in, t, err) : inspect_tensor(in, t, err);
        }
    }
    return unknown_tensor(in->checkpoint, o->tensor, err);
}

/* The page goes through a commit as every target does: complete or not there. */
static fc_code write_html(inspection *in, const options *o, fc_error *err) {
    fc_commit *commit = NULL;
    fc_code rc = fc_commit_begin(o->html, false, o->force, 0, &commit, err);
    if (rc != FC_OK) {
        return rc;
    }
    text_out *page = malloc(sizeof *page);
    int fd = page ? open(fc_commit_path(commit), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666) : -1;
    if (!page) {
        rc = inspect_no_memory(in, err);
    } else if (fd < 0) {
        rc = fc_fail_errno(err, errno, "%s: cannot be created", o->html);
    } else {
        text_out *before = in->out;
        text_out_init(page, fd);
        in->out = page;
        rc = inspect_html(in, err);
        in->out = before;
        int errnum = text_flush(page);
        if (close(fd) != 0 && errnum == 0) {
            errnum = errno;
        }
        if (rc == FC_OK && errnum != 0) {
            rc = fc_fail_errno(err, errnum, "%s: cannot be written", o->html);
        }
    }
    free(page);
    if (rc != FC_OK) {
        fc_commit_abort(commit);
        return rc;
    }
    return fc_commit_finish(commit, err);
}

static fc_code show(inspection *in, const options *o, fc_error *err) {
    if (o->html) {
        return write_html(in, o, err);
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
    fc_open_options how = {.headers_only = o->headers_only, .follow_external = o->follow_external};
    fc_checkpoint *checkpoint = NULL;
    fc_code rc = fc_checkpoint_open(o->operands[0], &how, &checkpoint, err);
    if (rc != FC_OK) {
        return rc;
    }
    inspection in = {.checkpoint = checkpoint, .out = call->out, .headers_only = o->headers_only, .worst = FC_OK};
    rc = show(&in, o, err);
    if (rc == FC_OK && in.worst != FC_OK) {
        rc = in.worst;
        *err = in.first;
    }
    cut_scratch_free(&in.scratch);
    fc_checkpoint_close(checkpoint);
    return rc;
}

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
        "it "
        "is cut into. Reads headers only, plus the few bytes of the objects (step, lr, ...), which are decoded without "
        "executing anything.\n\n"
        "With --quiet it prints nothing: the exit status says whether SRC opens and all its files are there.",
    .examples = examples,
    .takes = TAKES_COMMON | TAKES(OPT_TREE) | TAKES(OPT_TENSOR) | TAKES(OPT_HTML) | TAKES(OPT_HEADERS_ONLY) |
             TAKES(OPT_FOLLOW_EXTERNAL) | TAKES(OPT_JSON) | TAKES(OPT_FORCE),
    .run = run,
};
