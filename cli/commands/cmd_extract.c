/*
 * extract: writes one whole tensor or object of a checkpoint to standard output or a file.
 */
#include "options/command.h"
#include "options/suggest.h"
#include "out_file.h"
#include "output/json_out.h"
#include "output/npy.h"
#include "recipe.h"
#include "signals.h"
#include "source.h"
#include "target.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"

#include <string.h>
#include <strings.h>
#include <unistd.h>

typedef enum form { FORM_RAW, FORM_NPY, FORM_JSON } form;

/* The value to write, and its form. */
typedef struct extraction {
    const fc_checkpoint *checkpoint;
    const fc_target_tensor *value;
    form form;
    text_out *out;
    fc_progress *progress;
    fc_arena *arena;
} extraction;

/* The words that users of NumPy or C know for each form. */
static const struct {
    const char *word;
    form form;
} form_words[] = {{"raw", FORM_RAW}, {"bin", FORM_RAW},   {"bytes", FORM_RAW},
                  {"npy", FORM_NPY}, {"numpy", FORM_NPY}, {"json", FORM_JSON}};

static fc_code read_form(const char *word, form *out, fc_error *err) {
    const char *best = NULL;
    size_t score = SUGGEST_NONE;
    for (size_t i = 0; i < sizeof form_words / sizeof *form_words; i++) {
        if (strcasecmp(word, form_words[i].word) == 0) {
            *out = form_words[i].form;
            return FC_OK;
        }
        suggest_consider(word, strlen(word), form_words[i].word, &best, &score);
    }
    return fc_fail(err, FC_EUSAGE, "extract: --to %s: %s%s%schoose raw, npy, or json for objects", word,
                   best ? "did you mean '" : "", best ? best : "", best ? "'? " : "");
}

static fc_code choose_form(const options *o, form *out, fc_error *err) {
    static const char *const extensions[] = {".npy", ".json", ".raw", ".bin", ".dat", NULL};
    static const target_kind raw = {"raw bytes", extensions};
    *out = FORM_RAW;
    if (o->to) {
        return read_form(o->to, out, err);
    }
    if (!o->output) {
        return FC_OK;
    }
    *out = text_ends_with(o->output, ".npy") ? FORM_NPY : text_ends_with(o->output, ".json") ? FORM_JSON : FORM_RAW;
    const fc_format *format = target_named_format(o->output);
    if (format && !text_ends_with(o->output, ".bin")) {
        return fc_fail(err, FC_EUSAGE,
                       "extract: %s: the extension names %s, but extract writes raw bytes (--to raw), .npy or .json; "
                       "for a checkpoint of one tensor use: fsdpckpt consolidate %s --include '%s' -o %s",
                       o->output, format->description, o->operands[0], o->operands[1], o->output);
    }
    return target_check(o->output, &raw, err);
}

static fc_code take_bytes(void *context, const void *bytes, size_t size, fc_error *err) {
    extraction *x = context;
    text_write(x->out, bytes, size);
    return x->out->error ? FC_EIO
                         : fc_progress_count(x->progress, size, err); /* the owner of `out` reports the error */
}

static fc_code write_json(extraction *x, fc_error *err) {
    const char *json = NULL;
    FC_TRY(fc_checkpoint_object_json(x->checkpoint, x->value->source, x->arena, &json, err));
    jw_copy(x->out, json);
    text_puts(x->out, "\n");
    return FC_OK;
}

/* The bytes of all elements; 0 if the number overflows. */
static uint64_t data_size(const fc_target_tensor *value) {
    int64_t n;
    uint64_t bytes;
    bool known = fc_numel(value->source->ndim, value->source->shape, &n) &&
                 !__builtin_mul_overflow((uint64_t)n, (uint64_t)fc_dtype_size(value->dtype), &bytes) &&
                 bytes <= UINT64_MAX - NPY_HEADER_MAX;
    return known ? bytes : 0;
}

static uint64_t size_of(const fc_target_tensor *value) {
    return data_size(value) + NPY_HEADER_MAX;
}

static fc_code write_value(void *context, text_out *out, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS] = {0};
    extraction *x = context;
    const fc_tensor *t = x->value->source;
    const fc_box all = {t->ndim, origin, t->shape};
    char header[NPY_HEADER_MAX];
    x->out = out;
    if (x->form == FORM_JSON) {
        FC_TRY(write_json(x, err));
        return fc_checkpoint_unchanged(x->checkpoint, err);
    }
    if (x->form == FORM_NPY) {
        text_write(out, header, npy_header(x->value->dtype, t->ndim, t->shape, header));
    }
    fc_progress_begin(x->progress, FC_PHASE_READING, FC_COUNTED_BYTES, data_size(x->value));
    fc_code rc = fc_read_stream(x->checkpoint, t, &all, x->value->dtype, take_bytes, x, err);
    FC_TRY(rc == FC_EIO && out->error ? FC_OK : rc);
    return fc_checkpoint_unchanged(x->checkpoint, err);
}

