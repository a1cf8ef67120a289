/*
 * Compares collectives with their definitions, see comm_cases.h.
 */
#include "comm_cases.h"

#include "fsdpckpt/cast.h"
#include "fsdpckpt/move.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A byte that depends on the rank and the index. */
static unsigned char byte_of(int rank, size_t i) {
    return (unsigned char)((unsigned)rank * 37u + (unsigned)i * 11u + (unsigned)(i >> 8) + 5u);
}

static unsigned char *bytes_of(int rank, size_t count) {
    unsigned char *bytes = malloc(count + 1);
    for (size_t i = 0; bytes && i < count; i++) {
        bytes[i] = byte_of(rank, i);
    }
    return bytes;
}

static fc_code check_bytes(const char *what, const unsigned char *got, int rank, size_t count, fc_error *err) {
    for (size_t i = 0; i < count; i++) {
        if (got[i] != byte_of(rank, i)) {
            return fc_fail(err, FC_EFOUND, "%s: byte %zu of rank %d is %u", what, i, rank, (unsigned)got[i]);
        }
    }
    return FC_OK;
}

static fc_code all_gather_of(fc_comm *comm, size_t bytes, bool in_place, fc_error *err) {
    size_t all = bytes * (size_t)comm->size;
    unsigned char *mine = bytes_of(comm->rank, bytes), *recv = malloc(all + 1);
    recv[all] = 0xee;
    unsigned char *send = mine;
    if (in_place) {
        send = recv + bytes * (size_t)comm->rank;
        memcpy(send, mine, bytes);
    }
    fc_code rc = comm->all_gather(comm, send, recv, bytes, err);
    for (int r = 0; rc == FC_OK && r < comm->size; r++) {
        rc = check_bytes("all_gather", recv + bytes * (size_t)r, r, bytes, err);
    }
    if (rc == FC_OK && recv[all] != 0xee) {
        rc = fc_fail(err, FC_EFOUND, "all_gather wrote after the end of its buffer");
    }
    free(mine);
    free(recv);
    return rc;
}

fc_code case_all_gather(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    static const size_t sizes[] = {0, 1, 3, 64, 1000, 70001};
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < sizeof sizes / sizeof *sizes; i++) {
        rc = all_gather_of(comm, sizes[i], false, err);
        rc = rc == FC_OK ? all_gather_of(comm, sizes[i], true, err) : rc;
    }
    return rc;
}

/* Gathers blocks with gaps between them, in reverse order of the ranks if `reverse`. */
static fc_code all_gather_v_of(fc_comm *comm, const size_t *counts, bool reverse, fc_error *err) {
    size_t displs[64], all = 0;
    for (int i = 0; i < comm->size; i++) {
        int r = reverse ? comm->size - 1 - i : i;
        displs[r] = all;
        all += counts[r] + 3;
    }
    unsigned char *mine = bytes_of(comm->rank, counts[comm->rank]), *recv = malloc(all);
    memset(recv, 0xee, all);
    fc_code rc = comm->all_gather_v(comm, mine, recv, counts, displs, err);
    for (int r = 0; rc == FC_OK && r < comm->size; r++) {
        rc = check_bytes("all_gather_v", recv + displs[r], r, counts[r], err);
        if (rc == FC_OK && memcmp(recv + displs[r] + counts[r], "\xee\xee\xee", 3) != 0) {
            rc = fc_fail(err, FC_EFOUND, "all_gather_v wrote into the gaps");
        }
    }
    free(mine);
    free(recv);
    return rc;
}

fc_code case_all_gather_v(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    fc_code rc = FC_OK;
    for (int kind = 0; rc == FC_OK && kind < 5; kind++) {
        size_t counts[64];
        for (int r = 0; r < comm->size; r++) {
            size_t uneven = (size_t)(r * 101 + 7);
            size_t chosen[] = {uneven, r % 2 ? 0 : uneven, r == comm->size - 1 ? 0 : 1000, r == 1 ? 5000 : 0, 0};
            counts[r] = chosen[kind];
        }
        rc = all_gather_v_of(comm, counts, false, err);
        rc = rc == FC_OK ? all_gather_v_of(comm, counts, true, err) : rc;
    }
    return rc;
}

