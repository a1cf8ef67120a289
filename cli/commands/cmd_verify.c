/*
 * verify: compares every byte with its digests. Passes options to fc_verify and prints defects as they are found.
 */
#include "commands/seal_file.h"
#include "options/command.h"
#include "options/hint.h"
#include "output/json_out.h"
#include "recipe.h"
#include "signals.h"
#include "source.h"
#include "versions.h"
#include "weights.h"

#include "fsdpckpt/check.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"
#include "fsdpckpt/verify.h"

#include <stdlib.h>
#include <string.h>

/* Where and how the result is printed. */
typedef struct verify_output {
    text_out *out;
    json_out json;
    bool is_json, silent;
    const char *seal; /* path of the seal to write; NULL: none */
} verify_output;

static void print_defect(void *context, const fc_defect *d) {
    verify_output *p = context;
    if (p->silent) {
        return;
    }
    if (!p->is_json) {
        text_name(p->out, d->message);
        text_puts(p->out, "\n");
        return;
    }
    jw_open(&p->json, '{');
    JSON_MEMBER(&p->json, string, "file", d->file);
    if (d->has_offset) {
        JSON_MEMBER(&p->json, uint, "offset", d->offset);
    } else {
        JSON_MEMBER(&p->json, string, "offset", NULL);
    }
    JSON_MEMBER(&p->json, string, "tensor", d->tensor);
    JSON_MEMBER(&p->json, string, "message", d->message);
    jw_close(&p->json, '}');
}

static void begin_json(verify_output *p, const fc_checkpoint *checkpoint) {
    if (!p->is_json) {
        return;
    }
    jw_document(&p->json, p->out, 2, "verify");
    JSON_MEMBER(&p->json, string, "source", checkpoint->path);
    JSON_MEMBER(&p->json, string, "format", checkpoint->format->name);
    jw_member_open(&p->json, "defects", '[');
}

static void end_json(verify_output *p, const fc_checkpoint *checkpoint, const fc_verify_report *r) {
    json_out *j = &p->json;
    jw_close(j, ']');
    JSON_UINTS(j, {"tensors", r->tensors}, {"objects", r->objects}, {"files", r->files}, {"bytes_read", r->bytes},
               {"with_digest", r->digested}, {"without_digest", r->undigested},
               {"bytes_without_digest", r->undigested_bytes}, {"files_with_header_digest", r->headers_digested});
    JSON_MEMBER(j, bool, "sealed", r->sealed);
    JSON_MEMBER(j, uint, "objects_not_known_harmless", r->unknown);
    JSON_MEMBER(j, string, "unverified", r->sealed ? NULL : checkpoint->format->verifier.unverified);
    jw_end_document(j);
}

/* Prints what the digests cover and what they do not, so that the result is not overestimated. */
static void end_text(verify_output *p, const fc_checkpoint *checkpoint, const fc_verify_report *r) {
    char bytes[TEXT_SIZE_MAX];
    size_t values = r->tensors + r->objects;
    text_name(p->out, checkpoint->path);
    text_printf(p->out, ": %zu %s and %zu %s in %zu %s, %s of data read\n", r->tensors,
                r->tensors == 1 ? "tensor" : "tensors", r->objects, r->objects == 1 ? "object" : "objects", r->files,
                r->files == 1 ? "file" : "files", text_bytes(bytes, r->bytes));
    if (r->sealed) {
        if (p->seal && r->defects == 0) {
            text_name_in(p->out, "sealed: every byte of every file, in ", p->seal, "\n");
        } else {
            text_puts(p->out, "covered: every byte of every file, by the seal\n");
        }
    } else {
        text_printf(p->out, "covered by digests: the data of %zu of %zu, the headers of %zu of %zu files\n",
                    r->digested, values, r->headers_digested, r->files);
    }
    if (!r->sealed && r->undigested > 0) {
        text_printf(p->out,
                    "not covered: the data of %zu (%s), which has no digests to compare with; verify --seal records "
                    "digests for next time\n",
                    r->undigested, text_bytes(bytes, r->undigested_bytes));
    }
    if (!r->sealed && checkpoint->format->verifier.unverified) {
        text_printf(p->out, "not covered: %s\n", checkpoint->format->verifier.unverified);
    }
    if (r->unknown > 0) {
        text_printf(p->out, "not known to be harmless: %zu %s, e.g. ", r->unknown,
                    r->unknown == 1 ? "object" : "objects");
        text_name(p->out, r->unknown_object);
        text_name_in(p->out, ": ", r->unknown_reason, "\n");
    }
    text_printf(p->out,
                r->defects == 0   ? "no defects\n"
                : r->defects == 1 ? "1 defect\n"
                                  : "%llu defects\n",
                (unsigned long long)r->defects);
}

