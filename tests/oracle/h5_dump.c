/*
 * Opens a checkpoint and prints one line per value; its bytes go to OUT/<number>. For the oracle tests of readers.
 *     h5_dump [--follow-external] [--headers-only] SRC [OUT]
 * A line is: number, name as hex, path as hex elements joined with "/" (an index is marked by "#"), dtype, shape, chunk
 * count, codec of the first chunk, encoding, placements, or the error. Fields are separated by tabs.
 */
#include "fsdpckpt/read.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { MOST = 256 << 20 }; /* bytes of a value */

static void print_hex(const char *s) {
    for (; *s; s++) {
        printf("%02x", (unsigned char)*s);
    }
}

static void print_header(const fc_tensor *t, size_t i) {
    char text[512] = "-";
    printf("%zu\t", i);
    print_hex(t->name);
    printf("\t");
    for (size_t k = 0; k < t->path.count; k++) {
        printf("%s%s", k ? "/" : "", t->path.elements[k].is_index ? "#" : "");
        print_hex(t->path.elements[k].key);
    }
    printf("\t%s\t", fc_dtype_get(t->dtype)->torch_name);
    for (int k = 0; k < t->ndim; k++) {
        printf("%s%" PRId64, k ? "," : "", t->shape[k]);
    }
    printf("\t%zu\t%s\t%s\t", t->nchunks, t->object ? t->object->encoding : "-", text);
}

static void print_error(const fc_error *err) {
    static const char *const hints[FC_HINT_COUNT] = {
        [FC_HINT_EXCLUDE] = "; exclude ", [FC_HINT_FOLLOW_EXTERNAL] = "; follow external or exclude "};
    const char *hint = (unsigned)err->hint < FC_HINT_COUNT ? hints[err->hint] : NULL;
    printf("ERROR %d %s%s%s\n", err->code, err->message, hint ? hint : "", hint ? err->about : "");
}

static int dump(const fc_checkpoint *c, const fc_tensor *t, size_t i, const char *out) {
    static const char *const codecs[] = {"raw", "inline", "filtered", "format"};
    fc_error err = {0};
    fc_extent extent = {0};
    char path[4096];
    int64_t origin[FC_MAX_DIMS] = {0}, numel = 0;
    fc_box box = {t->ndim, origin, t->shape};
    print_header(t, i);
    if (t->nchunks > 0 && fc_checkpoint_extent(c, t, 0, &extent, &err) != FC_OK) {
        print_error(&err);
        return 0;
    }
    if (!fc_numel(t->ndim, t->shape, &numel)) {
        return 1;
    }
    if (numel > MOST / fc_dtype_size(t->dtype)) { /* a damaged file may claim anything that it fills */
        printf("ERROR 0 too large to dump\n");
        return 0;
    }
    size_t size = (size_t)numel * fc_dtype_size(t->dtype);
    unsigned char *bytes = malloc(size + 1);
    if (!bytes || fc_read_box(c, t, &box, t->dtype, bytes, &err) != FC_OK) {
        print_error(&err);
        free(bytes);
        return 0;
    }
    snprintf(path, sizeof path, "%s/%zu", out, i);
    FILE *f = fopen(path, "wb");
    int bad = !f || fwrite(bytes, 1, size, f) != size;
    bad |= f && fclose(f) != 0;
    free(bytes);
    printf("%s\n", t->nchunks == 0 ? "-" : codecs[extent.codec]);
    return bad;
}

int main(int argc, char **argv) {
    fc_open_options options = {false, false};
    fc_checkpoint *c;
    fc_error err;
    int at = 1, bad = 0;
    for (; at < argc && strncmp(argv[at], "--", 2) == 0; at++) {
        options.follow_external |= strcmp(argv[at], "--follow-external") == 0;
        options.headers_only |= strcmp(argv[at], "--headers-only") == 0;
    }
    if (at >= argc) {
        return 2;
    }
    fc_code rc = fc_checkpoint_open(argv[at], &options, &c, &err);
    if (rc != FC_OK) {
        fprintf(stderr, "%s\n", err.message);
        return (int)rc;
    }
    for (size_t i = 0; i < c->ntensors && at + 1 < argc; i++) {
        bad |= dump(c, &c->tensors[i], i, argv[at + 1]);
    }
    fc_checkpoint_close(c);
    struct rusage usage;
    if (getenv("H5_DUMP_MEMORY") && getrusage(RUSAGE_SELF, &usage) == 0) {
        fprintf(stderr, "%ld\n", usage.ru_maxrss);
    }
    return bad ? 70 : 0;
}