/* ---- reductions of small numbers, which are exact in every dtype but bool and e8m0 ---- */

enum { PERIOD = 4, LARGEST_ELEMENT = 16 };

/* The numbers of a rank repeat after PERIOD elements. */
static int number_of(int rank, size_t i) {
    return (int)((i + (size_t)rank * 3) % PERIOD);
}

/* Stores x as element i of `to`, rounded to the dtype. A complex number is x + 2x i. */
static void put(fc_dtype dtype, void *to, size_t i, double x) {
    size_t size = fc_dtype_size(dtype);
    unsigned char *at = (unsigned char *)to + i * size;
    int64_t n = (int64_t)x;
    switch (fc_dtype_get(dtype)->cls) {
    case FC_CLASS_FLOAT:
        fc_cast(FC_F64, &x, dtype, at, 1);
        break;
    case FC_CLASS_COMPLEX: {
        fc_dtype component = dtype == FC_C128 ? FC_F64 : dtype == FC_C64 ? FC_F32 : FC_F16;
        double both[2] = {x, 2 * x};
        fc_cast(FC_F64, both, component, at, 2);
        break;
    }
    case FC_CLASS_BOOL:
        *at = n != 0;
        break;
    default:
        memcpy(at, &n, size);
    }
}

static double expected(fc_reduce op, int size, size_t i) {
    int odd = 0;
    double sum = 0, least = 9, most = -9;
    for (int r = 0; r < size; r++) {
        double x = number_of(r, i);
        odd ^= number_of(r, i);
        sum += x;
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    if (op == FC_REDUCE_XOR) {
        return odd;
    }
    return op == FC_REDUCE_SUM ? sum : op == FC_REDUCE_AVG ? sum / size : op == FC_REDUCE_MIN ? least : most;
}

/* Writes `count` elements at `to`: a pattern of PERIOD elements, repeated. Casting each element anew would take most of
   the test's time. */
static void repeat(const unsigned char *pattern, size_t element, size_t count, unsigned char *to) {
    for (size_t done = 0; done < count; done += PERIOD) {
        size_t some = count - done < PERIOD ? count - done : PERIOD;
        memcpy(to + done * element, pattern, some * element);
    }
}

/* Writes the elements that `rank` sends. */
static void put_numbers(fc_dtype dtype, int rank, size_t count, unsigned char *to) {
    unsigned char pattern[PERIOD * LARGEST_ELEMENT] = {0};
    for (size_t i = 0; i < PERIOD; i++) {
        put(dtype, pattern, i, number_of(rank, i));
    }
    repeat(pattern, fc_dtype_size(dtype), count, to);
}

/* Writes the expected elements from index `first` on. */
static void put_expected(fc_dtype dtype, fc_reduce op, int size, size_t first, size_t count, unsigned char *to) {
    unsigned char pattern[PERIOD * LARGEST_ELEMENT] = {0};
    for (size_t i = 0; i < PERIOD; i++) {
        put(dtype, pattern, i, expected(op, size, first + i));
    }
    repeat(pattern, fc_dtype_size(dtype), count, to);
}

/* Returns whether the reduction is defined and exact here. e8m0 has only powers of two, so most sums are not. */
static bool has_answer(fc_dtype dtype, fc_reduce op) {
    fc_dtype_class cls = fc_dtype_get(dtype)->cls;
    if (cls == FC_CLASS_PACKED || cls == FC_CLASS_OPAQUE || dtype == FC_F8_E8M0FNU) {
        return false;
    }
    if (op == FC_REDUCE_XOR && cls == FC_CLASS_BOOL) {
        return false; /* this test's numbers are not all 0 or 1 */
    }
    if (op == FC_REDUCE_XOR) {
        return cls == FC_CLASS_SIGNED || cls == FC_CLASS_UNSIGNED;
    }
    if (op == FC_REDUCE_AVG) {
        return cls == FC_CLASS_FLOAT || cls == FC_CLASS_COMPLEX;
    }
    return op == FC_REDUCE_SUM || cls != FC_CLASS_COMPLEX;
}

static fc_code compare(const char *what, fc_dtype dtype, fc_reduce op, const unsigned char *got,
                       const unsigned char *wanted, size_t bytes, fc_error *err) {
    if (bytes > 0 && memcmp(got, wanted, bytes) != 0) {
        return fc_fail(err, FC_EFOUND, "%s: operation %d of %s is wrong", what, (int)op,
                       fc_dtype_get(dtype)->torch_name);
    }
    return FC_OK;
}

static fc_code reduce_scatter_of(fc_comm *comm, fc_dtype dtype, fc_reduce op, size_t count, bool in_place,
                                 fc_error *err) {
    size_t size = fc_dtype_size(dtype), all = count * (size_t)comm->size, first = count * (size_t)comm->rank;
    unsigned char *send = calloc(all + 1, size), *own = calloc(count + 1, size), *wanted = calloc(count + 1, size);
    put_numbers(dtype, comm->rank, all, send);
    put_expected(dtype, op, comm->size, first, count, wanted);
    unsigned char *recv = in_place ? send + first * size : own;
    fc_code rc = fc_reduce_scatter(comm, send, recv, count, dtype, op, NULL, err);
    rc = rc == FC_OK ? compare("reduce_scatter", dtype, op, recv, wanted, count * size, err) : rc;
    free(send);
    free(own);
    free(wanted);
    return rc;
}

static fc_code all_reduce_of(fc_comm *comm, fc_dtype dtype, fc_reduce op, size_t count, fc_error *err) {
    size_t size = fc_dtype_size(dtype);
    unsigned char *data = calloc(count + 1, size), *wanted = calloc(count + 1, size);
    put_numbers(dtype, comm->rank, count, data);
    put_expected(dtype, op, comm->size, 0, count, wanted);
    fc_code rc = comm->all_reduce(comm, data, count, dtype, op, err);
    rc = rc == FC_OK ? compare("all_reduce", dtype, op, data, wanted, count * size, err) : rc;
    free(data);
    free(wanted);
    return rc;
}

static fc_code for_all_types(fc_comm *comm, bool scatter, fc_error *err) {
    static const size_t counts[] = {0, 1, 5, 1500};
    fc_code rc = FC_OK;
    for (int t = 0; t < FC_DTYPE_COUNT; t++) {
        for (int op = 0; op <= FC_REDUCE_XOR; op++) {
            for (size_t c = 0; rc == FC_OK && c < sizeof counts / sizeof *counts; c++) {
                if (!has_answer((fc_dtype)t, (fc_reduce)op)) {
                    continue;
                }
                if (!scatter) {
                    rc = all_reduce_of(comm, (fc_dtype)t, (fc_reduce)op, counts[c], err);
                    continue;
                }
                rc = reduce_scatter_of(comm, (fc_dtype)t, (fc_reduce)op, counts[c], false, err);
                rc = rc == FC_OK ? reduce_scatter_of(comm, (fc_dtype)t, (fc_reduce)op, counts[c], true, err) : rc;
            }
        }
    }
    return rc;
}

fc_code case_reduce_scatter(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    return for_all_types(comm, true, err);
}

fc_code case_all_reduce(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    return for_all_types(comm, false, err);
}

/* Rank 0 sends 1, each other rank a quarter of the last place. If each step were rounded, the sum would stay 1. It is
   exact in float32 and rounded once, to nearest even. */
fc_code case_rounding(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    static const struct {
        fc_dtype dtype;
        uint16_t one, quarter;
    } types[] = {{FC_F16, 0x3c00, 0x0c00}, {FC_BF16, 0x3f80, 0x3b00}};
    /* Last places above 1 by the number of quarters. Two quarters are a tie, which rounds to even. */
    static const uint16_t places[] = {0, 0, 0, 1, 1, 1, 2, 2};
    for (int t = 0; t < 2; t++) {
        uint16_t x = comm->rank == 0 ? types[t].one : types[t].quarter;
        fc_code rc = comm->all_reduce(comm, &x, 1, types[t].dtype, FC_REDUCE_SUM, err);
        uint16_t wanted = (uint16_t)(types[t].one + places[comm->size - 1]);
        if (rc != FC_OK || x != wanted) {
            return rc != FC_OK ? rc
                               : fc_fail(err, FC_EFOUND, "the sum of %s is %04x, not %04x",
                                         fc_dtype_get(types[t].dtype)->torch_name, x, wanted);
        }
    }
    float nan = comm->rank == comm->size - 1 ? __builtin_nanf("") : (float)comm->rank;
    fc_code rc = comm->all_reduce(comm, &nan, 1, FC_F32, FC_REDUCE_MAX, err);
    if (rc == FC_OK && nan == nan) {
        rc = fc_fail(err, FC_EFOUND, "a NaN was lost by max");
    }
    return rc;
}

fc_code case_broadcast(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    static const size_t sizes[] = {0, 1, 4097};
    fc_code rc = FC_OK;
    for (int root = 0; root < comm->size; root++) {
        for (size_t i = 0; rc == FC_OK && i < 3; i++) {
            unsigned char *data = bytes_of(comm->rank, sizes[i]);
            rc = comm->broadcast(comm, data, sizes[i], root, err);
            rc = rc == FC_OK ? check_bytes("broadcast", data, root, sizes[i], err) : rc;
            free(data);
        }
    }
    return rc == FC_OK ? comm->barrier(comm, err) : rc;
}

/* Checks that `group` consists of the `count` ranks in `members`, in this order. */
static fc_code check_members(fc_comm *comm, fc_comm *group, const int *members, int count, fc_error *err) {
    int got[64];
    if (group->size != count || members[group->rank] != comm->rank || strcmp(group->backend, comm->backend) != 0) {
        return fc_fail(err, FC_EFOUND, "a split has %d ranks and this is %d of them, of %d", group->size, group->rank,
                       count);
    }
    fc_code rc = group->all_gather(group, &comm->rank, got, sizeof *got, err);
    if (rc == FC_OK && memcmp(got, members, sizeof *got * (size_t)count) != 0) {
        rc = fc_fail(err, FC_EFOUND, "a split has other ranks than it should");
    }
    return rc;
}

fc_code case_split(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    fc_code rc = FC_OK;
    for (int by = 1; rc == FC_OK && by <= 3; by++) {
        int members[64], count = 0;
        fc_comm *group = NULL;
        for (int r = 0; r < comm->size; r++) {
            if (r % by == comm->rank % by) {
                members[count++] = r;
            }
        }
        rc = comm->split(comm, comm->rank % by, &group, err);
        if (rc == FC_OK) {
            rc = check_members(comm, group, members, count, err);
            group->free(group);
        }
    }
    return rc;
}

static fc_code split_mesh_of(fc_comm *comm, const fc_mesh *mesh, fc_error *err) {
    fc_code rc = FC_OK;
    for (int dim = 0; rc == FC_OK && dim < mesh->ndim; dim++) {
        int64_t at[FC_MAX_MESH_DIMS];
        int members[64], count = (int)mesh->sizes[dim];
        fc_comm *group = NULL;
        fc_mesh_coordinate(mesh, comm->rank, at);
        for (at[dim] = 0; at[dim] < count; at[dim]++) {
            members[at[dim]] = (int)fc_mesh_rank(mesh, at);
        }
        rc = fc_comm_split_mesh(comm, mesh, dim, &group, err);
        if (rc == FC_OK) {
            rc = check_members(comm, group, members, count, err);
            group->free(group);
        }
    }
    return rc;
}

fc_code case_split_mesh(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    fc_mesh one = {.ndim = 1, .sizes = {comm->size}};
    fc_mesh two = {.ndim = 2, .sizes = {comm->size / 2, 2}};
    fc_mesh three = {.ndim = 3, .sizes = {2, comm->size / 4, 2}};
    fc_code rc = split_mesh_of(comm, &one, err);
    rc = rc == FC_OK && comm->size % 2 == 0 ? split_mesh_of(comm, &two, err) : rc;
    rc = rc == FC_OK && comm->size % 4 == 0 ? split_mesh_of(comm, &three, err) : rc;
    if (rc == FC_OK) {
        fc_comm *group = NULL;
        fc_mesh wrong = {.ndim = 1, .sizes = {comm->size + 1}};
        if (fc_comm_split_mesh(comm, &wrong, 0, &group, NULL) != FC_EUSAGE ||
            fc_comm_split_mesh(comm, &one, 1, &group, NULL) != FC_EUSAGE || group) {
            rc = fc_fail(err, FC_EFOUND, "a mesh that does not fit was not refused");
        }
    }
    return rc;
}

fc_code case_agree(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    if (fc_comm_agree(comm, FC_OK, err) != FC_OK) {
        return err->code;
    }
    for (int bad = 0; bad < comm->size; bad++) { /* this rank and all above it fail */
        fc_error mine = {FC_OK, ""};
        char wanted[64];
        fc_code rc = comm->rank < bad ? FC_OK : fc_fail(&mine, FC_ECORRUPT, "bad luck of %d", comm->rank);
        rc = fc_comm_agree(comm, rc, &mine);
        snprintf(wanted, sizeof wanted, comm->size == 1 ? "bad luck of %d" : "rank %d: bad luck of %d", bad, bad);
        if (rc != FC_ECORRUPT || mine.code != rc || strcmp(mine.message, wanted) != 0) {
            return fc_fail(err, FC_EFOUND, "agreed on %d, \"%s\", instead of \"%s\"", (int)rc, mine.message, wanted);
        }
        rc = fc_comm_agree(comm, rc, &mine); /* an agreed message does not get a second rank */
        if (rc != FC_ECORRUPT || strcmp(mine.message, wanted) != 0) {
            return fc_fail(err, FC_EFOUND, "agreed again on \"%s\" instead of \"%s\"", mine.message, wanted);
        }
    }
    fc_error mine;
    fc_code rc = fc_comm_agree(comm, fc_fail(&mine, FC_EIO, "no file"), &mine);
    if (rc != FC_EIO || strcmp(mine.message, "no file") != 0) {
        return fc_fail(err, FC_EFOUND, "a failure of all ranks became \"%s\"", mine.message);
    }
    return FC_OK;
}

fc_code case_refusals(fc_comm *comm, void *context, fc_error *err) {
    (void)context;
    unsigned char data[1024] = {0};
    fc_error why;
    if (comm->all_reduce(comm, data, 4, FC_I32, FC_REDUCE_AVG, &why) != FC_EUNSUPPORTED ||
        !strstr(why.message, "int32") ||
        comm->all_reduce(comm, data, 4, FC_C64, FC_REDUCE_MAX, &why) != FC_EUNSUPPORTED ||
        fc_reduce_scatter(comm, data, data, 4, FC_F4_E2M1FN_X2, FC_REDUCE_SUM, NULL, &why) != FC_EUNSUPPORTED ||
        fc_reduce_scatter(comm, data, data, 4, FC_OPAQUE, FC_REDUCE_SUM, NULL, &why) != FC_EUNSUPPORTED ||
        comm->broadcast(comm, data, 4, comm->size, &why) != FC_EUSAGE) {
        return fc_fail(err, FC_EFOUND, "an invalid call was not refused");
    }
    return case_all_gather(comm, NULL, err);
}

const comm_case comm_cases[] = {
    {"all_gather", case_all_gather},
    {"all_gather_v", case_all_gather_v},
    {"reduce_scatter", case_reduce_scatter},
    {"all_reduce", case_all_reduce},
    {"rounding", case_rounding},
    {"broadcast", case_broadcast},
    {"split", case_split},
    {"split_mesh", case_split_mesh},
    {"agree", case_agree},
    {"refusals", case_refusals},
    {NULL, NULL},
};
