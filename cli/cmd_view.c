/*
 * view: an HDF5 file that shows the bytes of a checkpoint where they lie.
 */
#include "command.h"
#include "json_out.h"
#include "source.h"
#include "target.h"

#include "fsdpckpt/view.h"

#include <string.h>

static void print_json(const fc_view_report *r, const options *o, text_out *out) {
    json_out j;
    jw_document(&j, out, 1, "view");
    JSON_MEMBER(&j, string, "target", o->output);
    JSON_MEMBER(&j, uint, "tensors", r->selected.tensors);
    JSON_MEMBER(&j, uint, "objects", r->selected.objects);
    JSON_MEMBER(&j, uint, "left_out", r->selected.left_out);
    JSON_MEMBER(&j, uint, "external", r->external);
    JSON_MEMBER(&j, uint, "assembled", r->assembled);
    JSON_MEMBER(&j, uint, "pieces", r->pieces);
    JSON_MEMBER(&j, uint, "copied", r->copied);
    JSON_MEMBER(&j, uint, "viewed_bytes", r->viewed_bytes);
    JSON_MEMBER(&j, uint, "copied_bytes", r->copied_bytes);
    jw_key(&j, "reader_environment");
    jw_open(&j, '{');
    JSON_MEMBER(&j, string, "HDF5_EXTFILE_PREFIX", "${ORIGIN}");
    jw_close(&j, '}');
    jw_end_document(&j);
}

static void print_text(const fc_view_report *r, const options *o, const fc_checkpoint *source, text_out *out) {
    char seen[TEXT_SIZE_MAX], copied[TEXT_SIZE_MAX];
    text_name(out, o->output);
    text_printf(out, ": %zu %s, %s where they lie in %zu %s, and %zu %s; %s copied\n", r->selected.tensors,
                r->selected.tensors == 1 ? "tensor" : "tensors", text_bytes(seen, r->viewed_bytes), source->nfiles,
                source->nfiles == 1 ? "file" : "files", r->selected.objects,
                r->selected.objects == 1 ? "object" : "objects", text_bytes(copied, r->copied_bytes));
    if (r->assembled > 0) {
        text_printf(out, "%zu tensors are put together from %zu pieces\n", r->assembled, r->pieces);
    }
    if (r->copied > 0) {
        text_printf(out, "%zu small tensors cannot be viewed and were copied\n", r->copied);
    }
    if (r->selected.left_out > 0) {
        text_printf(out, "%zu left out by --include and --exclude\n", r->selected.left_out);
    }
    text_puts(out, "To read it, set this before the program starts; the names of the files in it are relative to it:\n"
                   "  export HDF5_EXTFILE_PREFIX='${ORIGIN}'\n");
}

static fc_code run(cli_call *call, fc_error *err) {
    const options *o = call->options;
    fc_view_options how = {
        .selection = {.include = o->include.items, .exclude = o->exclude.items, .strip_prefix = o->strip_prefix},
        .force = o->force,
        .teller = {source_note}};
    fc_view_report report;
    fc_checkpoint *source = NULL;
    fc_code rc = target_check(o->output, &target_view, err);
    rc = rc == FC_OK ? source_open(call, o->operands[0], false, &source, err) : rc;
    if (rc == FC_OK) {
        source_tell(o, source);
        rc = fc_view(source, o->output, &how, &report, err);
    }
    if (rc == FC_OK && o->json) {
        print_json(&report, o, call->out);
    } else if (rc == FC_OK && !o->quiet) {
        print_text(&report, o, source, call->out);
    }
    fc_checkpoint_close(source);
    return rc;
}

static const option_help helps[] = {
    {OPT_OUTPUT, "write the view to the file DST, which must not exist (but see --force)"},
    {.help = NULL},
};

static const char *const examples[] = {
    "fsdpckpt view ckpt/ -o view.h5",
    "a DCP checkpoint as an HDF5 file of a few kilobytes",
    "HDF5_EXTFILE_PREFIX='${ORIGIN}' h5dump -H view.h5",
    "any HDF5 program opens it",
    NULL,
};

const command command_view = {
    .name = "view",
    .operands = "SRC",
    .min_operands = 1,
    .max_operands = 1,
    .summary = "make an HDF5 file that shows a checkpoint's tensors where they lie",
    .description =
        "Writes an HDF5 file whose datasets are the bytes in the files of SRC, of any format and layout: h5py, h5dump "
        "and others see every tensor whole, and nothing is copied but objects. Tensors that are one run of bytes, or "
        "cut along their first dimension, are external datasets; others are virtual datasets over external ones in the "
        "group %pieces.\n\n"
        "The names of the files are relative to the view: move both together, and read with "
        "HDF5_EXTFILE_PREFIX='${ORIGIN}' in the environment. libhdf5 refuses to read from a file that is missing, but "
        "takes what is missing of a file that became shorter for zeros.\n\n"
        "What is compressed, of the other byte order or lazily negated cannot be viewed: up to 64 KiB of a tensor are "
        "copied, larger ones are an error that names them.",
    .examples = examples,
    .helps = helps,
    .synopsis = "-o DST",
    .takes = TAKES_COMMON | TAKES(OPT_OUTPUT) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) | TAKES(OPT_STRIP_PREFIX) |
             TAKES(OPT_FORCE) | TAKES(OPT_FOLLOW_EXTERNAL) | TAKES(OPT_SCHEMA) | TAKES(OPT_JSON),
    .needs = TAKES(OPT_OUTPUT),
    .run = run,
};
