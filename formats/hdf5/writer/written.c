/*
 * Records the content of files. A box takes 40 bytes, and each of its HDF5 chunks 16.
 */
#include "hdf5/writer/written.h"

#include "fsdpckpt/select.h"
#include "fsdpckpt/try.h"
#include "hdf5/writer/image_chunks.h"

#include <stdlib.h>
#include <string.h>

static bool same_grid(const fc_h5_written *written, size_t number, const fc_h5_grid *grid) {
    const fc_h5_grid_row *row = &written->grids[number];
    return row->ndim == (uint32_t)grid->ndim && row->filters[1] == (grid->element > 1 ? H5Z_FILTER_DEFLATE : 0) &&
           memcmp(written->grid_dims.data + row->dims * sizeof(int64_t), grid->chunk,
                  row->ndim * sizeof *grid->chunk) == 0;
}

static fc_code add_grid(fc_h5_written *written, const fc_h5_grid *grid, fc_error *err) {
    if (written->ngrids == FC_H5_NO_GRID ||
        !fc_grow(&written->grids, &written->grids_capacity, written->ngrids + 1, sizeof *written->grids)) {
        return fc_no_memory(err, "index.h5");
    }
    fc_h5_grid_row row = {.dims = written->grid_dims.size / sizeof(int64_t), .ndim = (uint32_t)grid->ndim};
    uint8_t *filter = row.filters;
    if (grid->element > 1) {
        *filter++ = H5Z_FILTER_SHUFFLE;
    }
    *filter = H5Z_FILTER_DEFLATE;
    fc_h5_add_bytes(&written->grid_dims, grid->chunk, (size_t)grid->ndim * sizeof *grid->chunk);
    written->grids[written->ngrids++] = row;
    return written->grid_dims.failed ? fc_no_memory(err, "index.h5") : FC_OK;
}

/* Finds or adds the row of a grid. Most ranks have the same grid as the rank before them. */
static fc_code find_grid(fc_h5_written *written, uint32_t tensor, const fc_h5_grid *grid, uint32_t *row,
                         fc_error *err) {
    size_t i = written->last_grid[tensor];
    if (i >= written->ngrids || !same_grid(written, i, grid)) {
        for (i = 0; i < written->ngrids && !same_grid(written, i, grid); i++) {
        }
        FC_TRY(i == written->ngrids ? add_grid(written, grid, err) : FC_OK);
    }
    *row = written->last_grid[tensor] = (uint32_t)i;
    return FC_OK;
}

static fc_code note_chunks(fc_h5_written *written, const fc_h5_image *image, uint64_t number, uint32_t tensor,
                           fc_h5_box_row *row, fc_error *err) {
    const fc_h5_chunk_index *index = &image->indexes[number];
    FC_TRY(find_grid(written, tensor, &index->grid, &row->grid, err));
    FC_NEED(
        fc_grow(&written->chunks, &written->chunks_capacity, written->nchunks + index->chunks, sizeof *written->chunks),
        err, "index.h5");
    row->offset = written->nchunks;
    row->length = index->chunks;
    for (uint64_t i = 0; i < index->chunks; i++) {
        written->chunks[written->nchunks++] = fc_h5_image_placed(image, number, i);
    }
    return FC_OK;
}

static fc_code note_box(fc_h5_written *written, const fc_target *target, const fc_target_file *file,
                        const fc_h5_image *image, const fc_target_item *item, size_t address, fc_error *err) {
    fc_h5_box_row row = {.offset = address == SIZE_MAX ? 0 : fc_load_little(image->objects.data + address, 8),
                         .length = fc_target_item_bytes(target, item),
                         .crc64 = item->crc64,
                         .rank = file->rank,
                         .grid = FC_H5_NO_GRID};
    FC_NEED(fc_grow(&written->boxes, &written->boxes_capacity, written->nboxes + 1, sizeof *written->boxes), err,
            "index.h5");
    FC_TRY(item->chunk ? note_chunks(written, image, item->offset, item->tensor, &row, err) : FC_OK);
    written->boxes[written->nboxes++] = (fc_h5_written_box){item->tensor, row};
    return FC_OK;
}

static fc_code add_boxes(fc_h5_written *written, const fc_target *target, const fc_target_file *file,
                         const fc_h5_image *image, const fc_h5_item_fields *fields, fc_error *err) {
    if (image->nindexes > 0 && !written->last_grid) {
        written->last_grid = calloc(target->ntensors, sizeof *written->last_grid);
        FC_NEED(written->last_grid, err, file->path);
    }
    for (size_t i = 0; i < file->nitems; i++) {
        const fc_target_item *item = &file->items[i];
        if (item->owned && fc_target_item_bytes(target, item) > 0) {
            FC_TRY(note_box(written, target, file, image, item, fields[i].address, err));
        }
    }
    return FC_OK;
}

fc_code fc_h5_note_boxes(fc_h5_written *written, const fc_target *target, const fc_target_file *file,
                         const fc_h5_image *image, const fc_h5_item_fields *fields, fc_error *err) {
    written->nboxes = written->nchunks = 0;
    FC_TRY(fc_h5_image_check(image, err));
    return add_boxes(written, target, file, image, fields, err);
}

fc_code fc_h5_note_file(fc_h5_written *written, const fc_target *target, const fc_target_file *file,
                        const fc_h5_image *image, const fc_h5_item_fields *fields, const fc_h5_file_row *row,
                        fc_error *err) {
    FC_NEED(fc_grow(&written->files, &written->files_capacity, written->nfiles + 1, sizeof *written->files), err,
            file->path);
    written->files[written->nfiles++] = *row;
    return add_boxes(written, target, file, image, fields, err);
}

bool fc_h5_written_take(fc_h5_written *written, fc_notes *notes) {
    const uint64_t counts[] = {written->nfiles, written->nboxes};
    written->nfiles = written->nboxes = 0;
    return fc_notes_add(notes, counts, sizeof counts) &&
           fc_notes_add(notes, written->files, (size_t)counts[0] * sizeof *written->files) &&
           fc_notes_add(notes, written->boxes, (size_t)counts[1] * sizeof *written->boxes);
}

fc_code fc_h5_written_add(fc_h5_written *written, const void *notes, fc_error *err) {
    uint64_t counts[2];
    const unsigned char *at = notes;
    memcpy(counts, at, sizeof counts);
    at += sizeof counts;
    const size_t files = (size_t)counts[0], boxes = (size_t)counts[1], bytes = files * sizeof *written->files;
    FC_NEED(fc_grow(&written->files, &written->files_capacity, written->nfiles + files, sizeof *written->files) &&
                fc_grow(&written->boxes, &written->boxes_capacity, written->nboxes + boxes, sizeof *written->boxes),
            err, "index.h5");
    if (files > 0) {
        memcpy(written->files + written->nfiles, at, bytes);
    }
    if (boxes > 0) { /* a rank may store nothing */
        memcpy(written->boxes + written->nboxes, at + bytes, boxes * sizeof *written->boxes);
    }
    written->nfiles += files;
    written->nboxes += boxes;
    return FC_OK;
}

void fc_h5_written_free(fc_h5_written *written) {
    free(written->files);
    free(written->boxes);
    free(written->chunks);
    free(written->grids);
    free(written->grid_dims.data);
    free(written->last_grid);
    *written = (fc_h5_written){NULL};
}
