/*
 * Rejects invalid requests before any data is read: see check_request.h.
 */
#include "move/check_request.h"

#include "base/file_name.h"
#include "fsdpckpt/try.h"
#include "net/remote.h"
#include "read/budget.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

bool fc_target_is_directory(const fc_target *target, const fc_format *format) {
    return format->target.is_directory ? format->target.is_directory(target) : target->mesh->ndim > 0;
}

/* Lists the formats whose targets can be compressed. */
static void list_compressing(char *names, size_t size) {
    size_t used = 0;
    for (const fc_format *const *f = fc_formats(); *f && used < size; f++) {
        if ((*f)->writer.place) {
            used += (size_t)snprintf(names + used, size - used, "%s%s", used ? ", " : "", (*f)->name);
        }
    }
}

static fc_code check_compression(const fc_convert_options *options, fc_error *err) {
    char names[128] = "";
    if (!options->selection.compress || options->format->writer.place) {
        return FC_OK;
    }
    list_compressing(names, sizeof names);
    return fc_fail(err, FC_EUNSUPPORTED, "the format '%s' has no compression; these have: %s", options->format->name,
                   names);
}

fc_code fc_check_request(const fc_checkpoint *source, const char *path, const fc_convert_options *options,
                         fc_error *err) {
    if (!fc_format_writes(options->format)) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: the format '%s' can be read but not written",
                       path ? path : source->path, options->format->name);
    }
    if (source->format->layout_only && !options->dry_run) {
        return fc_advise(err, fc_fail(err, FC_EUSAGE, "%s: a schema has no data to convert", source->path),
                         FC_HINT_DRY_RUN, NULL);
    }
    FC_TRY(fc_memory_check(options->work.memory, err));
    if (!path && !options->dry_run) {
        return fc_fail(err, FC_EUSAGE, "%s: no target path given", source->path);
    }
    if (path && fc_is_remote(path) && options->own_shards) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: what several processes hold cannot be written to a bucket: write it on this machine, and "
                       "upload it",
                       path);
    }
    if (options->resumable && (options->comm || options->own_shards)) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: a conversion by several processes cannot be resumed",
                       path ? path : source->path);
    }
    if (options->resumable && options->selection.compress) {
        return fc_fail(
            err, FC_EUNSUPPORTED,
            "%s: a conversion that compresses cannot be resumed, because the place of each chunk depends on all "
            "before it: convert without compression, and compress the result",
            path ? path : source->path);
    }
    if (options->own_shards && options->format->target.adapt) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: cannot be written as %s directly: save it as dcp, and convert that",
                       source->path, options->format->name);
    }
    if (options->own_shards && options->comm && options->selection.compress) {
        return fc_fail(err, FC_EUSAGE, "%s: with its data in the memory of %d ranks, the target must be uncompressed",
                       source->path, options->comm->size);
    }
    return check_compression(options, err);
}

/* Whether a target of this name was asked for as a file: by an extension, unless it ends with a slash or is a directory
 * already. */
static bool names_file(const char *path) {
    struct stat st;
    const char *name = fc_base_name(path), *dot = strrchr(name, '.');
    return dot && dot > name && fc_format_of_extension(dot) && !(fc_stat(path, &st) == 0 && S_ISDIR(st.st_mode));
}

/* Refuses to make a directory under the name of a file. */
fc_code fc_check_target_name(const fc_target *target, const char *path, const fc_format *format, fc_error *err) {
    if (!fc_target_is_directory(target, format) || !names_file(path)) {
        return FC_OK;
    }
    if (!format->target.is_checkpoint) { /* never one file */
        return fc_fail(err, FC_EUSAGE,
                       "%s: names a file, but a checkpoint of the format '%s' is a directory; name a directory", path,
                       format->name);
    }
    if (target->mesh->ndim > 0) {
        return fc_advise(
            err, fc_fail(err, FC_EUSAGE, "%s: names a file, but one file for each rank makes a directory", path),
            FC_HINT_ONE_FILE, NULL);
    }
    return fc_advise(err,
                     fc_fail(err, FC_EUSAGE, "%s: names a file, but files of a limited size make a directory", path),
                     FC_HINT_UNSPLIT, NULL);
}
