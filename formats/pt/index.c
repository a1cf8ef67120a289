/*
 * Opens a model in several torch.save files, as written by Hugging Face's save_pretrained and accelerate:
 * pytorch_model-00001-of-00003.bin, ... and pytorch_model.bin.index.json. The index has the form of a safetensors index
 * (safetensors/index.c).
 */
#include "checkpoint/path.h"
#include "pt/parts.h"
#include "pt/pt.h"
#include "safetensors/files.h"
#include "torch/file/file.h"

#include "base/file_name.h"
#include "base/name_table.h"
#include "checkpoint/identity.h"
#include "fsdpckpt/try.h"

#include <string.h>

/* The state while the files are read. */
typedef struct index_reader {
    fc_checkpoint *checkpoint;
    const fc_st_files *files;
    const char *path;    /* what messages name */
    fc_tensor **tensors; /* per file, in the arena */
    size_t *counts;
    size_t total;
    fc_progress *progress; /* may be NULL */
    fc_error *err;
} index_reader;

bool fc_pt_is_index(const char *path) {
    /* the index of ColossalAI's optimizer has numbers of parameters */
    return fc_is_index_of(path, ".bin") && strncmp(fc_base_name(path), "pytorch_optim.", 14) != 0;
}

static fc_code read_files(index_reader *o) {
    const fc_st_files *files = o->files;
    fc_progress_begin(o->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, files->nfiles);
    for (size_t f = 0; f < files->nfiles; f++) {
        FC_TRY_CONTEXT(fc_torch_read_file(o->checkpoint, files->files[f].path, (uint32_t)f, &o->tensors[f],
                                          &o->counts[f], NULL, o->err),
                       o->err, "%s", o->path);
        o->total += o->counts[f];
        FC_TRY(fc_progress_count(o->progress, 1, o->err));
    }
    return FC_OK;
}

/* Joins the tensors in the order of the files. No name may be in two files. */
static fc_code join_files(index_reader *o, fc_name_table *names, fc_tensor *all) {
    size_t n = 0;
    for (size_t f = 0; f < o->files->nfiles; f++) {
        for (size_t i = 0; i < o->counts[f]; i++) {
            const fc_tensor *t = &o->tensors[f][i];
            const size_t first = fc_name_table_put(names, t->name, strlen(t->name), f);
            FC_NEED(first != FC_NO_NAME, o->err, o->path);
            if (first != f) {
                return fc_fail(o->err, FC_ECORRUPT, "%s: %.256s is in two files, %s and %s", o->path, t->name,
                               o->files->files[first].name, o->files->files[f].name);
            }
            all[n++] = *t;
        }
    }
    o->checkpoint->tensors = all;
    o->checkpoint->ntensors = n;
    return FC_OK;
}

/* Checks that every tensor is in the file that the index names. */
static fc_code check_map(const index_reader *o, const fc_name_table *names) {
    for (size_t i = 0; i < o->files->nmap; i++) {
        const fc_st_mapped *m = &o->files->map[i];
        if (fc_name_table_find(names, m->name, strlen(m->name)) != m->file) {
            return fc_fail(o->err, FC_ECORRUPT, "%s: tensor %.256s: the index says that it is in %s, but it is not",
                           o->path, m->name, o->files->files[m->file].name);
        }
    }
    return FC_OK;
}

static fc_code open_files(index_reader *o, const fc_open_options *options) {
    fc_arena *arena = o->checkpoint->arena;
    o->tensors = fc_arena_calloc(arena, o->files->nfiles, sizeof *o->tensors);
    o->counts = fc_arena_calloc(arena, o->files->nfiles, sizeof *o->counts);
    FC_NEED(o->tensors && o->counts, o->err, o->checkpoint->path);
    o->checkpoint->files = o->files->files;
    o->checkpoint->nfiles = o->files->nfiles;
    FC_TRY(fc_identities_take(o->checkpoint, options, o->err));
    FC_TRY(read_files(o));
    fc_name_table *names = fc_name_table_new(arena, o->total + 1);
    fc_tensor *all = fc_arena_calloc(arena, o->total + 1, sizeof *all);
    FC_TRY(names && all ? join_files(o, names, all) : fc_no_memory(o->err, o->checkpoint->path));
    return check_map(o, names);
}

fc_code fc_pt_join_files(fc_checkpoint *checkpoint, const fc_st_files *files, const char *path,
                         const fc_open_options *options, fc_error *err) {
    index_reader o = {
        .checkpoint = checkpoint, .files = files, .path = path, .progress = options->progress, .err = err};
    return open_files(&o, options);
}

fc_code fc_pt_open_index(fc_checkpoint *checkpoint, const char *path, const fc_open_options *options, fc_error *err) {
    const char *name = fc_base_name(path);
    fc_st_files files = {0};
    files.directory = name == path ? "." : fc_arena_strndup(checkpoint->arena, path, (size_t)(name - path));
    path = fc_arena_strndup(checkpoint->arena, path, strlen(path));
    FC_NEED(files.directory && path, err, checkpoint->path);
    fc_code rc;
    FC_TRY_GOTO(fc_identities_add_header(checkpoint, path, options, err), rc, out);
    FC_TRY_GOTO(fc_st_index_read(checkpoint->arena, path, &files, err), rc, out);
    if (!options->follow_external) {
        FC_TRY_GOTO(fc_check_links(files.directory, files.files, files.nfiles, err), rc, out);
    }
    checkpoint->producer = "torch.save, with an index";
    FC_TRY_GOTO(fc_pt_join_files(checkpoint, &files, files.index->path, options, err), rc, out);
    checkpoint->nfiles++; /* the index */
out:
    fc_st_files_free(&files);
    return rc;
}
