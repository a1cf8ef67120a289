/*
 * The allowlist: which globals a pickle may name, and what each of them means to the pickle machine. Nothing here is
 * executed. The names are those that torch 1.13 to 2.15 write, from their sources and from real checkpoints.
 */
#include "torch/pickle.h"

#include <string.h>

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
    {"torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata", FC_GLOBAL_INERT, 0},
    {"torch.distributed._shard.metadata", "ShardMetadata", FC_GLOBAL_INERT, 0},
    {"torch.distributed.remote_device", "_remote_device", FC_GLOBAL_INERT, 0},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo", FC_GLOBAL_CLASS, FC_CLASS_STORAGE_INFO},
    {"torch.distributed._shard.checkpoint.filesystem", "_StorageInfo", FC_GLOBAL_CLASS, FC_CLASS_STORAGE_INFO},
    /* Megatron stores the ranks' plans in `.metadata`, so that the next save need not plan again. */
    {"torch.distributed.checkpoint.planner", "SavePlan", FC_GLOBAL_INERT, 0},
    {"megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan", FC_GLOBAL_INERT, 0},
    {"torch.distributed.checkpoint.planner", "WriteItem", FC_GLOBAL_INERT, 0},
    {"torch.distributed.checkpoint.planner", "WriteItemType", FC_GLOBAL_INERT, 0},
    {"torch.distributed.checkpoint.planner", "TensorWriteData", FC_GLOBAL_INERT, 0},
    {"torch.distributed.checkpoint.planner", "BytesIOWriteData", FC_GLOBAL_INERT, 0},
    {"torch", "Size", FC_GLOBAL_SIZE, 0},
    {"torch", "device", FC_GLOBAL_DEVICE, 0},
    {"torch", "Tensor", FC_GLOBAL_INERT, 0},
    {"torch._tensor", "Tensor", FC_GLOBAL_INERT, 0},
    {"torch.nn.parameter", "Parameter", FC_GLOBAL_INERT, 0},
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
    {"torch._utils", "_rebuild_sparse_tensor", FC_GLOBAL_REBUILD, FC_REBUILD_OTHER},
    {"torch._utils", "_rebuild_sparse_csr_tensor", FC_GLOBAL_REBUILD, FC_REBUILD_OTHER},
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
    BUILTIN("int", FC_GLOBAL_INERT),
    BUILTIN("float", FC_GLOBAL_INERT),
    BUILTIN("str", FC_GLOBAL_INERT),
    BUILTIN("bool", FC_GLOBAL_INERT),
    BUILTIN("tuple", FC_GLOBAL_INERT),
    BUILTIN("object", FC_GLOBAL_INERT),
    BUILTIN("range", FC_GLOBAL_INERT),
    {"__builtin__", "xrange", FC_GLOBAL_INERT, 0}, /* names of Python 2, which protocol 2 still uses */
    {"__builtin__", "long", FC_GLOBAL_INERT, 0},
    {"__builtin__", "unicode", FC_GLOBAL_INERT, 0},
    BUILTIN("slice", FC_GLOBAL_INERT),
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

