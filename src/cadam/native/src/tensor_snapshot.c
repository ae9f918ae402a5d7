/* What Python calls to look at its tensors: asking torch about thousands of them from Python takes longer than their
 * step. */
#include "torch_tensors.h"

enum { MOVED = 1, CHANGED = 2 }; /* another address; another size or kind */

typedef struct {
    tensors some;
    int64_t *addresses, *sizes, *kinds;
    int64_t news;
} view;

static int64_t note(const view *v, int64_t i, sight seen)
{
    const int64_t news = (v->addresses[i] != seen.address ? MOVED : 0) |
                         (v->sizes[i] != seen.size || v->kinds[i] != seen.kind ? CHANGED : 0);
    v->addresses[i] = seen.address;
    v->sizes[i] = seen.size;
    v->kinds[i] = seen.kind;
    return news;
}

static void look_range(int64_t begin, int64_t end, void *context)
{
    view *v = context;
    int64_t news = 0;
    for (int64_t i = begin; i < end; i++)
        news |= note(v, i, look_at(v->some.torch, tensor_of(&v->some, i)));
    __atomic_fetch_or(&v->news, news, __ATOMIC_RELAXED);
}

static void look_at_grads_range(int64_t begin, int64_t end, void *context)
{
    view *v = context;
    int64_t news = 0;
    for (int64_t i = begin; i < end; i++)
        news |= note(v, i, look_at_grad(&v->some, i));
    __atomic_fetch_or(&v->news, news, __ATOMIC_RELAXED);
}

/* Where the tensors of Python objects (or their gradients) lie, their sizes and kinds. Returns what is new since the
 * last look. Threads are worth it only where they are awake. */
EXPORT int64_t cadam_snapshot_tensors(const torch_functions *torch, char **objects, int64_t place, int64_t count, int64_t grads,
                          int64_t threads, int64_t *addresses, int64_t *sizes, int64_t *kinds)
{
    view v = {{torch, objects, place}, addresses, sizes, kinds, 0};
    enum { GRAIN = 512 };
    range_fn *look = grads ? look_at_grads_range : look_range;
    if (threads && count > GRAIN)
        torch->parallel_for(0, count, GRAIN, look, &v);
    else
        look(0, count, &v);
    return v.news;
}
