/*
 * What the names of classes and functions in a pickle mean: those of the allowlist (globals.c), those that are known to
 * run code (dangerous.c), and in harmless.h those that may be called because they only make data.
 */
#pragma once

#include "fsdpckpt/dtype.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** How a global is treated. */
typedef enum fc_global_kind {
    FC_GLOBAL_UNKNOWN, /**< not in the allowlist */
    FC_GLOBAL_INERT,   /**< known; its calls are kept as FC_PV_CALL */
    FC_GLOBAL_CLASS,   /**< a dataclass with slots: `aux` is an fc_class */
    FC_GLOBAL_DTYPE,   /**< `aux` is an fc_dtype; FC_OPAQUE if fsdpckpt does not have the type */
    FC_GLOBAL_STORAGE, /**< `aux` is an fc_dtype; FC_OPAQUE for UntypedStorage, FC_DTYPE_COUNT for quantized types */
    FC_GLOBAL_REBUILD, /**< `aux` is an fc_rebuild */
    FC_GLOBAL_SIZE,
    FC_GLOBAL_DICT, /**< OrderedDict, Counter, dict */
    FC_GLOBAL_DEFAULTDICT,
    FC_GLOBAL_LIST,
    FC_GLOBAL_SET,
    FC_GLOBAL_FROZENSET,
    FC_GLOBAL_BYTES,
    FC_GLOBAL_BYTEARRAY,
    FC_GLOBAL_ENCODE,  /**< _codecs.encode: how protocol 2 writes bytes */
    FC_GLOBAL_GETATTR, /**< only for members of enumerations */
    FC_GLOBAL_ENUM,    /**< the memory format enumeration */
    FC_GLOBAL_LAYOUT,  /**< torch.serialization._get_layout */
    FC_GLOBAL_DEVICE,
    FC_GLOBAL_COMPLEX,
    FC_GLOBAL_PATH /**< pathlib's classes */
} fc_global_kind;

/** The dataclasses of `.metadata`. Their slots are the enumerators below, in the order of the fields in torch. */
typedef enum fc_class {
    FC_CLASS_METADATA,
    FC_CLASS_TENSOR_STORAGE,
    FC_CLASS_BYTES_STORAGE,
    FC_CLASS_CHUNK_STORAGE,
    FC_CLASS_TENSOR_PROPERTIES,
    FC_CLASS_METADATA_INDEX,
    FC_CLASS_STORAGE_INFO,
    FC_CLASS_STORAGE_META,
    FC_CLASS_COUNT
} fc_class;

enum { FC_CLASS_MAX_FIELDS = 6 };

enum {
    FC_METADATA_STATE_DICT,
    FC_METADATA_PLANNER,
    FC_METADATA_STORAGE,
    FC_METADATA_STORAGE_META,
    FC_METADATA_VERSION,
    FC_METADATA_MEGATRON /**< mcore_data, which Megatron-Core adds */
};
enum { FC_TENSOR_PROPERTIES, FC_TENSOR_SIZE, FC_TENSOR_CHUNKS };
enum { FC_BYTES_ENCODING /**< fsdpckpt_encoding, which fsdpckpt adds for an object of another format */ };
enum { FC_CHUNK_OFFSETS, FC_CHUNK_SIZES };
enum { FC_PROPERTIES_DTYPE, FC_PROPERTIES_LAYOUT };
enum { FC_INDEX_FQN, FC_INDEX_OFFSET, FC_INDEX_INDEX };
enum { FC_INFO_PATH, FC_INFO_OFFSET, FC_INFO_LENGTH, FC_INFO_TRANSFORMS };

typedef enum fc_rebuild {
    FC_REBUILD_TENSOR_V2,
    FC_REBUILD_TENSOR_V3,
    FC_REBUILD_PARAMETER,
    FC_REBUILD_FROM_TYPE,
    FC_REBUILD_SPARSE,
    FC_REBUILD_OTHER /**< quantized, meta, nested …: known, but not decoded */
} fc_rebuild;

/** Looks up `module`.`name` in the allowlist. @return its kind, or FC_GLOBAL_UNKNOWN if it is not listed. */
fc_global_kind fc_global_find(const char *module, size_t module_len, const char *name, size_t name_len, uint32_t *aux);

/**
 * @return whether a global that is not in the allowlist is known to run code or commands when called, like os.system.
 */
bool fc_global_runs(const char *module, const char *name);

/** @return whether `module` is `package` or in it. */
bool fc_module_is_within(const char *module, const char *package);

/** @return the name of torch's class of storages of `dtype`, such as "FloatStorage"; NULL if there is none. */
const char *fc_storage_class(fc_dtype dtype);

/** @return the names of the fields of `cls` in slot order, NULL-terminated. */
const char *const *fc_class_fields(fc_class cls);