/* Classes of trainers whose instances are data: creating one and setting its state only sets fields. */
static const struct {
    const char *module, *name;
    bool is_enum; /* getattr of it gives a member */
} harmless[] = {
    {"argparse", "Namespace", false},
    {"types", "SimpleNamespace", false},
    {"datetime", "datetime", false},
    {"datetime", "date", false},
    {"datetime", "time", false},
    {"datetime", "timedelta", false},
    {"datetime", "timezone", false},
    {"decimal", "Decimal", false},
    {"fractions", "Fraction", false},
    {"uuid", "UUID", false},
    {"uuid", "SafeUUID", true},
    {"collections", "deque", false},
    {"collections", "ChainMap", false},
    {"UserDict", "IterableUserDict",
     false}, /* names of Python 2, which protocol 2 uses for collections.UserDict and UserList */
    {"UserList", "UserList", false},
    {"functools", "partial", false}, /* creating one calls nothing; a call of one is the result of another call */
    {"ipaddress", "IPv4Address", false},
    {"ipaddress", "IPv6Address", false},
    {"ipaddress", "IPv4Network", false},
    {"ipaddress", "IPv6Network", false},
    {"ipaddress", "IPv4Interface", false},
    {"ipaddress", "IPv6Interface", false},
    {"zoneinfo", "ZoneInfo", false},
    {"re", "_compile", false},
    {"re", "RegexFlag", true},
    {"time", "struct_time", false},
    {"_io", "BytesIO", false}, /* the _extra_state of Transformer Engine */
    {"_io", "StringIO", false},
    {"array", "array", false},
    {"itertools", "count", false},
    {"random", "Random", false},
    {"string", "Template", false},
    {"operator", "itemgetter", false}, /* as with partial, creating one calls nothing */
    {"operator", "attrgetter", false},
    {"http", "HTTPStatus", true},
    {"__builtin__", "Ellipsis", false},
    {"builtins", "Ellipsis", false},
    {"torch.torch_version", "TorchVersion", false},
    {"torch._C", "Generator", false},
    {"signal", "Signals", true},
    /* numpy 1 and numpy 2 name their modules differently. */
    {"numpy", "dtype", false},
    {"numpy", "ndarray", false},
    {"numpy.random.bit_generator", "__pyx_unpickle_SeedSequence", false},
    {"numpy.core.multiarray", "scalar", false},
    {"numpy.core.multiarray", "_reconstruct", false},
    {"numpy._core.multiarray", "scalar", false},
    {"numpy._core.multiarray", "_reconstruct", false},
    {"numpy.core.numeric", "_frombuffer", false},
    {"numpy._core.numeric", "_frombuffer", false},
    {"omegaconf.dictconfig", "DictConfig", false},
    {"omegaconf.listconfig", "ListConfig", false},
    {"omegaconf.base", "ContainerMetadata", false},
    {"omegaconf.base", "Metadata", false},
    {"omegaconf.base", "SCMode", true},
    {"omegaconf.base", "UnionNode", false},
    {"omegaconf.nodes", "AnyNode", false},
    {"omegaconf.nodes", "StringNode", false},
    {"omegaconf.nodes", "IntegerNode", false},
    {"omegaconf.nodes", "FloatNode", false},
    {"omegaconf.nodes", "BooleanNode", false},
    {"omegaconf.nodes", "BytesNode", false},
    {"omegaconf.nodes", "PathNode", false},
    {"omegaconf.nodes", "EnumNode", false},
    {"typing", "Any", false},
    {"lightning_fabric.utilities.data", "AttributeDict", false},
    {"lightning.fabric.utilities.data", "AttributeDict", false},
    {"pytorch_lightning.utilities.parsing", "AttributeDict", false},
    {"megatron.core.enums", "ModelType", true},
    {"megatron.core.enums", "Fp8Recipe", true},
    {"megatron.core.transformer.enums", "AttnBackend", true},
    {"megatron.core.transformer.enums", "AttnMaskType", true},
    {"megatron.core.transformer.enums", "AttnType", true},
    {"megatron.core.transformer.enums", "LayerType", true},
    {"megatron.core.rerun_state_machine", "RerunDiagnostic", true},
    {"megatron.core.rerun_state_machine", "RerunMode", true},
    {"megatron.core.rerun_state_machine", "RerunState", true},
    {"megatron.model.enums", "AttnMaskType", true},
    {"megatron.model.enums", "LayerType", true},
    {"megatron.model.enums", "PositionEmbeddingType", true},
    {"deepspeed.runtime.fp16.loss_scaler", "LossScaler", false},
    {"deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler", false},
    {"deepspeed.utils.tensor_fragment", "fragment_address", false},
    {"deepspeed.runtime.zero.config", "ZeroStageEnum", true},
    {"transformers.training_args", "TrainingArguments", false},
    {"transformers.training_args", "OptimizerNames", true},
    {"transformers.training_args", "ParallelMode", true},
    {"transformers.trainer_utils", "IntervalStrategy", true},
    {"transformers.trainer_utils", "SaveStrategy", true},
    {"transformers.trainer_utils", "EvaluationStrategy", true},
    {"transformers.trainer_utils", "SchedulerType", true},
    {"transformers.trainer_utils", "HubStrategy", true},
    {"accelerate.utils.dataclasses", "DistributedType", true},
    {"accelerate.utils.dataclasses", "PrecisionType", true},
    {"accelerate.utils.dataclasses", "RNGType", true},
    {"accelerate.utils.dataclasses", "LoggerType", true},
    {"accelerate.utils.dataclasses", "ComputeEnvironment", true},
    {"accelerate.utils.dataclasses", "DynamoBackend", true},
    {"accelerate.utils.dataclasses", "DDPCommunicationHookType", true},
    {"accelerate.utils.dataclasses", "SageMakerDistributedType", true},
    {"accelerate.utils.dataclasses", "GradientAccumulationPlugin", false},
    {"accelerate.utils.dataclasses", "ProjectConfiguration", false},
    {"accelerate.utils.dataclasses", "DataLoaderConfiguration", false},
    {"accelerate.utils.dataclasses", "GradScalerKwargs", false},
    {"accelerate.utils.dataclasses", "InitProcessGroupKwargs", false},
    {"accelerate.utils.dataclasses", "DistributedDataParallelKwargs", false},
    {"transformers.trainer_pt_utils", "AcceleratorConfig", false},
    {"transformers.trainer_callback", "TrainerState", false},
    {"transformers.trainer_utils", "FSDPOption", true},
    {"transformers.debug_utils", "DebugOption", true},
    {"torch.distributed.fsdp.api", "StateDictType", true},
    {"torch.distributed.fsdp.api", "ShardingStrategy", true},
    {"torch.distributed.fsdp.api", "BackwardPrefetch", true},
    {"torch.distributed.fsdp.api", "CPUOffload", false},
    {"torch.distributed.fsdp.api", "MixedPrecision", false},
    {"torch.distributed.fsdp.api", "FullStateDictConfig", false},
    {"torch.distributed.fsdp.api", "LocalStateDictConfig", false},
    {"torch.distributed.fsdp.api", "ShardedStateDictConfig", false},
    {"torch.distributed.fsdp.api", "FullOptimStateDictConfig", false},
    {"torch.distributed.fsdp.api", "LocalOptimStateDictConfig", false},
    {"torch.distributed.fsdp.api", "ShardedOptimStateDictConfig", false},
    {"torch.distributed.tensor.placement_types", "Shard", false},
    {"torch.distributed.tensor.placement_types", "Replicate", false},
    {"torch.distributed.tensor.placement_types", "Partial", false},
    {"torch.distributed.tensor.placement_types", "_StridedShard", false},
    {"torch.distributed.distributed_c10d", "ReduceOp", false},
    {"torch._C._distributed_c10d", "ReduceOp", false},
    {"torch.distributed.fsdp", "MixedPrecisionPolicy", false},
    {"torch.distributed.fsdp", "OffloadPolicy", false},
    {"torch.distributed.fsdp", "CPUOffloadPolicy", false},
    {"torch.distributed.fsdp._fully_shard._fsdp_api", "MixedPrecisionPolicy", false},
    {"torch.distributed.fsdp._fully_shard._fsdp_api", "OffloadPolicy", false},
    {"torch.distributed.fsdp._fully_shard._fsdp_api", "CPUOffloadPolicy", false},
    {"torch.distributed.checkpoint.state_dict", "StateDictOptions", false},
};

