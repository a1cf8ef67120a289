/*
 * Decodes and writes sparse tensors: torch._utils._rebuild_sparse_tensor(layout, (indices, values, size,
 * is_coalesced)), and the same with two tensors of indices for the compressed layouts. Whether the indices are within
 * the size is in the data; torch.load(weights_only=True) checks it.
 */
#include "torch/object/sparse.h"

#include "base/text.h"
#include "fsdpckpt/try.h"
#include "torch/object/item.h"

#include <inttypes.h>
#include <jansson.h>
#include <string.h>

static const fc_sparse_layout layouts[] = {
    {"torch.sparse_coo", {"indices", "values"}, 2},
    {"torch.sparse_csr", {"crow_indices", "col_indices", "values"}, 3},
    {"torch.sparse_csc", {"ccol_indices", "row_indices", "values"}, 3},
    {"torch.sparse_bsr", {"crow_indices", "col_indices", "values"}, 3},
    {"torch.sparse_bsc", {"ccol_indices", "row_indices", "values"}, 3},
};

static bool is_coo(const fc_sparse_layout *layout) {
    return layout == layouts;
}

static const fc_sparse_layout *find_layout(const char *name) {
    for (size_t i = 0; name && i < sizeof layouts / sizeof *layouts; i++) {
        if (strcmp(name, layouts[i].name) == 0) {
            return &layouts[i];
        }
    }
    return NULL;
}

static fc_code bad_sparse(const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "the pickled sparse tensor is damaged: %s", what);
}

/* @return the layout that a call of torch.serialization._get_layout names. */
static const fc_sparse_layout *layout_of(const fc_pickle *p, fc_pv v) {
    size_t n = 0, length;
    const fc_pv *args = fc_pv_typeof(v) == FC_PV_CALL ? fc_pickle_call_items(p, v, &n) : NULL;
    return n == 1 && fc_pv_typeof(args[0]) == FC_PV_STR ? find_layout(fc_pickle_bytes(p, args[0], &length)) : NULL;
}

static bool read_sparse_size(const fc_pickle *p, fc_pv v, fc_torch_sparse *out) {
    size_t n;
    const fc_pv_type type = fc_pv_typeof(v);
    const fc_pv *items = type == FC_PV_SIZE || type == FC_PV_TUPLE ? fc_pickle_tuple(p, v, &n) : NULL;
    bool good = items && n <= FC_MAX_DIMS;
    out->ndim = good ? (int)n : 0;
    for (int i = 0; i < out->ndim && good; i++) {
        good = fc_pickle_int(p, items[i], &out->size[i]) && out->size[i] >= 0;
    }
    return good;
}

/* Whether the indices are (sparse dimensions, n), and the values (n, dense sizes…). */
static bool fits_coo(const fc_torch_sparse *s, const fc_torch_tensor *indices, const fc_torch_tensor *values) {
    bool good = indices->dtype == FC_I64 && indices->ndim == 2 && values->ndim > 0 &&
                values->sizes[0] == indices->sizes[1] && s->ndim == indices->sizes[0] + values->ndim - 1;
    for (int d = 1; good && d < values->ndim; d++) {
        good = values->sizes[d] == s->size[s->ndim - values->ndim + d];
    }
    return good;
}

/* Whether both tensors of indices have the same batch dimensions as the values, and as many indices as these. */
static bool fits_compressed(const fc_torch_sparse *s, const fc_torch_tensor *compressed, const fc_torch_tensor *plain,
                            const fc_torch_tensor *values) {
    const int batch = plain->ndim - 1;
    bool good = (plain->dtype == FC_I64 || plain->dtype == FC_I32) && compressed->dtype == plain->dtype && batch >= 0 &&
                compressed->ndim == plain->ndim && values->ndim > batch && s->ndim >= batch + 2 &&
                values->sizes[batch] == plain->sizes[batch];
    for (int d = 0; good && d < batch; d++) {
        good = s->size[d] == plain->sizes[d] && s->size[d] == compressed->sizes[d] && s->size[d] == values->sizes[d];
    }
    return good;
}

static fc_code check_parts(const fc_pickle *p, const fc_torch_sparse *s, fc_error *err) {
    fc_torch_tensor parts[FC_SPARSE_MOST_PARTS] = {{0}};
    for (size_t i = 0; i < s->layout->nparts; i++) {
        FC_TRY(fc_torch_tensor_decode(p, s->parts[i], &parts[i], err));
    }
    const bool good =
        is_coo(s->layout) ? fits_coo(s, &parts[0], &parts[1]) : fits_compressed(s, &parts[0], &parts[1], &parts[2]);
    return good ? FC_OK : bad_sparse("the shapes of its parts do not fit", err);
}

