/*
 * The program: finds the command, parses its options, runs it, and turns an error into one line on stderr and an exit
 * status.
 */
#include "options/command.h"
#include "options/help.h"
#include "options/hint.h"
#include "options/words.h"
#include "output/terminal.h"
#include "progress_view.h"
#include "queries.h"
#include "signals.h"

#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fsdpckpt/try.h"

static fc_code unknown_command(const char *name, fc_error *err) {
    const char *best = words_command(name);
    if (best) {
        return fc_fail(err, FC_EUSAGE, "unknown command '%s'; did you mean '%s'?", name, best);
    }
    if (access(name, F_OK) == 0) {
        return fc_fail(err, FC_EUSAGE, "'%s' is a path, not a command; did you mean 'fsdpckpt inspect %s'?", name,
                       name);
    }
    return fc_fail(err, FC_EUSAGE, "unknown command '%s'; see 'fsdpckpt --help'", name);
}

/* Without a command: --help, --version, or a usage error. */
static fc_code answer_bare(const options *o, int argc, text_out *out, fc_error *err) {
    if (o->version) {
        help_version(out);
        return FC_OK;
    }
    if (o->help) {
        help_program(out);
        return FC_OK;
    }
    if (argc > 0) {
        return fc_fail(err, FC_EUSAGE, "no command given; see 'fsdpckpt --help'");
    }
    out->fd = STDERR_FILENO; /* prints the usage, but is still an error */
    help_program(out);
    return FC_EUSAGE;
}

/* Without a command: --help, --version, or a usage error. */
static fc_code run_bare(int argc, char **argv, text_out *out, fc_error *err) {
    options o;
    fc_code rc;
    FC_TRY_GOTO(options_parse(argc, argv, NULL, TAKES(OPT_HELP) | TAKES(OPT_VERSION), &o, err), rc, out);
    rc = answer_bare(&o, argc, out, err);
out:
    options_free(&o);
    return rc;
}

/* The correct form of the command line, for the end of a usage error. */
static const char *usage_of(const command *c, char *buf, size_t size) {
    snprintf(buf, size, "fsdpckpt %s %s%s%s", c->name, c->operands, c->synopsis ? " " : "",
             c->synopsis ? c->synopsis : "");
    return buf;
}

/* Whether the argument of an option that takes a glob is a file, as when the shell has expanded it. */
static bool names_a_file(const option_list *globs) {
    for (size_t i = 0; i < globs->count; i++) {
        if (access(globs->items[i], F_OK) == 0) {
            return true;
        }
    }
    return false;
}

/* The probable purpose of an extra operand. */
static const char *hint_for_extra(const command *c, const options *o) {
    const size_t most = command_most_operands(c);
    const char *extra = o->operands[most];
    const char *extension = strrchr(extra, '.');
    if ((c->needs & TAKES(OPT_OUTPUT)) && !o->output && o->noperands == most + 1) {
        return "; the target goes after -o";
    }
    if (access(extra, F_OK) == 0 && (names_a_file(&o->include) || names_a_file(&o->exclude))) {
        return "; if the shell has expanded a glob, quote it, as in --include '*.weight'";
    }
    const bool second = o->noperands == most + 1 && access(extra, F_OK) == 0;
    if ((c->takes & TAKES(OPT_AGAINST)) && (second || (extension && strcmp(extension, ".json") == 0))) {
        return "; a schema goes after --schema, another checkpoint after --against";
    }
    if (o->noperands > most + 1 && access(o->operands[0], F_OK) == 0 && access(extra, F_OK) == 0) {
        return "; if the shell has expanded a glob, quote it, as in --include '*.weight'";
    }
    if (access(extra, F_OK) == 0) {
        return most == 1 ? "; for a checkpoint in several files, give its directory" : "";
    }
    return c->takes & TAKES(OPT_TENSOR) ? "; a tensor name goes after --tensor"
                                        : "; an argument with spaces needs quotes";
}

