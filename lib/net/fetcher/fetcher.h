/*
 * What the files of the fetcher share. It is one thread in a confined process: a loop that waits for requests and for
 * servers. A name of a request becomes an object (a file) or a folder; what is learnt of these is kept. A transfer is
 * one request to a server, with its repetitions.
 */
#pragma once

#include "fsdpckpt/error.h"
#include "net/module.h"
#include "net/wire.h"

#include <curl/curl.h>
#include <stdbool.h>

enum {
    HEAD_BYTES = 1 << 20,         /* at the start of a file, read at once and kept, because headers are there */
    SHORT_HEAD = 64 << 10,        /* what is kept longer of each */
    MOST_HEADS = 64 << 20,        /* bytes of all heads that are kept */
    MOST_HEADER_BYTES = 64 << 10, /* of one answer */
    MOST_REDIRECTS = 5,
    MOST_TRIES = 6,
    MOST_ABORTS = 3, /* tries, when something has failed already */
    MOST_ETAG = 256,
    MOST_URL = 8192,
    MOST_PAGE = 64 << 20, /* bytes of an index or of a page of a list */
    MOST_ENTRIES = 1000000,
    MOST_NAMES = 128 << 20, /* bytes of the names of a list */
    MOST_PAGES = 10000,     /* of a list */
    MOST_INDEXED = 20000,   /* files of an index */
    FRESH_MS = 1000,        /* a name that is given twice within this time is asked for once */
    MOST_AHEAD = 256,       /* files that are opened before they are asked for */
    MOST_PARTS = 10000,     /* of an upload */
    MOST_ANSWER = 64 << 10, /* bytes that a server says about what is written, except lists */
    MD5_BYTES = 16,
    RUN_DIGITS = 16,
};

/* The end of the name of the metadata that says which run made an object. */
#define RUN_HEADER "fsdpckpt-run"

/* What is known of an object or a folder. */
typedef enum knowledge { STATE_NEW, STATE_ASKED, STATE_READY, STATE_MISSING, STATE_FAILED } knowledge;

/* A request that waits until the state of an object or a folder is known. */
typedef struct waiter {
    struct waiter *next;
    char *name; /* of the request */
    int kind;   /* fc_net_request_kind */
    int answer; /* socket */
    int file;   /* socket for FC_NET_OPEN, else -1 */
} waiter;

/* The version of an object that every read must be of. */
typedef struct version {
    char etag[MOST_ETAG];     /* "" if the server has none */
    char modified[MOST_ETAG]; /* Last-Modified, likewise */
    uint64_t size;
} version;

typedef struct object {
    struct object *next;
    char *name;
    knowledge state;
    fc_error error; /* of STATE_FAILED */
    version version;
    char *direct; /* where redirects led; NULL: nowhere else */
    unsigned char *head;
    size_t head_size;
    uint64_t used;       /* when the head was used last */
    int64_t known_since; /* in milliseconds */
    bool forgotten;      /* it is open or asked for, but its name now means another object */
    waiter *waiters;
} object;

typedef struct entry {
    char *name; /* relative to the folder */
} entry;

typedef struct folder {
    struct folder *next;
    char *name;
    knowledge state;
    fc_error error;
    entry *entries;
    size_t count, capacity;
    size_t bytes;     /* of the names of the entries */
    unsigned pages;   /* of its list that were asked for */
    unsigned pending; /* objects and pages that are still asked for */
    int64_t known_since;
    bool forgotten;
    waiter *waiters;
} folder;

/* A part of an upload. */
typedef struct sent_part {
    char *etag; /* NULL: the server does not have the part */
    uint64_t size;
} sent_part;

/* An object that is sent in parts. */
typedef struct upload {
    char *name;
    char *id;     /* the server's ID for it; NULL: the server does not know it */
    uint64_t run; /* for its metadata */
    sent_part *parts;
    size_t capacity;
    bool open;  /* it has a socket */
    bool ended; /* the server no longer knows it */
    bool stays; /* it is not aborted when its socket is closed */
} upload;

