/*
 * The header of a `.npy` file: see npy.h.
 */
#include "output/npy.h"

#include "fsdpckpt/box.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

_Static_assert(FC_MAX_DIMS * 22 + 192 <= NPY_HEADER_MAX, "every shape has room");

static size_t append_text(char *buf, size_t used, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(buf + used, NPY_HEADER_MAX - used, fmt, args);
    va_end(args);
    return used + (size_t)(n > 0 ? n : 0);
}

size_t npy_header(fc_dtype dtype, int ndim, const int64_t *shape, char *buf) {
    enum { PREFIX = 10, ALIGNMENT = 64, GROWTH = 21 }; /* numpy leaves room for the first size to grow to 21 digits */
    static const char magic[PREFIX + 1] = "\x93NUMPY\x01\x00\x00\x00";
    char kind = fc_dtype_get(dtype)->numpy_kind;
    memcpy(buf, magic, PREFIX);
    size_t used =
        append_text(buf, PREFIX, "{'descr': '%c%c%u', 'fortran_order': False, 'shape': (",
                    kind != 'V' && fc_dtype_size(dtype) == 1 ? '|' : '<', kind, (unsigned)fc_dtype_size(dtype));
    size_t digits = 0;
    for (int d = 0; d < ndim; d++) {
        size_t before = used + 2 * (d > 0);
        used = append_text(buf, used, "%s%lld", d ? ", " : "", (long long)shape[d]);
        digits = d == 0 ? used - before : digits;
    }
    used = append_text(buf, used, ndim == 1 ? ",), }" : "), }");
    size_t end = used + (ndim > 0 ? GROWTH - digits : 0) + 1;
    end = (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    memset(buf + used, ' ', end - 1 - used);
    buf[end - 1] = '\n';
    buf[8] = (char)((end - PREFIX) & 0xff);
    buf[9] = (char)((end - PREFIX) >> 8);
    return end;
}
