/*
 * Sparse tensors, as torch.save pickles them: their parts are dense tensors, and the rest is the layout, the size and
 * whether it is coalesced. A checkpoint has the parts as tensors "<name>.indices", "<name>.values" and so on, and the
 * rest as an object "<name>.layout". A torch.save file with all of them gets the sparse tensor back.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/box.h"
#include "torch/pickle/pickle.h"
#include "torch/pickle/write.h"

/** The encoding of the object, and its last key. Its bytes are JSON: {"layout": …, "size": […], "is_coalesced": …}. */
#define FC_TORCH_SPARSE "torch.sparse"
#define FC_TORCH_SPARSE_KEY "layout"

enum { FC_SPARSE_MOST_PARTS = 3 };

/** A layout of torch, and the keys of its parts in the order of their pickle. The values are the last. */
typedef struct fc_sparse_layout {
    const char *name; /**< such as "torch.sparse_csr" */
    const char *keys[FC_SPARSE_MOST_PARTS];
    size_t nparts;
} fc_sparse_layout;

typedef struct fc_torch_sparse {
    const fc_sparse_layout *layout;
    fc_pv parts[FC_SPARSE_MOST_PARTS]; /**< dense tensors */
    int ndim;
    int64_t size[FC_MAX_DIMS];
    int coalesced; /**< of torch.sparse_coo: whether it is; -1: torch before 2.0 did not record it. Else -1 */
} fc_torch_sparse;

/**
 * Decodes a sparse tensor, and checks the shapes of its parts. Messages do not name the file.
 * @return FC_EUNSUPPORTED for any other value.
 */
fc_code fc_torch_sparse_decode(const fc_pickle *p, fc_pv v, fc_torch_sparse *out, fc_error *err);

/** Makes the bytes of the object. @return NULL: out of memory. */
char *fc_torch_sparse_text(const fc_torch_sparse *sparse, fc_arena *arena);

/** Reads the bytes of the object; sets no parts. @return FC_ECORRUPT. */
fc_code fc_torch_sparse_parse(const char *text, size_t size, fc_torch_sparse *out, fc_error *err);

/** Writes the tensor; `part` writes its part number `index`. */
typedef void (*fc_sparse_part_fn)(void *context, fc_torch_pickler *w, size_t index);
void fc_torch_sparse_write(const fc_torch_sparse *sparse, fc_torch_pickler *w, fc_sparse_part_fn part, void *context);
