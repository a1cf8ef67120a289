/*
 * Maps words of other tools to ours: see words.h.
 */
#include "options/words.h"

#include "options/command.h"
#include "options/suggest.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

typedef struct pair {
    const char *theirs; /* with a space between two words */
    const char *ours;
} pair;

static const pair commands[] = {
    {"merge gather unshard join combine merge-weights merge-fsdp-weights zero-to-fp32 zero-to-fp32.py", "consolidate"},
    {"dcp-to-torch dcp-to-torch-save to-torch to-pt", "consolidate --to pt"},
    {"torch-save-to-dcp torch-to-dcp to-dcp", "convert --to dcp"},
    {"to-hdf5", "convert --to h5"},
    {"to-safetensors convert-to-safetensors", "consolidate --to safetensors"},
    {"to-hf convert-to-hf save-pretrained", "export"},
    {"merge-lora merge-adapter", "consolidate --adapter"},
    {"split shard cut", "reshard"},
    {"transform", "convert"},
    {"info show ls list stat dump open", "inspect"},
    {"validate lint test", "check"},
    {"compare cmp", "diff"},
    {"mean soup", "average"},
    {"cat get read", "extract"},
    {"fsck checksum sha256", "verify"},
    {"seal", "verify --seal"},
    {"mount", "view"},
    {"names", "schema"},
    {"wrap", "units"},
    {"plan", "reshard --dry-run"},
};

/* The first whose option the command takes is suggested. */
static const pair option_words[] = {
    {"model weights-only no-optimizer exclude-optimizer skip-optimizer", "model-only"},
    {"pattern filter only keys", "include"},
    {"hsdp dp-replicate", "replicas"},
    {"nproc fsdp world-size ranks num-shards num-ranks num-gpus gpus nproc-per-node mesh shards dp-size "
     "data-parallel",
     "dp"},
    {"out dst dest outdir output-dir output-path save", "output"},
    {"format output-format", "to"},
    {"type precision cast bf16 fp16 fp32 half", "dtype"},
    {"tensor-parallel tp-size", "tp"},
    {"overwrite yes exist-ok", "force"},
    {"threads workers num-workers parallel", "jobs"},
    {"skip", "exclude"},
    {"prefix remove-prefix", "strip-prefix"},
    {"sed", "rename"},
    {"name key", "tensor"},
    {"silent", "quiet"},
    {"mem memory-limit", "memory"},
    {"gzip compression", "compress"},
    {"reference", "against"},
    {"plan", "tp-plan"},
    {"dryrun simulate what-if", "dry-run"},
    {"verify", "data"},
    {"max-file-size shard-size", "max-shard-size"},
    {"wrap-policy", "policy"},
    {"model base-model tokenizer", "like"},
    {"lora peft", "adapter"},
};

static const struct {
    const char *word;
    fc_dtype dtype;
} types[] = {{"half", FC_F16},     {"fp16", FC_F16},          {"float", FC_F32},          {"fp32", FC_F32},
             {"single", FC_F32},   {"double", FC_F64},        {"fp64", FC_F64},           {"e4m3fn", FC_F8_E4M3FN},
             {"e5m2", FC_F8_E5M2}, {"f8_e4m3", FC_F8_E4M3FN}, {"fp8_e4m3", FC_F8_E4M3FN}, {"fp8_e5m2", FC_F8_E5M2}};

/* Options that no option of the command stands for, or whose meaning depends on the command. */
static const struct {
    const char *command, *word, *reply; /* command: NULL: any that takes `takes` */
    unsigned long long takes;           /* 0: all commands do */
} replies[] = {
    {NULL, "--grep", "use --include '*TEXT*'", TAKES(OPT_INCLUDE)},
    {NULL, "--search", "use --include '*TEXT*'", TAKES(OPT_INCLUDE)},
    {"diff", "--like", "the other checkpoint is an argument: 'fsdpckpt diff A B'"},
    {"diff", "--against", "the other checkpoint is an argument: 'fsdpckpt diff A B'"},
    {"export", "--model-only", "leave it out: export always takes the model only"},
    {"export", "--weights-only", "leave it out: export always takes the model only"},
    {"check", "--like", "use '--against', which takes any checkpoint or schema"},
    {"inspect", "--output", "use '--html FILE' for a page, or redirect the output"},
    {"inspect", "-o", "use '--html FILE' for a page, or redirect the output"},
    {"extract", "--tensor", "the name is an argument: 'fsdpckpt extract SRC NAME'"},
    {"extract", "-t", "the name is an argument: 'fsdpckpt extract SRC NAME'"},
    {"average", "--delta", "write each model with its deltas first: 'fsdpckpt consolidate MODEL --delta DIR -o FILE'"},
    {"view", "--delta",
     "a view refers to stored bytes: write them with 'fsdpckpt consolidate MODEL --delta DIR -o FILE'"},
    {"schema", "--delta", "leave it out: a delta changes no names, dtypes and shapes"},
    {"units", "--delta", "leave it out: a delta changes no names, dtypes and shapes"},
    {NULL, "--input", "the checkpoint is an argument: 'fsdpckpt COMMAND SRC'"},
    {NULL, "--input-dir", "the checkpoint is an argument: 'fsdpckpt COMMAND SRC'"},
    {NULL, "--checkpoint", "the checkpoint is an argument: 'fsdpckpt COMMAND SRC'"},
    {NULL, "--pp", "no target is divided into pipeline stages; choose --dp and --tp"},
    {NULL, "-V", "did you mean '--version'?"},
    {NULL, "-y", "did you mean '--force'?"},
};

