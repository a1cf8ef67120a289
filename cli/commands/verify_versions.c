/*
 * verify for a delta and a directory of versions: what the frames, the full versions and the checksums show without the
 * model, and what they do not.
 */
#include "output/json_out.h"
#include "signals.h"
#include "source.h"
#include "versions.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/verify.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNCHECKED = 6 }; /* reasons */

/* The result, and where it is printed. */
typedef struct versions_result {
    const cli_call *call;
    bool silent;
    json_out json;
    const char *version; /* the name of the full version that is verified, for the paths of its files */
    uint64_t defects, bytes_read;
    size_t deltas, full, files, frames, decoded, sizeless;
    size_t compared[FC_DELTA_COMPARED_COUNT];
    uint64_t uncompared_bytes;
    int64_t last_for_model;   /* the last version that has a checksum which only the model can prove */
    fc_verify_report of_full; /* the sum over all full versions */
    const char *unverified;   /* of their format */
} versions_result;

/* ---- defects ---- */

static void print_version_defect(versions_result *r, const char *file, const uint64_t *offset, const char *tensor,
                                 const char *message) {
    json_out *j = &r->json;
    r->defects++;
    if (r->silent) {
        return;
    }
    if (!r->call->options->json) {
        text_name(r->call->out, message);
        text_puts(r->call->out, "\n");
        return;
    }
    jw_open(j, '{');
    JSON_MEMBER(j, string, "file", file);
    jw_key(j, "offset");
    if (offset) {
        jw_uint(j, *offset);
    } else {
        jw_string(j, NULL);
    }
    JSON_MEMBER(j, string, "tensor", tensor);
    JSON_MEMBER(j, string, "message", message);
    jw_close(j, '}');
}

/* The path of a file of the operand, relative to it. */
static const char *relative_path(const char *whole, const char *path) {
    const size_t length = strlen(whole);
    if (strncmp(whole, path, length) != 0) {
        return path;
    }
    path += length;
    return *path == '\0' ? NULL : path + strspn(path, "/");
}

static void print_fault(versions_result *r, const fc_delta_fault *f) {
    const char *file = relative_path(r->call->options->operands[0], f->path);
    print_version_defect(r, file, f->tensor ? &f->offset : NULL, f->tensor, f->message);
}

static void print_full_defect(void *context, const fc_defect *d) {
    versions_result *r = context;
    char *file = NULL;
    const bool inside = d->file && asprintf(&file, "%s/%s", r->version, d->file) >= 0;
    print_version_defect(r, inside ? file : d->file, d->has_offset ? &d->offset : NULL, d->tensor, d->message);
    free(inside ? file : NULL);
}

/* ---- what is verified ---- */

static void count_frame(versions_result *r, const fc_delta_seen *v, const fc_delta_changed *f) {
    r->frames++;
    r->decoded += f->decoded;
    r->sizeless += !f->decoded && f->bytes == FC_DELTA_UNKNOWN && v->encoding == FC_DELTA_XOR;
    r->compared[f->compared]++;
    r->uncompared_bytes += f->compared != FC_DELTA_COMPARED && f->bytes != FC_DELTA_UNKNOWN ? f->bytes : 0;
    if (f->compared == FC_DELTA_NEEDS_MODEL) {
        r->last_for_model = v->number;
    }
}

static void count_versions(versions_result *r, const fc_delta_survey *s) {
    for (size_t i = 0; i < s->count; i++) {
        const fc_delta_seen *v = &s->versions[i];
        r->deltas += v->frames != NULL;
        r->files += v->frames ? v->files : 0;
        for (size_t k = 0; v->frames && k < v->tensors; k++) {
            count_frame(r, v, &v->frames[k]);
        }
    }
    r->bytes_read = s->bytes_read;
}