/* The uploads of other runs, which are aborted. */
typedef struct clearing {
    char *name;
    int answer; /* socket */
    bool is_folder;
    size_t pending; /* transfers */
    size_t count, pages;
    fc_error error; /* the first one */
} clearing;

/* An open file, or an upload. */
typedef struct opened_file {
    int socket;
    object *object; /* NULL: it is an upload */
    upload *upload;
} opened_file;

/* What the headers of the answer in progress say. */
typedef struct response {
    size_t bytes;
    long status;
    bool has_range, encoded;
    uint64_t first, last, total;
    uint64_t length; /* of the body */
    char etag[MOST_ETAG], modified[MOST_ETAG];
    char location[MOST_URL];
    char next[MOST_URL]; /* of a list: the URL of the next page (Link) */
    char region[64];     /* of a bucket */
    char code[64];       /* of an error of a bucket, such as ExpiredToken */
    uint64_t run;        /* that made the object, by its metadata; 0: it does not say */
    bool checked;
} response;

/* What the other end of a socket has not taken yet. Nobody waits for it. */
typedef struct outbox {
    struct outbox *next;
    int socket;
    unsigned char *bytes; /* those from `sent` to `size` */
    size_t sent, size, capacity;
    bool ends; /* the socket is closed when all are sent */
} outbox;

typedef enum transfer_kind {
    FOR_HEAD,
    FOR_RANGE,
    FOR_PAGE,
    /* These have an `outgoing`. */
    FOR_BEGIN,
    FOR_PARTS, /* a page of the parts of an upload that goes on */
    FOR_PART,
    FOR_COMPLETE,
    FOR_ABORT,
    FOR_WHOLE,
    FOR_DELETE,
    FOR_UPLOADS, /* a page of the uploads of a bucket */
    FOR_PROBE,   /* whether `next` may be done: there is no such object, or, to delete it, it is of the run `run` */
    FOR_PROOF    /* whether the object is of this run, because the answer to `next` was lost */
} transfer_kind;

/* What a transfer that writes has in addition. */
typedef struct outgoing {
    char *name;
    upload *upload;     /* or NULL */
    clearing *clearing; /* or NULL */
    char *id;           /* FOR_ABORT of another run's upload */
    char *text;         /* FOR_COMPLETE: what is sent */
    int file;           /* FOR_PART and FOR_WHOLE: the file that is sent; else -1 */
    uint64_t sent;      /* bytes of this try */
    uint64_t run;       /* number of the run that makes the object, or made what is deleted; 0: any */
    unsigned part;      /* FOR_PART: its number; FOR_COMPLETE, FOR_PARTS: how many there are */
    unsigned after;     /* FOR_PARTS: the last part of the page before */
    bool only_new;
    bool summed;  /* its MD5 sum was sent */
    bool probed;  /* there was no such object before */
    bool exists;  /* there is one */
    bool missing; /* FOR_PARTS, FOR_COMPLETE: there is no such upload */
    transfer_kind next;
} outgoing;

/* A server, or the proxy. */
typedef struct host_line {
    struct host_line *next;
    char *line;                  /* "host:port:addresses" */
    int64_t heard;               /* when a read received something last */
    int64_t average;             /* milliseconds until an answer comes; 0: not known */
    unsigned served;             /* most reads that were answered at the same time */
    unsigned most;               /* reads that may run at once; 0: any number */
    unsigned answers, doublings; /* since `most` was changed; see crowds.c */
} host_line;

typedef enum transfer_state { WAITS, NEEDS_HOST, RUNS } transfer_state;

