/*
 * Writes ShardedTensors: the pickle of a flat parameter in FSDP1's LOCAL_STATE_DICT, with the state that every torch
 * since 2.0 accepts: (local shards, metadata, process group, sharding spec, init_rrefs).
 */
#include "pt/writer.h"

typedef struct sharded_out {
    fc_torch_pickler *w;
    int64_t numel, shard, ranks, rank; /* numel, shard: elements of the whole and of the first shard */
} sharded_out;

static void begin_instance(const sharded_out *s, const char *module, const char *name) {
    fc_torch_pickle_global(s->w, module, name);
    fc_torch_pickle_tuple(s->w, 0);
    fc_torch_pickle_op(s->w, FC_PICKLE_NEWOBJ);
    fc_torch_pickle_op(s->w, FC_PICKLE_EMPTY_DICT);
    fc_torch_pickle_op(s->w, FC_PICKLE_MARK);
}

static void end_instance(const sharded_out *s) {
    fc_torch_pickle_op(s->w, FC_PICKLE_SETITEMS);
    fc_torch_pickle_op(s->w, FC_PICKLE_BUILD);
}

static void call(const sharded_out *s, const char *module, const char *name, const char *text) {
    fc_torch_pickle_global(s->w, module, name);
    fc_torch_pickle_often(s->w, text);
    fc_torch_pickle_tuple(s->w, 1);
    fc_torch_pickle_op(s->w, FC_PICKLE_REDUCE);
}

static void list_of(const sharded_out *s, int64_t value) {
    fc_torch_pickle_op(s->w, FC_PICKLE_EMPTY_LIST);
    fc_torch_pickle_int(s->w, value);
    fc_torch_pickle_op(s->w, FC_PICKLE_APPEND);
}

/* Writes "rank:1/cpu". */
static void write_placement(const sharded_out *s, int64_t rank) {
    begin_instance(s, "torch.distributed.remote_device", "_remote_device");
    fc_torch_pickle_often(s->w, "_worker_name");
    fc_torch_pickle_op(s->w, FC_PICKLE_NONE);
    fc_torch_pickle_often(s->w, "_rank");
    fc_torch_pickle_int(s->w, rank);
    fc_torch_pickle_often(s->w, "_device");
    call(s, "torch", "device", "cpu");
    end_instance(s);
}

static int64_t shard_size(const sharded_out *s, int64_t rank) {
    int64_t left = s->numel - s->shard * rank;
    return left < 0 ? 0 : left < s->shard ? left : s->shard;
}

/* Starts an instance with slots, whose state is (None, {…}). */
static void begin_slots(const sharded_out *s, const char *module, const char *name) {
    fc_torch_pickle_global(s->w, module, name);
    fc_torch_pickle_tuple(s->w, 0);
    fc_torch_pickle_op(s->w, FC_PICKLE_NEWOBJ);
    fc_torch_pickle_op(s->w, FC_PICKLE_NONE);
    fc_torch_pickle_op(s->w, FC_PICKLE_EMPTY_DICT);
    fc_torch_pickle_op(s->w, FC_PICKLE_MARK);
}

static void end_slots(const sharded_out *s) {
    fc_torch_pickle_op(s->w, FC_PICKLE_SETITEMS);
    fc_torch_pickle_tuple(s->w, 2);
    fc_torch_pickle_op(s->w, FC_PICKLE_BUILD);
}

static void write_shard(const sharded_out *s, int64_t rank) {
    begin_slots(s, "torch.distributed._shard.metadata", "ShardMetadata");
    fc_torch_pickle_often(s->w, "shard_offsets");
    list_of(s, s->shard * rank);
    fc_torch_pickle_often(s->w, "shard_sizes");
    list_of(s, shard_size(s, rank));
    fc_torch_pickle_often(s->w, "placement");
    write_placement(s, rank);
    end_slots(s);
}

/* Writes the metadata of the shards of all ranks that have one. */
static void write_shards(const sharded_out *s) {
    fc_torch_pickle_op(s->w, FC_PICKLE_EMPTY_LIST);
    fc_torch_pickle_op(s->w, FC_PICKLE_MARK);
    for (int64_t rank = 0; rank < s->ranks && shard_size(s, rank) > 0; rank++) {
        write_shard(s, rank);
    }
    fc_torch_pickle_op(s->w, FC_PICKLE_APPENDS);
}

static void write_properties(const sharded_out *s, fc_dtype dtype) {
    static const char metadata[] = "torch.distributed._shard.sharded_tensor.metadata";
    fc_torch_pickle_global(s->w, metadata, "TensorProperties");
    fc_torch_pickle_tuple(s->w, 0);
    fc_torch_pickle_op(s->w, FC_PICKLE_NEWOBJ);
    fc_torch_pickle_op(s->w, FC_PICKLE_MARK);
    fc_torch_pickle_global(s->w, "torch", fc_dtype_get(dtype)->torch_name);
    call(s, "torch.serialization", "_get_layout", "torch.strided");
    fc_torch_pickle_bool(s->w, true);
    fc_torch_pickle_global(s->w, metadata, "MEM_FORMAT_ENCODING");
    fc_torch_pickle_int(s->w, 0);
    fc_torch_pickle_tuple(s->w, 1);
    fc_torch_pickle_op(s->w, FC_PICKLE_REDUCE);
    fc_torch_pickle_bool(s->w, false);
    fc_torch_pickle_op(s->w, FC_PICKLE_TUPLE);
    fc_torch_pickle_op(s->w, FC_PICKLE_BUILD);
}

