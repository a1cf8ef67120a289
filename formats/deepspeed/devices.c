/*
 * Detects files of ZeRO-3 that were renamed. They do not record their rank, but they record the device that each tensor
 * was on.
 *
 * Launchers number the devices of a machine in the order of its ranks. So before a rank on device 1 there is one on
 * device 0, before the second rank on device 1 a second one on device 0, and so on. This is a strong hint but no proof:
 * a training script may choose its devices freely.
 */
#include "deepspeed/stages.h"

#include "fsdpckpt/order.h"

#include <stdlib.h>
#include <string.h>

int64_t fc_ds_device(const torch_file *f, const fc_torch_tensor *t) {
    size_t n = 0;
    const char *text = fc_pv_typeof(t->location) == FC_PV_STR ? fc_pickle_bytes(f->p, t->location, &n) : "";
    const char *colon = memchr(text, ':', n);
    int64_t value = 0;
    if (!colon || colon + 1 == text + n) {
        return -1;
    }
    for (const char *s = colon + 1; s < text + n; s++) {
        if (*s < '0' || *s > '9' || value > UINT32_MAX) {
            return -1;
        }
        value = value * 10 + (*s - '0');
    }
    return value;
}

/* The index of `number` among `count` sorted, different numbers. */
static size_t index_of(const int64_t *numbers, size_t count, int64_t number) {
    const int64_t *found = fc_find_item(&number, numbers, count, sizeof *numbers, fc_order_numbers);
    return found ? (size_t)(found - numbers) : 0;
}

bool fc_ds_devices_disorder(const int64_t *devices, size_t ranks, size_t *rank) {
    int64_t *numbers = calloc(ranks + 1, sizeof *numbers);
    size_t *seen = calloc(ranks + 1, sizeof *seen); /* number of ranks so far on each device */
    size_t count = 0;
    bool known = numbers && seen, found = false;
    for (size_t i = 0; known && i < ranks; i++) {
        numbers[i] = devices[i];
        known = devices[i] >= 0;
    }
    if (known) {
        fc_sort_items(numbers, ranks, sizeof *numbers, fc_order_numbers);
    }
    for (size_t i = 0; known && i < ranks; i++) {
        if (i == 0 || numbers[i] != numbers[count - 1]) {
            numbers[count++] = numbers[i];
        }
    }
    for (size_t i = 0; known && !found && i < ranks; i++) {
        size_t at = index_of(numbers, count, devices[i]);
        found = at > 0 && seen[at] >= seen[at - 1];
        seen[at]++;
        *rank = i;
    }
    free(numbers);
    free(seen);
    return found;
}
