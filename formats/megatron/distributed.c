/*
 * Reads the state of the distributed optimizer from distrib_optim.pt, which is in the directory of a rank. For each
 * chunk of the model it has one flat fp32 tensor per key, gathered from all data-parallel ranks. With expert
 * parallelism it is a list, whose last member is the state of the experts; a rank has None for what another rank
 * gathered. Parameters are stored from the last to the first, each aligned to 64 elements. The file does not record
 * this layout, and buckets may be padded differently. So the sizes must agree, and the first element of each master,
 * rounded, must equal that of the model's parameter. Otherwise the file is left out.
 */
#include "megatron/stages.h"

#include "base/checked.h"
#include "base/grow.h"
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"
#include "io/file.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ALIGN = 64 };

static const char other_layout[] = "its buckets have an unknown layout";

typedef struct mg_key {
    const char *file, *name;
} mg_key;

static const mg_key keys[] = {{"param", "fp32_param"}, {"exp_avg", "exp_avg"}, {"exp_avg_sq", "exp_avg_sq"}};

enum { KEYS = sizeof keys / sizeof *keys };

/* The flat tensors of a chunk, which have the same size. */
typedef struct mg_flat {
    torch_record records[KEYS];
    uint64_t first[KEYS];
    int64_t size;
} mg_flat;

/* The state of one of several optimizers. */
typedef struct mg_optimizer {
    const torch_file *f;
    fc_pv dict;
    size_t member, members;
    size_t first, end; /* of the model's values */
} mg_optimizer;

static bool has_parameter(const fc_mg_reader *r, const mg_optimizer *o, size_t i, size_t chunk) {
    const fc_mg_value *v = &r->values[i];
    return fc_mg_is_parameter(v) && v->chunk == chunk && fc_mg_belongs(r, v, o->member, o->members);
}

static bool has_parameters(const fc_mg_reader *r, const mg_optimizer *o, size_t chunk) {
    for (size_t i = o->first; i < o->end; i++) {
        if (has_parameter(r, o, i, chunk)) {
            return true;
        }
    }
    return false;
}

/* The dict of number `chunk`, which is nested in a dict with one entry, a pair of dtypes. */
static fc_pv find_chunk(const torch_file *f, fc_pv dict, int64_t chunk) {
    size_t n, m;
    const fc_pv *pairs = fc_pickle_items(f->p, dict, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        int64_t number;
        if (!fc_pickle_int(f->p, pairs[i], &number) || number != chunk || fc_pv_typeof(pairs[i + 1]) != FC_PV_DICT) {
            continue;
        }
        const fc_pv *types = fc_pickle_items(f->p, pairs[i + 1], &m);
        return m == 2 && fc_pv_typeof(types[1]) == FC_PV_DICT ? types[1] : 0;
    }
    return 0;
}

/* The number of chunks in the file; -1 if its content is something else. */
static int64_t count_chunks(const torch_file *f, fc_pv dict) {
    size_t n;
    int64_t count = 0, number;
    if (fc_pv_typeof(dict) != FC_PV_DICT || !fc_pv_is_true(fc_torch_dict_get(f->p, dict, "buckets_coalesced"))) {
        return -1;
    }
    const fc_pv *pairs = fc_pickle_items(f->p, dict, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        count += fc_pickle_int(f->p, pairs[i], &number);
    }
    return count;
}

/* Reads the flat tensors of a chunk. `*known` is false if they are not as expected. */
static fc_code read_flat(const fc_mg_reader *r, const torch_file *f, fc_pv dict, mg_flat *out, bool *known) {
    *known = false;
    for (size_t k = 0; k < KEYS; k++) {
        fc_pv v = dict ? fc_torch_dict_get(f->p, dict, keys[k].file) : 0;
        fc_torch_tensor t = {0};
        torch_extent *extent = NULL;
        if (!v || !fc_torch_is_tensor(f->p, v)) {
            return FC_OK;
        }
        fc_code rc = fc_torch_find_extent(f, v, &t, r->checkpoint->arena, &extent, r->err);
        if (rc != FC_OK) {
            return rc == FC_ENOMEM || rc == FC_EIO ? rc : FC_OK;
        }
        if (t.dtype != FC_F32 || t.ndim != 1 || (t.sizes[0] > 1 && t.strides[0] != 1) ||
            (k > 0 && t.sizes[0] != out->size) || extent->record.method != FC_ZIP_STORED || extent->swap ||
            extent->negate) {
            return FC_OK;
        }
        out->records[k] = extent->record;
        out->first[k] = extent->first;
        out->size = t.sizes[0];
    }
    *known = true;
    return FC_OK;
}

/* Reads `size` bytes at offset `first` of a record. */
static fc_code read_start(const fc_mg_reader *r, const torch_record *record, uint64_t first, unsigned char *out,
                          size_t size) {
    const char *path = r->checkpoint->files[record->file].path;
    int fd;
    uint64_t length;
    FC_TRY(fc_open_input(path, &fd, &length, r->err));
    fc_code rc = fc_pread_full(fd, out, size, record->offset + first, path, r->err);
    close(fd);
    return rc;
}

/* Compares the first element of the master at `start`, rounded, with that of the parameter. */
static fc_code begins_alike(const fc_mg_reader *r, const fc_mg_value *v, const mg_flat *masters, int64_t start,
                            bool *alike) {
    unsigned char own[8], flat[4], rounded[8];
    size_t size = fc_dtype_size(v->dtype);
    *alike = false;
    if (v->extent->record.method != FC_ZIP_STORED || v->extent->swap ||
        (v->dtype != FC_BF16 && v->dtype != FC_F16 && v->dtype != FC_F32)) {
        return FC_OK;
    }
    FC_TRY(read_start(r, &v->extent->record, v->extent->first, own, size));
    FC_TRY(read_start(r, &masters->records[0], masters->first[0] + (uint64_t)start * 4, flat, sizeof flat));
    fc_cast(FC_F32, flat, v->dtype, rounded, 1);
    *alike = memcmp(own, rounded, size) == 0;
    return FC_OK;
}

