/*
 * The table of formats that fsdpckpt does not read: see foreign.h. tests/oracle/foreign.py has a file for each entry.
 */
#include "io/foreign.h"

#include "base/file_name.h"
#include "fsdpckpt/io.h"
#include "io/directory.h"

#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Files by their first bytes. */
static const struct {
    size_t offset, size;
    const char *magic, *what;
} contents[] = {
    {0, 4, "GGUF", "it is a GGUF file of llama.cpp: use the model that it was made from"},
    {0, 6, "\x93NUMPY", "it is a NumPy array: load it, and save a dict of tensors"},
    {0, 2, "\x1f\x8b", "it is a gzip file: decompress it first"},
    {0, 4, "\x28\xb5\x2f\xfd", "it is a zstd file: decompress it first"},
    {0, 5,
     "\xfd"
     "7zXZ",
     "it is an xz file: decompress it first"},
    {0, 3, "BZh", "it is a bzip2 file: decompress it first"},
    {257, 5, "ustar", "it is a tar archive: extract it first"},
    {4, 4, "TFL3", "it is a TensorFlow Lite model: use the model that it was made from"},
    {0, 22, "model_checkpoint_path:",
     "it is TensorFlow's list of checkpoints: load one with TensorFlow, and save its variables as "
     "safetensors"},
    {0, 4, "\x0c\xdb\x3a\x2a",
     "it is an OCDBT file of Orbax (JAX), which only TensorStore reads: give the path of the checkpoint"},
    {0, 4, "PAR1", "it is a Parquet file: load it, and save a dict of tensors"},
    {0, 6, "ARROW1", "it is an Arrow file: load it, and save a dict of tensors"},
    {0, 10, "MATLAB 5.0", "it is a MATLAB file of version 5: save it with -v7.3, which is HDF5"},
};

/* TensorStore is a C++ library that Debian does not have. What this advises can be read. */
#define ORBAX                                                                                                          \
    "an Orbax checkpoint (JAX), which only TensorStore reads: write flax.serialization.msgpack_serialize("             \
    "orbax.checkpoint.PyTreeCheckpointer().restore(FOLDER)) to a file that ends in .msgpack, which can be read"

static const char orbax_mark[] = "_CHECKPOINT_METADATA";

/* Files by their names. A directory that contains one is of that format. `disguised`: each file alone can be read. */
static const struct {
    const char *pattern, *what;
    bool disguised;
} names[] = {
    {"*_pp-rank-*-of-*_tp-rank-*-of-*.safetensors",
     "a folder of a nanotron checkpoint: give the path of the one that has checkpoint_metadata.json", true},
    {"checkpoint*-shard[0-9]*.pt",
     "flat shards of fairscale's FullyShardedDataParallel (fairseq, metaseq): merge them with its "
     "consolidate_shard_weights, or with metaseq.scripts.reshard_fsdp",
     true},
    {"pytorch_optim.bin.index.json",
     "an optimizer of ColossalAI, whose index has numbers, and no names, of parameters: convert the model, which is in "
     "another folder, or one pytorch_optim-*.bin",
     false},
    {orbax_mark, ORBAX, false},
    {"manifest.ocdbt", ORBAX, false},
    {"_METADATA", ORBAX, false},
    {"saved_model.pb", "a TensorFlow SavedModel: load it with TensorFlow, and save its variables as safetensors",
     false},
    {"*.data-0*-of-0*", "a TensorFlow checkpoint: load it with TensorFlow, and save its variables as safetensors",
     false},
    {"*ckpt*.index", "a TensorFlow checkpoint: load it with TensorFlow, and save its variables as safetensors", false},
    {"*.onnx", "an ONNX model, which is a program: use the model that it was made from", false},
    {"*.gguf", "a GGUF file of llama.cpp: use the model that it was made from", false},
    {"*.npy", "NumPy arrays: load them, and save a dict of tensors", false},
    {"*.npz", "NumPy arrays: load them, and save a dict of tensors", false},
    {".zarray", "a Zarr array: load it, and save a dict of tensors", false},
    {".zgroup", "a Zarr store: load it, and save a dict of tensors", false},
    {"zarr.json", "a Zarr store: load it, and save a dict of tensors", false},
};

const char *fc_name_foreign_content(const char *head, size_t size) {
    for (size_t i = 0; i < sizeof contents / sizeof *contents; i++) {
        if (size >= contents[i].offset + contents[i].size &&
            memcmp(head + contents[i].offset, contents[i].magic, contents[i].size) == 0) {
            return contents[i].what;
        }
    }
    /* The opcode PROTO, but not the magic number of torch before 1.6, which follows it. */
    if (size >= 3 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5 && head[2] != '\x8a') {
        return "it is a pickle of Python's own: load it, and save a dict of its tensors with torch.save";
    }
    return NULL;
}

/* @return the first entry for a file of this name; -1: none */
static int find_name(const char *name, bool disguised) {
    const int count = (int)(sizeof names / sizeof *names);
    for (int i = 0; i < count; i++) {
        if (names[i].disguised == disguised && fnmatch(names[i].pattern, name, 0) == 0) {
            return i;
        }
    }
    return -1;
}

/* @return the first entry that some name matches; -1: none */
static int find_in_directory(const char *path, bool disguised) {
    fc_dir dir;
    int best = -1;
    const fc_code rc = fc_dir_open(&dir, path, NULL);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        const int found = find_name(name, disguised);
        best = found >= 0 && (best < 0 || found < best) ? found : best;
    }
    (void)fc_dir_close(&dir, rc, NULL);
    return best;
}

/* Whether the directory has the steps of Orbax's CheckpointManager. @return the entry; -1: it has none */
static int find_steps(const char *path) {
    char file[PATH_MAX];
    fc_dir dir;
    bool found = false;
    const fc_code rc = fc_dir_open(&dir, path, NULL);
    for (const char *name; rc == FC_OK && !found && (name = fc_dir_next(&dir)) != NULL;) {
        found = name[0] != '.' && snprintf(file, sizeof file, "%s/%s/%s", path, name, orbax_mark) < (int)sizeof file &&
                fc_access(file, F_OK) == 0;
    }
    (void)fc_dir_close(&dir, rc, NULL);
    return found ? find_name(orbax_mark, false) : -1;
}

/* @param found -1: FC_OK */
static fc_code fail_foreign(const char *path, int found, fc_error *err) {
    return found < 0 ? FC_OK : fc_fail(err, FC_EUNSUPPORTED, "%s: not supported: %s", path, names[found].what);
}

fc_code fc_check_foreign(const char *path, bool is_directory, fc_error *err) {
    int found = is_directory ? find_in_directory(path, false) : find_name(fc_base_name(path), false);
    if (is_directory && found < 0) {
        found = find_steps(path);
    }
    return fail_foreign(path, found, err);
}

fc_code fc_check_disguised(const char *directory, fc_error *err) {
    return fail_foreign(directory, find_in_directory(directory, true), err);
}