static void write_metadata(const sharded_out *s, fc_dtype dtype) {
    begin_instance(s, "torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata");
    fc_torch_pickle_often(s->w, "shards_metadata");
    write_shards(s);
    fc_torch_pickle_often(s->w, "size");
    fc_torch_pickle_global(s->w, "torch", "Size");
    fc_torch_pickle_ints(s->w, &s->numel, 1);
    fc_torch_pickle_tuple(s->w, 1);
    fc_torch_pickle_op(s->w, FC_PICKLE_REDUCE);
    fc_torch_pickle_often(s->w, "tensor_properties");
    write_properties(s, dtype);
    end_instance(s);
}

/* Writes a nested class, which protocol 2 gets with getattr. */
static void write_group(const sharded_out *s) {
    const struct {
        const char *name;
        int64_t value;
    } fields[] = {{"local_rank", s->rank},
                  {"global_rank", s->rank},
                  {"local_world_size", s->ranks},
                  {"global_world_size", s->ranks}};
    fc_torch_pickle_global(s->w, "__builtin__", "getattr");
    fc_torch_pickle_global(s->w, "torch.distributed._shard.sharded_tensor.api", "ShardedTensor");
    fc_torch_pickle_often(s->w, "ProcessGroupState");
    fc_torch_pickle_tuple(s->w, 2);
    fc_torch_pickle_op(s->w, FC_PICKLE_REDUCE);
    fc_torch_pickle_tuple(s->w, 0);
    fc_torch_pickle_op(s->w, FC_PICKLE_NEWOBJ);
    fc_torch_pickle_op(s->w, FC_PICKLE_EMPTY_DICT);
    fc_torch_pickle_op(s->w, FC_PICKLE_MARK);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        fc_torch_pickle_often(s->w, fields[i].name);
        fc_torch_pickle_int(s->w, fields[i].value);
    }
    end_instance(s);
}

/* Writes the spec that torch infers for one dimension sharded by torch.chunk over all ranks. */
static void write_spec(const sharded_out *s) {
    begin_instance(s, "torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec");
    fc_torch_pickle_often(s->w, "shards");
    write_shards(s);
    end_instance(s);
}

/* Writes the arguments of ShardedTensor.__new__, which are those of every subclass of Tensor without storage. */
static void write_arguments(const sharded_out *s, fc_dtype dtype) {
    fc_torch_pickle_op(s->w, FC_PICKLE_MARK);
    fc_torch_pickle_global(s->w, "torch.distributed._shard.sharded_tensor.api", "ShardedTensor");
    fc_torch_pickle_global(s->w, "torch", fc_dtype_get(dtype)->torch_name);
    fc_torch_pickle_ints(s->w, &s->numel, 1);
    fc_torch_pickle_ints(s->w, (const int64_t[]){1}, 1);
    fc_torch_pickle_int(s->w, 0);
    call(s, "torch.serialization", "_get_layout", "torch.strided");
    call(s, "torch", "device", "cpu");
    fc_torch_pickle_bool(s->w, true);
    fc_torch_pickle_op(s->w, FC_PICKLE_TUPLE);
}

void fc_pt_write_sharded(const fc_target *target, const fc_target_file *file, uint32_t item, fc_pt_local_fn local,
                         void *context, fc_torch_pickler *w) {
    const fc_target_item *it = &file->items[item];
    const fc_target_tensor *t = &target->tensors[it->tensor];
    sharded_out s = {
        .w = w, .numel = t->source->shape[0], .ranks = fc_mesh_ranks(target->mesh), .rank = (int64_t)file->rank};
    s.shard = s.numel / s.ranks + (s.numel % s.ranks != 0);
    fc_torch_pickle_global(w, "torch._tensor", "_rebuild_from_type_v2");
    fc_torch_pickle_op(w, FC_PICKLE_MARK);
    fc_torch_pickle_global(w, "torch._utils", "_rebuild_wrapper_subclass");
    fc_torch_pickle_global(w, "torch.distributed._shard.sharded_tensor.api", "ShardedTensor");
    write_arguments(&s, t->dtype);
    fc_torch_pickle_op(w, FC_PICKLE_MARK);
    fc_torch_pickle_op(w, FC_PICKLE_EMPTY_LIST);
    if (shard_size(&s, s.rank) > 0) {
        begin_slots(&s, "torch.distributed._shard.sharded_tensor.shard", "Shard");
        fc_torch_pickle_often(w, "tensor");
        local(context, w, item);
        fc_torch_pickle_often(w, "metadata");
        write_shard(&s, s.rank);
        end_slots(&s);
        fc_torch_pickle_op(w, FC_PICKLE_APPEND);
    }
    write_metadata(&s, t->dtype);
    write_group(&s);
    write_spec(&s);
    fc_torch_pickle_bool(w, false); /* init_rrefs */
    fc_torch_pickle_op(w, FC_PICKLE_TUPLE);
    fc_torch_pickle_op(w, FC_PICKLE_TUPLE);
    fc_torch_pickle_op(w, FC_PICKLE_REDUCE);
}
