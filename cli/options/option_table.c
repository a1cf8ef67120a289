/*
 * The option table: names, kinds and help texts, and the field that receives each value.
 */
#include "options/options.h"

#include "fsdpckpt/delta.h"
#include "fsdpckpt/seal.h"

#include <stddef.h>

static const char *const progress_choices[] = {"auto", "always", "never", "json", NULL};
static const char *const color_choices[] = {"auto", "always", "never", NULL};
static const char *const sort_choices[] = {"source", "name", "size", NULL};
static const char *const encoding_choices[] = {"xor", "overwrite", "auto", NULL};
static const char *const checksum_choices[] = {"xxh3-128", "adler32", "blake3", NULL};
static const char *const comm_choices[] = {"auto", "none", "mpi", NULL};

#define FIELD(name) offsetof(options, name)

const option_row option_table[OPT_COUNT] = {
    [OPT_OUTPUT] = {.name = "output",
                    .letter = 'o',
                    .kind = KIND_TEXT,
                    .arg = "DST",
                    .offset = FIELD(output),
                    .help = "write the new checkpoint to DST, which must not exist unless --force is given; s3:// and "
                            "gs:// name one in a bucket"},
    [OPT_TO] = {.name = "to",
                .kind = KIND_TEXT,
                .arg = "FORMAT",
                .offset = FIELD(to),
                .help =
                    "format of DST, one of accelerate, dcp, fsdp_dtensor, h5, pt, safetensors or torch_dist (default: "
                    "from the extension of DST, see 'fsdpckpt --help'; h5 for a directory of one file per rank "
                    "without an extension)"},
    [OPT_DP] = {.name = "dp",
                .kind = KIND_NUMBER,
                .arg = "N",
                .offset = FIELD(dp),
                .max = 1 << 20,
                .help = "shard over N data-parallel ranks (FSDP): Shard(0)"},
    [OPT_TP] = {.name = "tp",
                .kind = KIND_NUMBER,
                .arg = "N",
                .offset = FIELD(tp),
                .max = 1 << 20,
                .help = "shard over N tensor-parallel ranks, as the TP plan defines"},
    [OPT_REPLICAS] = {.name = "replicas",
                      .kind = KIND_NUMBER,
                      .arg = "N",
                      .offset = FIELD(replicas),
                      .max = 1 << 20,
                      .help = "make N replicas of the dp x tp mesh (HSDP); the data is stored once"},
    [OPT_TP_PLAN] =
        {.name = "tp-plan",
         .kind = KIND_TEXT,
         .arg = "FILE|NAME",
         .offset = FIELD(tp_plan),
         .help = "how --tp shards tensors: 'auto' (the default), which knows the names of Llama, Qwen, Mistral, GPT-2 "
                 "and GPT-NeoX, or a JSON file in the form of Hugging Face's base_model_tp_plan"},
    [OPT_MODEL_ONLY] = {.name = "model-only",
                        .kind = KIND_FLAG,
                        .offset = FIELD(model_only),
                        .help = "take only the parameters and buffers of the model, under the names that they have in "
                                "it: without the optimizer, other state of the run, and what DDP, FSDP, torch.compile "
                                "and trainers add to names. It comes before all other options about names"},
    [OPT_INCLUDE] = {.name = "include",
                     .kind = KIND_LIST,
                     .arg = "GLOB",
                     .offset = FIELD(include),
                     .help = "select only names that match GLOB (repeatable)"},
    [OPT_EXCLUDE] = {.name = "exclude",
                     .kind = KIND_LIST,
                     .arg = "GLOB",
                     .offset = FIELD(exclude),
                     .help = "leave out names that match GLOB (repeatable)"},
    [OPT_STRIP_PREFIX] = {.name = "strip-prefix",
                          .kind = KIND_TEXT,
                          .arg = "PREFIX",
                          .offset = FIELD(strip_prefix),
                          .help = "remove PREFIX, and a dot that follows it, from the start of names"},
    [OPT_RENAME] = {.name = "rename",
                    .kind = KIND_LIST,
                    .arg = "RULE",
                    .offset = FIELD(rename),
                    .help = "change names as sed -E does, after --strip-prefix: s/regex/replacement/, with \\1, &, any "
                            "delimiter and the flags g and i (repeatable, applied in order)"},
    [OPT_DTYPE] = {.name = "dtype",
                   .kind = KIND_DTYPE,
                   .arg = "TYPE",
                   .offset = FIELD(dtype),
                   .help = "convert floating-point tensors to TYPE: f64, f32, f16, bf16, f8_e4m3fn, f8_e5m2 ... (or "
                           "PyTorch's names)"},
    [OPT_DTYPE_FOR] = {.name = "dtype-for",
                       .kind = KIND_LIST,
                       .arg = "GLOB=TYPE",
                       .offset = FIELD(dtype_for),
                       .help = "like --dtype, for the names in SRC that match GLOB; 'keep' as TYPE keeps their type "
                               "(repeatable; it overrides --dtype, and the last match decides)"},
    [OPT_DEQUANTIZE] =
        {.name = "dequantize",
         .kind = KIND_DTYPE,
         .arg = "TYPE",
         .offset = FIELD(dequantize),
         .help = "turn quantized weights, which SRC stores as codes and scales, into numbers of TYPE: fp8, int8, "
                 "packed integers of compressed-tensors, GPTQ and AWQ, NVFP4, MXFP4, and NF4 and FP4 of bitsandbytes "
                 "(see docs/WEIGHTS.md). It comes before --include and all other options about names"},
    [OPT_QUANTIZE] = {.name = "quantize",
                      .kind = KIND_LIST,
                      .arg = "GLOB",
                      .offset = FIELD(quantize),
                      .help = "turn the floating-point matrices that match GLOB into f8_e4m3fn codes with a scale for "
                              "each block of 128 x 128, in NAME_scale_inv, as DeepSeek stores them (repeatable). GLOB "
                              "matches names in SRC, or those that --recipe makes"},
    [OPT_DELTA] = {.name = "delta",
                   .kind = KIND_LIST,
                   .arg = "DIR",
                   .offset = FIELD(delta),
                   .help = "read SRC with deltas applied: DIR is a version that 'fsdpckpt delta' or another program "
                           "wrote (repeatable), or a directory of versions. It comes before all other options about "
                           "tensors"},
    [OPT_ADAPTER] = {.name = "adapter",
                     .kind = KIND_LIST,
                     .arg = "DIR[=W]",
                     .offset = FIELD(adapter),
                     .help = "merge the LoRA adapter that PEFT saved in DIR, with the weight W (default: 1), into the "
                             "weights of SRC (repeatable). It comes after --dequantize and before --include and all "
                             "other options about names"},
    [OPT_ADAPTER_CONFIG] = {.name = "adapter-config",
                            .kind = KIND_TEXT,
                            .arg = "FILE",
                            .offset = FIELD(adapter_config),
                            .help = "merge the LoRA adapter that the model in SRC has inside, as PEFT trains it "
                                    "(q_proj.base_layer.weight, q_proj.lora_A.default.weight). FILE is its "
                                    "adapter_config.json, or the folder of that"},
    [OPT_RECIPE] = {.name = "recipe",
                    .kind = KIND_TEXT,
                    .arg = "RECIPE",
                    .offset = FIELD(recipe),
                    .help = "give the selected tensors the names and layouts of another program: the name of a shipped "
                            "recipe (see 'fsdpckpt recipes'), a JSON file, or auto, the only shipped one that fits. "
                            "--include, --exclude, --strip-prefix and --rename come before it, other options after it"},
    [OPT_REVERSE] = {.name = "reverse",
                     .kind = KIND_FLAG,
                     .offset = FIELD(reverse),
                     .help = "apply the recipe in the other direction"},
    [OPT_INFER] = {.name = "infer",
                   .kind = KIND_FLAG,
                   .offset = FIELD(infer),
                   .help = "find the recipe that turns the checkpoint A into the checkpoint B, which has the same "
                           "weights, and prove it: what it makes of A is compared with B, bit for bit; without B, "
                           "propose one from the names of A"},
    [OPT_CONFIG] = {.name = "config",
                    .kind = KIND_TEXT,
                    .arg = "FILE",
                    .offset = FIELD(config),
                    .help = "config.json of the model, or its folder, from which --recipe takes sizes such as "
                            "num_attention_heads, and --dequantize those of blocks (default: the one next to SRC)"},
    [OPT_COMPRESS] = {.name = "compress",
                      .kind = KIND_LEVEL,
                      .arg = "LEVEL",
                      .offset = FIELD(compress),
                      .help = "compress tensors with shuffle and deflate, which every HDF5 program reads: 1 is "
                              "fastest, 9 is smallest, 0 is off (the default)"},
    [OPT_MAX_SHARD_SIZE] =
        {.name = "max-shard-size",
         .kind = KIND_BYTES,
         .arg = "SIZE",
         .offset = FIELD(max_shard_size),
         .help = "write a directory of safetensors files of at most SIZE (such as 5GB) with Hugging Face's "
                 "index. A tensor is never split. If one file is enough, it is model.safetensors without an index, as "
                 "huggingface_hub writes it. The default is 5GB if DST is a directory or ends with /"},
    [OPT_FORCE] = {.name = "force",
                   .letter = 'f',
                   .kind = KIND_FLAG,
                   .offset = FIELD(force),
                   .help = "replace the target if it exists; the old one stays until the new one is complete"},
    [OPT_RESUME] = {.name = "resume",
                    .kind = KIND_FLAG,
                    .offset = FIELD(resume),
                    .help =
                        "keep what is written if the command fails or is killed, and go on with what an earlier run "
                        "kept that had --resume, the same source and the same options. It cannot be combined with "
                        "--compress or mpirun"},
    [OPT_TRUST_OBJECTS] = {.name = "trust-objects",
                           .kind = KIND_FLAG,
                           .offset = FIELD(trust_objects),
                           .help = "copy objects into DCP and torch.save files even if loading them would run code, or "
                                   "needs a class that is not known to be harmless"},
    [OPT_DRY_RUN] = {.name = "dry-run",
                     .letter = 'n',
                     .kind = KIND_FLAG,
                     .offset = FIELD(dry_run),
                     .help =
                         "check everything and print the files, bytes and memory of the whole job, but write nothing"},
    [OPT_RANK] = {.name = "rank",
                  .kind = KIND_INDEX,
                  .arg = "R",
                  .offset = FIELD(rank),
                  .max = (1 << 20) - 1,
                  .help = "with --dry-run: print the boxes, bytes and reads of rank R instead of the totals"},
    [OPT_JOBS] = {.name = "jobs",
                  .letter = 'j',
                  .kind = KIND_NUMBER,
                  .arg = "N",
                  .offset = FIELD(jobs),
                  .max = 4096,
                  .help = "number of worker threads (default: enough to keep the processors and the disk busy)"},
    [OPT_MEMORY] = {.name = "memory",
                    .kind = KIND_SIZE,
                    .arg = "SIZE",
                    .offset = FIELD(memory),
                    .help = "memory for all buffers, such as 512M or 2G (default: 56M)"},
    [OPT_PROGRESS] = {.name = "progress",
                      .kind = KIND_CHOICE,
                      .arg = "WHEN",
                      .offset = FIELD(progress),
                      .choices = progress_choices,
                      .help = "show progress on stderr: auto (the default: one line on a terminal after a second, "
                              "occasional lines in a log after a minute), always, never, or json for JSON lines"},
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
                  .help =
                      "share the work with other processes: mpi, none or auto (the default: mpi when mpirun started "
                      "more than one rank)"},
    [OPT_LOCAL] = {.name = "local",
                   .kind = KIND_FLAG,
                   .offset = FIELD(local),
                   .help = "under mpirun: SRC is a directory on each rank's own disk that holds some of the files; "
                           "they are gathered next to DST on rank 0, which needs room for both"},
    [OPT_WEIGHTS] = {.name = "weights",
                     .kind = KIND_TEXT,
                     .arg = "W,W,...",
                     .offset = FIELD(weights),
                     .help =
                         "one weight per SRC, in the same order; they are divided by their sum (default: all equal)"},
    [OPT_TAKE_FIRST] =
        {.name = "take-first",
         .kind = KIND_FLAG,
         .offset = FIELD(take_first),
         .help = "use integers, booleans and objects of the first SRC where they differ, instead of failing"},
    [OPT_TREE] = {.name = "tree",
                  .kind = KIND_FLAG,
                  .offset = FIELD(tree),
                  .help = "show the nesting of the state dict"},
    [OPT_ALL] = {.name = "all",
                 .kind = KIND_FLAG,
                 .offset = FIELD(all),
                 .help = "print one line per tensor and object; do not fold layers that are alike into one line"},
    [OPT_SORT] = {.name = "sort",
                  .kind = KIND_CHOICE,
                  .arg = "ORDER",
                  .offset = FIELD(sort),
                  .choices = sort_choices,
                  .help = "order the list by name, by size with the largest first, or as SRC has it (the default)"},
    [OPT_DEPTH] = {.name = "depth",
                   .kind = KIND_NUMBER,
                   .arg = "N",
                   .offset = FIELD(depth),
                   .max = 1000,
                   .help = "show N levels of modules and add up the levels below: model.layers has two levels"},
    [OPT_TENSOR] =
        {.name = "tensor",
         .letter = 't',
         .kind = KIND_TEXT,
         .arg = "NAME",
         .offset = FIELD(tensor),
         .help = "show one tensor: its chunks drawn as a grid of ranks, with the file, offset and bytes of each"},
    [OPT_HTML] = {.name = "html",
                  .kind = KIND_TEXT,
                  .arg = "FILE",
                  .offset = FIELD(html),
                  .help = "write one self-contained HTML page that shows how each tensor is sharded"},
    [OPT_STATS] = {.name = "stats",
                   .kind = KIND_FLAG,
                   .offset = FIELD(stats),
                   .help = "read the data once and show mean, standard deviation, minimum and maximum of the finite "
                           "values of each tensor, and how many values are zero, NaN and infinite; --json and --html "
                           "also have histograms"},
    [OPT_HEADERS_ONLY] = {.name = "headers-only",
                          .kind = KIND_FLAG,
                          .offset = FIELD(headers_only),
                          .help = "use only the headers; the data files may be absent"},
    [OPT_FOLLOW_EXTERNAL] = {.name = "follow-external",
                             .kind = KIND_FLAG,
                             .offset = FIELD(follow_external),
                             .help = "allow HDF5 external links, external storage, virtual datasets over other files, "
                                     "and symbolic links that leave the checkpoint"},
    [OPT_HDF5_PLUGINS] =
        {.name = "hdf5-plugins",
         .kind = KIND_TEXT,
         .arg = "DIR",
         .offset = FIELD(hdf5_plugins),
         .help = "load plugins of libhdf5 from DIR, for HDF5 filters that fsdpckpt does not decode. Plugins "
                 "are code: name a folder that you trust"},
    [OPT_LIKE] =
        {.name = "like",
         .kind = KIND_TEXT,
         .arg = "HF_DIR",
         .offset = FIELD(like),
         .help = "directory of the model, as downloaded from the Hugging Face hub, or hf://owner/model: names, dtypes, "
                 "tied weights, the size of the vocabulary, "
                 "which file holds which tensor, and all files but the weights come from there. Any other difference "
                 "is an error. Its weights may be absent"},
    [OPT_AGAINST] =
        {.name = "against",
         .kind = KIND_TEXT,
         .arg = "REF",
         .offset = FIELD(against),
         .help = "checkpoint of any format and layout, or a schema, with the expected names, shapes and dtypes"},
    [OPT_SCHEMA] = {.name = "schema",
                    .kind = KIND_TEXT,
                    .arg = "FILE",
                    .offset = FIELD(schema),
                    .help = "names, shapes and order of the parameters in FSDP1's flat parameters: a file that "
                            "'fsdpckpt schema' wrote, or any checkpoint of the model"},
    [OPT_ALLOW_MISSING] = {.name = "allow-missing",
                           .kind = KIND_LIST,
                           .arg = "GLOB",
                           .offset = FIELD(allow_missing),
                           .help = "accept that names that match GLOB are missing from SRC (repeatable)"},
    [OPT_ALLOW_UNEXPECTED] = {.name = "allow-unexpected",
                              .kind = KIND_LIST,
                              .arg = "GLOB",
                              .offset = FIELD(allow_unexpected),
                              .help = "accept names that match GLOB even if REF does not have them (repeatable)"},
    [OPT_JUNIT] = {.name = "junit",
                   .kind = KIND_TEXT,
                   .arg = "FILE",
                   .offset = FIELD(junit),
                   .help = "also write the result to FILE as JUnit XML; an existing XML file is replaced"},
    [OPT_GITHUB] = {.name = "github",
                    .kind = KIND_FLAG,
                    .offset = FIELD(github),
                    .help = "print findings as annotations for GitHub Actions"},
    [OPT_SEAL] = {.name = "seal",
                  .kind = KIND_FLAG,
                  .offset = FIELD(seal),
                  .help = "if there are no defects, write the digests of SRC to SRC" FC_SEAL_SUFFIX " next to it"},
    [OPT_DATA] = {.name = "data",
                  .kind = KIND_FLAG,
                  .offset = FIELD(data),
                  .help = "compare the data even where recorded digests are enough"},
    [OPT_RTOL] = {.name = "rtol",
                  .kind = KIND_REAL,
                  .arg = "X",
                  .offset = FIELD(rtol),
                  .help = "relative tolerance: elements are equal if |a - b| <= atol + X * |b|, as in numpy.isclose "
                          "(with --atol alone: 0)"},
    [OPT_ATOL] = {.name = "atol",
                  .kind = KIND_REAL,
                  .arg = "X",
                  .offset = FIELD(atol),
                  .help = "absolute tolerance: elements are equal if |a - b| <= X + rtol * |b| (with --rtol alone: 0)"},
    [OPT_EQUAL_NAN] = {.name = "equal-nan",
                       .kind = KIND_FLAG,
                       .offset = FIELD(equal_nan),
                       .help = "treat NaN as equal to NaN, with any bits"},
    [OPT_ENCODING] = {.name = "encoding",
                      .kind = KIND_CHOICE,
                      .arg = "ENCODING",
                      .offset = FIELD(encoding),
                      .choices = encoding_choices,
                      .help = "how changed bytes are stored: xor (the default; smaller as a rule, but a program that "
                              "applies it twice undoes it), overwrite (positions and new values, for tensors below 4 "
                              "GiB), or auto (whichever is smaller)"},
    [OPT_CHECKSUM] = {.name = "checksum",
                      .kind = KIND_CHOICE,
                      .arg = "CHECKSUM",
                      .offset = FIELD(checksum),
                      .choices = checksum_choices,
                      .help =
                          "checksum of each tensor's new bytes: xxh3-128 (the default) or adler32; blake3 is part of "
                          "the format, but not of this build"},
    [OPT_LEVEL] = {.name = "level",
                   .kind = KIND_NUMBER,
                   .arg = "N",
                   .offset = FIELD(level),
                   .max = FC_DELTA_MOST_LEVEL,
                   .help = "zstd level 1 (the default) to 9"},
    [OPT_NUMBER] = {.name = "number",
                    .kind = KIND_INDEX,
                    .arg = "N",
                    .offset = FIELD(number),
                    .max = FC_DELTA_MOST_NUMBER,
                    .help = "the number of the new version (default: from the name weight_vNNNNNN of DST)"},
    [OPT_BASE] = {.name = "base",
                  .kind = KIND_INDEX,
                  .arg = "N",
                  .offset = FIELD(base),
                  .max = FC_DELTA_MOST_NUMBER,
                  .help = "the number of the version that it changes (default: the one before)"},
    [OPT_UP_TO] = {.name = "up-to",
                   .kind = KIND_INDEX,
                   .arg = "N",
                   .offset = FIELD(up_to),
                   .max = FC_DELTA_MOST_NUMBER,
                   .help = "the last version of the directory of versions that is used (default: the newest)"},
    [OPT_POLICY] = {.name = "policy",
                    .kind = KIND_TEXT,
                    .arg = "POLICY",
                    .offset = FIELD(policy),
                    .help = "which modules become units: 'blocks' (the default: the outermost numbered modules, such "
                            "as layers.0), 'always', 'size:100M' (modules with at least this many elements left), "
                            "'class:NAME,...', 'name:PATTERN,...', several of these joined by '+', or a JSON file of "
                            "patterns; '+leaf:CLASS,...' and '+exclude:CLASS,...' limit the policy before them"},
    [OPT_CLASSES] =
        {.name = "classes",
         .kind = KIND_TEXT,
         .arg = "FILE",
         .offset = FIELD(classes),
         .help = "JSON file with facts about the model that names do not show: {\"layers.*\": \"LlamaDecoderLayer\", "
                 "\"$frozen\": [...], \"$shared\": [[...]], \"$ignored\": [...], \"$buffers\": [...]}"},
    [OPT_IGNORE] = {.name = "ignore",
                    .kind = KIND_LIST,
                    .arg = "PATTERN",
                    .offset = FIELD(ignore),
                    .help =
                        "keep these modules or parameters out of all units, like FSDP's ignored_states (repeatable)"},
    [OPT_JSON] = {.name = "json", .kind = KIND_FLAG, .offset = FIELD(json), .help = "print the result as JSON"},
    [OPT_QUIET] = {.name = "quiet",
                   .letter = 'q',
                   .kind = KIND_FLAG,
                   .offset = FIELD(quiet),
                   .help = "print errors only, no summary and no progress; --json and --progress json still print"},
    [OPT_VERBOSE] = {.name = "verbose",
                     .letter = 'v',
                     .kind = KIND_COUNT,
                     .offset = FIELD(verbose),
                     .help = "print more details on stderr"},
    [OPT_HELP] = {.name = "help",
                  .letter = 'h',
                  .kind = KIND_FLAG,
                  .offset = FIELD(help),
                  .help = "show all options; -h shows the usual ones"},
    [OPT_VERSION] = {.name = "version",
                     .kind = KIND_FLAG,
                     .offset = FIELD(version),
                     .help = "show the version and the libraries in this build"},
};

