/*
 * Recognises quantized weights: see quantized.h.
 */
#include "plan/quantized.h"

#include <stdio.h>
#include <string.h>

static const fc_quantizer quantizers[] = {
    {"", "_scale_inv", FC_CODES_SCALED, "DeepSeek"},
    {"", "_scale", FC_CODES_SCALED, "compressed-tensors, FBGEMM or ModelOpt"},
    {".weight", ".scale", FC_CODES_SCALED, "DeepSeek's inference code"},
    {".weight", ".scale_weight", FC_CODES_SCALED, "ComfyUI"},
    {"_blocks", "_scales", FC_CODES_TRANSPOSED, "GPT-OSS"},
    {".weight", ".scales", FC_CODES_OTHER, "MLX"},
    {"_packed", "_scale", FC_CODES_SCALED, "compressed-tensors"},
    {".qweight", ".scales", FC_CODES_GROUPED, "GPTQ or AWQ"},
    {"_qdata", "_scale", FC_CODES_SCALED, "torchao"},
    {"._data._data", "._scale", FC_CODES_OTHER, "quanto (without the shape of the weight)"},
    {"._data", "._scale", FC_CODES_SCALED, "quanto"},
    {".weight", ".SCB", FC_CODES_SCALED, "bitsandbytes"},
    {"", ".absmax", FC_CODES_BLOCKWISE, "bitsandbytes"},
};
enum { QUANTIZERS = sizeof quantizers / sizeof *quantizers };

/* Codes have few bits, or are packed into integers. */
static bool can_be_codes(const fc_tensor *t) {
    switch (fc_dtype_get(t->dtype)->cls) {
    case FC_CLASS_FLOAT:
        return fc_dtype_size(t->dtype) == 1;
    case FC_CLASS_PACKED:
    case FC_CLASS_SIGNED:
    case FC_CLASS_UNSIGNED:
        return !t->object;
    default:
        return false;
    }
}

fc_quantized fc_quantized_find(const fc_checkpoint *source, const fc_name_table *names, size_t index) {
    const fc_tensor *t = &source->tensors[index];
    const size_t len = strlen(t->name);
    char buf[1024];
    for (int i = 0; !t->object && i < QUANTIZERS; i++) {
        const fc_quantizer *q = &quantizers[i];
        if (q->kind != FC_CODES_BLOCKWISE && !can_be_codes(t)) { /* bitsandbytes may store bytes as other types */
            continue;
        }
        const size_t end = strlen(q->codes);
        if (len < end || strcmp(t->name + len - end, q->codes) != 0) {
            continue;
        }
        const int used = snprintf(buf, sizeof buf, "%.*s%s", (int)(len - end), t->name, q->scales);
        const size_t at =
            used > 0 && (size_t)used < sizeof buf ? fc_name_table_find(names, buf, (size_t)used) : FC_NO_NAME;
        if (at != FC_NO_NAME && !source->tensors[at].object) {
            return (fc_quantized){q, at};
        }
    }
    return (fc_quantized){NULL, 0};
}
