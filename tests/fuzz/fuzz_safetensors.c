/*
 * Fuzzes a safetensors file.
 */
#include "fuzz_one_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_open_file(data, size, ".safetensors");
    return 0;
}
