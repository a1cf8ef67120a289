/*
 * box_tool: for each line "SHAPE MESH PLACEMENTS" on stdin ("8,6 2,2 [_StridedShard(0, 2), Shard(0)]", SHAPE "-" for a
 * scalar) prints the boxes of all ranks, "OFFSETS:SIZES", or "!CODE" for a rank whose box fc_local_box refuses. With
 * the argument "recorded", the boxes are those of fc_recorded_box. boxes.py compares them with torch's.
 */
#include "fsdpckpt/box.h"
#include "fsdpckpt/mesh.h"
#include "sharding/recorded.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int read_numbers(const char *text, int64_t *out, int limit) {
    int n = 0;
    while (*text >= '0' && *text <= '9' && n < limit) {
        char *end;
        out[n++] = strtoll(text, &end, 10);
        text = *end == ',' ? end + 1 : end;
    }
    return n;
}

static void print_numbers(int n, const int64_t *numbers) {
    for (int i = 0; i < n; i++) {
        printf("%s%" PRId64, i > 0 ? "," : "", numbers[i]);
    }
}

static void print_box(bool recorded, int ndim, const int64_t *shape, const fc_mesh *mesh,
                      const fc_placement *placements, int64_t rank) {
    int64_t coordinate[FC_MAX_MESH_DIMS], offsets[FC_MAX_DIMS], sizes[FC_MAX_DIMS];
    fc_mesh_coordinate(mesh, rank, coordinate);
    fc_code code =
        (recorded ? fc_recorded_box : fc_local_box)(ndim, shape, mesh, placements, coordinate, offsets, sizes, NULL);
    printf("%s", rank > 0 ? " " : "");
    if (code != FC_OK) {
        printf("!%d", code);
        return;
    }
    print_numbers(ndim, offsets);
    printf(":");
    print_numbers(ndim, sizes);
}

int main(int argc, char **argv) {
    const bool recorded = argc > 1 && strcmp(argv[1], "recorded") == 0;
    char line[1024], shape_text[256], mesh_text[256], placement_text[512];
    while (fgets(line, sizeof line, stdin)) {
        fc_mesh mesh = {0};
        fc_placement placements[FC_MAX_MESH_DIMS];
        int64_t shape[FC_MAX_DIMS];
        if (sscanf(line, "%255s %255s %511[^\n]", shape_text, mesh_text, placement_text) != 3) {
            return 2;
        }
        int ndim = read_numbers(shape_text, shape, FC_MAX_DIMS);
        mesh.ndim = read_numbers(mesh_text, mesh.sizes, FC_MAX_MESH_DIMS);
        if (!fc_placements_parse(placement_text, mesh.ndim, placements)) {
            fprintf(stderr, "cannot read placements %s\n", placement_text);
            return 2;
        }
        for (int64_t rank = 0; rank < fc_mesh_ranks(&mesh); rank++) {
            print_box(recorded, ndim, shape, &mesh, placements, rank);
        }
        printf("\n");
    }
    return ferror(stdin) ? 4 : 0;
}
