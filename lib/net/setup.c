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

enum { MOST_LINE = 8192 };

static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* Keeps what is known already. */
static void copy(char *out, size_t size, const char *value) {
    if (value && !out[0] && strlen(value) < size) {
        snprintf(out, size, "%s", value);
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
    const char *key = trim(line), *value = trim(equals + 1);
    if (strcmp(key, "aws_access_key_id") == 0) {
        copy(s->key, sizeof s->key, value);
    } else if (strcmp(key, "aws_secret_access_key") == 0) {
        copy(s->secret, sizeof s->secret, value);
    } else if (strcmp(key, "aws_session_token") == 0) {
        copy(s->token, sizeof s->token, value);
    } else if (strcmp(key, "region") == 0) {
        copy(s->region, sizeof s->region, value);
    } else if (strcmp(key, "endpoint_url") == 0) {
        copy(s->endpoint, sizeof s->endpoint, value);
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

static void read_s3(fc_net_setup *s) {
    const char *profile = variable("AWS_PROFILE");
    copy(s->region, sizeof s->region, variable("AWS_REGION"));
    copy(s->region, sizeof s->region, variable("AWS_DEFAULT_REGION"));
    copy(s->endpoint, sizeof s->endpoint, variable("AWS_ENDPOINT_URL_S3"));
    copy(s->endpoint, sizeof s->endpoint, variable("AWS_ENDPOINT_URL"));
    if (variable("AWS_ACCESS_KEY_ID") && variable("AWS_SECRET_ACCESS_KEY")) {
        copy(s->key, sizeof s->key, variable("AWS_ACCESS_KEY_ID"));
        copy(s->secret, sizeof s->secret, variable("AWS_SECRET_ACCESS_KEY"));
        copy(s->token, sizeof s->token, variable("AWS_SESSION_TOKEN"));
    }
    fc_net_setup files = {.pace = 0};
    profile = profile ? profile : "default";
    read_profile(&files, variable("AWS_SHARED_CREDENTIALS_FILE"), ".aws/credentials", profile);
    read_profile(&files, variable("AWS_CONFIG_FILE"), ".aws/config", profile);
    copy(s->region, sizeof s->region, files.region[0] ? files.region : "us-east-1");
    copy(s->endpoint, sizeof s->endpoint, files.endpoint);
    if (!s->key[0] && files.secret[0]) { /* a token belongs to its key */
        copy(s->key, sizeof s->key, files.key);
        copy(s->secret, sizeof s->secret, files.secret);
        copy(s->token, sizeof s->token, files.token);
    }
}

static void read_hub(fc_net_setup *s) {
    char path[PATH_MAX], line[sizeof s->hub_token];
    const char *home = variable("HF_HOME"), *given = variable("HF_TOKEN_PATH");
    copy(s->hub, sizeof s->hub, variable("HF_ENDPOINT"));
    copy(s->hub, sizeof s->hub, "https://huggingface.co");
    copy(s->hub_token, sizeof s->hub_token, variable("HF_TOKEN"));
    if (!given && home && snprintf(path, sizeof path, "%s/token", home) < (int)sizeof path) {
        given = path;
    }
    FILE *file = s->hub_token[0] ? NULL : open_own(given, ".cache/huggingface/token");
    if (file && fgets(line, sizeof line, file)) {
        copy(s->hub_token, sizeof s->hub_token, trim(line));
    }
    if (file) {
        fclose(file);
    }
}

static void drop_slash(char *url) {
    const size_t n = strlen(url);
    if (n > 0 && url[n - 1] == '/') {
        url[n - 1] = '\0';
    }
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
    drop_slash(out->endpoint);
    drop_slash(out->hub);
}
