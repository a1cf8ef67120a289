/*
 * Reads credentials as other programs do: see setup.h. Nothing of them is ever printed.
 */
#include "net/setup.h"

#include <ctype.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MOST_LINE = 8192, MOST_WRONG = sizeof((fc_net_setup *)0)->wrong_hub };

static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* A value and its room. */
typedef struct place {
    char *out;
    size_t size;
    char *wrong; /* receives what is wrong with the value; has MOST_WRONG bytes */
} place;

#define PLACE(setup, member, wrong) ((place){(setup)->member, sizeof(setup)->member, (setup)->wrong})

/* Copies a value without the blanks at its ends, unless one is known already. A newline would end the header of the
   request that the value is sent in. */
static void copy(place to, const char *what, const char *value) {
    size_t n = value ? strlen(value) : 0;
    while (n > 0 && isspace((unsigned char)*value)) {
        value++;
        n--;
    }
    while (n > 0 && isspace((unsigned char)value[n - 1])) {
        n--;
    }
    bool good = n < to.size;
    for (size_t i = 0; i < n; i++) {
        good = good && !iscntrl((unsigned char)value[i]);
    }
    if (good && !to.out[0]) {
        snprintf(to.out, to.size, "%.*s", (int)n, value ? value : "");
    } else if (!good && !to.out[0] && !to.wrong[0]) {
        snprintf(to.wrong, MOST_WRONG, "%s is too long or has a newline: set it again", what);
    }
}

/* A password in a URL would be sent, and not be used. */
static void check_url(place url, const char *what) {
    const char *host = strncmp(url.out, "https://", 8) == 0  ? url.out + 8
                       : strncmp(url.out, "http://", 7) == 0 ? url.out + 7
                                                             : "";
    const size_t n = strlen(url.out);
    if (n > 0 && !url.wrong[0] && (!*host || *host == '/' || strpbrk(url.out, "@?# \\"))) {
        snprintf(url.wrong, MOST_WRONG, "%s must be https://host, without a user or a query", what);
    }
    if (n > 0 && url.out[n - 1] == '/') {
        url.out[n - 1] = '\0';
    }
}

/* Removes blanks at both ends. */
static char *trim(char *text) {
    while (isspace((unsigned char)*text)) {
        text++;
    }
    size_t n = strlen(text);
    while (n > 0 && isspace((unsigned char)text[n - 1])) {
        text[--n] = '\0';
    }
    return text;
}

/* Takes "key = value" of a section of a file of AWS. */
static void take_line(fc_net_setup *s, char *line) {
    char *equals = strchr(line, '=');
    if (!equals) {
        return;
    }
    *equals = '\0';
    const char *key = trim(line), *value = equals + 1;
    if (strcmp(key, "aws_access_key_id") == 0) {
        copy(PLACE(s, key, wrong_bucket), key, value);
    } else if (strcmp(key, "aws_secret_access_key") == 0) {
        copy(PLACE(s, secret, wrong_bucket), key, value);
    } else if (strcmp(key, "aws_session_token") == 0) {
        copy(PLACE(s, token, wrong_bucket), key, value);
    } else if (strcmp(key, "region") == 0) {
        copy(PLACE(s, region, wrong_bucket), key, value);
    } else if (strcmp(key, "endpoint_url") == 0) {
        copy(PLACE(s, endpoint, wrong_bucket), key, value);
    }
}

/* @param path NULL: `below` in the home directory */
static FILE *open_own(const char *path, const char *below) {
    char whole[PATH_MAX] = "";
    const char *home = getenv("HOME");
    if (!path && home && snprintf(whole, sizeof whole, "%s/%s", home, below) < (int)sizeof whole) {
        path = whole;
    }
    return path ? fopen(path, "re") : NULL;
}

static void read_profile(fc_net_setup *s, const char *path, const char *below, const char *profile) {
    char line[MOST_LINE], section[MOST_LINE] = "";
    FILE *file = open_own(path, below);
    while (file && fgets(line, sizeof line, file)) {
        char *text = trim(line), *end = strchr(text, ']');
        if (*text == '[' && end) {
            *end = '\0';
            const char *name = trim(text + 1);
            name += strncmp(name, "profile ", 8) == 0 ? 8 : 0;
            name += strspn(name, " \t");
            memmove(section, name, strlen(name) + 1);
        } else if (*text != '#' && *text != ';' && strcmp(section, profile) == 0) {
            take_line(s, text);
        }
    }
    if (file) {
        fclose(file);
    }
}

/* Takes a variable, unless the value is known already. */
static void copy_variable(place to, const char *name) {
    copy(to, name, variable(name));
}

