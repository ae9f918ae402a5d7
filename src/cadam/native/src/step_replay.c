/* The prepared step on CUDA: from step() to the launch in one call.
 *
 * Nothing here links against torch, Python or CUDA: what is called of them comes as addresses.
 */
#include "torch_tensors.h"

#include <string.h>

/* Functions of Python, in the order of step_replay.py. They may only be called by a thread that holds Python's lock. */
typedef struct {
    int (*dict_next)(void *dict, int64_t *position, void **key, void **value);
    int64_t (*list_size)(void *list);
    void *(*list_item)(void *list, int64_t i);
    void *(*release_lock)(void);
    void (*take_lock)(void *thread);
} python_functions;

/* A Python dict or list and the objects that must be in it, in this order; 0 stands for any. */
typedef struct {
    void *object;
    int64_t is_dict, count;
    void **expected;
} container;

static int is_unchanged_container(const python_functions *python, const container *c)
{
    if (c->is_dict) {
        int64_t position = 0, i = 0;
        void *key, *value;
        for (; python->dict_next(c->object, &position, &key, &value); i++)
            if (i >= c->count || (c->expected[i] && c->expected[i] != value))
                return 0;
        return i == c->count;
    }
    if (python->list_size(c->object) != c->count)
        return 0;
    for (int64_t i = 0; i < c->count; i++)
        if (python->list_item(c->object, i) != c->expected[i])
            return 0;
    return 1;
}

/* Functions of the CUDA driver, in the order of step_replay.py; 0 is success. */
typedef struct {
    int (*current_context)(void **context);
    int (*is_capturing)(void *stream, int *status);
    int (*event_query)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*copy_to_device)(uint64_t to, const void *from, size_t bytes, void *stream);
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra);
} cuda_functions;

/* Where torch keeps things in its tensors and storages, counted in words: found out by step_replay.py. */
typedef struct {
    int64_t storage, offset, size; /* after the size: dtype, device and flags; then the keys that say of what kind it is */
    int64_t data;                  /* of a storage; then to whom it belongs and how it is freed */
    int64_t meant;                 /* bits of the word with dtype, device and flags that mean something */
} layout;

enum { IMAGE = 9, GRAD_IMAGE = 3 };

/* All that matters about a tensor that is to stay as it is. */
static void depict(const layout *at, void **tensor, int64_t *image)
{
    static const int64_t none[3];
    const int64_t *words = *tensor, *storage = (const int64_t *)words[at->storage];
    const int64_t *about = words + at->size, *data = storage ? storage + at->data : none;
    const int64_t now[IMAGE] = {(int64_t)words, (int64_t)storage, words[at->offset], about[0], about[1],
                                about[2],       data[0],          data[1],           data[2]};
    memcpy(image, now, sizeof now);
}

/* Is it what it was? The image stays: the caller may be interrupted before it has acted on the news. */
static int is_as_before(const layout *at, void **tensor, const int64_t *image)
{
    int64_t now[IMAGE], news = 0;
    depict(at, tensor, now);
    for (int i = 0; i < IMAGE; i++)
        news |= now[i] ^ image[i];
    return !news;
}

/* The same of a gradient, of which there is another in each step. Returns where it lies; its elements have so many
 * bytes. */
static int64_t depict_grad(const layout *at, void **grad, int64_t bytes, int64_t *image)
{
    const int64_t *words = *grad;
    image[0] = words[at->size];
    image[1] = words[at->size + 1] & at->meant;
    image[2] = words[at->size + 2];
    const int64_t *storage = (const int64_t *)words[at->storage];
    return storage ? storage[at->data] + words[at->offset] * bytes : 0;
}

/* Parameters that share one row of coefficients. On the device lies that row, then the addresses of the gradients;
 * each part begins at a multiple of 16 bytes. The gradients of `sparse` parameters are looked at by Python. */
typedef struct {
    int64_t lasting; /* tensors that must be as they were: parameters and their state */
    char **lasting_objects;
    int64_t *images; /* of these, IMAGE words each */
    int64_t count;   /* of the parameters */
    char **params;
    int64_t *grad_images; /* GRAD_IMAGE words each */
    const int64_t *grad_sizes, *grad_kinds;
    int64_t bytes;        /* of an element of a gradient */
    float *steps;
    int64_t columns;
    const double *coefficients; /* the first is the step that they are for */
    int64_t sparse;
} part;

