/* What XLA calls on the CPU: one pass over gradients and moments, which writes the new moments and counts the aligned
 * elements. XLA alone would run a loop for each array that it writes.
 *
 * Nothing here links against XLA. These are the few structs of its C interface for such functions that are used, as of
 * version 0.1. Later versions only append to them, and each says how long it is. */
#include "cadam.h"

#include <sched.h>
#include <stddef.h>
#include <stdlib.h>

typedef struct extension {
    size_t size;
    int type;
    struct extension *next;
} extension;

typedef struct {
    size_t size;
    extension *extensions;
    int major, minor;
} api_version;

typedef struct {
    extension base;
    struct {
        size_t size;
        api_version version;
    } *metadata;
} metadata_query; /* an extension of type 1: which version was this compiled for? */

typedef struct {
    size_t size;
    extension *extensions;
    int dtype;
    void *data;
    int64_t rank, *dims;
} buffer;

typedef struct {
    size_t size;
    extension *extensions;
    int64_t count;
    int *types;
    buffer **buffers;
} buffers;

typedef struct {
    size_t size;
    extension *extensions;
    const char *message;
    int code;
} make_error_args;

typedef struct {
    size_t size;
    extension *extensions;
    void *error;
} drop_error_args;

typedef struct {
    size_t size;
    extension *extensions;
    void *context;
    void (*task)(void *);
    void *data;
} schedule_args;

typedef struct {
    size_t size;
    extension *extensions;
    void *context;
    int64_t *threads;
} threads_args;

typedef struct {
    size_t size;
    extension *extensions;
    api_version version;
    const void *internal;
    void *(*make_error)(make_error_args *);
    void *unused;
    void (*drop_error)(drop_error_args *);
    void *more_unused[8];
    void *(*schedule)(schedule_args *);
    void *(*count_threads)(threads_args *);
} api;

typedef struct {
    size_t size;
    extension *extensions;
    const api *api;
    void *context;
    int stage;
    buffers args, results;
    struct {
        size_t size;
        extension *extensions;
        int64_t count;
        int *types;
        void **names;
        struct {
            int dtype;
            int64_t *value;
        } **numbers;
    } attributes;
} call;

enum { VERSION_QUERY = 1, NUMBER = 3, S64 = 5, U32 = 8, FLOAT = 11, INVALID_ARGUMENT = 3 }; /* XLA's codes */

typedef struct {
    const float *g;
    float *s[MAX_BUFFERS];
    int64_t n, end; /* among the chunks of all leaves: where its own end */
} leaf;

/* Leaves, cut into chunks. Whoever is free takes the next chunk, so nobody waits for a thread that never comes. */
typedef struct {
    update_fn *update;
    const void *c;
    int64_t chunks, next, done, aligned;
    int64_t users; /* the last one frees it */
    leaf leaves[];
} pass;

enum { CHUNK = 1 << 15 };

static void leave(pass *all)
{
    if (__atomic_sub_fetch(&all->users, 1, __ATOMIC_ACQ_REL) == 0)
        free(all);
}