typedef struct transfer {
    struct transfer *next;
    struct fetcher *fetcher; /* to which it belongs */
    transfer_kind purpose;
    transfer_state progress;
    object *object; /* FOR_HEAD and FOR_RANGE */
    folder *folder; /* FOR_PAGE; FOR_HEAD: the one that wants the object, or NULL */
    outgoing *out;  /* NULL: it reads */
    int reply;      /* FOR_RANGE and writes: socket for the answer, which can also ask for an address; else -1 */
    int file;       /* FOR_RANGE that was announced: the socket of the file, whose next read may be of it; else -1 */
    char *url;
    uint64_t offset, length, done;
    uint64_t from, until; /* FOR_RANGE: what its reader wants, counted like `done` */
    unsigned char *into;  /* FOR_RANGE: where in shared memory; NULL: the bytes are sent */
    size_t given;         /* FOR_RANGE: bytes that its reader has from the head */
    size_t taken;         /* FOR_RANGE: bytes that were taken of those that libcurl gives again after a pause */
    unsigned char *body;  /* what the server sent, except FOR_RANGE: `done` bytes */
    size_t capacity;
    int tries, redirects;
    bool moved;      /* to the region that the server named */
    bool paused;     /* until what it sent has been taken, or has a reader */
    bool plain_http; /* the name has http://, so it may stay there */
    bool proxied;    /* the server is asked through the proxy */
    int64_t wake;    /* WAITS: when it starts, in milliseconds; NEEDS_HOST: when it asks somebody else */
    int asked;       /* NEEDS_HOST: socket of who was asked */
    host_line *host; /* which it asks; NULL: not known yet */
    int64_t began;   /* RUNS: when; 0: it waited for others */
    int64_t since;   /* RUNS: when it began, or got its reader */
    int restarts;    /* because its server answered nobody */
    bool heard;      /* RUNS: it received bytes of a body */
    struct curl_slist *headers, *resolve;
    CURL *easy;
    response answer;
    fc_error error; /* code FC_OK: none */
} transfer;

/* Where a bucket is, if its server said so. */
typedef struct bucket_place {
    struct bucket_place *next;
    char *bucket; /* "s3://bucket" */
    char region[64];
} bucket_place;

/* The query of a URL, from '?' on, and the name without it. */
typedef struct hidden_query {
    struct hidden_query *next;
    char *name, *query;
} hidden_query;

typedef struct fetcher {
    fc_net_setup setup;
    fc_error failed; /* to start, which is the answer to all requests */
    int requests;
    CURLM *multi;
    char *certificates;
    size_t certificates_size;
    void *store; /* the certificates as OpenSSL has them; NULL: libcurl parses them */
    object *objects;
    folder *folders;
    transfer *transfers;
    host_line *hosts;
    bucket_place *places;
    hidden_query *queries;
    outbox *outboxes;
    opened_file *files;
    size_t nfiles, capacity;
    bool sums;      /* a bucket demands MD5 sums, so they are sent */
    int64_t leaves; /* the caller has gone: when the fetcher ends; 0: the caller is there */
    size_t heads;   /* bytes */
    uint64_t clock, random;
} fetcher;

/* ---- outboxes.c ---- */

/* Sends an answer and its text or data, without waiting: what the other end does not take now is kept for it. Failures
   are ignored: the caller has gone. @return false after one */
bool fetcher_send(fetcher *f, int socket, fc_net_answer head, const void *bytes, size_t size);
void fetcher_send_error(fetcher *f, int socket, const fc_error *error);
/* Closes the socket of an answer when all is sent. */
void fetcher_close(fetcher *f, int socket);
/* Whether the other end has not taken all. A transfer waits then, so that at most one piece of it is kept. */
bool outbox_has(const fetcher *f, int socket);
/* Sends more of what was kept. Transfers that waited for it go on. */
void outboxes_send(fetcher *f);

/* ---- serve.c ---- */

int64_t fetcher_now(void);
int fetcher_serve(void *state);

/* ---- names.c ---- */

typedef enum provider { PROVIDER_HTTP, PROVIDER_S3, PROVIDER_GS, PROVIDER_HUB } provider;