enum { REPLIES = sizeof replies / sizeof *replies };
enum { COMMANDS = sizeof commands / sizeof *commands, OPTIONS = sizeof option_words / sizeof *option_words };
enum { TYPES = sizeof types / sizeof *types };

/* Whether two words are the same, whatever their case, and with "_" for "-". */
static bool same_word(const char *ours, size_t n, const char *word, size_t len) {
    for (size_t i = 0; i < len && n == len; i++) {
        char c = word[i] == '_' ? '-' : word[i];
        if (strncasecmp(&ours[i], &c, 1) != 0) {
            return false;
        }
    }
    return n == len;
}

/* Whether one of `ours`, with a space between two, is the word. */
static bool has_word(const char *ours, const char *word, size_t len) {
    for (size_t n; *ours; ours += n + (ours[n] == ' ')) {
        n = strcspn(ours, " ");
        if (same_word(ours, n, word, len)) {
            return true;
        }
    }
    return false;
}

const char *words_command(const char *word) {
    const char *best = NULL;
    size_t score = SUGGEST_NONE;
    for (size_t i = 0; i < COMMANDS; i++) {
        if (has_word(commands[i].theirs, word, strlen(word))) {
            return commands[i].ours;
        }
    }
    for (const command *const *c = command_table; *c; c++) {
        suggest_consider(word, strlen(word), (*c)->name, &best, &score);
    }
    return best;
}

const char *words_reply(const char *name, const char *arg, size_t len, unsigned long long takes) {
    for (size_t i = 0; i < REPLIES; i++) {
        const bool same = len == 2 ? memcmp(replies[i].word, arg, len) == 0 && !replies[i].word[len]
                                   : has_word(replies[i].word, arg, len);
        const bool taken = !replies[i].takes || (takes & replies[i].takes);
        if (same && taken && (!replies[i].command || (name && strcmp(replies[i].command, name) == 0))) {
            return replies[i].reply;
        }
    }
    return NULL;
}

const char *words_option(const char *word, size_t len, unsigned long long takes) {
    const char *best = NULL;
    size_t score = SUGGEST_NONE;
    for (size_t i = 0; i < OPTIONS; i++) {
        option_id id = option_find(option_words[i].ours, strlen(option_words[i].ours));
        if (has_word(option_words[i].theirs, word, len) && id != OPT_COUNT && (takes & TAKES(id))) {
            return option_words[i].ours;
        }
    }
    for (int id = 0; len > 0 && id < OPT_COUNT; id++) {
        if (takes & TAKES(id)) {
            suggest_consider(word, len, option_table[id].name, &best, &score);
        }
    }
    return best;
}

bool words_dtype(const char *word, fc_dtype *out) {
    word += strncasecmp(word, "torch.", 6) == 0 ? 6 : 0;
    for (int i = 0; i < FC_OPAQUE; i++) {
        const fc_dtype_info *info = fc_dtype_get((fc_dtype)i);
        if (strcasecmp(word, info->torch_name) == 0 || strcasecmp(word, info->short_name) == 0) {
            *out = (fc_dtype)i;
            return true;
        }
    }
    for (size_t i = 0; i < TYPES; i++) {
        if (strcasecmp(word, types[i].word) == 0) {
            *out = types[i].dtype;
            return true;
        }
    }
    return false;
}

const char *words_dtypes(char *buf) {
    size_t used = 0;
    buf[0] = '\0';
    for (int i = 0; i < FC_OPAQUE && used < WORDS_DTYPES_MAX; i++) {
        const fc_dtype_info *info = fc_dtype_get((fc_dtype)i);
        if (info->cls == FC_CLASS_FLOAT) {
            used += (size_t)snprintf(buf + used, WORDS_DTYPES_MAX - used, "%s%s", used ? " " : "", info->short_name);
        }
    }
    return buf;
}

const char *words_near_dtype(const char *word) {
    const char *best = NULL, *name = NULL;
    size_t score = SUGGEST_NONE;
    word += strncasecmp(word, "torch.", 6) == 0 ? 6 : 0;
    if (strcasecmp(word, "fp8") == 0 || strcasecmp(word, "f8") == 0 || strcasecmp(word, "float8") == 0) {
        return fc_dtype_get(FC_F8_E4M3FN)->short_name;
    }
    for (int i = 0; i < FC_OPAQUE; i++) {
        const fc_dtype_info *info = fc_dtype_get((fc_dtype)i);
        const char *const names[] = {info->short_name, info->torch_name};
        for (size_t n = 0; n < 2 && info->cls == FC_CLASS_FLOAT; n++) {
            size_t before = score;
            suggest_consider(word, strlen(word), names[n], &name, &score);
            best = score < before ? info->short_name : best;
        }
    }
    return best;
}
