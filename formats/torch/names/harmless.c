/*
 * The table of classes and functions that are harmless, and what each may be given: see harmless.h. The names are those
 * that torch 1.13 to 2.15 and trainers write, from their sources and from real checkpoints.
 */
#include "torch/names/harmless.h"

#include <string.h>

/* The attributes of a parameter or tensor: those in __dict__, and perhaps those in slots. */
#define ATTRIBUTES "[nM([nM][nM])]"

/* A class whose instances are data: creating one and setting its state only sets fields. */
#define RECORD(module, name)                                                                                           \
    { module, name, .newobj = "", .state = "R" }
/* A member of an enumeration is made from its value. */
#define ENUM(module, name)                                                                                             \
    { module, name, .reduce = "k", .is_enum = true }
#define PATH(module, name)                                                                                             \
    { module, name, .reduce = "s*", .is_value = true }
#define BUILTIN(name, ...)                                                                                             \
    {"builtins", name, __VA_ARGS__, .is_value = true}, {                                                               \
        "__builtin__", name, __VA_ARGS__, .is_value = true                                                             \
    }

static const fc_harmless table[] = {
    /* The layers of torch.nn. Their constructors may copy arguments in ways that these decide. */
    {NULL, NULL, .newobj = "", .state = "M", .is_value = true},
    /* Python. Protocol 2 still uses names of Python 2. */
    BUILTIN("int", .reduce = "k*"),
    BUILTIN("float", .reduce = "k"),
    BUILTIN("str", .reduce = "k*"),
    BUILTIN("bool", .reduce = "k"),
    BUILTIN("tuple", .reduce = "l?"),
    BUILTIN("object", .reduce = "", .newobj = ""),
    BUILTIN("range", .reduce = "i*"),
    BUILTIN("slice", .reduce = "k*"),
    BUILTIN("complex", .reduce = "ff"),
    {"__builtin__", "xrange", .reduce = "i*", .is_value = true},
    {"__builtin__", "long", .reduce = "k*", .is_value = true},
    {"__builtin__", "unicode", .reduce = "k*", .is_value = true},
    PATH("pathlib", "PosixPath"),
    PATH("pathlib", "PurePosixPath"),
    PATH("pathlib", "WindowsPath"),
    PATH("pathlib", "PureWindowsPath"),
    PATH("pathlib", "Path"),
    PATH("pathlib._local", "PosixPath"),
    PATH("pathlib._local", "PurePosixPath"),
    PATH("pathlib._local", "WindowsPath"),
    PATH("pathlib._local", "PureWindowsPath"),
    RECORD("argparse", "Namespace"),
    {"types", "SimpleNamespace", .reduce = "", .state = "R"},
    {"datetime", "datetime", .reduce = "xZ?|i*"},
    {"datetime", "date", .reduce = "x|i*"},
    {"datetime", "time", .reduce = "xZ?|i*"},
    {"datetime", "timedelta", .reduce = "f*"},
    {"datetime", "timezone", .reduce = "Zs?"},
    {"decimal", "Decimal", .reduce = "s"},
    {"fractions", "Fraction", .reduce = "s|ii"},
    {"uuid", "UUID", .newobj = "", .state = "{k}"},
    ENUM("uuid", "SafeUUID"),
    {"collections", "deque", .reduce = "l?[in]?", .is_value = true},
    RECORD("collections", "ChainMap"),
    RECORD("UserDict", "IterableUserDict"),
    RECORD("UserList", "UserList"),
    {"functools", "partial", .reduce = "c", .state = "(cl[dn]e)"},
    {"ipaddress", "IPv4Address", .reduce = "[ix]"},
    {"ipaddress", "IPv6Address", .reduce = "[ix]"},
    {"ipaddress", "IPv4Network", .reduce = "[ix]"},
    {"ipaddress", "IPv6Network", .reduce = "[ix]"},
    {"ipaddress", "IPv4Interface", .reduce = "[ix]"},
    {"ipaddress", "IPv6Interface", .reduce = "[ix]"},
    {"zoneinfo", "ZoneInfo", .reduce = "s"},
    {"re", "_compile", .reduce = "xi"},
    ENUM("re", "RegexFlag"),
    {"time", "struct_time", .reduce = "zd?"},
    {"_io", "BytesIO", .newobj = "", .state = "(xin)"},
    {"_io", "StringIO", .newobj = "", .state = "(s[sn]in)"},
    {"array", "array", .reduce = "s[zx]"},
    {"itertools", "count", .reduce = "f*"},
    {"random", "Random", .reduce = "", .state = "(iz[fn])"},
    RECORD("string", "Template"),
    {"operator", "itemgetter", .reduce = "k*"},
    {"operator", "attrgetter", .reduce = "s*"},
    ENUM("http", "HTTPStatus"),
    {"__builtin__", "Ellipsis", .is_value = true},
    {"builtins", "Ellipsis", .is_value = true},
    /* PyTorch */
    {"torch.distributed.checkpoint.metadata", "MetadataIndex", .newobj = "", .state = "R"},
    {"torch.distributed._shard.checkpoint.metadata", "MetadataIndex", .newobj = "", .state = "R"},
    {"torch.distributed.checkpoint.metadata", "ChunkStorageMetadata", .newobj = "", .state = "R"},
    {"torch.distributed._shard.checkpoint.metadata", "ChunkStorageMetadata", .newobj = "", .state = "R"},
    {"torch.distributed.checkpoint.metadata", "TensorStorageMetadata", .newobj = "", .state = "R"},
    {"torch.distributed._shard.checkpoint.metadata", "TensorStorageMetadata", .newobj = "", .state = "R"},
    {"torch.distributed.checkpoint.metadata", "BytesStorageMetadata", .newobj = "", .state = "R"},
    {"torch.distributed._shard.checkpoint.metadata", "BytesStorageMetadata", .newobj = "", .state = "R"},
    {"torch.distributed.checkpoint.metadata", "Metadata", .newobj = "", .state = "R"},
    {"torch.distributed._shard.checkpoint.metadata", "Metadata", .newobj = "", .state = "R"},
    {"torch.distributed.checkpoint.metadata", "StorageMeta", .newobj = "", .state = "R"},
    {"torch.distributed.checkpoint.metadata", "TensorProperties", .newobj = "", .state = "(y[Ls]iEik?)"},
    {"torch.distributed._shard.sharded_tensor.metadata", "TensorProperties", .newobj = "", .state = "(y[Ls]iEik?)"},
    ENUM("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ENUM("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    RECORD("torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata"),
    {"torch.distributed._shard.metadata", "ShardMetadata", .newobj = "", .state = "R|(nR)"},
    RECORD("torch.distributed.remote_device", "_remote_device"),
    RECORD("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    RECORD("torch.distributed._shard.checkpoint.filesystem", "_StorageInfo"),
    /* Megatron stores the ranks' plans in `.metadata`, so that the next save need not plan again. */
    RECORD("torch.distributed.checkpoint.planner", "SavePlan"),
    RECORD("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    RECORD("torch.distributed.checkpoint.planner", "WriteItem"),
    ENUM("torch.distributed.checkpoint.planner", "WriteItemType"),
    RECORD("torch.distributed.checkpoint.planner", "TensorWriteData"),
    RECORD("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
    {"torch", "device", .reduce = "si?", .is_value = true},
    {"torch", "Tensor", .reduce = "", .is_value = true},
    {"torch._tensor", "Tensor", .reduce = "", .is_value = true},
    {"torch.nn.parameter", "Parameter", .reduce = "Ti?", .is_value = true},
    {"torch.nn.parameter", "Buffer", .is_value = true},
    {"torch.serialization", "_get_layout", .reduce = "s"},
    {"torch._utils", "_rebuild_tensor_v2", .reduce = "Pizzie[nd]?"},
    {"torch._utils", "_rebuild_tensor_v3", .reduce = "Pizziey[nd]?"},
    {"torch._utils", "_rebuild_tensor", .reduce = "Pizz"},
    {"torch._utils", "_rebuild_parameter", .reduce = "Tie"},
    {"torch._utils", "_rebuild_parameter_with_state", .reduce = "Tie" ATTRIBUTES ""},
    {"torch._utils", "_rebuild_sparse_tensor", .reduce = "[Ls](T*zi?)"},
    {"torch._utils", "_rebuild_sparse_csr_tensor", .reduce = "[Ls](T*zi?)"},
    {"torch._utils", "_rebuild_qtensor", .reduce = "Pizz[(gff)(g[zT][zT]i)]ie"},
    {"torch._utils", "_rebuild_nested_tensor", .reduce = "T*"},
    {"torch._utils", "_rebuild_meta_tensor_no_storage", .reduce = "yzzi"},
    {"torch._utils", "_rebuild_wrapper_subclass", .reduce = "Wyzzi[Ls][Vs]i"},
    {"torch._utils", "_rebuild_device_tensor_from_numpy", .reduce = "Ay[Vs]i"},
    {"torch._utils", "_rebuild_device_tensor_from_cpu_tensor", .reduce = "Ty[Vs]i"},
    {"torch.nested._internal.nested_tensor", "_rebuild_njt", .reduce = "{[kT{[kT]}]}"},
    {"torch._tensor", "_rebuild_from_type_v2", .reduce = "rWl" ATTRIBUTES ""},
    {"torch.torch_version", "TorchVersion", .newobj = "s"},
    {"torch._C", "Generator", .reduce = "V?", .state = "(i[in]T)"},
    ENUM("signal", "Signals"),
    /* NumPy 1 and 2 name their modules differently. */
    {"numpy", "dtype", .reduce = "qi1", .state = "(i[sn]nnniii([nd](xi*))?)", .is_value = true},
    {"numpy", "ndarray", .is_value = true},
    {"numpy.random.bit_generator", "__pyx_unpickle_SeedSequence", .reduce = "Qin", .state = "([kz]iAiz)"},
    {"numpy.core.multiarray", "scalar", .reduce = "Dx"},
    {"numpy.core.multiarray", "_reconstruct", .reduce = "Nzx", .state = "(izDix)|(izOil)"},
    {"numpy._core.multiarray", "scalar", .reduce = "Dx"},
    {"numpy._core.multiarray", "_reconstruct", .reduce = "Nzx", .state = "(izDix)|(izOil)"},
    {"numpy.core.numeric", "_frombuffer", .reduce = "xDzs[zn]?"},
    {"numpy._core.numeric", "_frombuffer", .reduce = "xDzs[zn]?"},
    /* Trainers */
    RECORD("omegaconf.dictconfig", "DictConfig"),
    RECORD("omegaconf.listconfig", "ListConfig"),
    RECORD("omegaconf.base", "ContainerMetadata"),
    RECORD("omegaconf.base", "Metadata"),
    ENUM("omegaconf.base", "SCMode"),
    RECORD("omegaconf.base", "UnionNode"),
    RECORD("omegaconf.nodes", "AnyNode"),
    RECORD("omegaconf.nodes", "StringNode"),
    RECORD("omegaconf.nodes", "IntegerNode"),
    RECORD("omegaconf.nodes", "FloatNode"),
    RECORD("omegaconf.nodes", "BooleanNode"),
    RECORD("omegaconf.nodes", "BytesNode"),
    RECORD("omegaconf.nodes", "PathNode"),
    RECORD("omegaconf.nodes", "EnumNode"),
    {"typing", "Any", .is_value = true},
    {"lightning_fabric.utilities.data", "AttributeDict", .newobj = ""},
    {"lightning.fabric.utilities.data", "AttributeDict", .newobj = ""},
    {"pytorch_lightning.utilities.parsing", "AttributeDict", .newobj = ""},
    ENUM("megatron.core.enums", "ModelType"),
    ENUM("megatron.core.enums", "Fp8Recipe"),
    ENUM("megatron.core.transformer.enums", "AttnBackend"),
    ENUM("megatron.core.transformer.enums", "AttnMaskType"),
    ENUM("megatron.core.transformer.enums", "AttnType"),
    ENUM("megatron.core.transformer.enums", "LayerType"),
    ENUM("megatron.core.rerun_state_machine", "RerunDiagnostic"),
    ENUM("megatron.core.rerun_state_machine", "RerunMode"),
    ENUM("megatron.core.rerun_state_machine", "RerunState"),
    ENUM("megatron.model.enums", "AttnMaskType"),
    ENUM("megatron.model.enums", "LayerType"),
    ENUM("megatron.model.enums", "PositionEmbeddingType"),
    RECORD("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    RECORD("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    RECORD("deepspeed.utils.tensor_fragment", "fragment_address"),
    ENUM("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    RECORD("transformers.training_args", "TrainingArguments"),
    ENUM("transformers.training_args", "OptimizerNames"),
    ENUM("transformers.training_args", "ParallelMode"),
    ENUM("transformers.trainer_utils", "IntervalStrategy"),
    ENUM("transformers.trainer_utils", "SaveStrategy"),
    ENUM("transformers.trainer_utils", "EvaluationStrategy"),
    ENUM("transformers.trainer_utils", "SchedulerType"),
    ENUM("transformers.trainer_utils", "HubStrategy"),
    ENUM("accelerate.utils.dataclasses", "DistributedType"),
    ENUM("accelerate.utils.dataclasses", "PrecisionType"),
    ENUM("accelerate.utils.dataclasses", "RNGType"),
    ENUM("accelerate.utils.dataclasses", "LoggerType"),
    ENUM("accelerate.utils.dataclasses", "ComputeEnvironment"),
    ENUM("accelerate.utils.dataclasses", "DynamoBackend"),
    ENUM("accelerate.utils.dataclasses", "DDPCommunicationHookType"),
    ENUM("accelerate.utils.dataclasses", "SageMakerDistributedType"),
    RECORD("accelerate.utils.dataclasses", "GradientAccumulationPlugin"),
    RECORD("accelerate.utils.dataclasses", "ProjectConfiguration"),
    RECORD("accelerate.utils.dataclasses", "DataLoaderConfiguration"),
    RECORD("accelerate.utils.dataclasses", "GradScalerKwargs"),
    RECORD("accelerate.utils.dataclasses", "InitProcessGroupKwargs"),
    RECORD("accelerate.utils.dataclasses", "DistributedDataParallelKwargs"),
    RECORD("transformers.trainer_pt_utils", "AcceleratorConfig"),
    RECORD("transformers.trainer_callback", "TrainerState"),
    ENUM("transformers.trainer_utils", "FSDPOption"),
    ENUM("transformers.debug_utils", "DebugOption"),
    ENUM("torch.distributed.fsdp.api", "StateDictType"),
    ENUM("torch.distributed.fsdp.api", "ShardingStrategy"),
    ENUM("torch.distributed.fsdp.api", "BackwardPrefetch"),
    RECORD("torch.distributed.fsdp.api", "CPUOffload"),
    RECORD("torch.distributed.fsdp.api", "MixedPrecision"),
    RECORD("torch.distributed.fsdp.api", "FullStateDictConfig"),
    RECORD("torch.distributed.fsdp.api", "LocalStateDictConfig"),
    RECORD("torch.distributed.fsdp.api", "ShardedStateDictConfig"),
    RECORD("torch.distributed.fsdp.api", "FullOptimStateDictConfig"),
    RECORD("torch.distributed.fsdp.api", "LocalOptimStateDictConfig"),
    RECORD("torch.distributed.fsdp.api", "ShardedOptimStateDictConfig"),
    RECORD("torch.distributed.tensor.placement_types", "Shard"),
    RECORD("torch.distributed.tensor.placement_types", "Replicate"),
    RECORD("torch.distributed.tensor.placement_types", "Partial"),
    RECORD("torch.distributed.tensor.placement_types", "_StridedShard"),
    {"torch.distributed.distributed_c10d", "ReduceOp", .is_value = true},
    {"torch._C._distributed_c10d", "ReduceOp", .is_value = true},
    RECORD("torch.distributed.fsdp", "MixedPrecisionPolicy"),
    RECORD("torch.distributed.fsdp", "OffloadPolicy"),
    RECORD("torch.distributed.fsdp", "CPUOffloadPolicy"),
    RECORD("torch.distributed.fsdp._fully_shard._fsdp_api", "MixedPrecisionPolicy"),
    RECORD("torch.distributed.fsdp._fully_shard._fsdp_api", "OffloadPolicy"),
    RECORD("torch.distributed.fsdp._fully_shard._fsdp_api", "CPUOffloadPolicy"),
    RECORD("torch.distributed.checkpoint.state_dict", "StateDictOptions"),
    RECORD("accelerate.state", "PartialState"),
};

static bool equals(const char *a, size_t len, const char *b) {
    return strlen(b) == len && memcmp(a, b, len) == 0;
}

uint32_t fc_harmless_find(const char *module, size_t module_len, const char *name, size_t name_len) {
    if (fc_harmless_is_layer(module, module_len, name, name_len)) {
        return 1;
    }
    for (size_t i = 1; i < sizeof table / sizeof *table; i++) {
        if (equals(name, name_len, table[i].name) && equals(module, module_len, table[i].module)) {
            return (uint32_t)i + 1;
        }
    }
    return 0;
}

const fc_harmless *fc_harmless_get(uint32_t number) {
    return &table[number - 1];
}
