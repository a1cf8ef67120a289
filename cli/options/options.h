/*
 * The option table. Parsing, --help, the man pages and the shell completions use it; a command only lists the options
 * that it takes.
 */
#pragma once

#include "output/terminal.h"

#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum option_id {
    OPT_OUTPUT,
    OPT_TO,
    OPT_DP,
    OPT_TP,
    OPT_REPLICAS,
    OPT_TP_PLAN,
    OPT_MODEL_ONLY,
    OPT_INCLUDE,
    OPT_EXCLUDE,
    OPT_STRIP_PREFIX,
    OPT_RENAME,
    OPT_DTYPE,
    OPT_DTYPE_FOR,
    OPT_DEQUANTIZE,
    OPT_QUANTIZE,
    OPT_DELTA,
    OPT_ADAPTER,
    OPT_ADAPTER_CONFIG,
    OPT_RECIPE,
    OPT_REVERSE,
    OPT_INFER,
    OPT_CONFIG,
    OPT_COMPRESS,
    OPT_MAX_SHARD_SIZE,
    OPT_FORCE,
    OPT_RESUME,
    OPT_TRUST_OBJECTS,
    OPT_DRY_RUN,
    OPT_RANK,
    OPT_JOBS,
    OPT_MEMORY,
    OPT_PROGRESS,
    OPT_COLOR,
    OPT_COMM,
    OPT_LOCAL,
    OPT_WEIGHTS,
    OPT_TAKE_FIRST,
    OPT_TREE,
    OPT_ALL,
    OPT_SORT,
    OPT_DEPTH,
    OPT_TENSOR,
    OPT_HTML,
    OPT_STATS,
    OPT_HEADERS_ONLY,
    OPT_FOLLOW_EXTERNAL,
    OPT_HDF5_PLUGINS,
    OPT_LIKE,
    OPT_AGAINST,
    OPT_SCHEMA,
    OPT_ALLOW_MISSING,
    OPT_ALLOW_UNEXPECTED,
    OPT_JUNIT,
    OPT_GITHUB,
    OPT_SEAL,
    OPT_ENCODING,
    OPT_CHECKSUM,
    OPT_LEVEL,
    OPT_NUMBER,
    OPT_BASE,
    OPT_UP_TO,
    OPT_DATA,
    OPT_RTOL,
    OPT_ATOL,
    OPT_EQUAL_NAN,
    OPT_POLICY,
    OPT_CLASSES,
    OPT_IGNORE,
    OPT_JSON,
    OPT_QUIET,
    OPT_VERBOSE,
    OPT_HELP,
    OPT_VERSION,
    OPT_COUNT
} option_id;

/** A set of options, one bit each. */
__extension__ typedef unsigned __int128 option_set;

/** The set of one option. */
#define TAKES(id) ((option_set)1 << (id))

/** The options that every command takes. */
#define TAKES_COMMON                                                                                                   \
    (TAKES(OPT_PROGRESS) | TAKES(OPT_COLOR) | TAKES(OPT_QUIET) | TAKES(OPT_VERBOSE) | TAKES(OPT_HELP) |                \
     TAKES(OPT_VERSION))
/** The options that choose and rename values. */
#define TAKES_NAMES                                                                                                    \
    (TAKES(OPT_MODEL_ONLY) | TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) | TAKES(OPT_STRIP_PREFIX) | TAKES(OPT_RENAME))

/** The options that allow files, and code, that are not of SRC. */
#define TAKES_EXTERNAL (TAKES(OPT_FOLLOW_EXTERNAL) | TAKES(OPT_HDF5_PLUGINS))

/** The options of every command that writes a checkpoint. */
#define TAKES_CONVERSION                                                                                               \
    (TAKES_COMMON | TAKES(OPT_OUTPUT) | TAKES(OPT_TO) | TAKES_NAMES | TAKES(OPT_DTYPE) | TAKES(OPT_DTYPE_FOR) |        \
     TAKES(OPT_COMPRESS) | TAKES(OPT_FORCE) | TAKES(OPT_RESUME) | TAKES(OPT_DRY_RUN) | TAKES(OPT_JOBS) |               \
     TAKES(OPT_MEMORY) | TAKES(OPT_COMM) | TAKES(OPT_LOCAL) | TAKES_EXTERNAL | TAKES(OPT_SCHEMA) | TAKES(OPT_JSON) |   \
     TAKES(OPT_TRUST_OBJECTS))

/** The options of commands that apply a recipe to SRC. */
#define TAKES_RECIPE (TAKES(OPT_RECIPE) | TAKES(OPT_REVERSE) | TAKES(OPT_CONFIG))
/** The options of commands that apply a recipe to SRC, or compute weights of it. */
#define TAKES_COMPUTED (TAKES_RECIPE | TAKES(OPT_DEQUANTIZE) | TAKES(OPT_QUANTIZE) | TAKES(OPT_ADAPTER))
/** The options of commands that read SRC with deltas applied. */
#define TAKES_DELTA (TAKES(OPT_DELTA) | TAKES(OPT_UP_TO))