/* Adds the parameter's range of each flat tensor. */
static fc_code add_states(fc_mg_reader *r, const fc_mg_value *param, const mg_flat *flat, int64_t start) {
    fc_arena *arena = r->checkpoint->arena;
    for (size_t k = 0; k < KEYS; k++) {
        torch_extent *extent =
            fc_arena_calloc(arena, 1, sizeof *extent + (size_t)param->ndim * sizeof *extent->strides);
        FC_NEED(extent, r->err, r->checkpoint->path);
        extent->record = flat->records[k];
        extent->first = flat->first[k] + (uint64_t)start * 4;
        fc_row_major_strides(param->ndim, param->sizes, extent->strides);
        fc_mg_value value = *param;
        value.file = extent->record.file;
        value.extent = extent;
        value.dtype = FC_F32;
        FC_NEED(fc_mg_name_state(r, param, keys[k].name, &value.name, &value.path) &&
                    fc_grow(&r->values, &r->capacity, r->nvalues + 1, sizeof *r->values),
                r->err, r->checkpoint->path);
        r->values[r->nvalues++] = value;
    }
    return FC_OK;
}

/* Computes the positions of a chunk's parameters. `starts` has one entry per value of the model. `*known` is false if
   the layout is another one. */
static fc_code place_parameters(const fc_mg_reader *r, const mg_optimizer *o, size_t chunk, const mg_flat *flat,
                                int64_t *starts, bool *known) {
    int64_t at = 0, numel;
    *known = false;
    for (size_t i = o->end; i-- > o->first;) {
        const fc_mg_value *v = &r->values[i];
        int64_t *start = &starts[i - o->first];
        if (!has_parameter(r, o, i, chunk)) {
            continue;
        }
        if (!fc_numel(v->ndim, v->sizes, &numel) || !fc_add_i64(at, ALIGN - 1, &at)) {
            return FC_OK;
        }
        at -= at % ALIGN;
        *start = at;
        bool alike = fc_add_i64(at, numel, &at) && at <= flat->size;
        if (alike && numel > 0) {
            FC_TRY(begins_alike(r, v, flat, *start, &alike));
        }
        if (!alike) {
            return FC_OK;
        }
    }
    *known = at == flat->size;
    return FC_OK;
}

/* Finds the flat tensors of all chunks and the positions in them. `*known` is false if the layout is another one. */
static fc_code find_all(const fc_mg_reader *r, const mg_optimizer *o, mg_flat *flats, int64_t *starts, bool *known) {
    const int64_t count = count_chunks(o->f, o->dict);
    int64_t number = 0; /* chunks without parameters have no dict */
    *known = count >= 0;
    for (size_t c = 0; *known && c < r->chunks; c++) {
        if (!has_parameters(r, o, c)) {
            continue;
        }
        FC_TRY(read_flat(r, o->f, find_chunk(o->f, o->dict, number++), &flats[c], known));
        if (*known) {
            FC_TRY(place_parameters(r, o, c, &flats[c], starts, known));
        }
    }
    *known = *known && number == count;
    return FC_OK;
}

static fc_code read_optimizer(fc_mg_reader *r, const mg_optimizer *o, bool *known) {
    mg_flat *flats = calloc(r->chunks, sizeof *flats);
    int64_t *starts = calloc(o->end - o->first + 1, sizeof *starts);
    fc_code rc;
    *known = false;
    FC_TRY_GOTO(flats && starts ? FC_OK : fc_mg_no_memory(r), rc, out);
    FC_TRY_GOTO(find_all(r, o, flats, starts, known), rc, out);
    for (size_t i = o->first; *known && i < o->end; i++) {
        const fc_mg_value param = r->values[i]; /* a copy: the list moves as it grows */
        if (has_parameter(r, o, i, param.chunk)) {
            FC_TRY_GOTO(add_states(r, &param, &flats[param.chunk], starts[i - o->first]), rc, out);
        }
    }
out:
    free(flats);
    free(starts);
    return rc;
}

/* Reads the optimizers of a file. One of an unknown layout ends it, and is noted. */
static fc_code read_optimizers(fc_mg_reader *r, const torch_file *f, size_t first, size_t end) {
    const fc_pv *dicts = &f->p->root;
    size_t members = 1;
    bool known = true;
    if (fc_pv_typeof(f->p->root) == FC_PV_LIST) {
        dicts = fc_pickle_items(f->p, f->p->root, &members);
        known = members > 1;
    }
    for (size_t i = 0; known && i < members; i++) {
        const mg_optimizer o = {f, dicts[i], i, members, first, end};
        if (fc_pv_typeof(dicts[i]) != FC_PV_NONE) {
            FC_TRY(read_optimizer(r, &o, &known));
        }
    }
    r->undistributed = known ? r->undistributed : other_layout;
    return FC_OK;
}

fc_code fc_mg_read_distributed(fc_mg_reader *r, size_t first, size_t end) {
    uint32_t index = r->rank + (uint32_t)r->grid.count;
    torch_file f;
    FC_TRY(fc_torch_open_one(r->checkpoint, index, &f, r->err));
    fc_code rc = read_optimizers(r, &f, first, end);
    fc_torch_file_close(&f);
    return rc;
}
