/*
 * Fuzzes the HDF5 filters that the engine undoes. The input is the number of a filter (2 bytes), what bitshuffle has
 * inside (1), the bytes of an element (1) and of the result (4), little-endian, and the stored bytes.
 */
#include "codec/filter.h"

#include "base/little.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    enum { HEADER = 8, MOST = 1 << 18 };
    if (size < HEADER) {
        return 0;
    }
    const uint64_t decoded = fc_load_little(data + 4, 4);
    const fc_filter filter = {.id = (uint16_t)fc_load_little(data, 2), .inner = data[2] & 3};
    const fc_filter_info *info = fc_filter_find(filter.id);
    if (!info || data[3] == 0 || decoded == 0 || decoded > MOST) {
        return 0;
    }
    /* Of the exact sizes, so that AddressSanitizer sees each byte outside. */
    const size_t room = (size_t)decoded * info->scratch, stored = size - HEADER;
    unsigned char *out = malloc((size_t)decoded), *scratch = malloc(room ? room : 1), *in = malloc(stored ? stored : 1);
    if (!out || !scratch || !in) {
        abort();
    }
    for (size_t i = 0; i < stored; i++) {
        in[i] = data[HEADER + i];
    }
    fc_error err;
    const fc_code rc = fc_filter_undo(&filter, in, stored, data[3], scratch, out, (size_t)decoded, &err);
    if (rc != FC_OK && rc != FC_ECORRUPT && rc != FC_EUNSUPPORTED && rc != FC_ENOMEM) {
        abort();
    }
    free(out);
    free(scratch);
    free(in);
    return 0;
}