static fc_code verify_source(const cli_call *call, const fc_checkpoint *checkpoint, fc_seal *seal, verify_output *p,
                             fc_verify_report *report, fc_error *err) {
    const options *o = call->options;
    const fc_verify_options how = {.work = {.threads = (int)o->jobs, .memory = o->memory, .progress = call->progress},
                                   .seal = seal};
    signals_cancel(call->progress);
    fc_code rc = fc_verify(checkpoint, &how, print_defect, p, report, err);
    signals_cancel(NULL);
    return rc;
}

/* Verifies, and seals what has no defects. */
static fc_code verify_and_seal(const cli_call *call, const fc_checkpoint *checkpoint, verify_output *p,
                               fc_verify_report *report, fc_error *err) {
    const options *o = call->options;
    if (!o->seal) {
        return verify_source(call, checkpoint, NULL, p, report, err);
    }
    fc_seal seal;
    FC_TRY(fc_seal_new(checkpoint, call->arena, &seal, err));
    p->seal = seal.path;
    const fc_commit_options how = {.path = seal.path, .force = o->force, .any_content = true};
    FC_TRY(fc_commit_check(&how, err));
    FC_TRY(verify_source(call, checkpoint, &seal, p, report, err));
    return report->defects == 0 ? seal_write(o, checkpoint, &seal, err) : FC_OK;
}

/* The files that prevent a checkpoint from being opened, with one message each. */
typedef struct bad_files {
    fc_arena *arena;
    struct {
        const char *path, *line;
    } * items;
    size_t count, capacity;
} bad_files;

static void add_bad_file(void *context, const char *path, const char *line) {
    bad_files *bad = context;
    for (size_t i = 0; i < bad->count; i++) {
        if (strcmp(bad->items[i].path, path) == 0) {
            return;
        }
    }
    if (bad->count == bad->capacity) {
        size_t capacity = 2 * bad->capacity + 16; /* cannot overflow: that many items are in memory */
        void *grown = reallocarray(bad->items, capacity, sizeof *bad->items);
        if (!grown) {
            return; /* fewer lines */
        }
        bad->items = grown;
        bad->capacity = capacity;
    }
    path = fc_arena_strndup(bad->arena, path, strlen(path));
    line = fc_arena_strndup(bad->arena, line, strlen(line));
    if (path && line) {
        bad->items[bad->count].path = path;
        bad->items[bad->count++].line = line;
    }
}

/* Finds missing and truncated files without opening any. */
static void find_absent(const char *path, const fc_open_options *how, bad_files *bad) {
    const fc_check_options what = {.setting_names = hint_settings,
                                   .open = {.follow_external = how->follow_external, .session = how->session}};
    fc_checkpoint *checkpoint = NULL;
    fc_report report = {0};
    fc_error ignored;
    bool known = fc_check_path(path, &what, bad->arena, &checkpoint, &report, &ignored) == FC_OK;
    for (size_t i = 0; known && i < report.count; i++) {
        const fc_finding *f = &report.findings[i];
        if (f->kind == FC_FOUND_FILE_MISSING || f->kind == FC_FOUND_FILE_TRUNCATED ||
            f->kind == FC_FOUND_FILE_DAMAGED) {
            add_bad_file(bad, f->name, f->message);
        }
    }
    fc_checkpoint_close(checkpoint);
}

/* Whether the error is about the file `path`; then the line of that file replaces it. */
static bool is_about(const fc_error *err, const char *path) {
    const char *at = strstr(err->message, path);
    return at && at[strlen(path)] == ':';
}

/*
 * If several files of a checkpoint are missing, truncated or damaged, each is reported on its own line, so that all can
 * be restored at once. Other errors stay unchanged.
 */
static void report_files(const bad_files *bad, fc_error *err) {
    bool reported = false;
    for (size_t i = 0; bad->count > 1 && i < bad->count; i++) {
        text_report("%s", bad->items[i].line);
        reported |= is_about(err, bad->items[i].path);
    }
    if (reported) {
        err->message[0] = '\0';
    }
}

