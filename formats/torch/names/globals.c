/*
 * The allowlist: which globals a pickle may name, and what each of them means to the pickle machine. Nothing here is
 * executed. The names are those that torch 1.13 to 2.15 write, from their sources and from real checkpoints.
 */
#include "torch/names/globals.h"
#include "torch/names/harmless.h"
#include "torch/names/words.h"

typedef struct entry {
    const char *module, *name;
    fc_global_kind kind;
    uint32_t aux;
} entry;

/* DCP is torch.distributed.checkpoint since 2.0, and was torch.distributed._shard.checkpoint in 1.13. */
#define DCP_METADATA(name, cls)                                                                                        \
    {"torch.distributed.checkpoint.metadata", name, FC_GLOBAL_CLASS, cls}, {                                           \
        "torch.distributed._shard.checkpoint.metadata", name, FC_GLOBAL_CLASS, cls                                     \
    }

#define BUILTIN(name, kind)                                                                                            \
    {"builtins", name, kind, 0}, {                                                                                     \
        "__builtin__", name, kind, 0                                                                                   \
    }

static const entry entries[] = {
    DCP_METADATA("MetadataIndex", FC_CLASS_METADATA_INDEX),
    DCP_METADATA("ChunkStorageMetadata", FC_CLASS_CHUNK_STORAGE),
    DCP_METADATA("TensorStorageMetadata", FC_CLASS_TENSOR_STORAGE),
    DCP_METADATA("BytesStorageMetadata", FC_CLASS_BYTES_STORAGE),
    DCP_METADATA("Metadata", FC_CLASS_METADATA),
    {"torch.distributed.checkpoint.metadata", "StorageMeta", FC_GLOBAL_CLASS, FC_CLASS_STORAGE_META},
    {"torch.distributed.checkpoint.metadata", "TensorProperties", FC_GLOBAL_CLASS, FC_CLASS_TENSOR_PROPERTIES},
    {"torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", FC_GLOBAL_ENUM, 0},
    {"torch.distributed._shard.sharded_tensor.metadata", "TensorProperties", FC_GLOBAL_CLASS,
     FC_CLASS_TENSOR_PROPERTIES},
    {"torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING", FC_GLOBAL_ENUM, 0},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo", FC_GLOBAL_CLASS, FC_CLASS_STORAGE_INFO},
    {"torch.distributed._shard.checkpoint.filesystem", "_StorageInfo", FC_GLOBAL_CLASS, FC_CLASS_STORAGE_INFO},
    {"torch", "Size", FC_GLOBAL_SIZE, 0},
    {"torch", "device", FC_GLOBAL_DEVICE, 0},
    {"torch.serialization", "_get_layout", FC_GLOBAL_LAYOUT, 0},
    {"torch", "DoubleStorage", FC_GLOBAL_STORAGE, FC_F64},
    {"torch", "FloatStorage", FC_GLOBAL_STORAGE, FC_F32},
    {"torch", "HalfStorage", FC_GLOBAL_STORAGE, FC_F16},
    {"torch", "BFloat16Storage", FC_GLOBAL_STORAGE, FC_BF16},
    {"torch", "LongStorage", FC_GLOBAL_STORAGE, FC_I64},
    {"torch", "IntStorage", FC_GLOBAL_STORAGE, FC_I32},
    {"torch", "ShortStorage", FC_GLOBAL_STORAGE, FC_I16},
    {"torch", "CharStorage", FC_GLOBAL_STORAGE, FC_I8},
    {"torch", "ByteStorage", FC_GLOBAL_STORAGE, FC_U8},
    {"torch", "BoolStorage", FC_GLOBAL_STORAGE, FC_BOOL},
    {"torch", "ComplexFloatStorage", FC_GLOBAL_STORAGE, FC_C64},
    {"torch", "ComplexDoubleStorage", FC_GLOBAL_STORAGE, FC_C128},
    {"torch", "QUInt8Storage", FC_GLOBAL_STORAGE, FC_DTYPE_COUNT},
    {"torch", "QInt8Storage", FC_GLOBAL_STORAGE, FC_DTYPE_COUNT},
    {"torch", "QInt32Storage", FC_GLOBAL_STORAGE, FC_DTYPE_COUNT},
    {"torch", "QUInt4x2Storage", FC_GLOBAL_STORAGE, FC_DTYPE_COUNT},
    {"torch", "QUInt2x4Storage", FC_GLOBAL_STORAGE, FC_DTYPE_COUNT},
    {"torch", "UntypedStorage", FC_GLOBAL_STORAGE, FC_OPAQUE},
    {"torch.storage", "UntypedStorage", FC_GLOBAL_STORAGE, FC_OPAQUE},
    {"torch.storage", "_UntypedStorage", FC_GLOBAL_STORAGE, FC_OPAQUE},
    {"torch._utils", "_rebuild_tensor_v2", FC_GLOBAL_REBUILD, FC_REBUILD_TENSOR_V2},
    {"torch._utils", "_rebuild_tensor_v3", FC_GLOBAL_REBUILD, FC_REBUILD_TENSOR_V3},
    {"torch._utils", "_rebuild_tensor", FC_GLOBAL_REBUILD, FC_REBUILD_TENSOR_V2},
    {"torch._utils", "_rebuild_parameter", FC_GLOBAL_REBUILD, FC_REBUILD_PARAMETER},
    {"torch._utils", "_rebuild_parameter_with_state", FC_GLOBAL_REBUILD, FC_REBUILD_PARAMETER},
    {"torch._tensor", "_rebuild_from_type_v2", FC_GLOBAL_REBUILD, FC_REBUILD_FROM_TYPE},
    {"torch._utils", "_rebuild_sparse_tensor", FC_GLOBAL_REBUILD, FC_REBUILD_SPARSE},
    {"torch._utils", "_rebuild_sparse_csr_tensor", FC_GLOBAL_REBUILD, FC_REBUILD_SPARSE},
    {"torch._utils", "_rebuild_qtensor", FC_GLOBAL_REBUILD, FC_REBUILD_OTHER},
    {"torch._utils", "_rebuild_nested_tensor", FC_GLOBAL_REBUILD, FC_REBUILD_OTHER},
    {"torch._utils", "_rebuild_meta_tensor_no_storage", FC_GLOBAL_REBUILD, FC_REBUILD_OTHER},
    {"torch._utils", "_rebuild_wrapper_subclass", FC_GLOBAL_REBUILD, FC_REBUILD_OTHER},
    {"torch._utils", "_rebuild_device_tensor_from_numpy", FC_GLOBAL_REBUILD, FC_REBUILD_OTHER},
    {"torch.nested._internal.nested_tensor", "_rebuild_njt", FC_GLOBAL_REBUILD, FC_REBUILD_OTHER},
    {"torch._utils", "_rebuild_device_tensor_from_cpu_tensor", FC_GLOBAL_REBUILD, FC_REBUILD_OTHER},
    {"collections", "OrderedDict", FC_GLOBAL_DICT, 0},
    {"collections", "Counter", FC_GLOBAL_DICT, 0},
    {"collections", "defaultdict", FC_GLOBAL_DEFAULTDICT, 0},
    {"_codecs", "encode", FC_GLOBAL_ENCODE, 0},
    BUILTIN("dict", FC_GLOBAL_DICT),
    BUILTIN("list", FC_GLOBAL_LIST),
    BUILTIN("set", FC_GLOBAL_SET),
    BUILTIN("frozenset", FC_GLOBAL_FROZENSET),
    BUILTIN("bytes", FC_GLOBAL_BYTES),
    BUILTIN("bytearray", FC_GLOBAL_BYTEARRAY),
    BUILTIN("complex", FC_GLOBAL_COMPLEX),
    BUILTIN("getattr", FC_GLOBAL_GETATTR),
    {"pathlib", "PosixPath", FC_GLOBAL_PATH, 0},
    {"pathlib", "PurePosixPath", FC_GLOBAL_PATH, 0},
    {"pathlib", "WindowsPath", FC_GLOBAL_PATH, 0},
    {"pathlib", "PureWindowsPath", FC_GLOBAL_PATH, 0},
    {"pathlib", "Path", FC_GLOBAL_PATH, 0},
    {"pathlib._local", "PosixPath", FC_GLOBAL_PATH, 0},
    {"pathlib._local", "PurePosixPath", FC_GLOBAL_PATH, 0},
    {"pathlib._local", "WindowsPath", FC_GLOBAL_PATH, 0},
    {"pathlib._local", "PureWindowsPath", FC_GLOBAL_PATH, 0},
};

