/*
 * Shared by the parts of the writer: target_file.c makes the full file and the shard files, index.c makes index.h5, and
 * attributes.c sets the attributes.
 */
#pragma once

#include "hdf5/writer/set.h"
#include "hdf5/writer/tables_out.h"
#include "hdf5/writer/tree.h"
#include "hdf5/writer/written.h"

typedef struct fc_h5_writer {
    const fc_target *target;
    fc_arena *arena;     /* owns this struct and everything in it */
    const char *staging; /* path of the file, or of the directory of the shards */
    const char *layout;  /* the attribute `layout` of the root */
    int64_t ranks;
    fc_h5_tree tree;
    fc_h5_written written;     /* the content of the files with data, for the tables */
    fc_h5_image image;         /* the file that was reserved last */
    fc_h5_item_fields *fields; /* per item of the image */
} fc_h5_writer;

#define FC_H5_PRODUCER "fsdpckpt " FSDPCKPT_VERSION

/* The most bytes of the name of a shard file, with its NUL: two numbers of up to 20 digits. */
enum { FC_H5_SHARD_NAME = 64 };

/** Writes the name of the file of `rank`, without a directory. */
void fc_h5_shard_name(const fc_h5_writer *w, int64_t rank, char name[FC_H5_SHARD_NAME]);

/** Makes the path of `name` in the staged target, in the writer's arena. */
fc_code fc_h5_staged_path(fc_h5_writer *w, const char *name, const char **path, fc_error *err);

/**
 * Sets the attributes of the root group, header_crc64 last. @param rank the rank of a shard file; -1 for other files.
 */
void fc_h5_root_attributes(const fc_h5_writer *w, fc_h5_holder *root, int64_t rank);

struct fc_h5_groups;

/**
 * Makes the root group after all values, with its attributes and all groups. A file that describes a whole checkpoint
 * gets tables. @param rank the rank of a shard file; -1 for other files.
 */
fc_code fc_h5_make_root(fc_h5_writer *w, fc_h5_image *image, struct fc_h5_groups *groups, int64_t rank, fc_error *err);

/** Sets the attributes that a value has in every file: dtype, fqn, placements, encoding, json. */
fc_code fc_h5_value_attributes(const fc_h5_writer *w, fc_h5_holder *value, const fc_target_tensor *tensor,
                               fc_error *err);

/** Sets the attributes of a tensor in a shard file: its box, and the rank that owns it. */
void fc_h5_box_attributes(fc_h5_holder *value, const fc_target_tensor *tensor, const fc_target_item *item, bool copy);

/** @return whether the name differs from the path joined with ".". */
bool fc_h5_needs_fqn(const fc_target_tensor *tensor);

enum { FC_H5_PLACEMENTS = FC_MAX_MESH_DIMS * 64 /**< the most bytes of a tensor's placements as text */ };

/** Formats the attribute `placements`. @param file for the message. */
fc_code fc_h5_placements_text(const fc_h5_writer *w, const fc_target_tensor *tensor, const char *file,
                              char text[FC_H5_PLACEMENTS], fc_error *err);

/** Writes index.h5, which has every value as a whole. @param digests those of target->tensors. */
fc_code fc_h5_write_index(fc_h5_writer *w, const uint64_t *digests, fc_error *err);