/* Verifies a full version, like any checkpoint. */
static fc_code verify_full(versions_result *r, const fc_delta_seen *v, fc_error *err) {
    const options *o = r->call->options;
    const fc_open_options open = {
        .others = source_others(r->call), .progress = r->call->progress, .session = r->call->session};
    const fc_verify_options how = {
        .work = {.threads = (int)o->jobs, .memory = o->memory, .progress = r->call->progress}};
    const char *relative = relative_path(o->operands[0], v->path);
    fc_checkpoint *checkpoint = NULL;
    fc_verify_report report;
    fc_code rc = fc_checkpoint_open(v->path, &open, &checkpoint, err);
    if (rc == FC_ECORRUPT || rc == FC_EUNSUPPORTED) {
        print_version_defect(r, relative, NULL, NULL, err->message);
        return FC_OK;
    }
    FC_TRY(rc);
    r->version = relative ? relative : v->path;
    r->unverified = checkpoint->format->verifier.unverified;
    signals_cancel(r->call->progress);
    rc = fc_verify(checkpoint, &how, print_full_defect, r, &report, err);
    signals_cancel(NULL);
    fc_checkpoint_close(checkpoint);
    FC_TRY(rc);
    fc_verify_report *sum = &r->of_full;
    r->full++;
    sum->tensors += report.tensors;
    sum->objects += report.objects;
    sum->files += report.files;
    sum->bytes += report.bytes;
    sum->digested += report.digested;
    sum->undigested += report.undigested;
    sum->undigested_bytes += report.undigested_bytes;
    sum->headers_digested += report.headers_digested;
    return FC_OK;
}

/* ---- what is not ---- */

/* Says in words which of the checksums were not compared, each in a text of the arena. */
static fc_code list_unchecked(const versions_result *r, const fc_delta_survey *s, const char *lines[UNCHECKED],
                              size_t *count, fc_error *err) {
    fc_arena *arena = r->call->arena;
    const char *path = r->call->options->operands[0];
    const size_t model = r->compared[FC_DELTA_NEEDS_MODEL], memory = r->compared[FC_DELTA_NEEDS_MEMORY],
                 blake3 = r->compared[FC_DELTA_NEEDS_BLAKE3];
    const char *up_to = "";
    *count = 0;
    if (s->versions[s->count - 1].number != r->last_for_model) {
        up_to = fc_arena_printf(arena, " --up-to %" PRId64, r->last_for_model);
    }
    if (model > 0) {
        lines[(*count)++] = fc_arena_printf(arena,
                                            "the checksums of %zu %s need the model: verify MODEL --delta %s%s "
                                            "compares the last one of each tensor",
                                            model, model == 1 ? "frame" : "frames", path, up_to ? up_to : "");
    }
    if (memory > 0) {
        lines[(*count)++] = fc_arena_printf(
            arena, "the checksums of %zu %s, because too many deltas follow a full version: raise --memory", memory,
            memory == 1 ? "frame" : "frames");
    }
    if (blake3 > 0) {
        lines[(*count)++] = fc_arena_printf(arena, "the checksums of %zu %s: this build cannot compute blake3", blake3,
                                            blake3 == 1 ? "frame" : "frames");
    }
    if (r->sizeless > 0) {
        lines[(*count)++] =
            fc_arena_printf(arena,
                            "%zu %s not say how many bytes the tensor has, which only the model or a full "
                            "version tells",
                            r->sizeless, r->sizeless == 1 ? "frame does" : "frames do");
    }
    if (r->deltas > 0) {
        lines[(*count)++] = "the headers and indexes of deltas, which have no digests";
    }
    if (r->full > 0 && r->unverified) {
        lines[(*count)++] = r->unverified;
    }
    for (size_t i = 0; i < *count; i++) {
        FC_NEED(lines[i], err, path);
    }
    return FC_OK;
}

/* ---- output ---- */