/* Dtypes of torch that fsdpckpt does not have. They are known so that a message can name the tensor. */
static const char other_dtypes[] =
    "quint8 qint8 qint32 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 uint1 uint2 uint3 uint4 uint5 "
    "uint6 uint7 int1 int2 int3 int4 int5 int6 int7 bit bcomplex32";

static bool find_dtype(const char *name, size_t len, uint32_t *aux) {
    for (int i = 0; i < FC_OPAQUE; i++) {
        if (fc_word_is(name, len, fc_dtype_get((fc_dtype)i)->torch_name)) {
            *aux = (uint32_t)i;
            return true;
        }
    }
    *aux = FC_OPAQUE;
    return fc_words_have(other_dtypes, name, len);
}

fc_global_kind fc_global_find(const char *module, size_t module_len, const char *name, size_t name_len, uint32_t *aux) {
    *aux = 0;
    if (fc_word_is(module, module_len, "torch") && find_dtype(name, name_len, aux)) {
        return FC_GLOBAL_DTYPE;
    }
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (fc_word_is(name, name_len, entries[i].name) && fc_word_is(module, module_len, entries[i].module)) {
            *aux = entries[i].aux;
            return entries[i].kind;
        }
    }
    return fc_harmless_find(module, module_len, name, name_len) ? FC_GLOBAL_INERT : FC_GLOBAL_UNKNOWN;
}

const char *fc_storage_class(fc_dtype dtype) {
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (entries[i].kind == FC_GLOBAL_STORAGE && entries[i].aux == (uint32_t)dtype && dtype != FC_OPAQUE) {
            return entries[i].name;
        }
    }
    return NULL;
}

const char *const *fc_class_fields(fc_class cls) {
    static const char *const fields[FC_CLASS_COUNT][FC_CLASS_MAX_FIELDS + 1] = {
        [FC_CLASS_METADATA] = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version",
                               "mcore_data"},
        [FC_CLASS_TENSOR_STORAGE] = {"properties", "size", "chunks"},
        [FC_CLASS_BYTES_STORAGE] = {"fsdpckpt_encoding"},
        [FC_CLASS_CHUNK_STORAGE] = {"offsets", "sizes"},
        [FC_CLASS_TENSOR_PROPERTIES] = {"dtype", "layout"},
        [FC_CLASS_METADATA_INDEX] = {"fqn", "offset", "index"},
        [FC_CLASS_STORAGE_INFO] = {"relative_path", "offset", "length", "transform_descriptors"},
    };
    return fields[cls];
}
