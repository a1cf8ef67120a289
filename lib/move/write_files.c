/*
 * Writes the files of a target. See write_files.h. It goes file by file, so memory does not grow with the number of
 * files. Several ranks either write each file together, or, if there are many files, each rank writes every n-th file
 * on its own; rank 0's writer then gets what the others noted for the index.
 */
#include "move/write_files.h"

#include "base/crc.h"
#include "fsdpckpt/try.h"
#include "integrity/source_crc.h"
#include "io/file.h"
#include "io/path.h"
#include "io/staged_objects.h"
#include "io/sync.h"
#include "move/file.h"
#include "move/resume.h"
#include "plan/target_file.h"
#include "ranks/exchange.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

/* With fewer files per rank, one rank more or less would matter. */
enum { FILES_PER_RANK = 4 };

static bool has_chunks(const fc_target_file *file) {
    for (size_t i = 0; i < file->nitems; i++) {
        if (file->items[i].chunk) {
            return true;
        }
    }
    return false;
}

/* Compresses the chunked items of a file. All ranks take part. */
static fc_code compress_items(fc_conversion *m, const fc_target_file *file, fc_error *err) {
    uint64_t stored = 0, raw = 0;
    fc_code rc = fc_compress_file(m->target, file, &m->writer, m->comm, &m->move, &stored, err);
    for (size_t i = 0; i < file->nitems; i++) {
        raw += file->items[i].chunk ? fc_target_item_bytes(m->target, &file->items[i]) : 0;
    }
    m->report->stored_bytes = m->report->stored_bytes - raw + stored;
    return rc;
}

/* Whether this process moves each item as a whole, and so knows when it is complete. */
static bool moves_whole_items(const fc_conversion *m) {
    return m->move.shares <= 1 && !m->movers;
}

/* Lets the writer write the headers of all items that were moved. */
static fc_code finish_items(fc_conversion *m, const fc_target_file *file, fc_error *err) {
    const int fd = fc_open(file->path, O_WRONLY, 0);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be reopened", file->path);
    }
    fc_code rc = FC_OK;
    for (size_t i = 0; i < file->nitems && rc == FC_OK; i++) {
        const fc_target_item *item = &file->items[i];
        if (item->owned && !item->chunk && fc_target_item_bytes(m->target, item) > 0) {
            rc = m->writer.format->writer.finish_item(&m->writer, item, fd, err);
        }
    }
    return fc_close_written(fd, rc, file->path, err);
}

/* Writes the headers that depend on digests. */
static fc_code finish_file(fc_conversion *m, const fc_target_file *file, fc_error *err) {
    const fc_format_writer *writer = &m->writer.format->writer;
    if (writer->finish_item && !m->move.writer) {
        FC_TRY(finish_items(m, file, err));
    }
    return writer->finish_file ? writer->finish_file(&m->writer, file, err) : FC_OK;
}

/* Writes one target file. Rank 0 writes the headers; all ranks move or compress the data. */
static fc_code write_file(fc_conversion *m, fc_target_file *file, fc_arena *arena, fc_error *err) {
    const fc_format_writer *writer = &m->writer.format->writer;
    fc_code reserved = m->leads ? writer->reserve(&m->writer, file, err) : FC_OK;
    FC_TRY(fc_ranks_share_file(m->comm, reserved, file, arena, err));
    FC_TRY(m->move.resume ? fc_resume_file(m->move.resume, file, err) : FC_OK);
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_target_item *item = &file->items[i];
        m->unmoved[item->tensor] |= item->owner == file->rank && !item->owned; /* the writer has cleared it */
    }
    m->move.writer = writer->finish_item && moves_whole_items(m) ? &m->writer : NULL;
    fc_code written = m->move_file ? m->move_file(m, file, err) : fc_move_file(m->target, file, &m->move, err);
    if (has_chunks(file)) {
        FC_TRY(fc_ranks_agree(m->comm, written, err));
        written = compress_items(m, file, err);
    }
    FC_TRY(fc_ranks_join_items(m->comm, written, m->target, file, m->move.crc32, err));
    FC_TRY(fc_ranks_agree(m->comm, m->leads ? finish_file(m, file, err) : FC_OK, err));
    FC_TRY(fc_staged_end(file->path, err));
    return m->apart ? fc_sync_path(AT_FDCWD, file->path, file->path, err)
                    : FC_OK; /* rank 0 cannot sync another machine's page cache */
}