/* Without blocks, none. */
typedef struct {
    void *function;
    int64_t blocks, across, threads, shared;
    void **arguments;
} kernel_launch;

typedef struct {
    const torch_functions *torch;
    const python_functions *python;
    const cuda_functions *cuda;
    void (*bump_version)(void **tensor);
    const layout *layout;
    int64_t place;
    int64_t containers;
    const container *container;
    int64_t absent; /* parameters that must have no gradient */
    char **absent_objects;
    int64_t parts;
    const part *part;
    int64_t launches;
    const kernel_launch *launch;
    void *context;
    int64_t *host; /* [slots][words], pinned */
    int64_t words, slots, slot;
    void **events; /* one for each slot: has the device read it? */
    uint64_t device;
} prepared_step;

enum { DONE = 0, NOT_TAKEN = -1 }; /* and positive: an error of the driver */

/* Tensors are spread over memory that no cache may know: what comes later is fetched while the present one is looked
 * at. */
enum { FAR = 24, MIDDLE = 16, NEAR = 8 };

static void fetch_tensor(const layout *at, const int64_t *tensor)
{
    if (!tensor)
        return;
    __builtin_prefetch(tensor + at->storage);
    __builtin_prefetch(tensor + at->size);
    __builtin_prefetch(tensor + at->size + 2);
}

static void fetch_storage(const layout *at, const int64_t *tensor)
{
    if (tensor && tensor[at->storage])
        __builtin_prefetch((const int64_t *)tensor[at->storage] + at->data);
}

static void fetch_ahead(const layout *at, const tensors *some, int64_t i, int64_t count)
{
    if (i + FAR < count)
        __builtin_prefetch(tensor_of(some, i + FAR));
    if (i + MIDDLE < count)
        fetch_tensor(at, *tensor_of(some, i + MIDDLE));
    if (i + NEAR < count)
        fetch_storage(at, *tensor_of(some, i + NEAR));
}

/* What autograd knows of a tensor follows its storage: if not, the wrong memory is fetched and nothing worse. */
static void fetch_grads_ahead(const layout *at, const tensors *some, int64_t i, int64_t count)
{
    if (i + FAR < count) {
        const int64_t *tensor = *tensor_of(some, i + FAR);
        __builtin_prefetch((const char *)tensor[at->storage + 1]);
        __builtin_prefetch((const char *)tensor[at->storage + 1] + 64);
    }
    if (i + MIDDLE < count)
        fetch_tensor(at, *grad_of(some, i + MIDDLE));
    if (i + NEAR < count)
        fetch_storage(at, *grad_of(some, i + NEAR));
}

/* A dict keeps its items apart, at an address in its fifth word; the same holds as above. */
static void fetch_containers_ahead(const container *c, int64_t i, int64_t count)
{
    if (i + MIDDLE < count)
        __builtin_prefetch(c[i + MIDDLE].object);
    if (i + NEAR < count && c[i + NEAR].is_dict) {
        const char *items = ((const char **)c[i + NEAR].object)[4];
        __builtin_prefetch(items);
        __builtin_prefetch(items + 64);
    }
}

/* Is everything as it was when this step was prepared? */
static int is_unchanged(const prepared_step *s)
{
    for (int64_t i = 0; i < s->containers; i++) {
        fetch_containers_ahead(s->container, i, s->containers);
        if (!is_unchanged_container(s->python, &s->container[i]))
            return 0;
    }
    for (const part *p = s->part; p < s->part + s->parts; p++) {
        const tensors lasting = {s->torch, p->lasting_objects, s->place};
        for (int64_t i = 0; i < p->lasting; i++) {
            fetch_ahead(s->layout, &lasting, i, p->lasting);
            if (!is_as_before(s->layout, tensor_of(&lasting, i), p->images + i * IMAGE))
                return 0;
        }
    }
    const tensors absent = {s->torch, s->absent_objects, s->place};
    for (int64_t i = 0; i < s->absent; i++) {
        _Bool defined = 1;
        if (s->torch->is_defined(grad_of(&absent, i), &defined) || defined)
            return 0;
    }
    return 1;
}