static fc_code open_source(const cli_call *call, fc_checkpoint **checkpoint, fc_error *err) {
    bad_files damaged = {.arena = call->arena}, bad = {.arena = call->arena};
    const options *o = call->options;
    const fc_open_options how = {.follow_external = o->follow_external,
                                 .damaged = add_bad_file,
                                 .context = &damaged,
                                 .reporter = {source_note},
                                 .others = source_others(call),
                                 .progress = call->progress,
                                 .session = call->session};
    fc_code rc = fc_checkpoint_open_model(o->operands[0], &how, NULL, checkpoint, err);
    if (rc == FC_ECORRUPT || rc == FC_EIO) {
        find_absent(o->operands[0], &how, &bad);
        for (size_t i = 0; i < damaged.count; i++) { /* files already reported as absent are skipped */
            add_bad_file(&bad, damaged.items[i].path, damaged.items[i].line);
        }
        report_files(&bad, err);
    }
    free(damaged.items);
    free(bad.items);
    return rc;
}

/* Opens the source with the deltas applied. */
static fc_code open_patched(const cli_call *call, fc_checkpoint **out, fc_error *err) {
    const options *o = call->options;
    if (o->seal) {
        return fc_fail(err, FC_EUSAGE,
                       "verify: --seal records the digests of files, and --delta changes what they "
                       "hold: seal the model without it");
    }
    FC_TRY(source_open(call, o->operands[0], false, out, err));
    const fc_code rc = weights_compute(o, out, err);
    if (rc != FC_OK) {
        fc_checkpoint_close(*out);
        *out = NULL;
    }
    return rc;
}

static fc_code run_verify(cli_call *call, fc_error *err) {
    const options *o = call->options;
    fc_checkpoint *checkpoint = NULL;
    fc_verify_report report;
    verify_output p = {.out = call->out, .is_json = o->json, .silent = options_silent(o)};
    FC_TRY(recipe_check_options(o, err));
    bool versions;
    FC_TRY(versions_meant(call, TAKES(OPT_JSON) | TAKES(OPT_JOBS) | TAKES(OPT_MEMORY), &versions, err));
    if (versions) {
        return versions_verify(call, err);
    }
    FC_TRY((o->delta.count > 0 ? open_patched : open_source)(call, &checkpoint, err));
    source_report(o, checkpoint);
    begin_json(&p, checkpoint);
    fc_code rc;
    FC_TRY_GOTO(verify_and_seal(call, checkpoint, &p, &report, err), rc, out);
    if (!p.silent) {
        (p.is_json ? end_json : end_text)(&p, checkpoint, &report);
    }
    rc = report.defects > 0 ? FC_EFOUND : FC_OK;
out:
    fc_checkpoint_close(checkpoint);
    return rc;
}

static const option_help helps[] = {
    {OPT_FORCE, "replace the seal that exists, with --seal"},
    {OPT_QUIET, "print nothing except for --json; the exit status is the result"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt verify ckpt/",
    "before it is copied, deleted or trained on",
    "fsdpckpt verify ckpt/ --json > defects.json",
    "every defect with its file, offset and tensor",
    "fsdpckpt verify --seal ckpt/",
    "record digests of a checkpoint that has none, for later comparisons",
    "fsdpckpt verify updates/",
    "the versions of a model, without the model",
    NULL,
};

const command command_verify = {
    .name = "verify",
    .operands = "SRC",
    .summary = "check every byte of a checkpoint against its digests",
    .description =
        "Reads all of SRC and compares it with the recorded digests: those that fsdpckpt writes for each tensor, each "
        "shard and the headers of each file, and the CRCs of zip archives (DCP, torch.save). Also checks that the "
        "chunks cover each tensor, that objects can be decoded, and that the headers match the files.\n\nWith --seal, "
        "and if there are no defects, the digests of every file and tensor are written to a file next to SRC; SRC "
        "itself is never changed. From then on verify, diff and conversions use this seal, and verify compares every "
        "byte of every file with it.\n\nPrints every defect with its file, offset and tensor, then a summary of the "
        "data that the digests cover and do not cover. The exit status is 0 if there are no defects, 1 if there are "
        "defects, and 3 if SRC cannot be opened.\n\nWith --delta, what the deltas make of SRC is read and "
        "compared with their checksums. Without a model, verify checks a delta or a directory of versions as far as "
        "that is possible: it decodes every frame, verifies full versions, compares the checksums of the deltas that "
        "follow one, and says what it could not check.",
    .examples = examples,
    .helps = helps,
    .takes = TAKES_COMMON | TAKES_DELTA | TAKES(OPT_JOBS) | TAKES(OPT_MEMORY) | TAKES_EXTERNAL | TAKES(OPT_SEAL) |
             TAKES(OPT_FORCE) | TAKES(OPT_JSON),
    .usual = TAKES(OPT_SEAL) | TAKES(OPT_FORCE) | TAKES(OPT_JOBS) | TAKES(OPT_JSON),
    .run = run_verify,
};