static fc_code check_operands(const command *c, const options *o, fc_error *err) {
    char usage[160];
    const size_t most = command_most_operands(c);
    if (o->noperands < command_least_operands(c)) {
        return fc_fail(err, FC_EUSAGE, "%s needs %s; use '%s'", c->name, c->operands, usage_of(c, usage, sizeof usage));
    }
    if (o->noperands > most) {
        return fc_fail(err, FC_EUSAGE, "%s takes only %s; '%s' is one argument too many%s", c->name, c->operands,
                       o->operands[most], hint_for_extra(c, o));
    }
    for (size_t i = 0; i < o->noperands; i++) {
        if (!*o->operands[i]) {
            return fc_fail(err, FC_EUSAGE, "%s: %s is empty; is a shell variable unset?", c->name, c->operands);
        }
    }
    if ((c->needs & TAKES(OPT_OUTPUT)) && o->output && strcmp(o->output, "-") == 0) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: -o -: a checkpoint cannot be written to a pipe, because its bytes are not written in "
                       "order; name a file or directory",
                       c->name);
    }
    for (int id = 0; id < OPT_COUNT; id++) {
        if ((c->needs & TAKES(id)) && !(o->given & TAKES(id)) && !o->dry_run) {
            char term[64];
            help_option_term(term, sizeof term, &option_table[id]);
            return fc_fail(err, FC_EUSAGE, "%s needs %s%s; use '%s'", c->name, term,
                           c->takes & TAKES(OPT_DRY_RUN) ? " (or --dry-run)" : "", usage_of(c, usage, sizeof usage));
        }
    }
    return FC_OK;
}

typedef void help_printer(text_out *out, const command *c);

/* @return how to print the help that the line asks for, or NULL. `reshard help` asks for it unless a file has that
 * name. */
static help_printer *help_asked_for(int argc, char **argv) {
    help_printer *asked = argc == 1 && strcmp(argv[0], "help") == 0 && access(argv[0], F_OK) != 0 ? help_command : NULL;
    for (int i = 0; i < argc && !asked && strcmp(argv[i], "--") != 0; i++) {
        asked = strcmp(argv[i], "-h") == 0       ? help_command_briefly
                : strcmp(argv[i], "--help") == 0 ? help_command
                                                 : NULL;
    }
    return asked;
}

static fc_code run_shown(const command *c, const options *o, text_out *out, fc_error *err) {
    fc_progress progress = {.context = NULL};
    cli_notes notes = {.count = 0};
    cli_call call = {o, out, &progress, progress_now(), &notes, fc_session_new(), fc_arena_new()};
    progress_view *view = progress_start(&progress, o, call.started);
    fc_code rc = call.arena && call.session ? FC_OK : fc_no_memory(err, NULL);
    if (rc == FC_OK && o->hdf5_plugins) {
        rc = fc_session_set_plugins(call.session, o->hdf5_plugins, err);
    }
    rc = rc == FC_OK ? c->run(&call, err) : rc;
    fc_session_free(call.session);
    fc_arena_free(call.arena);
    progress_stop(view);
    for (size_t i = 0; i < notes.count; i++) {
        if ((rc == FC_OK || rc == FC_EFOUND) && !o->quiet && !notes.silent) {
            text_report("%s", notes.lines[i]);
        }
        free(notes.lines[i]);
    }
    return rc;
}

static fc_code run_parsed(const command *c, const options *o, text_out *out, fc_error *err) {
    if (o->help) {
        help_command(out, c);
        return FC_OK;
    }
    if (o->version) {
        help_version(out);
        return FC_OK;
    }
    FC_TRY(check_operands(c, o, err));
    return run_shown(c, o, out, err);
}

static fc_code run_command(const command *c, int argc, char **argv, text_out *out, fc_error *err) {
    options o;
    fc_code rc = options_parse(argc, argv, c->name, c->takes, &o, err);
    terminal_set_color(rc == FC_OK ? (color_mode)o.color : COLOR_AUTO);
    help_printer *help = help_asked_for(argc, argv);
    if (help) { /* wins over errors in the rest of the line */
        help(out, c);
        rc = FC_OK;
    } else if (rc == FC_OK) {
        rc = run_parsed(c, &o, out, err);
    }
    options_free(&o);
    return rc;
}

/* `fsdpckpt help reshard` means `fsdpckpt reshard --help`. */
static fc_code run_help(int argc, char **argv, text_out *out, fc_error *err) {
    const command *c = argc > 0 ? command_find(argv[0]) : NULL;
    if (argc > 0 && !c && argv[0][0] != '-' && strcmp(argv[0], "help") != 0) {
        return unknown_command(argv[0], err);
    }
    if (c) {
        help_command(out, c);
    } else {
        help_program(out);
    }
    return FC_OK;
}