static fc_code check_form(const extraction *x, fc_error *err) {
    const fc_tensor *t = x->value->source;
    if (x->form == FORM_NPY && t->object) {
        return fc_fail(err, FC_EUSAGE, "%s: '%s' is an object, not a tensor; use --to json or --to raw",
                       x->checkpoint->path, x->value->name);
    }
    if (x->form == FORM_JSON && !t->object) {
        return fc_fail(err, FC_EUSAGE, "%s: '%s' is a tensor, not an object; use --to npy or --to raw",
                       x->checkpoint->path, x->value->name);
    }
    if (x->checkpoint->format->layout_only) {
        return fc_fail(err, FC_EUSAGE, "%s: is a schema, which has no data to extract", x->checkpoint->path);
    }
    return FC_OK;
}

static fc_code write_out(extraction *x, const cli_call *call, fc_error *err) {
    const options *o = call->options;
    bool printed = !o->output || strcmp(o->output, "-") == 0;
    if (printed && x->form != FORM_JSON && isatty(STDOUT_FILENO)) {
        return fc_fail(err, FC_EUSAGE, "extract: cannot write bytes to a terminal; use -o FILE or a pipe");
    }
    signals_cancel(printed ? NULL : x->progress);
    fc_code rc = out_result(call, x->checkpoint, size_of(x->value), write_value, x, err);
    signals_cancel(NULL);
    return rc;
}

static fc_code extract_value(extraction *x, const cli_call *call, fc_error *err) {
    const options *o = call->options;
    const char *name = o->operands[1];
    fc_selection selection = source_selection(o);
    selection.cast = option_given(o, OPT_DTYPE);
    selection.dtype = o->dtype;
    fc_target target;
    fc_selected counts;
    FC_TRY(fc_target_new(x->checkpoint, &selection, call->arena, &target, &counts, err));
    for (size_t i = 0; i < target.ntensors && !x->value; i++) {
        x->value = strcmp(target.tensors[i].name, name) == 0 ? &target.tensors[i] : NULL;
    }
    if (!x->value) {
        return suggest_name(x->checkpoint->path, &target.tensors[0].name, sizeof target.tensors[0], target.ntensors,
                            name, err);
    }
    FC_TRY(check_form(x, err));
    return write_out(x, call, err);
}

static fc_code run_extract(cli_call *call, fc_error *err) {
    const options *o = call->options;
    extraction x = {.progress = call->progress, .arena = call->arena};
    options rest;
    fc_checkpoint *checkpoint = NULL;
    fc_code rc;
    FC_TRY_GOTO(choose_form(o, &x.form, err), rc, out);
    FC_TRY_GOTO(recipe_open(call, &rest, o->operands[0], false, &checkpoint, err), rc, out);
    source_report(o, checkpoint);
    x.checkpoint = checkpoint;
    FC_TRY_GOTO(source_note_selection(call, checkpoint, false, err), rc, out);
    rc = extract_value(&x, call, err);
out:
    fc_checkpoint_close(checkpoint);
    return rc;
}

static const option_help helps[] = {
    {OPT_TP_PLAN, SOURCE_TP_PLAN_HELP},
    {OPT_OUTPUT,
     "write to the file DST, which must not exist unless --force is given; - is standard output, the default"},
    {OPT_TO, "format of DST, one of raw, npy, and json for objects (default: from the extension of DST, else raw)"},
    {OPT_QUIET, "print errors only"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt extract ckpt/ model.norm.weight -o norm.npy",
    "a tensor for numpy.load",
    "fsdpckpt extract ckpt/ model.norm.weight --dtype f32 | xxd | head",
    "its bytes, converted to float32",
    "fsdpckpt extract ckpt/ optim.param_groups.0.betas -o betas.json",
    "an object, decoded as JSON",
    NULL,
};

const command command_extract = {
    .name = "extract",
    .operands = "SRC NAME",
    .summary = "extract one tensor or object from a checkpoint",
    .description =
        "Writes the whole tensor NAME, in any layout, to standard output or to the file of -o: its elements in "
        "row-major order, little-endian (--to raw, the default), or as a NumPy file (--to npy, or a name that ends in "
        ".npy). An object is written as its original bytes, or decoded (--to json, or a name that ends in "
        ".json).\n\nNumPy has no bfloat16 and no fp8: such elements get the types V2 and V1, as numpy.save writes "
        "those of ml_dtypes. numpy.load(f).view(ml_dtypes.bfloat16) gives the array; --dtype f32 avoids the "
        "conversion. complex32 becomes V4: .view('f2') shows the real and imaginary parts side by side.\n\nThe data is "
        "compared with its recorded CRCs (torch archives) and digests (fsdpckpt). Damage gives exit status 3, and no "
        "file is written; bytes that already went to standard output cannot be taken back, so check the "
        "status.\n\nNAME is the name after --strip-prefix and --rename.",
    .examples = examples,
    .helps = helps,
    .takes = TAKES_COMMON | TAKES_RECIPE | TAKES_DELTA | TAKES(OPT_DEQUANTIZE) | TAKES(OPT_OUTPUT) | TAKES(OPT_TO) |
             TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) | TAKES(OPT_STRIP_PREFIX) |
             TAKES(OPT_RENAME) | TAKES(OPT_DTYPE) | TAKES(OPT_FORCE) | TAKES_EXTERNAL | TAKES(OPT_SCHEMA) |
             TAKES(OPT_TP_PLAN),
    .usual = TAKES(OPT_OUTPUT) | TAKES(OPT_TO) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) |
             TAKES(OPT_DTYPE) | TAKES(OPT_FORCE),
    .run = run_extract,
};