const option_group option_groups[OPTION_GROUPS] = {
    {"Target", TAKES(OPT_OUTPUT) | TAKES(OPT_TO) | TAKES(OPT_DTYPE) | TAKES(OPT_DTYPE_FOR) | TAKES(OPT_COMPRESS) |
                   TAKES(OPT_MAX_SHARD_SIZE) | TAKES(OPT_FORCE) | TAKES(OPT_RESUME) | TAKES(OPT_DRY_RUN) |
                   TAKES(OPT_RANK) | TAKES(OPT_SEAL) | TAKES(OPT_ENCODING) | TAKES(OPT_CHECKSUM) | TAKES(OPT_LEVEL) |
                   TAKES(OPT_NUMBER) | TAKES(OPT_BASE)},
    {"Layout", TAKES(OPT_DP) | TAKES(OPT_TP) | TAKES(OPT_REPLICAS) | TAKES(OPT_TP_PLAN) | TAKES(OPT_POLICY) |
                   TAKES(OPT_CLASSES) | TAKES(OPT_IGNORE)},
    {"Tensors and names", TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) | TAKES(OPT_STRIP_PREFIX) |
                              TAKES(OPT_RENAME) | TAKES_DELTA | TAKES_COMPUTED | TAKES(OPT_INFER) |
                              TAKES(OPT_ADAPTER_CONFIG) | TAKES(OPT_WEIGHTS) | TAKES(OPT_TAKE_FIRST) |
                              TAKES(OPT_TENSOR)},
    {"Source and reference", TAKES(OPT_SCHEMA) | TAKES(OPT_LIKE) | TAKES(OPT_AGAINST) | TAKES(OPT_ALLOW_MISSING) |
                                 TAKES(OPT_ALLOW_UNEXPECTED) | TAKES(OPT_HEADERS_ONLY) | TAKES_EXTERNAL |
                                 TAKES(OPT_DATA) | TAKES(OPT_RTOL) | TAKES(OPT_ATOL) | TAKES(OPT_EQUAL_NAN)},
    {"Resources", TAKES(OPT_JOBS) | TAKES(OPT_MEMORY) | TAKES(OPT_COMM) | TAKES(OPT_LOCAL)},
    {"Output", TAKES(OPT_TREE) | TAKES(OPT_ALL) | TAKES(OPT_STATS) | TAKES(OPT_SORT) | TAKES(OPT_DEPTH) |
                   TAKES(OPT_HTML) | TAKES(OPT_JUNIT) | TAKES(OPT_GITHUB) | TAKES(OPT_JSON) | TAKES_COMMON},
};

option_set option_group_of(int i, option_set takes) {
    option_set others = 0;
    for (int g = 0; g < OPTION_GROUPS - 1; g++) {
        others |= option_groups[g].members;
    }
    return takes & (i < OPTION_GROUPS - 1 ? option_groups[i].members : ~others);
}
