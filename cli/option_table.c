/*
 * The one table of options: what --help, the man page and the completions say, and where the parser puts values.
 */
#include "options.h"

#include "fsdpckpt/seal.h"

#include <stddef.h>

static const char *const progress_choices[] = {"auto", "always", "never", "json", NULL};
static const char *const color_choices[] = {"auto", "always", "never", NULL};
static const char *const sort_choices[] = {"source", "name", "size", NULL};
static const char *const comm_choices[] = {"auto", "none", "mpi", "nccl", NULL};

#define FIELD(name) offsetof(options, name)

const option_row option_table[OPT_COUNT] = {
    [OPT_OUTPUT] = {.name = "output",
                    .letter = 'o',
                    .kind = KIND_TEXT,
                    .arg = "DST",
                    .offset = FIELD(output),
                    .help = "write the new checkpoint to DST, which must not exist (but see --force)"},
    [OPT_TO] = {.name = "to",
                .kind = KIND_TEXT,
                .arg = "FORMAT",
                .offset = FIELD(to),
                .help = "format of DST: dcp, h5, pt or safetensors (default: what its extension says, "
                        "see 'fsdpckpt --help'; h5 for a directory of one file per rank whose name has none)"},
    [OPT_DP] = {.name = "dp",
                .kind = KIND_NUMBER,
                .arg = "N",
                .offset = FIELD(dp),
                .max = 1 << 20,
                .help = "cut over N data-parallel (FSDP) ranks: Shard(0)"},
    [OPT_TP] = {.name = "tp",
                .kind = KIND_NUMBER,
                .arg = "N",
                .offset = FIELD(tp),
                .max = 1 << 20,
                .help = "cut over N tensor-parallel ranks, as the TP plan says"},
    [OPT_REPLICAS] = {.name = "replicas",
                      .kind = KIND_NUMBER,
                      .arg = "N",
                      .offset = FIELD(replicas),
                      .max = 1 << 20,
                      .help = "HSDP: N replicas of the dp x tp mesh; the data is stored once"},
    [OPT_TP_PLAN] = {.name = "tp-plan",
                     .kind = KIND_TEXT,
                     .arg = "FILE|NAME",
                     .offset = FIELD(tp_plan),
                     .help =
                         "how --tp cuts tensors: JSON file in the spelling of Hugging Face's base_model_tp_plan, or "
                         "'auto' (the default), which knows the names of Llama, Qwen, Mistral, GPT-2 and GPT-NeoX"},
    [OPT_INCLUDE] = {.name = "include",
                     .kind = KIND_LIST,
                     .arg = "GLOB",
                     .offset = FIELD(include),
                     .help = "only what has a name that matches GLOB (repeatable)"},
    [OPT_EXCLUDE] = {.name = "exclude",
                     .kind = KIND_LIST,
                     .arg = "GLOB",
                     .offset = FIELD(exclude),
                     .help = "leave out what has a name that matches GLOB (repeatable)"},
    [OPT_STRIP_PREFIX] = {.name = "strip-prefix",
                          .kind = KIND_TEXT,
                          .arg = "PREFIX",
                          .offset = FIELD(strip_prefix),
                          .help = "remove PREFIX, and a dot that follows it, from the start of names"},
    [OPT_RENAME] = {.name = "rename",
                    .kind = KIND_LIST,
                    .arg = "RULE",
                    .offset = FIELD(rename),
                    .help =
                        "change names, after --strip-prefix, as sed -E does: s/regex/replacement/, with \\1, &, any "
                        "delimiter, flags g and i (repeatable: one after the other)"},
    [OPT_DTYPE] = {.name = "dtype",
                   .kind = KIND_DTYPE,
                   .arg = "TYPE",
                   .offset = FIELD(dtype),
                   .help = "convert floating-point tensors to TYPE: f64, f32, f16, bf16, f8_e4m3fn, f8_e5m2 ... "
                           "(or torch's names)"},
    [OPT_COMPRESS] = {.name = "compress",
                      .kind = KIND_LEVEL,
                      .arg = "LEVEL",
                      .offset = FIELD(compress),
                      .help = "compress tensors (shuffle and deflate, which every HDF5 program reads): 1, the fastest, "
                              "to 9; 0: not at all (the default)"},
    [OPT_MAX_SHARD_SIZE] = {.name = "max-shard-size",
                            .kind = KIND_BYTES,
                            .arg = "SIZE",
                            .offset = FIELD(max_shard_size),
                            .help = "with --to safetensors: DST is a directory of files of at most SIZE (such as 5GB; "
                                    "but a tensor is never cut) and Hugging Face's index; where one file is enough it "
                                    "is model.safetensors without an index, as huggingface_hub writes it. If DST ends "
                                    "with / or is a directory, this is the default, with 5GB"},
    [OPT_FORCE] = {.name = "force",
                   .letter = 'f',
                   .kind = KIND_FLAG,
                   .offset = FIELD(force),
                   .help = "replace the target if it exists; the old one stays until the new one is complete"},
    [OPT_TRUST_OBJECTS] = {.name = "trust-objects",
                           .kind = KIND_FLAG,
                           .offset = FIELD(trust_objects),
                           .help = "copy objects into DCP and torch.save files even if loading them would run code, or "
                                   "needs a class that is not known to be harmless"},
    [OPT_DRY_RUN] = {.name = "dry-run",
                     .letter = 'n',
                     .kind = KIND_FLAG,
                     .offset = FIELD(dry_run),
                     .help = "check everything, print the files, bytes and memory of the whole job, write nothing"},
    [OPT_RANK] = {.name = "rank",
                  .kind = KIND_INDEX,
                  .arg = "R",
                  .offset = FIELD(rank),
                  .max = (1 << 20) - 1,
                  .help =
                      "with --dry-run: print what rank R would hold, its boxes, bytes and reads, instead of the sum"},
    [OPT_JOBS] = {.name = "jobs",
                  .letter = 'j',
                  .kind = KIND_NUMBER,
                  .arg = "N",
                  .offset = FIELD(jobs),
                  .max = 4096,
                  .help = "number of worker threads (default: what keeps processors and disk busy)"},
    [OPT_MEMORY] = {.name = "memory",
                    .kind = KIND_SIZE,
                    .arg = "SIZE",
                    .offset = FIELD(memory),
                    .help = "memory for all buffers, with K, M or G (default: 56M)"},
    [OPT_PROGRESS] = {.name = "progress",
                      .kind = KIND_CHOICE,
                      .arg = "WHEN",
                      .offset = FIELD(progress),
                      .choices = progress_choices,
                      .help = "show progress on stderr: auto (the default: a line on a terminal, after a second; "
                              "in a log a line now and then, after a minute), always, never, or json: JSON lines"},
    [OPT_COLOR] = {.name = "color",
                   .kind = KIND_CHOICE,
                   .arg = "WHEN",
                   .offset = FIELD(color),
                   .choices = color_choices,
                   .help = "use colors: auto (the default: on a terminal, unless NO_COLOR is set), always or never"},
    [OPT_COMM] = {.name = "comm",
                  .kind = KIND_CHOICE,
                  .arg = "HOW",
                  .offset = FIELD(comm),
                  .choices = comm_choices,
                  .help = "share the work with other processes: mpi, none, or auto (the default: mpi when started by "
                          "mpirun with more than one rank); nccl: --local through GPUs"},
    [OPT_LOCAL] = {.name = "local",
                   .kind = KIND_FLAG,
                   .offset = FIELD(local),
                   .help =
                       "under mpirun: SRC is a directory on each rank's own disk with a part of the files; they are "
                       "brought together beside DST on rank 0, which needs room for both"},
    [OPT_WEIGHTS] = {.name = "weights",
                     .kind = KIND_TEXT,
                     .arg = "W,W,...",
                     .offset = FIELD(weights),
                     .help =
                         "a weight for each SRC, in their order; they are divided by their sum (default: all equal)"},
    [OPT_TAKE_FIRST] = {.name = "take-first",
                        .kind = KIND_FLAG,
                        .offset = FIELD(take_first),
                        .help = "take integers, booleans and objects from the first SRC where they differ, instead of "
                                "refusing"},
    [OPT_TREE] = {.name = "tree",
                  .kind = KIND_FLAG,
                  .offset = FIELD(tree),
                  .help = "show the nesting of the state dict"},
    [OPT_ALL] = {.name = "all",
                 .kind = KIND_FLAG,
                 .offset = FIELD(all),
                 .help = "a line for each tensor and object: do not fold layers that are alike into one line"},
    [OPT_SORT] = {.name = "sort",
                  .kind = KIND_CHOICE,
                  .arg = "ORDER",
                  .offset = FIELD(sort),
                  .choices = sort_choices,
                  .help = "list by source (the default: as SRC has them), by name, or by size, the largest first"},
    [OPT_DEPTH] = {.name = "depth",
                   .kind = KIND_NUMBER,
                   .arg = "N",
                   .offset = FIELD(depth),
                   .max = 1000,
                   .help = "show N levels of modules and sum up what is below: model.layers is two levels"},
    [OPT_TENSOR] = {.name = "tensor",
                    .letter = 't',
                    .kind = KIND_TEXT,
                    .arg = "NAME",
                    .offset = FIELD(tensor),
                    .help = "show one tensor: its pieces drawn as a grid of ranks, each with file, offset and bytes"},
    [OPT_HTML] = {.name = "html",
                  .kind = KIND_TEXT,
                  .arg = "FILE",
                  .offset = FIELD(html),
                  .help = "write one self-contained page with a picture of how each tensor is cut"},
    [OPT_HEADERS_ONLY] = {.name = "headers-only",
                          .kind = KIND_FLAG,
                          .offset = FIELD(headers_only),
                          .help = "do not ask for the data files: only what the headers say"},
    [OPT_FOLLOW_EXTERNAL] =
        {.name = "follow-external",
         .kind = KIND_FLAG,
         .offset = FIELD(follow_external),
         .help =
             "allow HDF5 external links, external storage and foreign virtual datasets, and symbolic links out of the "
             "checkpoint"},
    [OPT_AGAINST] = {.name = "against",
                     .kind = KIND_TEXT,
                     .arg = "REF",
                     .offset = FIELD(against),
                     .help =
                         "a checkpoint of any format and layout, or a schema, with the names, shapes and dtypes that "
                         "are wanted"},
    [OPT_SCHEMA] =
        {.name = "schema",
         .kind = KIND_TEXT,
         .arg = "FILE",
         .offset = FIELD(schema),
         .help = "names, shapes and order of the parameters in FSDP1's flat parameters: a file that 'fsdpckpt schema' "
                 "wrote, or any checkpoint of the model"},
    [OPT_ALLOW_MISSING] = {.name = "allow-missing",
                           .kind = KIND_LIST,
                           .arg = "GLOB",
                           .offset = FIELD(allow_missing),
                           .help = "what has a name that matches GLOB may be missing (repeatable)"},
    [OPT_ALLOW_UNEXPECTED] = {.name = "allow-unexpected",
                              .kind = KIND_LIST,
                              .arg = "GLOB",
                              .offset = FIELD(allow_unexpected),
                              .help = "what has a name that matches GLOB may be there though REF has it not "
                                      "(repeatable)"},
    [OPT_JUNIT] = {.name = "junit",
                   .kind = KIND_TEXT,
                   .arg = "FILE",
                   .offset = FIELD(junit),
                   .help = "write the result to FILE as JUnit XML, too; an XML file there is replaced"},
    [OPT_GITHUB] = {.name = "github",
                    .kind = KIND_FLAG,
                    .offset = FIELD(github),
                    .help = "print findings as annotations of GitHub Actions"},
    [OPT_SEAL] = {.name = "seal",
                  .kind = KIND_FLAG,
                  .offset = FIELD(seal),
                  .help = "when there are no defects, write the digests of SRC to SRC" FC_SEAL_SUFFIX " beside it"},
    [OPT_DATA] = {.name = "data",
                  .kind = KIND_FLAG,
                  .offset = FIELD(data),
                  .help = "compare the data also where recorded digests answer"},
    [OPT_RTOL] = {.name = "rtol",
                  .kind = KIND_REAL,
                  .arg = "X",
                  .offset = FIELD(rtol),
                  .help = "equal is |a - b| <= atol + X * |b|, as numpy.isclose (with --atol alone: 0)"},
    [OPT_ATOL] = {.name = "atol",
                  .kind = KIND_REAL,
                  .arg = "X",
                  .offset = FIELD(atol),
                  .help = "equal is |a - b| <= X + rtol * |b| (with --rtol alone: 0)"},
    [OPT_EQUAL_NAN] = {.name = "equal-nan",
                       .kind = KIND_FLAG,
                       .offset = FIELD(equal_nan),
                       .help = "NaN equals NaN, whatever its bits"},
    [OPT_POLICY] = {.name = "policy",
                    .kind = KIND_TEXT,
                    .arg = "POLICY",
                    .offset = FIELD(policy),
                    .help = "which modules become units: 'blocks' (the default: the outermost numbered ones, such as "
                            "layers.0), 'size:100M' (those with at least so many elements left), 'class:NAME,...' or a "
                            "JSON file of patterns"},
    [OPT_CLASSES] = {.name = "classes",
                     .kind = KIND_TEXT,
                     .arg = "FILE",
                     .offset = FIELD(classes),
                     .help = "JSON file with what names do not say: {\"layers.*\": \"LlamaDecoderLayer\", \"$frozen\": "
                             "[...], \"$shared\": [[...]], \"$ignored\": [...], \"$buffers\": [...]}"},
    [OPT_IGNORE] = {.name = "ignore",
                    .kind = KIND_LIST,
                    .arg = "PATTERN",
                    .offset = FIELD(ignore),
                    .help = "modules or parameters that no unit manages, as ignored_states of FSDP (repeatable)"},
    [OPT_JSON] = {.name = "json", .kind = KIND_FLAG, .offset = FIELD(json), .help = "print the result as JSON"},
    [OPT_QUIET] = {.name = "quiet",
                   .letter = 'q',
                   .kind = KIND_FLAG,
                   .offset = FIELD(quiet),
                   .help = "no summary and no progress, errors only; what --json and --progress json print stays"},
    [OPT_VERBOSE] = {.name = "verbose",
                     .letter = 'v',
                     .kind = KIND_COUNT,
                     .offset = FIELD(verbose),
                     .help = "say what is being done, on stderr"},
    [OPT_HELP] = {.name = "help", .letter = 'h', .kind = KIND_FLAG, .offset = FIELD(help), .help = "show this help"},
    [OPT_VERSION] = {.name = "version",
                     .kind = KIND_FLAG,
                     .offset = FIELD(version),
                     .help = "show the version and what it was built with"},
};

