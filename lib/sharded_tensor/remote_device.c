/*
 * torch.device and _remote_device as text. The strings come from checkpoints (ShardMetadata.placement) and go into the
 * metadata that sharding_spec.c and dtensor.c build.
 */
#include "fsdpckpt/sharded_tensor/sharding_spec.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The names of c10::DeviceType that torch.device accepts. */
static const char *const device_types[] = {
    "cpu",  "cuda", "ipu",  "xpu",    "mkldnn", "opengl", "opencl", "ideep", "hip",  "ve",
    "fpga", "xla",  "lazy", "vulkan", "mps",    "meta",   "hpu",    "mtia",  "maia", "privateuseone",
};

/* c10::DeviceIndex is an int8. */
enum { MAX_DEVICE_INDEX = 127 };

bool fc_torch_device_parse(const char *text, size_t len, fc_torch_device *out) {
    const char *colon = memchr(text, ':', len);
    size_t type_len = colon ? (size_t)(colon - text) : len;
    int index = -1;
    if (colon) {
        const char *digits = colon + 1, *end = text + len;
        /* torch rejects "cuda:01", which would be a second name for the same device. */
        if (digits == end || end - digits > 3 || (*digits == '0' && end - digits > 1)) {
            return false;
        }
        index = 0;
        for (; digits < end; digits++) {
            if (*digits < '0' || *digits > '9') {
                return false;
            }
            index = index * 10 + (*digits - '0');
        }
        if (index > MAX_DEVICE_INDEX) {
            return false;
        }
    }
    for (size_t i = 0; i < sizeof device_types / sizeof *device_types; i++) {
        if (strlen(device_types[i]) == type_len && memcmp(device_types[i], text, type_len) == 0) {
            snprintf(out->type, sizeof out->type, "%s", device_types[i]);
            out->index = index;
            return true;
        }
    }
    return false;
}

bool fc_torch_device_equal(const fc_torch_device *a, const fc_torch_device *b) {
    return a->index == b->index && strcmp(a->type, b->type) == 0;
}

/* Writes the device like str(torch.device), e.g. "cuda:0". */
static int format_device(const fc_torch_device *device, char *buf, size_t size) {
    return device->index < 0 ? snprintf(buf, size, "%s", device->type)
                             : snprintf(buf, size, "%s:%d", device->type, device->index);
}

static fc_code cannot_parse(const char *text, fc_error *err) {
    return fc_fail(err, FC_EUSAGE,
                   "cannot parse remote_device %s; valid forms are '<workername>/<device>', 'rank:<rank>/<device>' and "
                   "'<device>'",
                   text);
}

/* Parses "rank:<digits>" or the name of a worker, which contains no colon. */
static fc_code parse_worker(const char *text, const char *worker, size_t len, fc_remote_device *out, fc_error *err) {
    const char *colon = memchr(worker, ':', len);
    if (len == 0) {
        return cannot_parse(text, err);
    }
    if (!colon) {
        if (len >= sizeof out->worker) {
            return fc_fail(err, FC_EUNSUPPORTED, "remote_device %s: the worker name is longer than %zu bytes", text,
                           sizeof out->worker - 1);
        }
        memcpy(out->worker, worker, len);
        return FC_OK;
    }
    size_t digits = len - 5;
    if (len < 6 || memcmp(worker, "rank:", 5) != 0 || digits > 18) {
        return cannot_parse(text, err);
    }
    out->rank = 0;
    for (const char *c = worker + 5; c < worker + len; c++) {
        if (*c < '0' || *c > '9') {
            return cannot_parse(text, err);
        }
        out->rank = out->rank * 10 + (*c - '0');
    }
    return FC_OK;
}

fc_code fc_remote_device_parse(const char *text, fc_remote_device *out, fc_error *err) {
    fc_remote_device parsed = {.worker = "", .rank = -1, .device = {"cpu", -1}};
    const char *slash = strchr(text, '/');
    fc_code code = FC_OK;
    if (slash) {
        if (!fc_torch_device_parse(slash + 1, strlen(slash + 1), &parsed.device)) {
            return cannot_parse(text, err);
        }
        code = parse_worker(text, text, (size_t)(slash - text), &parsed, err);
    } else if (!fc_torch_device_parse(text, strlen(text), &parsed.device)) {
        code = parse_worker(text, text, strlen(text), &parsed, err);
    }
    if (code == FC_OK) {
        *out = parsed;
    }
    return code;
}

fc_remote_device fc_remote_device_of_rank(int64_t rank, const fc_torch_device *device) {
    fc_remote_device out = {.worker = "", .rank = rank, .device = *device};
    return out;
}

int fc_remote_device_format(const fc_remote_device *device, char *buf, size_t size) {
    char text[32];
    format_device(&device->device, text, sizeof text);
    if (device->worker[0] != '\0') {
        return snprintf(buf, size, "%s/%s", device->worker, text);
    }
    return device->rank >= 0 ? snprintf(buf, size, "rank:%" PRId64 "/%s", device->rank, text)
                             : snprintf(buf, size, "%s", text);
}
