/*
 * spec_tool: for each command on stdin prints shards as torch prints ShardMetadata, joined by ";", or "!CODE". Numbers
 * are separated by commas; specs.py compares the answers with torch's.
 *   chunk DIM RANKS SHAPE                        ChunkShardingSpec.build_metadata on "rank:i/cpu"
 *   overlap NDIM OFFSETS-AND-SIZES SHAPE         EnumerableShardingSpec.build_metadata
 *   local SHAPE RANKS DIM RANK                   _create_shard_md_from_dt of Shard(DIM), -1 for Replicate
 *   global SHAPE RANKS DIM RANK                  _create_sharded_tensor_md_from_dt
 *   chunk_tensor SHAPE RANKS DEVICES RANK        _chunk_tensor of a plain tensor: all shards, "|", the local one
 *   chunk_dt SHAPE RANKS DIM RANK                _chunk_tensor of a DTensor: outer, "|", outer local, "|", inner
 *   chunk_dtensor SHAPE DP TP DIM RANK           _chunk_dtensor: placements, global shape, local shape
 */
#include "fsdpckpt/sharded_tensor/dtensor.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NUMBERS = 4096 };

typedef struct args {
    int64_t numbers[8][MAX_NUMBERS];
    int counts[8];
    int n;
} args;

static void read_args(char *text, args *a) {
    char *save = NULL;
    a->n = 0;
    for (char *word = strtok_r(text, " \n", &save); word && a->n < 8; word = strtok_r(NULL, " \n", &save), a->n++) {
        int count = 0;
        for (char *at = word; *at && *at != '.' && count < MAX_NUMBERS; at += *at == ',') {
            a->numbers[a->n][count++] = strtoll(at, &at, 10);
        }
        a->counts[a->n] = count;
    }
}

static void print_shards(const fc_shard_metadata *shards, size_t count) {
    for (size_t i = 0; i < count; i++) {
        char text[512];
        fc_shard_metadata_format(&shards[i], text, sizeof text);
        printf("%s%s", i > 0 ? ";" : "", text);
    }
}

static void print_numbers(const char *before, int n, const int64_t *numbers) {
    printf("%s", before);
    for (int i = 0; i < n; i++) {
        printf("%s%" PRId64, i > 0 ? "," : "", numbers[i]);
    }
}

static fc_code chunk_spec(const args *a, fc_arena *arena) {
    static const fc_torch_device cpu = {"cpu", -1};
    fc_remote_device devices[64];
    size_t ranks = (size_t)a->numbers[1][0];
    for (size_t i = 0; i < ranks && i < 64; i++) {
        devices[i] = fc_remote_device_of_rank((int64_t)i, &cpu);
    }
    fc_sharding_spec spec = {.kind = FC_SPEC_CHUNK, .as.chunk = {(int)a->numbers[0][0], devices, ranks}};
    fc_sharded_tensor_metadata md;
    fc_tensor_properties properties = {FC_F32, false, false};
    fc_code code = fc_build_metadata(&spec, a->counts[2], a->numbers[2], &properties, arena, &md, NULL);
    if (code == FC_OK) {
        print_shards(md.shards, md.nshards);
    }
    return code;
}

static fc_code enumerable_spec(const args *a, fc_arena *arena) {
    static fc_shard_metadata shards[MAX_NUMBERS];
    int ndim = (int)a->numbers[0][0], count = a->counts[1] / (2 * ndim);
    for (int i = 0; i < count; i++) {
        const int64_t *dims = a->numbers[1] + i * 2 * ndim;
        shards[i] = (fc_shard_metadata){.box = {ndim, dims, dims + ndim}};
    }
    fc_sharding_spec spec = {.kind = FC_SPEC_ENUMERABLE, .as.enumerable = {shards, (size_t)count}};
    fc_sharded_tensor_metadata md;
    fc_tensor_properties properties = {FC_F32, false, false};
    fc_error err = {0};
    fc_code code = fc_build_metadata(&spec, a->counts[2], a->numbers[2], &properties, arena, &md, &err);
    printf("%s", code == FC_OK ? "ok" : err.message);
    return FC_OK;
}

/* SHAPE RANKS DIM RANK as a DTensor. */
static fc_code dtensor_of(const args *a, fc_dtensor *dt) {
    fc_mesh mesh = {.ndim = 1, .sizes = {a->numbers[1][0]}};
    int dim = (int)a->numbers[2][0];
    fc_placement p = {dim < 0 ? FC_REPLICATE : FC_SHARD, dim < 0 ? 0 : dim, 0};
    return fc_dtensor_init(dt, a->counts[0], a->numbers[0], &mesh, &p, a->numbers[3], NULL);
}