/* Prints tensor names for shell completion. */
static fc_code print_names(const char *path, text_out *out, fc_error *err) {
    const fc_open_options how = {.headers_only = true};
    fc_checkpoint *checkpoint = NULL;
    FC_TRY(fc_checkpoint_open(path, &how, &checkpoint, err));
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        text_name(out, checkpoint->tensors[i].name);
        text_puts(out, "\n");
    }
    fc_checkpoint_close(checkpoint);
    return FC_OK;
}

/* Whether the word after the option `arg` is the argument of the option. */
static bool takes_next(const char *arg) {
    option_id id = OPT_COUNT;
    if (arg[1] == '-') {
        id = option_find(arg + 2, strlen(arg + 2));
        return id != OPT_COUNT && option_table[id].arg;
    }
    for (const char *s = arg + 1; *s; s++) {
        id = option_find_letter(*s);
        if (id == OPT_COUNT || option_table[id].arg) {
            return id != OPT_COUNT && !s[1];
        }
    }
    return false;
}

/* @return the index of the first word that is neither an option nor the argument of one, or argc. */
static int find_command(int argc, char **argv) {
    int at = 1;
    while (at < argc && argv[at][0] == '-' && strcmp(argv[at], "--") != 0) {
        at += 1 + takes_next(argv[at]);
    }
    return at < argc ? at : argc;
}

static fc_code dispatch_command(int argc, char **argv, text_out *out, fc_error *err) {
    int at = find_command(argc, argv);
    if (at > 1 && at < argc && command_find(argv[at])) { /* options before the command belong to it */
        char *name = argv[at];
        memmove(argv + 2, argv + 1, (size_t)(at - 1) * sizeof *argv);
        argv[1] = name;
    }
    if (argc < 2 || argv[1][0] == '-') {
        return run_bare(argc - (argc > 0), argv + (argc > 0), out, err);
    }
    if (strcmp(argv[1], "help") == 0) {
        return run_help(argc - 2, argv + 2, out, err);
    }
    if (strcmp(argv[1], "version") == 0) {
        help_version(out);
        return FC_OK;
    }
    if (strcmp(argv[1], "__names") == 0 && argc == 3) {
        return print_names(argv[2], out, err);
    }
    const command *c = command_find(argv[1]);
    if (!c) {
        return unknown_command(argv[1], err);
    }
    return run_command(c, argc - 2, argv + 2, out, err);
}

/*
 * If a standard descriptor is closed, the next file that is opened gets its number, and an error message could end up
 * in a tensor. This occupies the number with /dev/null, opened in a mode in which using it still fails.
 */
static bool hold_standard_descriptors(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd) {
            return false;
        }
    }
    return true;
}

int main(int argc, char **argv) {
#ifdef __GLIBC__
    /* Its threshold would rise to the size of the arenas' blocks, and then freed arenas would stay in the heap. */
    mallopt(M_MMAP_THRESHOLD, 512 << 10);
#endif
    fc_error err = {FC_OK, ""};
    if (!hold_standard_descriptors()) {
        return FC_EIO;
    }
    setlocale(LC_CTYPE, "");
    terminal_set_color(COLOR_AUTO);
    signals_install();
    text_out *out = malloc(sizeof *out);
    if (!out) {
        fputs("fsdpckpt: out of memory\n", stderr);
        return FC_EIO;
    }
    text_out_init(out, STDOUT_FILENO);
    fc_code rc = queries_hide(argc, argv, &err);
    rc = rc == FC_OK ? dispatch_command(argc, argv, out, &err) : rc;
    int errnum = text_flush(out);
    if (errnum == EPIPE) {
        /* `fsdpckpt inspect … | head`: the reader has stopped reading. */
        errnum = 0;
    }
    if (rc == FC_OK && errnum != 0) {
        rc = fc_fail_errno(&err, errnum, "standard output: cannot be written");
    }
    if (rc != FC_OK && err.message[0]) { /* without a message, the error is on stdout or another rank prints it */
        char hint[8 * sizeof err.about + 128], line[sizeof err.message + sizeof hint];
        snprintf(line, sizeof line, "%s%s", err.message, hint_text(&err, hint, sizeof hint));
        text_report_error(line);
    }
    free(out);
    return fc_exit_status(rc);
}