static void print_verified_text(const versions_result *r, const char *const *lines, size_t count) {
    text_out *out = r->call->out;
    char bytes[TEXT_SIZE_MAX];
    const fc_verify_report *full = &r->of_full;
    text_name(out, r->call->options->operands[0]);
    text_printf(out, ": %zu %s", r->deltas, r->deltas == 1 ? "delta" : "deltas");
    if (r->full > 0) {
        text_printf(out, " and %zu full %s", r->full, r->full == 1 ? "version" : "versions");
    }
    const size_t files = r->files + full->files;
    text_printf(out, " in %zu %s, %s of data read\n", files, files == 1 ? "file" : "files",
                text_bytes(bytes, r->bytes_read + full->bytes));
    text_printf(out, "decoded: %zu of %zu %s\n", r->decoded, r->frames, r->frames == 1 ? "frame" : "frames");
    text_printf(out, "covered by checksums: what %zu of %zu %s\n", r->compared[FC_DELTA_COMPARED], r->frames,
                r->frames == 1 ? "frame makes" : "frames make");
    if (r->full > 0) {
        text_printf(out,
                    "covered by digests: the data of %zu of %zu in full versions, the headers of %zu of %zu files\n",
                    full->digested, full->tensors + full->objects, full->headers_digested, full->files);
    }
    if (full->undigested > 0) {
        text_printf(out, "not covered: the data of %zu in full versions (%s), which has no digests to compare with\n",
                    full->undigested, text_bytes(bytes, full->undigested_bytes));
    }
    for (size_t i = 0; i < count; i++) {
        text_name_in(out, "not covered: ", lines[i], "\n");
    }
    text_printf(out,
                r->defects == 0   ? "no defects\n"
                : r->defects == 1 ? "1 defect\n"
                                  : "%" PRIu64 " defects\n",
                r->defects);
}

static fc_code print_verified_json(versions_result *r, const char *const *lines, size_t count, fc_error *err) {
    json_out *j = &r->json;
    const fc_verify_report *full = &r->of_full;
    const char *all = count > 0 ? lines[0] : NULL;
    for (size_t i = 1; i < count; i++) {
        all = fc_arena_printf(r->call->arena, "%s; %s", all, lines[i]);
        FC_NEED(all, err, r->call->options->operands[0]);
    }
    const size_t compared = r->compared[FC_DELTA_COMPARED];
    jw_close(j, ']');
    JSON_UINTS(j, {"tensors", r->frames + full->tensors}, {"objects", full->objects}, {"files", r->files + full->files},
               {"bytes_read", r->bytes_read + full->bytes}, {"with_digest", compared + full->digested},
               {"without_digest", r->frames - compared + full->undigested},
               {"bytes_without_digest", r->uncompared_bytes + full->undigested_bytes},
               {"files_with_header_digest", full->headers_digested});
    JSON_MEMBER(j, bool, "sealed", false);
    JSON_MEMBER(j, uint, "objects_not_known_harmless", 0);
    JSON_MEMBER(j, string, "unverified", all);
    jw_end_document(j);
    return FC_OK;
}

static fc_code verify_all(versions_result *r, fc_error *err) {
    versions_faults faults = {.count = 0};
    fc_delta_survey s;
    const char *lines[UNCHECKED];
    size_t count;
    FC_TRY(versions_look(r->call, FC_DELTA_CHECKSUMS, &faults, &s, err));
    if (r->call->options->json) {
        jw_document(&r->json, r->call->out, 2, "verify");
        JSON_MEMBER(&r->json, string, "source", r->call->options->operands[0]);
        JSON_MEMBER(&r->json, string, "format", "delta");
        jw_member_open(&r->json, "defects", '[');
    }
    for (size_t i = 0; i < faults.count; i++) {
        print_fault(r, &faults.items[i]);
    }
    count_versions(r, &s);
    for (size_t i = 0; i < s.count; i++) {
        FC_TRY(s.versions[i].full && !s.versions[i].damaged ? verify_full(r, &s.versions[i], err) : FC_OK);
    }
    FC_TRY(list_unchecked(r, &s, lines, &count, err));
    if (r->call->options->json) {
        return print_verified_json(r, lines, count, err);
    }
    if (!r->silent) {
        print_verified_text(r, lines, count);
    }
    return FC_OK;
}

fc_code versions_verify(cli_call *call, fc_error *err) {
    versions_result r = {.call = call, .silent = options_silent(call->options)};
    FC_TRY(verify_all(&r, err));
    return r.defects > 0 ? FC_EFOUND : FC_OK;
}