/* Write what the device is to know: coefficients and where the gradients lie. Are they, and the step counts, as
 * expected? */
static int fill(const prepared_step *s, int64_t *to)
{
    for (const part *p = s->part; p < s->part + s->parts; p++) {
        const tensors params = {s->torch, p->params, s->place};
        const float now = (float)p->coefficients[0];
        memcpy(to, p->coefficients, (size_t)p->columns * sizeof *to);
        to += p->columns;
        for (int64_t i = 0; i < p->count; i++)
            if (next_step(p->steps[i]) != now)
                return 0;
        if (p->sparse)
            continue;
        for (int64_t i = 0; i < p->count; i++) {
            int64_t image[GRAD_IMAGE];
            fetch_grads_ahead(s->layout, &params, i, p->count);
            void **grad = grad_of(&params, i);
            _Bool defined = 0;
            if (s->torch->is_defined(grad, &defined) || !defined)
                return 0;
            *to++ = depict_grad(s->layout, grad, p->bytes, image);
            if (memcmp(image, p->grad_images + i * GRAD_IMAGE, sizeof image)) {
                const sight seen = look_at_grad(&params, i);
                if (seen.size != p->grad_sizes[i] || seen.kind != p->grad_kinds[i])
                    return 0;
            }
        }
        to += p->count & 1;
    }
    return 1;
}

/* Note how the tensors and their gradients are: so they must be in the next step. */
EXPORT void cadam_replay_note(const prepared_step *s)
{
    for (const part *p = s->part; p < s->part + s->parts; p++) {
        const tensors lasting = {s->torch, p->lasting_objects, s->place}, params = {s->torch, p->params, s->place};
        for (int64_t i = 0; i < p->lasting; i++)
            depict(s->layout, tensor_of(&lasting, i), p->images + i * IMAGE);
        for (int64_t i = 0; i < p->count && !p->sparse; i++)
            depict_grad(s->layout, grad_of(&params, i), p->bytes, p->grad_images + i * GRAD_IMAGE);
    }
}

/* Returns 0 or an error of the driver. To be called without Python's lock: a full queue makes the driver wait, and the
 * device may be waiting for what another thread has to do. */
EXPORT int64_t cadam_replay_launch(const cuda_functions *cuda, const kernel_launch *launch, int64_t count, void *stream)
{
    int failed = 0;
    for (const kernel_launch *k = launch; k < launch + count && !failed; k++)
        if (k->blocks)
            failed = cuda->launch(k->function, (unsigned)k->blocks, (unsigned)k->across, 1, (unsigned)k->threads, 1, 1,
                                  (unsigned)k->shared, stream, k->arguments, 0);
    return failed;
}

/* Take the step that was prepared, on this stream: if nothing but gradients' addresses and the coefficients changed.
 * Returns DONE; NOT_TAKEN if something else did, or the device is not ready for it, and nothing was done; or an error
 * of the driver. */
EXPORT int64_t cadam_replay_step(prepared_step *s, void *stream)
{
    const cuda_functions *cuda = s->cuda;
    void *context = 0, *event = s->events[s->slot];
    int capturing = 0;
    int64_t failed;
    int64_t *host = s->host + s->slot * s->words;
    if (cuda->current_context(&context) || context != s->context || cuda->is_capturing(stream, &capturing) ||
        capturing || cuda->event_query(event) || !is_unchanged(s) || !fill(s, host))
        return NOT_TAKEN;
    s->slot = (s->slot + 1) % s->slots;
    void *thread = s->python->release_lock();
    if (!(failed = cuda->copy_to_device(s->device, host, (size_t)s->words * sizeof *host, stream)) &&
        !(failed = cuda->event_record(event, stream)))
        failed = cadam_replay_launch(cuda, s->launch, s->launches, stream);
    s->python->take_lock(thread);
    if (failed)
        return failed;
    for (const part *p = s->part; p < s->part + s->parts; p++) {
        const tensors params = {s->torch, p->params, s->place};
        for (int64_t i = 0; i < p->count; i++) {
            p->steps[i] = next_step(p->steps[i]);
            s->bump_version(tensor_of(&params, i));
        }
    }
    return DONE;
}