/* How many items of the shard, from `first` on, are of one section. */
static size_t items_of_section(const fc_target *target, const fc_target_file *shard, size_t first) {
    size_t end = first;
    while (end < shard->nitems &&
           target->tensors[shard->items[end].tensor].section == target->tensors[shard->items[first].tensor].section) {
        end++;
    }
    return end - first;
}

static fc_code write_files(fc_conversion *m, fc_target_file *shard, fc_arena *arena, fc_error *err) {
    const fc_format *format = m->writer.format;
    size_t first = 0;
    do { /* at least once: a rank that holds nothing still has a file */
        size_t count = items_of_section(m->target, shard, first);
        if (format->writer.split) {
            count = m->leads ? format->writer.split(&m->writer, shard, first) : 0;
            FC_TRY(fc_ranks_share_number(m->comm, FC_OK, &count, err));
        }
        fc_target_file file = {.rank = shard->rank, .items = shard->items + first, .nitems = count};
        FC_TRY(write_file(m, &file, arena, err));
        first += count ? count : 1;
    } while (first < shard->nitems);
    return FC_OK;
}

static fc_code write_rank(fc_conversion *m, uint32_t rank, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_target_file file;
    fc_code rc = arena ? fc_progress_count(m->move.work.progress, 0, err) : fc_no_memory(err, NULL);
    if (rc == FC_OK) {
        rc = fc_target_file_of(m->target, rank, arena, &file, err);
    }
    FC_TRY_GOTO(fc_ranks_agree(m->comm, rc, err), rc, out);
    rc = write_files(m, &file, arena, err);
out:
    fc_arena_free(arena);
    return rc;
}

/* ---- apart ---- */

bool fc_writes_apart(const fc_target *target, const fc_format *format, const fc_comm *comm, bool in_bucket) {
    return comm && comm->size > 1 && format->writer.notes && !target->compress &&
           (in_bucket || fc_mesh_ranks(target->mesh) >= FILES_PER_RANK * (int64_t)comm->size);
}

/* Adds what the writer keeps of the file that it has finished: the number of bytes, and the bytes. */
static fc_code take_notes(fc_conversion *m, fc_notes *notes, fc_error *err) {
    const fc_format_notes *kept = m->writer.format->writer.notes;
    unsigned char *bytes = NULL;
    size_t size = 0;
    if (!kept || !kept->take) {
        return FC_OK;
    }
    fc_code rc = kept->take(&m->writer, &bytes, &size, err);
    const uint64_t length = size;
    if (rc == FC_OK && !(fc_notes_add(notes, &length, sizeof length) && fc_notes_add(notes, bytes, size))) {
        rc = fc_no_memory(err, NULL);
    }
    free(bytes);
    return rc;
}

fc_code fc_write_noted(fc_conversion *m, uint32_t rank, fc_notes *notes, fc_error *err) {
    FC_TRY(write_rank(m, rank, err));
    return take_notes(m, notes, err);
}

/* Gives rank 0, which has begun a target in a bucket, the files that the others have written since the last time. */
static fc_code share_staged(fc_conversion *m, fc_error *err) {
    fc_notes told = {NULL, 0, 0};
    unsigned char *all = NULL;
    size_t *at = NULL;
    uint64_t length = 0;
    fc_code rc = fc_notes_add(&told, &length, sizeof length) ? FC_OK : fc_no_memory(err, NULL);
    rc = rc == FC_OK ? fc_staged_tell(m->staging, true, &told, err) : rc;
    FC_TRY_GOTO(fc_ranks_agree(m->comm, rc, err), rc, out);
    length = told.size - sizeof length;
    memcpy(told.data, &length, sizeof length);
    FC_TRY_GOTO(fc_ranks_gather_bytes(m->comm, told.data, told.size, &all, &at, err), rc, out);
    for (int rank = 1; rank < m->comm->size && m->leads && rc == FC_OK; rank++) {
        memcpy(&length, all + at[rank], sizeof length);
        rc = fc_staged_adopt(m->staging, all + at[rank] + sizeof length, (size_t)length, err);
    }
    rc = fc_ranks_agree(m->comm, rc, err);
out:
    free(told.data);
    free(all);
    free(at);
    return rc;
}

