/*
 * What the layouts of quantized weights share: the checkpoint in which they are found, and the one to which the weights
 * are added.
 */
#pragma once

#include "checkpoint/same_name.h"
#include "fsdpckpt/checkpoint.h"
#include "plan/quantized.h"
#include "weights/scales.h"

#include <jansson.h>

typedef struct fc_dequantizer {
    fc_checkpoint *source, *out;
    fc_arena *scratch;
    fc_name_table *names;
    fc_dtype dtype;
    json_t *root;         /* the model's configuration; NULL: none */
    const json_t *config; /* its "quantization_config"; NULL: none */
    json_t *metadata;     /* the object __metadata__, without the classes of torchao; NULL: none */
    json_t *classes;      /* of torchao, by the names of weights; NULL: unknown */
    size_t described;     /* index of that object, or FC_NO_NAME */
    int64_t blocks[2];    /* sizes of blocks in the configuration; 0: unknown */
    fc_quantized *found;  /* one per value of the source */
    bool *dropped;        /* one per value of the source */
    size_t count;
    fc_error *err;
} fc_dequantizer;

/** Finds the value called `name` without `less` bytes at its end, but with `more`. @return NULL: there is none. */
const fc_tensor *fc_dequantizer_near(const fc_dequantizer *d, const char *name, size_t less, const char *more);

/** Fails because of something that is missing or does not fit next to codes. @return FC_EUNSUPPORTED. */
fc_code fc_dequantizer_refuse(const fc_dequantizer *d, const fc_tensor *codes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/**
 * Finds the rest of a weight whose codes are packed as compressed-tensors does it (X_packed), and its shape.
 * @param end the length of "_packed" or of another end of the name of the codes.
 */
fc_code fc_packed_fit(const fc_dequantizer *d, fc_scaled *w, size_t end, int64_t *shape);

/** Adds a weight of bitsandbytes, whose four-bit codes are in blocks. */
fc_code fc_blockwise_add(const fc_dequantizer *d, const fc_tensor *codes, const fc_tensor *scales);

/** Adds a weight of GPTQ or AWQ. @param end the length of ".qweight" at the end of the name of the codes. */
fc_code fc_grouped_add(const fc_dequantizer *d, const fc_tensor *codes, const fc_tensor *scales, size_t end);

/** Finds the rest of a weight whose codes are pairs of four-bit floats in bytes named X, as ModelOpt stores them. */
fc_code fc_modelopt_fit(const fc_dequantizer *d, fc_scaled *w, int64_t *shape);

/** Reads which classes of torchao the weights had. */
fc_code fc_torchao_read(fc_dequantizer *d);

/** Adds what the object __metadata__ has besides these classes. */
fc_code fc_torchao_keep_rest(fc_dequantizer *d);

/** @return the name of the weight whose codes are called `codes`; NULL when out of memory. */
const char *fc_torchao_name(const fc_dequantizer *d, const char *codes, size_t end);

/** Drops the unreadable value that a pickle has of the weight besides its codes. */
fc_code fc_torchao_drop_whole(const fc_dequantizer *d, const char *codes, size_t end);

/** @return FC_EUNSUPPORTED for classes whose values are not codes times scales. */
fc_code fc_torchao_check(const fc_dequantizer *d, const fc_scaled *w, const char *name);

/** Finds zero points of codes that are int8. */
fc_code fc_packed_zeros(const fc_dequantizer *d, fc_scaled *w, size_t end);
