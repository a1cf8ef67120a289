/*
 * Fuzzes a msgpack file of Flax.
 */
#include "fuzz_one_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_open_file(data, size, ".msgpack");
    return 0;
}