/* Dtypes of torch that fsdpckpt does not have. They are known so that a message can name the tensor. */
static const char *const other_dtypes[] = {
    "quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2",    "bits8",
    "bits16", "uint1", "uint2",  "uint3",    "uint4",    "uint5",   "uint6",   "uint7",      "int1",
    "int2",   "int3",  "int4",   "int5",     "int6",     "int7",    "bit",     "bcomplex32",
};

static bool equals(const char *a, size_t len, const char *b) {
    return strlen(b) == len && memcmp(a, b, len) == 0;
}

static bool find_dtype(const char *name, size_t len, uint32_t *aux) {
    for (int i = 0; i < FC_OPAQUE; i++) {
        if (equals(name, len, fc_dtype_get((fc_dtype)i)->torch_name)) {
            *aux = (uint32_t)i;
            return true;
        }
    }
    for (size_t i = 0; i < sizeof other_dtypes / sizeof *other_dtypes; i++) {
        if (equals(name, len, other_dtypes[i])) {
            *aux = FC_OPAQUE;
            return true;
        }
    }
    return false;
}

bool fc_global_is_layer(const char *module, size_t module_len, const char *name, size_t name_len) {
    static const char layers[] = "torch.nn.modules.";
    return module_len >= sizeof layers && memcmp(module, layers, sizeof layers - 1) == 0 && name_len > 0 &&
           name[0] >= 'A' && name[0] <= 'Z' && !memchr(name, '.', name_len);
}

fc_global_kind fc_global_find(const char *module, size_t module_len, const char *name, size_t name_len, uint32_t *aux) {
    *aux = 0;
    if (equals(module, module_len, "torch") && find_dtype(name, name_len, aux)) {
        return FC_GLOBAL_DTYPE;
    }
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (equals(name, name_len, entries[i].name) && equals(module, module_len, entries[i].module)) {
            *aux = entries[i].aux;
            return entries[i].kind;
        }
    }
    /* Creating one without its constructor only sets its fields. */
    if (fc_global_is_layer(module, module_len, name, name_len)) {
        return FC_GLOBAL_INERT;
    }
    for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++) {
        if (equals(name, name_len, harmless[i].name) && equals(module, module_len, harmless[i].module)) {
            *aux = harmless[i].is_enum;
            return FC_GLOBAL_INERT;
        }
    }
    return FC_GLOBAL_UNKNOWN;
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
        [FC_CLASS_CHUNK_STORAGE] = {"offsets", "sizes"},
        [FC_CLASS_TENSOR_PROPERTIES] = {"dtype", "layout"},
        [FC_CLASS_METADATA_INDEX] = {"fqn", "offset", "index"},
        [FC_CLASS_STORAGE_INFO] = {"relative_path", "offset", "length", "transform_descriptors"},
    };
    return fields[cls];
}