static fc_code local(const args *a, fc_arena *arena) {
    fc_dtensor dt;
    fc_shard_metadata shard;
    fc_code code = dtensor_of(a, &dt);
    if (code == FC_OK) {
        code = fc_create_shard_md_from_dt(&dt, a->numbers[3][0], arena, &shard, NULL);
    }
    if (code == FC_OK) {
        print_shards(&shard, 1);
    }
    return code;
}

static fc_code global(const args *a, fc_arena *arena) {
    fc_dtensor dt;
    fc_sharded_tensor_metadata md;
    fc_code code = dtensor_of(a, &dt);
    if (code == FC_OK) {
        code = fc_create_sharded_tensor_md_from_dt(&dt, a->numbers[3][0], a->numbers[1][0], arena, &md, NULL);
    }
    if (code == FC_OK) {
        print_shards(md.shards, md.nshards);
    }
    return code;
}

static fc_code chunk(const args *a, bool is_dtensor, fc_arena *arena) {
    fc_dtensor dt;
    fc_chunk_result r;
    int64_t rank = a->numbers[3][0], ranks = a->numbers[1][0];
    fc_process_group group = {.rank = rank, .size = ranks, .device = {"cpu", -1}};
    fc_chunk_source source = {
        .kind = FC_CHUNK_PLAIN, .ndim = a->counts[0], .shape = a->numbers[0], .device = {"cpu", -1}};
    fc_code code = FC_OK;
    if (is_dtensor) {
        code = dtensor_of(a, &dt);
        source = (fc_chunk_source){.kind = FC_CHUNK_DTENSOR, .dtensor = &dt, .dtensor_group = &group};
    }
    if (code == FC_OK) {
        code = fc_chunk_tensor(&source, rank, ranks, 4, 1, &group, arena, &r, NULL);
    }
    if (code != FC_OK) {
        return code;
    }
    if (is_dtensor) {
        print_shards(r.outer.metadata.shards, r.outer.metadata.nshards);
        printf("|");
        print_shards(&r.outer.local, 1);
        printf("|");
    }
    print_shards(r.inner.metadata.shards, r.inner.metadata.nshards);
    printf("|");
    print_shards(&r.inner.local, r.inner.has_local);
    return FC_OK;
}

static fc_code chunk_dtensor(const args *a) {
    fc_mesh root = {.ndim = 2, .sizes = {a->numbers[1][0], a->numbers[2][0]}};
    fc_mesh tp_mesh = {.ndim = 1, .sizes = {a->numbers[2][0]}};
    int64_t coordinate[2], offsets[FC_MAX_DIMS];
    int dim = (int)a->numbers[3][0];
    fc_placement p = {dim == -1 ? FC_REPLICATE : FC_SHARD, dim < 0 ? 0 : dim, 0};
    fc_dtensor tp, out;
    char text[128];
    fc_mesh_coordinate(&root, a->numbers[4][0], coordinate);
    fc_code code = FC_OK;
    if (dim >= -1) {
        code = fc_dtensor_init(&tp, a->counts[0], a->numbers[0], &tp_mesh, &p, &coordinate[1], NULL);
    }
    if (code == FC_OK) {
        code = fc_chunk_dtensor(a->counts[0], a->numbers[0], dim >= -1 ? &tp : NULL, &root, coordinate, &out, offsets,
                                NULL);
    }
    if (code == FC_OK) {
        fc_placements_format(2, out.placements, text, sizeof text);
        printf("%s", text);
        print_numbers(" ", out.ndim, out.shape);
        print_numbers(" ", out.ndim, out.local_sizes);
    }
    return code;
}

int main(void) {
    static char line[1 << 16];
    static args a;
    while (fgets(line, sizeof line, stdin)) {
        fc_arena *arena = fc_arena_new();
        fc_code code = FC_EUSAGE;
        char *rest = strchr(line, ' ');
        if (!arena || !rest) {
            return 2;
        }
        *rest++ = '\0';
        read_args(rest, &a);
        if (strcmp(line, "chunk") == 0) {
            code = chunk_spec(&a, arena);
        } else if (strcmp(line, "overlap") == 0) {
            code = enumerable_spec(&a, arena);
        } else if (strcmp(line, "local") == 0) {
            code = local(&a, arena);
        } else if (strcmp(line, "global") == 0) {
            code = global(&a, arena);
        } else if (strcmp(line, "chunk_tensor") == 0 || strcmp(line, "chunk_dt") == 0) {
            code = chunk(&a, strcmp(line, "chunk_dt") == 0, arena);
        } else if (strcmp(line, "chunk_dtensor") == 0) {
            code = chunk_dtensor(&a);
        }
        if (code != FC_OK) {
            printf("!%d", code);
        }
        printf("\n");
        fc_arena_free(arena);
    }
    return ferror(stdin) ? 4 : 0;
}