static void read_s3(fc_net_setup *s) {
    const char *profile = variable("AWS_PROFILE");
    copy_variable(PLACE(s, region, wrong_bucket), "AWS_REGION");
    copy_variable(PLACE(s, region, wrong_bucket), "AWS_DEFAULT_REGION");
    copy_variable(PLACE(s, endpoint, wrong_bucket), "AWS_ENDPOINT_URL_S3");
    copy_variable(PLACE(s, endpoint, wrong_bucket), "AWS_ENDPOINT_URL");
    if (variable("AWS_ACCESS_KEY_ID") && variable("AWS_SECRET_ACCESS_KEY")) {
        copy_variable(PLACE(s, key, wrong_bucket), "AWS_ACCESS_KEY_ID");
        copy_variable(PLACE(s, secret, wrong_bucket), "AWS_SECRET_ACCESS_KEY");
        copy_variable(PLACE(s, token, wrong_bucket), "AWS_SESSION_TOKEN");
    }
    const char *payer = variable("AWS_REQUEST_PAYER"); /* as GDAL and Arrow know it */
    s->requester_pays = payer && strcasecmp(payer, "requester") == 0;
    fc_net_setup files = {.pace = 0};
    profile = profile ? profile : "default";
    read_profile(&files, variable("AWS_SHARED_CREDENTIALS_FILE"), ".aws/credentials", profile);
    read_profile(&files, variable("AWS_CONFIG_FILE"), ".aws/config", profile);
    copy(PLACE(s, region, wrong_bucket), "region", files.region[0] ? files.region : "us-east-1");
    copy(PLACE(s, endpoint, wrong_bucket), "endpoint_url", files.endpoint);
    if (!s->key[0] && (files.secret[0] || files.wrong_bucket[0])) { /* a token belongs to its key */
        copy(PLACE(s, key, wrong_bucket), "aws_access_key_id", files.key);
        copy(PLACE(s, secret, wrong_bucket), "aws_secret_access_key", files.secret);
        copy(PLACE(s, token, wrong_bucket), "aws_session_token", files.token);
        copy(PLACE(s, wrong_bucket, wrong_bucket), "", files.wrong_bucket);
    }
    check_url(PLACE(s, endpoint, wrong_bucket), "AWS_ENDPOINT_URL");
}

/* What huggingface_hub takes for true. */
static bool is_true(const char *value) {
    return value && (strcmp(value, "1") == 0 || strcasecmp(value, "true") == 0 || strcasecmp(value, "yes") == 0 ||
                     strcasecmp(value, "on") == 0);
}

static void read_hub(fc_net_setup *s) {
    char path[PATH_MAX], line[MOST_LINE];
    const char *home = variable("HF_HOME"), *given = variable("HF_TOKEN_PATH");
    copy_variable(PLACE(s, hub, wrong_hub), "HF_ENDPOINT");
    copy(PLACE(s, hub, wrong_hub), "", "https://huggingface.co");
    copy_variable(PLACE(s, hub_token, wrong_hub), "HF_TOKEN");
    if (!given && home && snprintf(path, sizeof path, "%s/token", home) < (int)sizeof path) {
        given = path;
    }
    FILE *file = s->hub_token[0] ? NULL : open_own(given, ".cache/huggingface/token");
    if (file && fgets(line, sizeof line, file)) {
        copy(PLACE(s, hub_token, wrong_hub), "the token of the hub", line);
    }
    if (file) {
        fclose(file);
    }
    check_url(PLACE(s, hub, wrong_hub), "HF_ENDPOINT");
    if (is_true(variable("HF_HUB_OFFLINE")) && !s->wrong_hub[0]) {
        snprintf(s->wrong_hub, sizeof s->wrong_hub, "it is not in the cache, and HF_HUB_OFFLINE is set");
    }
}

/* The variables that curl and Python read, in the order of curl. http:// is only for servers on this machine, which are
   asked without a proxy. */
static void read_proxy(fc_net_setup *s) {
    static const char *const names[] = {"https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"};
    const char *name = NULL, *given = NULL;
    char url[sizeof s->proxy + 8];
    for (size_t i = 0; i < sizeof names / sizeof *names && !given; i++) {
        name = names[i];
        given = variable(name);
    }
    if (!given) {
        return;
    }
    copy_variable(PLACE(s, no_proxy, wrong_proxy), "no_proxy");
    copy_variable(PLACE(s, no_proxy, wrong_proxy), "NO_PROXY");
    snprintf(url, sizeof url, "%s%s", strstr(given, "://") ? "" : "http://", given);
    if (strncasecmp(url, "socks", 5) == 0) {
        s->proxy_unsupported = true;
        snprintf(s->wrong_proxy, sizeof s->wrong_proxy,
                 "%s has a SOCKS proxy, which is not supported: name an HTTP proxy in it, or the server in no_proxy",
                 name);
    } else if (strlen(given) >= sizeof s->proxy ||
               (strncasecmp(url, "http://", 7) != 0 && strncasecmp(url, "https://", 8) != 0)) {
        snprintf(s->wrong_proxy, sizeof s->wrong_proxy, "%s must be http://host:port or https://host:port", name);
    }
    copy(PLACE(s, proxy, wrong_proxy), name, s->wrong_proxy[0] ? "" : url);
}

/* SSL_CERT_FILE and CURL_CA_BUNDLE are known to other programs. FSDPCKPT_NET_PACE is for tests: 1 waits a hundredth. */
void fc_net_setup_read(fc_net_setup *out) {
    const char *own = variable("SSL_CERT_FILE"), *pace = variable("FSDPCKPT_NET_PACE");
    const long percent = pace ? strtol(pace, NULL, 10) : 100;
    memset(out, 0, sizeof *out);
    out->certificates = own ? own : variable("CURL_CA_BUNDLE");
    out->pace = percent > 0 && percent < 100 ? (int)percent : 100;
    read_s3(out);
    read_hub(out);
    read_proxy(out);
}
