/*
 * The certificates that are trusted. They are read before the fetcher is confined, and parsed once: libcurl would parse
 * the 140 of a system for each connection, which takes longer than reading 20 MB. See fetcher.h.
 */
#include "net/fetcher/fetcher.h"

#include "fsdpckpt/try.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_CERTIFICATES = 64 << 20 };

static fc_code read_certificates(fetcher *f, const char *path) {
    FILE *file = fopen(path, "re");
    const size_t step = 1 << 16;
    size_t n = 1;
    if (!file) {
        return fc_fail_errno(&f->failed, errno, "%s: the certificates cannot be read", path);
    }
    while (n > 0 && f->certificates_size < MOST_CERTIFICATES) {
        char *more = realloc(f->certificates, f->certificates_size + step);
        if (!more) {
            break;
        }
        f->certificates = more;
        n = fread(f->certificates + f->certificates_size, 1, step, file);
        f->certificates_size += n;
    }
    const bool good = n == 0 && !ferror(file) && f->certificates_size > 0;
    fclose(file);
    return good ? FC_OK : fc_fail(&f->failed, FC_EIO, "%s: the certificates cannot be read", path);
}

#ifdef FSDPCKPT_HAVE_OPENSSL

#include <openssl/err.h>
#include <openssl/opensslv.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>

/* Whether libcurl uses the OpenSSL that this module is linked with. */
static bool has_openssl(void) {
    char wanted[32];
    const char *used = curl_version_info(CURLVERSION_NOW)->ssl_version;
    snprintf(wanted, sizeof wanted, "OpenSSL/%d.", OPENSSL_VERSION_MAJOR);
    return used && strncmp(used, wanted, strlen(wanted)) == 0;
}

/* Adds what the file has, as libcurl does. @return whether there is a certificate */
static bool add_all(X509_STORE *store, STACK_OF(X509_INFO) * all) {
    int added = 0;
    for (int i = 0; i < sk_X509_INFO_num(all); i++) {
        X509_INFO *info = sk_X509_INFO_value(all, i);
        added += info->x509 && X509_STORE_add_cert(store, info->x509) == 1;
        if (info->crl) {
            X509_STORE_add_crl(store, info->crl);
        }
    }
    return added > 0;
}

/* @return NULL: libcurl parses them itself, and reports what is wrong */
static void *parse_certificates(const fetcher *f) {
    BIO *bytes = has_openssl() && f->certificates_size <= INT_MAX
                     ? BIO_new_mem_buf(f->certificates, (int)f->certificates_size)
                     : NULL;
    STACK_OF(X509_INFO) *all = bytes ? PEM_X509_INFO_read_bio(bytes, NULL, NULL, NULL) : NULL;
    X509_STORE *store = all ? X509_STORE_new() : NULL;
    if (store && (!add_all(store, all) ||
                  X509_STORE_set_flags(store, X509_V_FLAG_TRUSTED_FIRST | X509_V_FLAG_PARTIAL_CHAIN) != 1)) {
        X509_STORE_free(store);
        store = NULL;
    }
    sk_X509_INFO_pop_free(all, X509_INFO_free);
    BIO_free(bytes);
    ERR_clear_error();
    return store;
}

static CURLcode use_store(CURL *easy, void *context, void *store) {
    (void)easy;
    SSL_CTX_set1_cert_store(context, store);
    return CURLE_OK;
}

static int set_store(const fetcher *f, CURL *easy) {
    int rc = 0;
    rc |= curl_easy_setopt(easy, CURLOPT_CAINFO, NULL);
    rc |= curl_easy_setopt(easy, CURLOPT_PROXY_CAINFO, NULL);
    rc |= curl_easy_setopt(easy, CURLOPT_SSL_CTX_FUNCTION, use_store);
    rc |= curl_easy_setopt(easy, CURLOPT_SSL_CTX_DATA, f->store);
    return rc;
}
#else
static void *parse_certificates(const fetcher *f) {
    (void)f;
    return NULL;
}

static int set_store(const fetcher *f, CURL *easy) {
    (void)f;
    (void)easy;
    return 0;
}
#endif

void trust_read(fetcher *f) {
    const char *usual = curl_version_info(CURLVERSION_NOW)->cainfo;
    const char *path = f->setup.certificates ? f->setup.certificates : usual;
    if (path && read_certificates(f, path) == FC_OK) {
        f->store = parse_certificates(f);
    }
}

bool trust_set(const fetcher *f, CURL *easy) {
    int rc = curl_easy_setopt(easy, CURLOPT_CAPATH, NULL);
    rc |= curl_easy_setopt(easy, CURLOPT_PROXY_CAPATH, NULL);
    if (f->store) {
        rc |= set_store(f, easy);
    } else if (f->certificates) {
        struct curl_blob blob = {f->certificates, f->certificates_size, CURL_BLOB_NOCOPY};
        rc |= curl_easy_setopt(easy, CURLOPT_CAINFO_BLOB, &blob);
        rc |= curl_easy_setopt(easy, CURLOPT_PROXY_CAINFO_BLOB, &blob);
    }
    return rc == 0;
}
