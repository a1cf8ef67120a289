/*
 * Writes state dicts, at once or in a thread. The thread has a communicator of its own, and touches nothing of the
 * training step but the stream of the copies.
 */
#include "fsdpckpt/try.h"
#include "train/state_dict.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static fc_code write_dict(fc_fsdp_state_dict *dict, const char *path, const fc_fsdp_save_options *options,
                          fc_comm *ranks, fc_error *err) {
    const fc_convert_options how = {.format = options->format,
                                    .selection = {.keep_layout = dict->type != FC_FULL_STATE_DICT},
                                    .force = options->force,
                                    .reporter = options->reporter,
                                    .work = options->work,
                                    .comm = ranks,
                                    .own_shards = true};
    FC_TRY(fc_comm_agree(ranks, fc_fsdp_state_dict_wait(dict, err), err));
    return fc_convert(dict->checkpoint, path, &how, NULL, err);
}

static fc_code check_options(const fc_fsdp_save_options *options, fc_error *err) {
    return options->format ? FC_OK : fc_fail(err, FC_EUSAGE, "a save needs a format");
}

fc_code fc_fsdp_save(const fc_fsdp_state *state, fc_state_dict_type type, const char *path,
                     const fc_fsdp_save_options *options, fc_comm *ranks, fc_error *err) {
    fc_fsdp_state_dict *dict = NULL;
    FC_TRY(fc_comm_agree(ranks, check_options(options, err), err));
    FC_TRY(fc_state_dict_make(state, type, true, NULL, ranks, &dict, err));
    fc_code rc = write_dict(dict, path, options, ranks, err);
    fc_fsdp_state_dict_free(dict);
    return rc;
}

/* ---- in the background ---- */

struct fc_fsdp_saver {
    fc_comm *ranks; /* the caller's; borrowed */
    fc_comm *own;   /* the same ranks; used by the thread while a save runs */
    bool started;   /* whether there is a save that was not waited for */
    bool has_thread;
    pthread_t thread;
    atomic_bool done;
    fc_fsdp_state_dict *dict;
    fc_staging spare; /* memory of the last state dict, for the next */
    char *path;
    fc_fsdp_save_options options;
    fc_progress progress; /* if the caller has none */
    fc_code code;         /* the outcome, once `done` */
    fc_error error;
};

fc_code fc_fsdp_saver_new(fc_comm *ranks, fc_fsdp_saver **out, fc_error *err) {
    fc_fsdp_saver *s = calloc(1, sizeof *s);
    fc_code rc = s ? FC_OK : fc_no_memory(err, NULL);
    *out = NULL;
    if (rc == FC_OK && !ranks->concurrent) {
        rc = fc_fail(err, FC_EUNSUPPORTED,
                     "%s: two threads cannot use communicators at the same time, so nothing can be saved in the "
                     "background%s",
                     ranks->backend, strcmp(ranks->backend, "mpi") == 0 ? ": start MPI with MPI_THREAD_MULTIPLE" : "");
    }
    FC_TRY_GOTO(fc_comm_agree(ranks, rc, err), rc, failed);
    FC_TRY_GOTO(s ? ranks->split(ranks, 0, &s->own, err) : FC_ENOMEM, rc, failed);
    s->ranks = ranks;
    atomic_init(&s->done, true);
    *out = s;
    return FC_OK;
failed:
    free(s);
    return rc;
}

static void *run_writer(void *context) {
    fc_fsdp_saver *s = context;
    s->code = write_dict(s->dict, s->path, &s->options, s->own, &s->error);
    atomic_store(&s->done, true);
    return NULL;
}

/* Signals are for the program's own threads. If no thread can be started, the save runs here: the other ranks wait for
 * this one. */
static void start_thread(fc_fsdp_saver *s) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    s->has_thread = pthread_create(&s->thread, NULL, run_writer, s) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!s->has_thread) {
        run_writer(s);
    }
}

/* Fails on all ranks if a save still runs on one. */
static fc_code refuse_second(const fc_fsdp_saver *s, fc_error *err) {
    fc_code mine = FC_OK;
    if (!fc_fsdp_save_is_done(s)) {
        mine = fc_fail(err, FC_EUSAGE, "%s is still being saved: wait for it, or save less often", s->path);
    }
    return fc_comm_agree(s->ranks, mine, err);
}

static fc_code prepare_save(fc_fsdp_saver *s, const char *path, const fc_fsdp_save_options *options, fc_error *err) {
    FC_TRY(check_options(options, err));
    s->path = strdup(path);
    s->options = *options;
    memset(&s->progress, 0, sizeof s->progress);
    if (!s->options.work.progress) {
        s->options.work.progress = &s->progress;
    }
    return s->path ? FC_OK : fc_no_memory(err, path);
}

static void forget(fc_fsdp_saver *s) {
    if (s->dict) {
        fc_staging_free(&s->spare);
        s->spare = s->dict->staging;
        s->dict->staging = (fc_staging){0};
    }
    fc_fsdp_state_dict_free(s->dict);
    free(s->path);
    s->dict = NULL;
    s->path = NULL;
    s->started = false;
}

fc_code fc_fsdp_save_start(fc_fsdp_saver *s, const fc_fsdp_state *state, fc_state_dict_type type, const char *path,
                           const fc_fsdp_save_options *options, fc_error *err) {
    fc_code rc;
    if (s->started && options->refuse_second) {
        FC_TRY(refuse_second(s, err));
    }
    FC_TRY(fc_fsdp_save_wait(s, err));
    FC_TRY_GOTO(fc_comm_agree(s->ranks, prepare_save(s, path, options, err), err), rc, failed);
    FC_TRY_GOTO(fc_state_dict_make(state, type, false, &s->spare, s->ranks, &s->dict, err), rc, failed);
    s->started = true;
    atomic_store(&s->done, false);
    start_thread(s);
    return FC_OK;
failed:
    forget(s);
    return rc;
}

bool fc_fsdp_save_is_done(const fc_fsdp_saver *s) {
    return atomic_load(&s->done);
}

fc_code fc_fsdp_save_wait(fc_fsdp_saver *s, fc_error *err) {
    if (!s->started) {
        return FC_OK;
    }
    fc_state_dict_settle(s->dict);
    if (s->has_thread) {
        pthread_join(s->thread, NULL);
    }
    fc_code rc = s->code;
    if (rc != FC_OK && err) {
        *err = s->error;
    }
    forget(s);
    return rc;
}

void fc_fsdp_saver_free(fc_fsdp_saver *s) {
    if (!s) {
        return;
    }
    if (s->started) {
        atomic_store(&s->options.work.progress->cancel, true);
        fc_fsdp_save_wait(s, NULL);
    }
    fc_staging_free(&s->spare);
    s->own->free(s->own);
    free(s);
}