provider name_provider(const char *name);
/* Whether the name is that of a file by its extension. */
bool name_is_file(const char *name);
/* Whether a file of this name has tensors. */
bool name_has_data(const char *name);
/* Writes the URL of an object. @return false if it is too long */
bool name_url(const fetcher *f, const char *name, char url[MOST_URL]);
/* Writes the URL of the bucket. @param key receives the rest of the name */
bool name_bucket_url(const fetcher *f, const char *name, char url[MOST_URL], const char **key);
/* @return the region of the bucket of a name */
const char *name_region(const fetcher *f, const char *name);
/* Keeps the region that a server said. @return false if it is none, or out of memory */
bool name_region_keep(fetcher *f, const char *name, const char *region);
/* Writes the URL of the files of a model on the hub, or of their list. @param path receives the rest of the name */
bool name_hub_url(const fetcher *f, const char *name, bool list, char url[MOST_URL], const char **path);
/* @return the length of the part of a name that is listed as one folder */
size_t name_root(const char *name);
/* Append text as it is, and encoded as a value of a query. @return false if the URL is too long */
bool url_add(char url[MOST_URL], const char *text);
bool url_add_value(char url[MOST_URL], const char *text);

/* ---- queries.c ---- */

/* Keeps the query of a URL. @return the number for its name; 0: it cannot be kept */
uint64_t query_keep(fetcher *f, const char *url);
/* Appends the query of a name, if it has one. @return false if the URL is too long */
bool query_add(const fetcher *f, const char *name, char url[MOST_URL]);
/* Whether a name has the mark of a hidden query, and there is none of this name: there can be no such file. */
bool query_is_lost(const fetcher *f, const char *name);

/* ---- objects.c ---- */

object *object_get(fetcher *f, const char *name);
/* Begins to read the head of an object that is new. */
void object_open(fetcher *f, object *o, folder *wanted_by, int reply);
/* Does so for a file that will be asked for. */
void object_expect(fetcher *f, const char *name);
void object_opened(fetcher *f, object *o, folder *wanted_by);
/* Answers a request for a name, now or when it is known what the name is. Owns the sockets. */
void object_request(fetcher *f, fc_net_request_kind kind, const char *name, int answer, int file);
void object_read(fetcher *f, const opened_file *file, const fc_net_request *request, int answer);
/* Makes a transfer of a range that has no reader. @return NULL: it cannot */
transfer *object_transfer(fetcher *f, object *o, uint64_t offset, uint64_t length);
void object_tell(fetcher *f, const object *o, int answer);
void object_end_waiters(fetcher *f, object *o);
void waiters_retry(fetcher *f, waiter *first);
uint64_t object_identity(const object *o);
/* Why nothing can be asked about a name. @return false if it can */
bool name_is_refused(const fetcher *f, const char *name, fc_error *error);
/* Makes a socket that of an open file or upload. @return false: out of memory */
bool fetcher_add_file(fetcher *f, opened_file file);

/* ---- refresh.c ---- */

/* A person gives the name: what was known of it for a while, or was not there, is asked for again. */
void fetcher_forget(fetcher *f, const char *name);
/* An object was written or deleted: what was known of it is wrong. */
void fetcher_forget_now(fetcher *f, const char *name);

/* ---- folders.c ---- */

/* A new folder. Its name is the first `size` bytes of `name`. */
folder *folder_get(fetcher *f, const char *name, size_t size);
/* The known folder that contains the name, or is it; NULL: none. @param rest the name relative to it */
folder *folder_of(const fetcher *f, const char *name, const char **rest);
void folder_open(fetcher *f, folder *d, int reply);
/* An object that the folder wanted is known. */
void folder_object_known(fetcher *f, folder *d, object *o);
void folder_page_done(fetcher *f, folder *d, transfer *t);
/* What a name in the folder is: STATE_READY or STATE_MISSING. */
knowledge folder_find(const folder *d, const char *rest, bool *is_folder);
/* Sends the names directly in a folder. @param below relative to it, "" for itself */
void folder_send(fetcher *f, const folder *d, const char *below, int answer);

/* Adds an entry. @return false: out of memory */
bool folder_add(folder *d, const char *name);
void folder_end(fetcher *f, folder *d, const fc_error *error);

/* ---- lists.c ---- */

/* Asks for the list of a folder, from a mark of the last page on, or from its beginning. @return false: it cannot */
bool list_ask(fetcher *f, folder *d, const char *mark);
/* Writes the URL of the first page of the list of a bucket. @return false if it is too long */
bool list_url(const fetcher *f, const folder *d, char url[MOST_URL]);
/* Takes a page. @return false after setting `error` */
bool list_take(fetcher *f, folder *d, transfer *t, fc_error *error);

