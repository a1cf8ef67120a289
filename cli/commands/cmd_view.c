/*
 * view: writes an HDF5 file that refers to the bytes of a checkpoint instead of copying them.
 */
#include "options/command.h"
#include "output/json_out.h"
#include "recipe.h"
#include "source.h"
#include "target.h"

#include "fsdpckpt/try.h"
#include "fsdpckpt/view.h"

static void print_view_json(const fc_view_report *r, const options *o, text_out *out) {
    json_out j;
    jw_document(&j, out, 1, "view");
    JSON_MEMBER(&j, string, "target", o->output);
    JSON_UINTS(&j, {"tensors", r->selected.tensors}, {"objects", r->selected.objects},
               {"left_out", r->selected.left_out}, {"external", r->external}, {"assembled", r->assembled},
               {"pieces", r->pieces}, {"copied", r->copied}, {"viewed_bytes", r->viewed_bytes},
               {"copied_bytes", r->copied_bytes});
    jw_member_open(&j, "reader_environment", '{');
    JSON_MEMBER(&j, string, "HDF5_EXTFILE_PREFIX", "${ORIGIN}");
    jw_close(&j, '}');
    jw_end_document(&j);
}

static void print_view_text(const fc_view_report *r, const options *o, const fc_checkpoint *source, text_out *out) {
    char seen[TEXT_SIZE_MAX], copied[TEXT_SIZE_MAX];
    text_name(out, o->output);
    text_printf(out, ": %zu %s, %s viewed in %zu %s, and %zu %s; %s copied\n", r->selected.tensors,
                r->selected.tensors == 1 ? "tensor" : "tensors", text_bytes(seen, r->viewed_bytes), source->nfiles,
                source->nfiles == 1 ? "file" : "files", r->selected.objects,
                r->selected.objects == 1 ? "object" : "objects", text_bytes(copied, r->copied_bytes));
    if (r->assembled > 0) {
        text_printf(out, "%zu tensors are assembled from %zu chunks\n", r->assembled, r->pieces);
    }
    if (r->copied > 0) {
        text_printf(out, "%zu small tensors cannot be viewed and were copied\n", r->copied);
    }
    if (r->selected.left_out > 0) {
        text_printf(out, "%zu left out by --include and --exclude\n", r->selected.left_out);
    }
    text_puts(
        out,
        "To read it, set this variable before the program starts, because the view refers to files by relative names:\n"
        "  export HDF5_EXTFILE_PREFIX='${ORIGIN}'\n");
}

static fc_code run_view(cli_call *call, fc_error *err) {
    options rest;
    fc_view_report report;
    fc_checkpoint *source = NULL;
    fc_code rc;
    FC_TRY(target_check(call->options->output, &target_view, err));
    FC_TRY(recipe_open(call, &rest, call->options->operands[0], false, &source, err));
    const options *o = call->options;
    const fc_view_options how = {.selection = source_selection(o), .force = o->force, .reporter = {source_note}};
    source_report(o, source);
    FC_TRY_GOTO(source_note_selection(call, source, true, err), rc, out);
    FC_TRY_GOTO(fc_view(source, o->output, &how, &report, err), rc, out);
    if (o->json) {
        print_view_json(&report, o, call->out);
    } else if (!o->quiet) {
        print_view_text(&report, o, source, call->out);
    }
out:
    fc_checkpoint_close(source);
    return rc;
}

static const option_help helps[] = {
    {OPT_OUTPUT, "write the view to the file DST, which must not exist unless --force is given"},
    {OPT_CONFIG, RECIPE_CONFIG_HELP},
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
    .summary = "create an HDF5 file that shows a checkpoint's tensors without copying them",
    .description =
        "Writes an HDF5 file whose datasets refer to the bytes in the files of SRC, in any format and "
        "layout: h5py, h5dump and other programs see every tensor whole, and only objects are copied. "
        "Tensors that are stored contiguously, or sharded along their first dimension, are external datasets; "
        "others are virtual datasets over external datasets in the group %pieces.\n\nFile names in the view "
        "are relative to it: move the view and SRC together, and set HDF5_EXTFILE_PREFIX='${ORIGIN}' in the "
        "environment to read it. libhdf5 fails if a file is missing, but reads zeros where a file is "
        "truncated.\n\nTensors that are compressed, big-endian or lazily negated cannot be viewed: up to 64 "
        "KiB of such a tensor are copied, and a larger one is an error that names it.",
    .examples = examples,
    .helps = helps,
    .synopsis = "-o DST",
    .takes = TAKES_COMMON | TAKES_RECIPE | TAKES(OPT_OUTPUT) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) |
             TAKES(OPT_EXCLUDE) | TAKES(OPT_STRIP_PREFIX) | TAKES(OPT_FORCE) | TAKES_EXTERNAL | TAKES(OPT_SCHEMA) |
             TAKES(OPT_JSON),
    .usual = TAKES(OPT_OUTPUT) | TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) |
             TAKES(OPT_STRIP_PREFIX) | TAKES(OPT_FORCE),
    .needs = TAKES(OPT_OUTPUT),
    .run = run_view,
};