/* Writes every n-th file. The ranks agree after each, so that no rank works on for long after another has failed. */
static fc_code write_own(fc_conversion *m, fc_notes *notes, fc_error *err) {
    const int64_t ranks = fc_mesh_ranks(m->target->mesh);
    fc_conversion alone = *m;
    alone.comm = NULL;
    alone.leads = true;
    alone.move.share = alone.move.shares = 0;
    for (int64_t first = 0; first < ranks; first += m->comm->size) {
        const int64_t rank = first + m->comm->rank;
        fc_code rc = rank < ranks ? fc_write_noted(&alone, (uint32_t)rank, notes, err) : FC_OK;
        FC_TRY(fc_ranks_agree(m->comm, rc, err));
        FC_TRY(fc_is_staged(m->staging) ? share_staged(m, err) : FC_OK);
    }
    return FC_OK;
}

/* Gives rank 0's writer the notes of all files in their order. `at`: where each rank's notes begin in `all`. */
static fc_code add_notes(fc_conversion *m, const unsigned char *all, size_t *at, fc_error *err) {
    const int64_t ranks = fc_mesh_ranks(m->target->mesh);
    for (int64_t rank = 0; rank < ranks; rank++) {
        size_t *next = &at[rank % m->comm->size];
        uint64_t length;
        memcpy(&length, all + *next, sizeof length);
        *next += sizeof length;
        FC_TRY(m->writer.format->writer.notes->add(&m->writer, all + *next, (size_t)length, err));
        *next += (size_t)length;
    }
    return FC_OK;
}

static fc_code share_notes(fc_conversion *m, const fc_notes *notes, fc_error *err) {
    unsigned char *all = NULL;
    size_t *at = NULL;
    FC_TRY(fc_ranks_gather_bytes(m->comm, notes->data, notes->size, &all, &at, err));
    fc_code rc = m->leads ? add_notes(m, all, at, err) : FC_OK;
    free(all);
    free(at);
    return fc_ranks_agree(m->comm, rc, err);
}

static fc_code write_apart(fc_conversion *m, fc_error *err) {
    fc_notes notes = {NULL, 0, 0};
    fc_code rc;
    FC_TRY_GOTO(write_own(m, &notes, err), rc, out);
    FC_TRY_GOTO(fc_ranks_join_flags(m->comm, m->unmoved, m->target->ntensors, err), rc, out);
    rc = m->writer.format->writer.notes->take ? share_notes(m, &notes, err) : FC_OK;
out:
    free(notes.data);
    return rc;
}

fc_code fc_write_files(fc_conversion *m, fc_error *err) {
    const int64_t ranks = fc_mesh_ranks(m->target->mesh);
    if (m->apart) {
        return write_apart(m, err);
    }
    for (int64_t rank = 0; rank < ranks; rank++) {
        FC_TRY(write_rank(m, (uint32_t)rank, err));
    }
    return FC_OK;
}

fc_code fc_finish_digests(const fc_conversion *m, fc_error *err) {
    const fc_target *target = m->target;
    uint64_t *digests = m->move.digests;
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_target_tensor *tensor = &target->tensors[i];
        if (m->unmoved[i]) {
            continue;
        }
        const fc_box whole = {tensor->source->ndim, NULL, tensor->source->shape};
        uint64_t bytes = (uint64_t)fc_box_volume(&whole) * fc_dtype_size(tensor->dtype);
        digests[i] = fc_crc64_finish(digests[i], bytes);
        if (tensor->dtype == tensor->source->dtype) { /* the elements of a cast tensor were added when they were read */
            FC_TRY(fc_source_check_digest(target->source, tensor->source, digests[i], err));
        }
    }
    return FC_OK;
}