typedef enum option_kind {
    KIND_FLAG,   /**< bool */
    KIND_COUNT,  /**< int, counts repetitions */
    KIND_TEXT,   /**< const char * */
    KIND_LIST,   /**< option_list, repeatable */
    KIND_NUMBER, /**< int64_t, 1 … max */
    KIND_INDEX,  /**< int64_t, 0 … max */
    KIND_BYTES,  /**< uint64_t bytes in Hugging Face's notation: 5GB is 5 · 10^9, 5GiB is 5 · 2^30, 5B is 5 */
    KIND_SIZE,   /**< uint64_t bytes with a K, M, G or T (powers of 1024), or B; from a million on also without */
    KIND_REAL,   /**< double, at least 0 and finite */
    KIND_DTYPE,  /**< fc_dtype, floating point */
    KIND_LEVEL,  /**< int, 0 … 9 */
    KIND_CHOICE  /**< int, an index into choices */
} option_kind;

typedef struct option_row {
    const char *name; /**< without the dashes */
    char letter;      /**< 0: none */
    option_kind kind;
    const char *arg; /**< name of the argument; NULL for flags */
    size_t offset;   /**< offset of the field in struct options */
    const char *help;
    const char *const *choices; /**< KIND_CHOICE: NULL-terminated */
    int64_t max;                /**< KIND_NUMBER, KIND_INDEX */
} option_row;

/** Indexed by option_id. */
extern const option_row option_table[OPT_COUNT];

/** Options that --help and the man pages show together. */
typedef struct option_group {
    const char *title;
    option_set members; /**< TAKES bits */
} option_group;

enum { OPTION_GROUPS = 6 };
/** In the order of --help. Options in no group belong to the last one. */
extern const option_group option_groups[OPTION_GROUPS];

/** @return the options of group `i` that are in the set `takes`. */
option_set option_group_of(int i, option_set takes);

typedef struct option_list {
    const char **items; /**< NULL-terminated; NULL when the option was not given */
    size_t count;
} option_list;

typedef enum progress_mode { PROGRESS_AUTO, PROGRESS_ALWAYS, PROGRESS_NEVER, PROGRESS_JSON } progress_mode;
typedef enum comm_mode { COMM_AUTO, COMM_NONE, COMM_MPI } comm_mode;

/** The parsed command line. Strings are borrowed from argv. */
typedef struct options {
    option_set given; /**< TAKES bits of the options on the command line */
    /* conversions, inspect */
    const char *output, *to, *tp_plan, *recipe, *config, *adapter_config, *strip_prefix, *tensor, *html;
    int64_t dp, tp, replicas, jobs; /**< 0: not given */
    int64_t rank;                   /**< valid if OPT_RANK was given */
    uint64_t memory;                /**< 0: not given */
    uint64_t max_shard_size;        /**< 0: not given */
    option_list include, exclude, rename, dtype_for, quantize, adapter, delta;
    fc_dtype dtype;      /**< valid if OPT_DTYPE was given */
    fc_dtype dequantize; /**< valid if OPT_DEQUANTIZE was given */
    int compress;        /**< 0: none */
    int progress;        /**< progress_mode */
    int color;           /**< color_mode */
    int comm;            /**< comm_mode */
    const char *weights;
    bool local, take_first;
    bool trust_objects, reverse, infer, model_only;
    bool force, resume, dry_run, tree, all, stats, headers_only, follow_external;
    int sort;      /**< inspect_sort */
    int64_t depth; /**< 0: not given */
    /* check and diff */
    const char *against, *schema, *junit, *like, *hdf5_plugins;
    option_list allow_missing, allow_unexpected;
    double rtol, atol;
    bool github, data, equal_nan, seal;
    /* deltas */
    int encoding, checksum;      /**< fc_delta_encoding, fc_delta_checksum */
    int64_t level;               /**< 0: not given */
    int64_t number, base, up_to; /**< valid if OPT_NUMBER, OPT_BASE and OPT_UP_TO were given */
    /* units */
    const char *policy, *classes;
    option_list ignore;
    /* all */
    int verbose;
    bool json, quiet, help, version;
    const char **operands;
    size_t noperands;
} options;

/* @return whether nothing is printed: with -q and without --json. */
static inline bool options_silent(const options *o) {
    return o->quiet && !o->json;
}

static inline bool option_given(const options *o, option_id id) {
    return (o->given & TAKES(id)) != 0;
}

/**
 * Parses the arguments after the command's name like getopt_long: options and operands in any order, `--opt=x`, `--opt
 * x`, `-j4`, `-qv`, and `--` ends the options. Option names cannot be abbreviated, so that scripts keep their meaning
 * when options are added.
 * @param of      the name of the command, for messages; NULL: none.
 * @param takes   the set of allowed options.
 * @param out     pass it to options_free, even after a failure.
 */
fc_code options_parse(int argc, char *const *argv, const char *of, option_set takes, options *out, fc_error *err);
void options_free(options *o);

/** @return the option called `name` (len bytes), or OPT_COUNT. */
option_id option_find(const char *name, size_t len);

/** @return the option with that letter, or OPT_COUNT. */
option_id option_find_letter(char letter);