/* ---- xml.c ---- */

/* Finds a tag, which begins with '<'. */
const char *xml_find(const char *text, const char *tag);
/* @return the text of the next element after `at`, which moves behind it; NULL: there is none */
char *xml_next_text(const char **at, const char *open, const char *close);

/* ---- transfers.c ---- */

transfer *transfer_new(fetcher *f, transfer_kind purpose, const char *url);
void transfer_free(fetcher *f, transfer *t);
/* Ends a transfer with t->error, or with success. */
void transfer_end(fetcher *f, transfer *t);
void transfer_fail(fetcher *f, transfer *t, fc_code code, const char *what);
/* Begins it again after a pause, unless that was done often. */
void transfer_repeat(fetcher *f, transfer *t, int64_t server_asks_ms, const char *why);
void transfers_start(fetcher *f);
/* Takes finished ones. @return whether there were any */
bool transfers_finish(fetcher *f);
/* Those that wait until a socket has taken what was sent go on. */
void transfers_go_on(fetcher *f, int socket);
/* @return milliseconds until the next one may start */
int transfers_pause(const fetcher *f);
void transfers_host_known(fetcher *f, const char *line);

/* The name for messages. */
const char *transfer_name(const transfer *t);

/* ---- requests.c ---- */

/* Makes t->easy, for the server at "host:port". @return false if it cannot */
bool request_make(const fetcher *f, transfer *t, const char *where);
bool transfer_is_of_bucket(const transfer *t);

/* ---- proxy.c ---- */

/* Whether the server at "host:port" is asked through the proxy. */
bool proxy_is_used(const fetcher *f, const char *where);
/* Writes "host:port" of the proxy. @return false if its URL cannot be understood */
bool proxy_where(const fetcher *f, char *where, size_t size);
/* Makes a request use the proxy, or none. @return false if it cannot */
bool proxy_set(const fetcher *f, const transfer *t);

/* ---- trust.c ---- */

/* Reads the certificates that are trusted, before the fetcher is confined. */
void trust_read(fetcher *f);
/* Makes a request trust them, and no others. @return false if it cannot */
bool trust_set(const fetcher *f, CURL *easy);

/* ---- hosts.c ---- */

enum { ASK_AGAIN_MS = 1000 };

/* Writes "host:port" of the URL. @return what is wrong with the URL; NULL: nothing */
const char *host_find(const transfer *t, char *where, size_t size);
/* Writes "host:port" of the peer: the server, or the proxy. @return false after failing */
bool host_find_peer(fetcher *f, transfer *t, const char *where, char *peer, size_t size);
/* @return "host:port:addresses", "" if it has no address, NULL if that must be asked for */
const char *host_known(const fetcher *f, const char *where);
void host_ask(fetcher *f, transfer *t, const char *where);
/* Whether the process that was asked has gone without an answer: it was killed. */
bool host_is_asked_in_vain(const transfer *t);
/* Whether "host:port:addresses" has some. */
bool host_has_address(const char *line);

/* ---- refusals.c ---- */

/* Asks again in the region that the server named. @return false if that is none, or was done before */
bool transfer_move(fetcher *f, transfer *t);
/* Ends a transfer with what the server says, and what can be done about it. */
void transfer_refused(fetcher *f, transfer *t);

/* ---- answers.c ---- */

/* Ends a transfer whose server sent too much. @return 0 */
size_t answer_refuse_more(transfer *t);
size_t answer_take_header(char *line, size_t size, size_t count, void *context);
/* Checks the headers of an answer with a body. @return false after setting t->error */
bool answer_check(transfer *t);
/* Keeps what a page of a bucket says of an error: <Code>ExpiredToken</Code>, <Region>eu-north-1</Region>. */
void answer_take_page(response *a, const char *bytes, size_t size);
bool answer_is_busy(long status);
bool answer_is_redirect(long status);