static void work(void *data)
{
    pass *all = data;
    for (int64_t chunk; (chunk = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < all->chunks;) {
        const leaf *x = all->leaves;
        int64_t first = 0;
        for (; chunk >= x->end; x++)
            first = x->end;
        const int64_t i = (chunk - first) * CHUNK, n = x->n - i < CHUNK ? x->n - i : CHUNK;
        void *s[MAX_BUFFERS];
        for (int b = 0; b < MAX_BUFFERS; b++)
            s[b] = x->s[b] ? x->s[b] + i : 0;
        const int64_t aligned = all->update((void *)(x->g + i), x->g + i, s, n, all->c); /* there is no parameter */
        __atomic_fetch_add(&all->aligned, aligned, __ATOMIC_RELAXED);
        __atomic_fetch_add(&all->done, 1, __ATOMIC_RELEASE);
    }
    leave(all);
}

/* Compute a pass on XLA's threads, this one among them. */
static void run(const call *frame, pass *all)
{
    int64_t threads = 1;
    void *error = frame->api->count_threads(&(threads_args){sizeof(threads_args), 0, frame->context, &threads});
    all->users = 2; /* this function, and `work` called by it */
    for (int64_t i = 1; !error && i < threads && i < all->chunks; i++) {
        __atomic_add_fetch(&all->users, 1, __ATOMIC_RELAXED);
        error = frame->api->schedule(&(schedule_args){sizeof(schedule_args), 0, frame->context, work, all});
        if (error)
            leave(all);
    }
    if (error) /* no more threads than there are now */
        frame->api->drop_error(&(drop_error_args){sizeof(drop_error_args), 0, error});
    work(all);
    while (__atomic_load_n(&all->done, __ATOMIC_ACQUIRE) < all->chunks)
        sched_yield();
}

static int64_t length(const buffer *b)
{
    int64_t n = 1;
    for (int64_t d = 0; d < b->rank; d++)
        n *= b->dims[d];
    return n;
}

static int is_of(const buffer *b, int dtype, int64_t n)
{
    return b->size >= sizeof *b && b->dtype == dtype && length(b) == n;
}

/* Do these buffers fit the kernel? */
static int fits(const call *frame, const kernel *k, int64_t leaves)
{
    buffer *const *in = frame->args.buffers, *const *out = frame->results.buffers;
    if (leaves < 1 || frame->results.count != leaves * k->buffers + 1 ||
        frame->args.count <= leaves * (k->buffers + 1))
        return 0;
    for (int64_t l = 0; l < leaves; l++)
        for (int b = 0; b <= k->buffers; b++)
            if (!is_of(in[b * leaves + l], FLOAT, length(in[l])) ||
                (b && out[(b - 1) * leaves + l]->data != in[b * leaves + l]->data))
                return 0;
    return is_of(in[leaves * (k->buffers + 1)], FLOAT, k->coefficients) && is_of(out[leaves * k->buffers], U32, 1);
}

/* Arguments: the gradients of some leaves, the first buffers of all of them, the second ones..., the coefficients; what
 * follows is not read, but waited for. Results: the buffers again, where they are, and how many elements were aligned.
 * The attribute is the number of a kernel. */
EXPORT void *cadam_xla_moments(const call *frame)
{
    for (extension *e = frame->extensions; e; e = e->next)
        if (e->type == VERSION_QUERY) {
            ((metadata_query *)e)->metadata->version.major = 0;
            ((metadata_query *)e)->metadata->version.minor = 1;
            return 0;
        }
    const instruction_set *set = cadam_instruction_set();
    const int64_t number = frame->size >= sizeof *frame && frame->attributes.count == 1 &&
                                   frame->attributes.types[0] == NUMBER && frame->attributes.numbers[0]->dtype == S64
                               ? *frame->attributes.numbers[0]->value
                               : -1;
    const kernel *k = number >= 0 && number < set->count ? &set->kernels[number] : 0;
    const int64_t leaves = k && k->buffers ? (frame->results.count - 1) / k->buffers : 0;
    const int is_meant = frame->api->size >= sizeof *frame->api && k && fits(frame, k, leaves);
    pass *all = is_meant ? calloc(1, sizeof *all + (size_t)leaves * sizeof *all->leaves) : 0;
    if (!all)
        return frame->api->make_error(&(make_error_args){
            sizeof(make_error_args), 0,
            is_meant ? "cadam: out of memory" : "cadam: XLA calls the C kernels otherwise than they expect", INVALID_ARGUMENT});
    buffer *const *in = frame->args.buffers, *const *out = frame->results.buffers;
    for (int64_t l = 0; l < leaves; l++) {
        leaf *x = &all->leaves[l];
        x->g = in[l]->data, x->n = length(in[l]);
        for (int b = 0; b < k->buffers; b++)
            x->s[b] = out[b * leaves + l]->data;
        x->end = all->chunks += (x->n + CHUNK - 1) / CHUNK;
    }
    all->update = k->moments, all->c = in[leaves * (k->buffers + 1)]->data;
    run(frame, all);
    *(uint32_t *)out[leaves * k->buffers]->data = (uint32_t)all->aligned;
    leave(all);
    return 0;
}