fc_code fc_torch_sparse_decode(const fc_pickle *p, fc_pv v, fc_torch_sparse *out, fc_error *err) {
    size_t n = 0, members = 0;
    const fc_pv *args = fc_torch_sparse_arguments(p, v, &n);
    *out = (fc_torch_sparse){.layout = args && n == 2 ? layout_of(p, args[0]) : NULL, .coalesced = -1};
    if (!args || !out->layout) {
        return fc_fail(err, FC_EUNSUPPORTED, "it is no sparse tensor of a known layout");
    }
    const fc_pv *data = fc_pv_typeof(args[1]) == FC_PV_TUPLE ? fc_pickle_tuple(p, args[1], &members) : NULL;
    const size_t nparts = out->layout->nparts, most = nparts + (is_coo(out->layout) ? 2 : 1);
    if (!data || members < nparts + 1 || members > most || !read_sparse_size(p, data[nparts], out)) {
        return bad_sparse("its size or one of its parts is missing", err);
    }
    memcpy(out->parts, data, nparts * sizeof *data);
    if (members == nparts + 2 && fc_pv_typeof(data[nparts + 1]) == FC_PV_BOOL) {
        out->coalesced = fc_pv_is_true(data[nparts + 1]);
    }
    return check_parts(p, out, err);
}

char *fc_torch_sparse_text(const fc_torch_sparse *sparse, fc_arena *arena) {
    static const char *const flags[] = {"", ", \"is_coalesced\": false", ", \"is_coalesced\": true"};
    char *size = fc_arena_printf(arena, "%s", "");
    for (int d = 0; size && d < sparse->ndim; d++) {
        size = fc_arena_printf(arena, "%s%s%" PRId64, size, d ? ", " : "", sparse->size[d]);
    }
    return size ? fc_arena_printf(arena, "{\"layout\": \"%s\", \"size\": [%s]%s}", sparse->layout->name, size,
                                  flags[sparse->coalesced + 1])
                : NULL;
}

static bool take_members(const json_t *root, fc_torch_sparse *out) {
    const json_t *size = json_object_get(root, "size"), *coalesced = json_object_get(root, "is_coalesced");
    const size_t n = json_array_size(size);
    bool good = json_is_array(size) && n <= FC_MAX_DIMS && (!coalesced || json_is_boolean(coalesced));
    *out = (fc_torch_sparse){.layout = find_layout(json_string_value(json_object_get(root, "layout"))),
                             .coalesced = coalesced ? json_is_true(coalesced) : -1};
    for (size_t d = 0; good && d < n; d++) {
        good = json_is_integer(json_array_get(size, d)) && json_integer_value(json_array_get(size, d)) >= 0;
        out->size[out->ndim++] = json_integer_value(json_array_get(size, d));
    }
    return good && out->layout;
}

fc_code fc_torch_sparse_parse(const char *text, size_t size, fc_torch_sparse *out, fc_error *err) {
    json_error_t why;
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &why);
    FC_NEED(root || json_error_code(&why) != json_error_out_of_memory, err, NULL);
    const bool good = take_members(root, out);
    json_decref(root);
    return good ? FC_OK : fc_fail(err, FC_ECORRUPT, "it does not describe a sparse tensor");
}

void fc_torch_sparse_write(const fc_torch_sparse *sparse, fc_torch_pickler *w, fc_sparse_part_fn part, void *context) {
    fc_torch_pickle_global(w, "torch._utils", "_rebuild_sparse_tensor");
    fc_torch_pickle_global(w, "torch.serialization", "_get_layout");
    fc_torch_pickle_often(w, sparse->layout->name);
    fc_torch_pickle_tuple(w, 1);
    fc_torch_pickle_op(w, FC_PICKLE_REDUCE);
    fc_torch_pickle_op(w, FC_PICKLE_MARK);
    for (size_t i = 0; i < sparse->layout->nparts; i++) {
        part(context, w, i);
    }
    fc_torch_pickle_global(w, "torch", "Size");
    fc_torch_pickle_ints(w, sparse->size, (size_t)sparse->ndim);
    fc_torch_pickle_tuple(w, 1);
    fc_torch_pickle_op(w, FC_PICKLE_REDUCE);
    if (sparse->coalesced >= 0) {
        fc_torch_pickle_bool(w, sparse->coalesced);
    }
    fc_torch_pickle_op(w, FC_PICKLE_TUPLE);
    fc_torch_pickle_tuple(w, 2);
    fc_torch_pickle_op(w, FC_PICKLE_REDUCE);
}