const option_group option_groups[OPTION_GROUPS] = {
    {"Target", TAKES(OPT_OUTPUT) | TAKES(OPT_TO) | TAKES(OPT_DTYPE) | TAKES(OPT_COMPRESS) | TAKES(OPT_MAX_SHARD_SIZE) |
                   TAKES(OPT_FORCE) | TAKES(OPT_DRY_RUN) | TAKES(OPT_RANK) | TAKES(OPT_SEAL)},
    {"Layout", TAKES(OPT_DP) | TAKES(OPT_TP) | TAKES(OPT_REPLICAS) | TAKES(OPT_TP_PLAN) | TAKES(OPT_POLICY) |
                   TAKES(OPT_CLASSES) | TAKES(OPT_IGNORE)},
    {"Tensors and names", TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) | TAKES(OPT_STRIP_PREFIX) | TAKES(OPT_RENAME) |
                              TAKES(OPT_WEIGHTS) | TAKES(OPT_TAKE_FIRST) | TAKES(OPT_TENSOR)},
    {"Source and reference", TAKES(OPT_SCHEMA) | TAKES(OPT_AGAINST) | TAKES(OPT_ALLOW_MISSING) |
                                 TAKES(OPT_ALLOW_UNEXPECTED) | TAKES(OPT_HEADERS_ONLY) | TAKES(OPT_FOLLOW_EXTERNAL) |
                                 TAKES(OPT_DATA) | TAKES(OPT_RTOL) | TAKES(OPT_ATOL) | TAKES(OPT_EQUAL_NAN)},
    {"Resources", TAKES(OPT_JOBS) | TAKES(OPT_MEMORY) | TAKES(OPT_COMM) | TAKES(OPT_LOCAL)},
    {"Output", TAKES(OPT_TREE) | TAKES(OPT_ALL) | TAKES(OPT_SORT) | TAKES(OPT_DEPTH) | TAKES(OPT_HTML) |
                   TAKES(OPT_JUNIT) | TAKES(OPT_GITHUB) | TAKES(OPT_PROGRESS) | TAKES(OPT_COLOR) | TAKES(OPT_JSON) |
                   TAKES_COMMON},
};

uint64_t option_group_of(int i, uint64_t takes) {
    uint64_t others = 0;
    for (int g = 0; g < OPTION_GROUPS - 1; g++) {
        others |= option_groups[g].members;
    }
    return takes & (i < OPTION_GROUPS - 1 ? option_groups[i].members : ~others);
}
